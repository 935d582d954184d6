//! Formats that are there to be compared with: what would a tensor lose in them?
//!
//! One is quantized, dequantized and measured on CPUs, by its definition, a block after another. No kernel computes it
//! and no convention of checkpoints stores it. It is a variant of [`ComparisonFormat`], with its [`Facts`] and its
//! [`Definition`] here, and a file for its element or arithmetic.

use crate::block::BlockEvents;
use crate::facts::Facts;

/// A format without kernels and without files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComparisonFormat {}

/// How blocks of a format are computed. A block at the end of a row may have fewer elements; the others are zeros.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// Quantizes a block: the bits of its scale, and what happened. The second slice takes its packed codes, for all of
    /// its elements. A block that holds a NaN or an infinity gets the NaN scale and codes 0; callers with another policy
    /// replace those values first.
    pub quantize_block: fn(&[f32], &mut [u8]) -> (u16, BlockEvents),
    /// Dequantizes a block, given the bits of its scale and its packed codes: as many elements as the slice has room
    /// for. A NaN scale gives the canonical NaN.
    pub dequantize_block: fn(u16, &[u8], &mut [f32]),
}

impl ComparisonFormat {
    /// The facts.
    #[inline]
    pub const fn facts(self) -> Facts {
        match self {}
    }

    /// The arithmetic.
    pub const fn definition(self) -> Definition {
        match self {}
    }
}
