//! Which tokens of a batch belong together, and their positions.

use std::fmt;

use candle_core::{DType, Device, Result, Tensor};

use crate::config::Config;

/// Sequences whose tokens are consecutive rows of a batch.
pub struct Rows<'a> {
    lengths: &'a [usize],
    rotations: &'a Rotations,
}

/// Cosines and sines by position.
pub struct Rotations {
    /// Of layers with full and with sliding attention.
    tables: [[Tensor; 2]; 2],
}

impl Rotations {
    /// Computes the tables of the first positions on a device.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(config: &Config, positions: usize, device: &Device) -> Result<Self> {
        let [full, sliding] = &config.ropes;
        Ok(Self { tables: [full.tables(positions, device)?, sliding.tables(positions, device)?] })
    }
}

impl<'a> Rows<'a> {
    /// Sequences of these lengths. Each one begins at position 0, or after its cache.
    pub fn new(lengths: &'a [usize], rotations: &'a Rotations) -> Self {
        Self { lengths, rotations }
    }

    /// Returns each sequence's first row and its length.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (usize, usize)> {
        self.lengths.iter().scan(0, |next, &length| {
            let start = *next;
            *next += length;
            Some((start, length))
        })
    }

    /// Returns cosines and sines of positions.
    pub(crate) fn rotations(
        &self,
        is_sliding: bool,
        first: usize,
        count: usize,
        dtype: DType,
    ) -> Result<[Tensor; 2]> {
        let [cos, sin] = &self.rotations.tables[usize::from(is_sliding)];
        let part = |table: &Tensor| table.narrow(0, first, count)?.to_dtype(dtype);
        Ok([part(cos)?, part(sin)?])
    }
}

/// Shows nothing of the tensors.
impl fmt::Debug for Rows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").finish_non_exhaustive()
    }
}

/// Shows nothing of the tensors.
impl fmt::Debug for Rotations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rotations").finish_non_exhaustive()
    }
}
