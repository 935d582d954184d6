//! Distributions of scales and codes: byte counts of one tensor, or of many in the same format.

use microscale::{Format, QuantizedTensor};
use rayon::prelude::*;

use crate::checkpoint_formats::packed::Packed;

/// Counts of scale bytes and codes in tensors of one format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// The format.
    pub format: Format,
    /// Counts by scale byte.
    pub scales: [u64; 256],
    /// Counts by code. 4-bit formats use only the first 16.
    pub codes: [u64; 256],
}

impl Histogram {
    /// An empty histogram.
    pub fn new(format: Format) -> Self {
        Self { format, scales: [0; 256], codes: [0; 256] }
    }

    /// Counts the scales and codes of one stored tensor.
    pub fn of(packed: &Packed<'_>) -> Self {
        let mut sum = Self::new(packed.format);
        for blocks in packed.each_blocks() {
            sum.add(&Self::of_bytes(packed.format, &blocks.scales, &blocks.codes));
        }
        sum
    }

    /// Counts the scales and codes of a tensor in memory, including its padding to whole blocks.
    pub fn of_tensor(tensor: &QuantizedTensor) -> Self {
        Self::of_bytes(tensor.format(), &tensor.linear_scales(), tensor.codes())
    }

    fn of_bytes(format: Format, scales: &[u8], codes: &[u8]) -> Self {
        let mut codes = count(codes);
        if format.bits() == 4 {
            let bytes = std::mem::replace(&mut codes, [0; 256]);
            for (byte, count) in bytes.into_iter().enumerate() {
                codes[byte & 15] += count;
                codes[byte >> 4] += count;
            }
        }
        Self { format, scales: count(scales), codes }
    }

    /// Adds the counts of another histogram of the same format.
    pub fn add(&mut self, other: &Self) {
        self.scales.iter_mut().zip(other.scales).for_each(|(sum, count)| *sum += count);
        self.codes.iter_mut().zip(other.codes).for_each(|(sum, count)| *sum += count);
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u64 {
        self.scales.iter().sum()
    }

    /// The number of blocks whose scale is NaN.
    pub fn nan_scales(&self) -> u64 {
        self.count_scales(|byte| self.format.is_scale(byte) && self.format.is_nan_scale(byte))
    }

    /// The number of blocks whose scale byte is invalid in the format: in NVFP4, with the sign bit
    /// set.
    pub fn foreign_scales(&self) -> u64 {
        self.count_scales(|byte| !self.format.is_scale(byte))
    }

    /// The smallest and the largest scale byte that occur, without NaN and invalid bytes.
    pub fn scale_range(&self) -> Option<(u8, u8)> {
        let used = |byte: &u8| {
            let is_number = self.format.is_scale(*byte) && !self.format.is_nan_scale(*byte);
            is_number && self.scales[usize::from(*byte)] > 0
        };
        Some(((0..=255).find(used)?, (0..=255).rfind(used)?))
    }

    fn count_scales(&self, counted: impl Fn(u8) -> bool) -> u64 {
        (0..=255u8).filter(|byte| counted(*byte)).map(|byte| self.scales[usize::from(byte)]).sum()
    }
}

/// Counts each byte.
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
