//! The kernels for products of quantized operands.

use microscale_formats::words;

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

words!(GemvKernel, "kernel" {
    Self::Rows1 = "rows1",
    Self::Rows2 = "rows2",
    Self::Rows4 = "rows4",
});
