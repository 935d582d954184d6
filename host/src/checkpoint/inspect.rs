//! Looking into a checkpoint: what is stored, and how scales and codes are distributed.

use rayon::prelude::*;

use super::compressed_tensors::{Logical, Packed, resolve};
use super::read::Checkpoint;

/// How often each scale byte and each code occurs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// By scale byte.
    pub scales: [u64; 256],
    /// By E2M1 code.
    pub codes: [u64; 16],
}

/// A tensor and, if it is quantized, the distribution of its scales and codes.
#[derive(Clone, Debug)]
pub struct Inspected<'a> {
    /// The tensor.
    pub tensor: Logical<'a>,
    /// Of a quantized tensor.
    pub histogram: Option<Histogram>,
}

/// Looks at every tensor of a checkpoint. What is packed in a format that cannot be read is listed as it is stored.
pub fn inspect(checkpoint: &Checkpoint) -> Vec<Inspected<'_>> {
    let mut inspected = Vec::new();
    for stored in checkpoint.tensors() {
        let tensor = match resolve(checkpoint, stored) {
            Ok(None) => continue,
            Ok(Some(tensor)) => tensor,
            Err(_) => Logical::Plain(stored),
        };
        let histogram = match &tensor {
            Logical::Mxfp4(packed) => Some(Histogram::of(packed)),
            Logical::Plain(_) => None,
        };
        inspected.push(Inspected { tensor, histogram });
    }
    inspected
}

impl Default for Histogram {
    fn default() -> Self {
        Self { scales: [0; 256], codes: [0; 16] }
    }
}

impl Histogram {
    /// Of one tensor.
    pub fn of(packed: &Packed<'_>) -> Self {
        let mut codes = [0; 16];
        for (byte, count) in count(packed.codes.data).into_iter().enumerate() {
            codes[byte & 15] += count;
            codes[byte >> 4] += count;
        }
        Self { scales: count(packed.scales.data), codes }
    }

    /// Adds another tensor's counts.
    pub fn add(&mut self, other: &Self) {
        self.scales.iter_mut().zip(other.scales).for_each(|(sum, count)| *sum += count);
        self.codes.iter_mut().zip(other.codes).for_each(|(sum, count)| *sum += count);
    }

    /// Blocks whose scale is NaN.
    pub fn nan_scales(&self) -> u64 {
        self.scales[255]
    }

    /// The smallest and largest scale byte in use, NaN apart.
    pub fn scale_range(&self) -> Option<(u8, u8)> {
        let used = |byte: &u8| self.scales[*byte as usize] > 0;
        Some(((0..255).find(used)?, (0..255).rev().find(used)?))
    }
}

/// How often each byte occurs.
fn count(bytes: &[u8]) -> [u64; 256] {
    let counts = bytes.par_chunks(1 << 16).map(|part| {
        let mut counts = [0u64; 256];
        part.iter().for_each(|byte| counts[*byte as usize] += 1);
        counts
    });
    counts.reduce(
        || [0; 256],
        |mut sum, part| {
            sum.iter_mut().zip(part).for_each(|(sum, count)| *sum += count);
            sum
        },
    )
}
