//! One typed function a kind of kernel: nothing else launches.
//!
//! Each computes the arguments from checked shapes, so that the kernel's contract (in `kernels-gpu`) holds.

mod gemv;
mod weights;

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
};
use microscale_formats::nvfp4::Direction;
use microscale_formats::{E2m1, E4m3, E5m2, ScaleLayout, ScaleRule, Search, mx};
use microscale_kernels_abi::{
    ApplyGlobal, BLOCK_LIMIT, BlockGrid, Divider, ERROR_PART, Kernel, NvPlan, NvQuantizeOptions, NvShortcut,
    QuantizeOptions, ScaleGrid,
};

pub(super) use gemv::gemv;
pub(super) use weights::gemv_weights;

use super::module::Module;
use super::{DeviceReport, DeviceTensor, doing};
use crate::element::Element;
use crate::error::OperandFault;
use crate::error::{Error, Result};
use crate::recipe::{Format, Global, NonFinite, Recipe, Scheme, Words};
use crate::tensor::{QuantizedShape, Shape};

/// A structure of `microscale_kernels_abi`, passed by value.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Argument<T>(T);

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<BlockGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<ScaleGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<Divider> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<QuantizeOptions> {}
// SAFETY: as above; its enumerations are of 32 bits, and the kernel knows the same values.
unsafe impl DeviceRepr for Argument<NvQuantizeOptions> {}
// SAFETY: an enumeration of 32 bits, of which the kernel knows the same values.
unsafe impl DeviceRepr for Argument<ApplyGlobal> {}

/// The word for a format in the kernels' names.
///
/// # Errors
/// [`Error::NoKernel`].
fn kernel_word(format: Format) -> Result<&'static str> {
    match format {
        Format::Mxfp4 => Ok("mxfp4"),
        Format::Nvfp4 => Ok("nvfp4"),
        Format::Mxfp8E4m3 => Ok("mxfp8_e4m3"),
        Format::Mxfp8E5m2 => Ok("mxfp8_e5m2"),
        Format::Comparison(_) => Err(Error::NoKernel { format }),
    }
}

