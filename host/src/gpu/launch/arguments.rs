//! Kernel arguments from checked shapes, and launch shapes, for all launchers.

use cudarc::driver::{DeviceRepr, LaunchConfig};
use microscale_formats::nvfp4::Direction;
use microscale_formats::{Format, ScaleLayout};
use microscale_kernels_abi::gemv::BLOCK_LIMIT;
use microscale_kernels_abi::{ApplyGlobal, BlockGrid, Divider, Epilogue, Kernel, ScaleGrid};

use crate::element::Element;
use crate::error::OperandFault;
use crate::error::{Error, Result};
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::shape::{QuantizedShape, Shape};

/// A structure of `microscale_kernels_abi` that is passed by value.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::gpu) struct Argument<T>(pub(in crate::gpu) T);

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<BlockGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<ScaleGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<Divider> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<Epilogue> {}
// SAFETY: a 32-bit enumeration; host and kernel share its definition.
unsafe impl DeviceRepr for Argument<ApplyGlobal> {}

impl Argument<BlockGrid> {
    /// Returns whether every row of the matrix at an address starts on 16 bytes.
    pub(in crate::gpu) fn is_aligned<T: Element>(&self, address: u64) -> bool {
        self.0.rows_are_aligned(address, T::DTYPE.bytes())
    }
}

/// How a kernel applies a tensor's global scale.
pub(in crate::gpu) fn apply_global(tensor: DeviceTensorView<'_>) -> Argument<ApplyGlobal> {
    apply_direction(tensor.direction())
}

/// How a kernel applies global scales of a direction.
pub(in crate::gpu) fn apply_direction(direction: Option<Direction>) -> Argument<ApplyGlobal> {
    Argument(match direction {
        Some(Direction::Divisor) => ApplyGlobal::Divisor,
        Some(Direction::Multiplier) => ApplyGlobal::Multiplier,
        None => ApplyGlobal::Absent,
    })
}

/// Addresses of a product's operands and results, and how its global scale is applied.
pub(in crate::gpu) struct Operands {
    pub(in crate::gpu) codes: u64,
    /// Matrices of weights: 1, or the number of experts.
    pub(in crate::gpu) matrices: u64,
    pub(in crate::gpu) scales: u64,
    pub(in crate::gpu) slot: u64,
    pub(in crate::gpu) activations: u64,
    pub(in crate::gpu) out: u64,
    pub(in crate::gpu) apply: Argument<ApplyGlobal>,
    pub(in crate::gpu) steps: Steps,
}

/// The epilogue of a product and the addresses of its operands, 0 for operands it does not have.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct Steps {
    pub(in crate::gpu) bias: u64,
    pub(in crate::gpu) residual: u64,
    pub(in crate::gpu) epilogue: Argument<Epilogue>,
}

impl Steps {
    /// Stores the results in the activations' dtype, without other steps.
    pub(in crate::gpu) const NONE: Self = Self { bias: 0, residual: 0, epilogue: Argument(Epilogue::NONE) };

    /// Stores the results in f32, without other steps.
    pub(in crate::gpu) const SUMS: Self = Self {
        epilogue: Argument(Epilogue { steps: Epilogue::F32_RESULTS, ..Epilogue::NONE }),
        ..Self::NONE
    };
}

/// Addresses for a product with experts' weights: the plan, and the lists of row numbers.
///
/// `from` lists the rows of activations, `to` the rows of results. Absent ones are 0.
#[derive(Clone, Copy, Default)]
pub(in crate::gpu) struct Routed {
    pub(in crate::gpu) plan: u64,
    pub(in crate::gpu) from: u64,
    pub(in crate::gpu) to: u64,
}

/// The blocks of a matrix that is not empty.
///
/// A matrix without gaps or padding between rows counts as one long row, which saves the kernel
/// divisions.
pub(in crate::gpu) fn grid(shape: Shape, block: usize) -> Result<Argument<BlockGrid>> {
    let Shape { rows, cols, row_stride } = shape;
    let flat = row_stride == cols && cols.is_multiple_of(block);
    let (r, c, s) = if flat { (1, rows * cols, rows * cols) } else { (rows, cols, row_stride) };
    let grid = BlockGrid::new(r as u64, c as u64, s as u64, block as u64);
    grid.map(Argument).ok_or(Error::TooLarge { rows, cols, row_stride })
}

/// [`grid`] with the matrix' own rows.
pub(in crate::gpu) fn by_rows(shape: Shape, block: usize) -> Result<Argument<BlockGrid>> {
    let Shape { rows, cols, row_stride } = shape;
    let grid = BlockGrid::new(rows as u64, cols as u64, row_stride as u64, block as u64);
    grid.map(Argument).ok_or(Error::TooLarge { rows, cols, row_stride })
}

/// The layout of the scale bytes of a tensor that is not empty.
pub(in crate::gpu) fn scale_grid(shape: QuantizedShape) -> Argument<ScaleGrid> {
    let blocks = shape.blocks_per_row() as u64;
    Argument(match shape.scale_layout {
        ScaleLayout::Linear => ScaleGrid::linear(blocks),
        ScaleLayout::Swizzled => ScaleGrid::swizzled(blocks),
    })
}

/// The elements of a grid's blocks, including padding.
pub(in crate::gpu) fn blocks_in_elements(grid: &Argument<BlockGrid>, format: Format) -> u64 {
    grid.0.blocks * format.block() as u64
}

/// Checks that a number is below the limit of a product's kernels.
pub(in crate::gpu) fn limited(what: &'static str, found: usize, limit: u64) -> Result<()> {
    let fits = (found as u64) < limit;
    if fits { Ok(()) } else { Err(Error::Operands(OperandFault::Limit { what, found, limit })) }
}

/// Checks the columns of a product's operands.
pub(in crate::gpu) fn limited_columns(shape: QuantizedShape) -> Result<()> {
    limited("columns", shape.cols, (BLOCK_LIMIT - 1) * shape.format.block() as u64 + 1)
}

/// The error for a launch that would need too many thread blocks.
pub(in crate::gpu) fn not_one_launch(what: impl std::fmt::Display) -> Error {
    let message = format!("{what} are more than one launch can cover; split the matrix by rows");
    Error::Gpu { doing: "launching a kernel", code: None, message }
}

/// The launch that covers `elements` elements.
///
/// For a kernel that does not handle elements, it has `elements` thread blocks.
pub(in crate::gpu) fn config(kernel: &Kernel, elements: u64) -> Result<LaunchConfig> {
    let thread_blocks = elements.div_ceil(u64::from(kernel.elements.max(1)));
    let grid_dim =
        i32::try_from(thread_blocks).map_err(|_| not_one_launch(format_args!("{elements} elements")))?;
    Ok(LaunchConfig {
        grid_dim: (grid_dim as u32, 1, 1),
        block_dim: (kernel.threads, 1, 1),
        shared_mem_bytes: kernel.shared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_named() {
        for format in [Format::Nvfp4, Format::Mxfp4] {
            let shape = |cols| QuantizedShape::new(format, 1, cols);
            // The largest supported number of blocks, all of them whole.
            let most = (BLOCK_LIMIT as usize - 1) * format.block();
            assert_eq!(shape(most).blocks_per_row() as u64, BLOCK_LIMIT - 1);
            assert!(limited_columns(shape(most)).is_ok());
            let refused = limited_columns(shape(most + 1)).unwrap_err().to_string();
            let found = most + 1;
            let expected = format!("{found} columns are more than a GPU multiplies; pass fewer than {found}");
            assert!(refused.starts_with(&expected), "{refused}");
        }
    }
}
