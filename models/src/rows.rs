//! Which tokens of a batch belong together, and their positions.

use std::fmt;

use candle_core::{Result, Tensor};

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
    /// Computes the tables of the first positions.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(config: &Config, positions: usize) -> Result<Self> {
        let [full, sliding] = &config.ropes;
        Ok(Self { tables: [full.tables(positions)?, sliding.tables(positions)?] })
    }

    /// Returns the number of positions.
    ///
    /// # Errors
    /// Never.
    pub fn positions(&self) -> Result<usize> {
        self.tables[0][0].dim(0)
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
    pub(crate) fn rotations(&self, is_sliding: bool, first: usize, count: usize) -> Result<[Tensor; 2]> {
        let [cos, sin] = &self.rotations.tables[usize::from(is_sliding)];
        Ok([cos.narrow(0, first, count)?, sin.narrow(0, first, count)?])
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
