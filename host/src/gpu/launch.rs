//! One typed function a kernel: nothing else launches.
//!
//! Each computes the arguments from checked shapes, so that the kernel's contract (in `kernels-gpu`) holds.

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
};
use microscale_kernels_abi::{BlockGrid, Kernel, QuantizeOptions};

use super::module::Module;
use super::{DeviceReport, DeviceTensor, doing};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::recipe::{NonFinite, Recipe, Words};
use crate::tensor::Shape;

/// A structure of `microscale_kernels_abi`, passed by value.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Argument<T>(T);

// SAFETY: a `repr(C)` structure of integers, without pointers and, but for its end, without padding.
unsafe impl DeviceRepr for Argument<BlockGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<QuantizeOptions> {}

/// Enqueues MXFP4 quantization. The caller has checked that `values` holds `shape` and that `out` has the shape.
pub(super) fn mxfp4_quantize<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    values: &impl DevicePtr<T>,
    shape: Shape,
    recipe: &Recipe,
    out: &mut DeviceTensor,
    report: &mut DeviceReport,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let access = access::<T>(values, shape);
    let name = format!("mxfp4_quantize_{}_{}_{access}", T::DTYPE.word(), recipe.arithmetic.ties.word());
    let (kernel, function) = module.kernel(&name)?;
    let grid = grid(shape)?;
    let options = options(recipe);
    let (codes, scales) = out.parts_mut();
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(codes).arg(scales).arg(report.slots_mut()).arg(&grid).arg(&options);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`, whose length the caller
    // checked; codes and scales have room for its blocks because `out` has the shape; the report has all its slots; the
    // `vector` variant is chosen only where rows start on 16 bytes. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(kernel, &grid.0)?) }.map_err(doing("launching a quantize kernel"))?;
    Ok(())
}

/// Enqueues one of the ladder's quantizers: ties to even, −0 kept, non-finite blocks become NaN, no report.
pub(super) fn mxfp4_quantize_baseline<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    variant: &str,
    values: &impl DevicePtr<T>,
    shape: Shape,
    recipe: &Recipe,
    out: &mut DeviceTensor,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let (kernel, function) = module.kernel(&format!("mxfp4_quantize_{}_{variant}", T::DTYPE.word()))?;
    let grid = grid(shape)?;
    let options = options(recipe);
    let (codes, scales) = out.parts_mut();
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(codes).arg(scales).arg(&grid).arg(&options);
    // SAFETY: as for `mxfp4_quantize`; these kernels access single elements.
    unsafe { launch.launch(config(kernel, &grid.0)?) }.map_err(doing("launching a baseline kernel"))?;
    Ok(())
}

/// Enqueues MXFP4 dequantization. The caller has checked that `out` holds `shape`.
pub(super) fn mxfp4_dequantize<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    tensor: &DeviceTensor,
    out: &mut impl DevicePtrMut<T>,
    shape: Shape,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (out, _written) = out.device_ptr_mut(stream);
    let access = access::<T>(out, shape);
    let (kernel, function) = module.kernel(&format!("mxfp4_dequantize_{}_{access}", T::DTYPE.word()))?;
    let grid = grid(shape)?;
    let mut launch = stream.launch_builder(function);
    launch.arg(tensor.codes()).arg(tensor.scales()).arg(&out).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `out`, whose length the caller
    // checked; codes and scales hold its blocks because `tensor` has the shape; the `vector` variant is chosen only where
    // rows start on 16 bytes. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(kernel, &grid.0)?) }.map_err(doing("launching a dequantize kernel"))?;
    Ok(())
}

/// Enqueues the kernel that does nothing.
pub(super) fn empty(module: &Module, stream: &Arc<CudaStream>) -> Result<()> {
    let (kernel, function): &(Kernel, CudaFunction) = module.kernel("empty")?;
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (kernel.threads, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel takes no arguments and touches nothing.
    unsafe { stream.launch_builder(function).launch(config) }.map_err(doing("launching the empty kernel"))?;
    Ok(())
}

/// Which variant of a kernel fits: `vector` if every row starts on 16 bytes.
fn access<T: Element>(address: u64, shape: Shape) -> &'static str {
    let row_bytes = (shape.row_stride * T::DTYPE.bytes()) as u64;
    let aligned = address.is_multiple_of(16) && (shape.rows == 1 || row_bytes.is_multiple_of(16));
    if aligned { "vector" } else { "element" }
}

/// The blocks of a matrix that is not empty. Without gaps and padding between rows it counts as one long row, which
/// spares the kernel its divisions.
fn grid(shape: Shape) -> Result<Argument<BlockGrid>> {
    let Shape { rows, cols, row_stride } = shape;
    let flat = row_stride == cols && cols.is_multiple_of(32);
    let (r, c, s) = if flat { (1, rows * cols, rows * cols) } else { (rows, cols, row_stride) };
    let grid = BlockGrid::new(r as u64, c as u64, s as u64, 32);
    grid.map(Argument).ok_or(Error::TooLarge { rows, cols, row_stride })
}

fn options(recipe: &Recipe) -> Argument<QuantizeOptions> {
    Argument(QuantizeOptions {
        mantissa_addend: recipe.arithmetic.scale_rule.mantissa_addend(),
        negative_zero: recipe.arithmetic.negative_zero as u32,
        saturate_non_finite: u32::from(recipe.non_finite == NonFinite::Saturate),
    })
}

fn config(kernel: &Kernel, grid: &BlockGrid) -> Result<LaunchConfig> {
    let thread_blocks = grid.blocks.div_ceil(u64::from(kernel.blocks));
    let grid_dim = i32::try_from(thread_blocks).map_err(|_| Error::Gpu {
        doing: "launching a kernel",
        message: format!(
            "{} blocks are more than one launch can cover; split the matrix by rows",
            grid.blocks
        ),
    })?;
    Ok(LaunchConfig {
        grid_dim: (grid_dim as u32, 1, 1),
        block_dim: (kernel.threads, 1, 1),
        shared_mem_bytes: 0,
    })
}
