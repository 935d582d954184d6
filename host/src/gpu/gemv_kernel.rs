//! The kernels for products of quantized operands.

use crate::words::Words;

/// A kernel for products of quantized operands. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemvKernel {
    /// A warp takes a row.
    Rows1,
    /// A warp takes two rows.
    Rows2,
    /// A warp takes four rows.
    Rows4,
}

impl Words for GemvKernel {
    const WORDS: &'static [(&'static str, Self)] =
        &[("rows1", Self::Rows1), ("rows2", Self::Rows2), ("rows4", Self::Rows4)];
}