/// What a scheme tells its kernel: the options of the MX formats or of NVFP4, and the variant in the kernel's name.
enum Options {
    Mx(Argument<QuantizeOptions>, &'static str),
    Nv(Argument<NvQuantizeOptions>, &'static str),
}

impl Options {
    /// # Errors
    /// [`Error::NoKernel`].
    fn of<T: Element>(recipe: &Recipe) -> Result<Self> {
        let saturate_non_finite = u32::from(recipe.non_finite == NonFinite::Saturate);
        let mx = |arithmetic: mx::Arithmetic, mantissa_addend| {
            let negative_zero = arithmetic.negative_zero as u32;
            let options = QuantizeOptions { mantissa_addend, negative_zero, saturate_non_finite };
            Self::Mx(Argument(options), arithmetic.ties.word())
        };
        let with_rule = |scale_rule: ScaleRule| mx::Arithmetic { scale_rule, ..Default::default() };
        Ok(match recipe.scheme {
            Scheme::Mxfp4(arithmetic) => mx(arithmetic, arithmetic.scale_rule.mantissa_addend::<E2m1>()),
            Scheme::Mxfp8E4m3(rule) => mx(with_rule(rule), rule.mantissa_addend::<E4m3>()),
            Scheme::Mxfp8E5m2(rule) => mx(with_rule(rule), rule.mantissa_addend::<E5m2>()),
            Scheme::Nvfp4(arithmetic, global) => {
                let global_scale = match global {
                    Global::Given(given) => given.value(),
                    // The plan's kernel puts in another.
                    Global::FromAmax | Global::Absent => 1.0,
                };
                let mut plan = NvPlan::new(arithmetic, global_scale);
                plan.shortcut = NvShortcut::new(&plan.quantizer, T::SIGNIFICAND);
                let variant = if global == Global::FromAmax { "planned" } else { "given" };
                Self::Nv(Argument(NvQuantizeOptions { plan, saturate_non_finite }), variant)
            }
            Scheme::Comparison(_) => return Err(Error::NoKernel { format: recipe.format() }),
        })
    }
}

/// Enqueues quantization. The caller has checked that `values` holds `shape`, that `out` is what the recipe makes of
/// it, and that the amax in `out`'s slot is the input's if the recipe asks for it.
#[expect(clippy::too_many_arguments, reason = "those of `Gpu::quantize_weighted_on`")]
pub(super) fn quantize<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    values: &impl DevicePtr<T>,
    shape: Shape,
    recipe: &Recipe,
    importance: Option<&CudaSlice<f32>>,
    out: &mut DeviceTensor,
    report: &mut DeviceReport,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let options = Options::of::<T>(recipe)?;
    let (Options::Mx(_, variant) | Options::Nv(_, variant)) = options;
    let (format, dtype) = (kernel_word(recipe.format())?, T::DTYPE.word());
    let (name, (grid, scale_grid)) = if recipe.search == Search::None {
        let access = access::<T>(values, shape);
        let name = format!("{format}_quantize_{dtype}_{variant}_{access}");
        (name, quantize_grids(shape, out.shape(), access)?)
    } else {
        // Weights go by column, which a flat grid has not.
        let grid = if importance.is_some() { by_rows } else { grid };
        let name = format!("{format}_search_{dtype}_{variant}");
        (name, (grid(shape, recipe.format().block())?, scale_grid(out.shape())))
    };
    let (kernel, function) = module.kernel(&name)?;
    let importance = importance.map(|importance| importance.device_ptr(stream));
    let importance = importance.as_ref().map_or(0, |(importance, _)| *importance);
    let search = recipe.search as u32;
    let (codes, scales, global) = out.parts_mut();
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(codes).arg(scales);
    if let Options::Nv(..) = options {
        launch.arg(global);
    }
    launch.arg(report.slots_mut()).arg(&grid).arg(&scale_grid);
    match &options {
        Options::Mx(options, _) => launch.arg(options),
        Options::Nv(options, _) => launch.arg(options),
    };
    if recipe.search != Search::None {
        launch.arg(&importance).arg(&search);
    }
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`, whose length the caller
    // checked; codes and scales have room for its blocks because `out` has the shape; the report and the global scale
    // have their slots; the `vector` variant is chosen only where rows start on 16 bytes; there are as many weights as
    // columns, or none. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(kernel, blocks_in_elements(&grid, recipe.format()))?) }
        .map_err(doing("launching a quantize kernel"))?;
    Ok(())
}

/// Enqueues one of the ladder's MXFP4 quantizers: ties to even, −0 kept, non-finite blocks become NaN,
/// linear scales, no report.
pub(super) fn quantize_baseline<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    variant: &str,
    values: &impl DevicePtr<T>,
    shape: Shape,
    recipe: &Recipe,
    out: &mut DeviceTensor,
) -> Result<()> {
    let Options::Mx(options, _) = Options::of::<T>(recipe)? else {
        return Err(Error::Gpu {
            doing: "choosing a baseline",
            message: "there is none for this format".into(),
        });
    };
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let name = format!("{}_quantize_{}_{variant}", kernel_word(recipe.format())?, T::DTYPE.word());
    let (kernel, function) = module.kernel(&name)?;
    let grid = grid(shape, recipe.format().block())?;
    let (codes, scales, _) = out.parts_mut();
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(codes).arg(scales).arg(&grid).arg(&options);
    // SAFETY: as for `quantize`; these kernels access single elements.
    unsafe { launch.launch(config(kernel, blocks_in_elements(&grid, recipe.format()))?) }
        .map_err(doing("launching a baseline kernel"))?;
    Ok(())
}

/// Enqueues dequantization. The caller has checked that `out` holds `shape`.
pub(super) fn dequantize<T: Element>(
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
    let name = format!("{}_dequantize_{}_{access}", kernel_word(tensor.format())?, T::DTYPE.word());
    let (kernel, function) = module.kernel(&name)?;
    let grid = grid(shape, tensor.format().block())?;
    let scale_grid = scale_grid(tensor.shape());
    let apply = apply_global(tensor);
    let mut launch = stream.launch_builder(function);
    launch.arg(tensor.codes()).arg(tensor.scales());
    if tensor.format() == Format::Nvfp4 {
        launch.arg(tensor.global_slot());
    }
    launch.arg(&out).arg(&grid).arg(&scale_grid);
    if tensor.format() == Format::Nvfp4 {
        launch.arg(&apply);
    }
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `out`, whose length the caller
    // checked; codes and scales hold its blocks because `tensor` has the shape; the `vector` variant is chosen only where
    // rows start on 16 bytes. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(kernel, blocks_in_elements(&grid, tensor.format()))?) }
        .map_err(doing("launching a dequantize kernel"))?;
    Ok(())
}

/// What a kernel does with a tensor's global scale.
fn apply_global(tensor: &DeviceTensor) -> Argument<ApplyGlobal> {
    Argument(match tensor.direction() {
        Some(Direction::Divisor) => ApplyGlobal::Divisor,
        Some(Direction::Multiplier) => ApplyGlobal::Multiplier,
        None => ApplyGlobal::Absent,
    })
}

/// Enqueues the search for a matrix' amax, into a slot that holds the amax of nothing, or of what is to be taken in
/// too. The caller has checked that `values` holds `shape`.
pub(super) fn amax<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    values: &impl DevicePtr<T>,
    shape: Shape,
    slot: &mut CudaSlice<u32>,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let access = access::<T>(values, shape);
    let (kernel, function) = module.kernel(&format!("amax_{}_{access}", T::DTYPE.word()))?;
    let grid = grid(shape, AMAX_BLOCK)?;
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(slot).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`, whose length the
    // caller checked; the slot is whole; the `vector` variant is chosen only where rows start on 16 bytes.
    unsafe { launch.launch(config(kernel, grid.0.blocks * AMAX_BLOCK as u64)?) }
        .map_err(doing("launching an amax kernel"))?;
    Ok(())
}

/// Enqueues what makes an NVFP4 plan of the amax in a tensor's slot.
pub(super) fn plan<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    recipe: &Recipe,
    slot: &mut CudaSlice<u32>,
) -> Result<()> {
    let Options::Nv(options, _) = Options::of::<T>(recipe)? else { return Ok(()) };
    let (kernel, function) = module.kernel(&format!("nvfp4_plan_{}", T::DTYPE.word()))?;
    let mut launch = stream.launch_builder(function);
    launch.arg(slot).arg(&options);
    // SAFETY: the arguments are the kernel's, in order; the slot is whole.
    unsafe { launch.launch(config(kernel, 1)?) }.map_err(doing("launching a plan kernel"))?;
    Ok(())
}

/// Enqueues the sums of what a matrix has lost, part by part of its rows. The caller has checked that `values` holds
/// `shape`, that `back` holds its rows without gaps, and that `sums` has room for [`error_parts`] of each row.
pub(super) fn errors<T: Element>(
    module: &Module,
    stream: &Arc<CudaStream>,
    values: &impl DevicePtr<T>,
    shape: Shape,
    back: &CudaSlice<f32>,
    sums: &mut CudaSlice<u64>,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let (kernel, function) = module.kernel(&format!("errors_{}", T::DTYPE.word()))?;
    let grid = by_rows(shape, ERROR_PART as usize)?;
    let mut launch = stream.launch_builder(function);
    launch.arg(&values).arg(back).arg(sums).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`, row by row; the caller
    // checked the lengths of all three. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(kernel, grid.0.blocks * u64::from(ERROR_PART))?) }
        .map_err(doing("launching an errors kernel"))?;
    Ok(())
}

/// Parts of each row whose errors are summed by themselves.
pub(super) fn error_parts(shape: Shape) -> usize {
    shape.cols.div_ceil(ERROR_PART as usize)
}

/// The blocks that the amax kernels count in.
const AMAX_BLOCK: usize = mx::BLOCK;

/// Enqueues the conversion of scales to the other layout. `swizzled` is the shape of the side that is swizzled.
pub(super) fn convert_scales(
    module: &Module,
    stream: &Arc<CudaStream>,
    source: &CudaSlice<u8>,
    target: &mut CudaSlice<u8>,
    to: ScaleLayout,
    shape: QuantizedShape,
) -> Result<()> {
    if shape.rows == 0 || shape.cols == 0 {
        return Ok(());
    }
    let (_, bytes) = shape.with_scale_layout(ScaleLayout::Swizzled).bytes()?;
    let name = match to {
        ScaleLayout::Swizzled => "scales_to_swizzled",
        ScaleLayout::Linear => "scales_to_linear",
    };
    let (kernel, function) = module.kernel(name)?;
    let rows = shape.rows as u64;
    let grid = ScaleGrid::swizzled(shape.blocks_per_row() as u64);
    let tiles = Argument(Divider::new(grid.tiles_per_row));
    let grid = Argument(grid);
    let mut launch = stream.launch_builder(function);
    launch.arg(source).arg(target).arg(&rows).arg(&grid).arg(&tiles);
    // SAFETY: the arguments are the kernel's, in order; both sides have the bytes of the shape in their layouts, and
    // there is a thread for each four bytes of the swizzled side.
    unsafe { launch.launch(config(kernel, bytes as u64)?) }.map_err(doing("launching a layout kernel"))?;
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
fn grid(shape: Shape, block: usize) -> Result<Argument<BlockGrid>> {
    let Shape { rows, cols, row_stride } = shape;
    let flat = row_stride == cols && cols.is_multiple_of(block);
    let (r, c, s) = if flat { (1, rows * cols, rows * cols) } else { (rows, cols, row_stride) };
    let grid = BlockGrid::new(r as u64, c as u64, s as u64, block as u64);
    grid.map(Argument).ok_or(Error::TooLarge { rows, cols, row_stride })
}

/// The same, row by row.
fn by_rows(shape: Shape, block: usize) -> Result<Argument<BlockGrid>> {
    let Shape { rows, cols, row_stride } = shape;
    let grid = BlockGrid::new(rows as u64, cols as u64, row_stride as u64, block as u64);
    grid.map(Argument).ok_or(Error::TooLarge { rows, cols, row_stride })
}

/// Where the scale bytes of a tensor that is not empty lie.
fn scale_grid(shape: QuantizedShape) -> Argument<ScaleGrid> {
    let blocks = shape.blocks_per_row() as u64;
    Argument(match shape.scale_layout {
        ScaleLayout::Linear => ScaleGrid::linear(blocks),
        ScaleLayout::Swizzled => ScaleGrid::swizzled(blocks),
    })
}

/// The grids of a quantizer, with which it goes by tiles where it can.
fn quantize_grids(
    shape: Shape,
    out: QuantizedShape,
    access: &str,
) -> Result<(Argument<BlockGrid>, Argument<ScaleGrid>)> {
    let Shape { rows, cols, .. } = shape;
    let mut scale_grid = scale_grid(out);
    if out.scale_layout == ScaleLayout::Swizzled && access == "vector" {
        let by_rows = by_rows(shape, out.format.block())?;
        if ScaleGrid::can_go_by_tiles(rows as u64, cols as u64, by_rows.0.blocks) {
            scale_grid.0.by_tiles = 1;
            return Ok((by_rows, scale_grid));
        }
    }
    Ok((grid(shape, out.format.block())?, scale_grid))
}

/// The elements of a grid's blocks, padding included.
fn blocks_in_elements(grid: &Argument<BlockGrid>, format: Format) -> u64 {
    grid.0.blocks * format.block() as u64
}

/// Checks the number of something that a product's kernels count.
fn limited(what: &'static str, found: usize, limit: u64) -> Result<()> {
    let fits = (found as u64) < limit;
    if fits { Ok(()) } else { Err(Error::Operands(OperandFault::Limit { what, found, limit })) }
}

/// Checks the columns of a product's operands.
fn limited_columns(shape: QuantizedShape) -> Result<()> {
    limited("columns", shape.cols, (BLOCK_LIMIT - 1) * shape.format.block() as u64 + 1)
}

/// There is no launch of so many thread blocks.
fn not_one_launch(what: impl std::fmt::Display) -> Error {
    let message = format!("{what} are more than one launch can cover; split the matrix by rows");
    Error::Gpu { doing: "launching a kernel", message }
}

/// The launch that covers so many elements, or has so many thread blocks if it is not elements that they handle.
fn config(kernel: &Kernel, elements: u64) -> Result<LaunchConfig> {
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
            // The last block that there may be, whole.
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
