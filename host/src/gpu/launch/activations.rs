//! The launch that quantizes activations.

use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, cuMemsetD32Async};
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::activations::{GROUP, LEAST_TOKEN_SCALE};
use microscale_formats::nvfp4::Direction;
use microscale_formats::{ActivationLayout, E2m1, E4m3, Glu};
use microscale_kernels_abi::activations::{self, ActivationLaunch, Output, RowOrder, RowScale};
use microscale_kernels_abi::{ActivationParams, KernelId};

use crate::activations::{
    ActivationFormat, ActivationRecipe, ActivationScale, Fp8Scale, GluOrder, RowOperation,
};
use crate::element::{Dtype, Element};
use crate::error::{ActivationFault, Error, Result};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::memory::activations::{
    DeviceActivationExperts, DeviceActivations, DeviceQuantizedActivations, DeviceScales,
};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

/// Alignment of codes.
const CODES_ALIGNMENT: usize = 16;

/// Enqueues the quantization of activations.
///
/// `rows` are the rows of scales without padding, of an expert for masked experts. The caller has
/// checked that inputs and outputs have the lengths that the recipe gives, and that neither `rows`
/// nor `columns` is 0. FP8 with a scale per tensor takes two kernels, after [`least_tensor_scale`].
pub(in crate::gpu) fn quantize_activations<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    input: DeviceActivations<'_, T>,
    recipe: &ActivationRecipe,
    [rows, columns]: [usize; 2],
    mut out: DeviceQuantizedActivations<'_>,
) -> Result<()> {
    let DeviceActivations { values, shape, mut residual, weights, scales: given, experts } = input;
    let output = output_of(recipe);
    let kernel = kernel_of(recipe, T::DTYPE)?;
    let layout = if output == Output::Fp8 { ActivationLayout::Linear } else { recipe.layout };
    let mut params = ActivationParams::new(output, rows as u32, columns as u32, layout);
    params.input_stride = shape.row_stride as u64;
    params.residual_stride = columns as u64;
    params.code_stride = recipe.format.row_bytes(columns) as u64;
    describe(recipe, &mut params);

    let stream_of_views = &**stream;
    let (values, _values) = values.read(stream_of_views, "the activations", 1)?;
    let (residual, _residual) = match &mut residual {
        Some(residual) => {
            let (address, guard) = residual.write(stream_of_views, "the residual", 1)?;
            (address, Some(guard))
        }
        None => (0, None),
    };
    let (weights, _weights) = read(weights, stream_of_views, "the weights")?;
    let (offsets, scale_offsets) = match experts {
        None => (None, None),
        Some(DeviceActivationExperts::Sorted { offsets, scale_offsets, .. }) => {
            params.order = RowOrder::Sorted as u32;
            params.rows = shape.rows as u32;
            params.experts = (offsets.len() - 1) as u32;
            (Some(offsets), Some(scale_offsets))
        }
        Some(DeviceActivationExperts::Masked { counts }) => {
            params.order = RowOrder::Masked as u32;
            params.experts = counts.len() as u32;
            params.scale_rows *= params.experts;
            (Some(counts), None)
        }
    };
    let (offsets, _offsets) = read(offsets, stream_of_views, "the experts' offsets")?;
    let (scale_offsets, _scale_offsets) =
        read(scale_offsets, stream_of_views, "the experts' offsets of scales")?;
    let given_scales = match given {
        DeviceScales::None => None,
        DeviceScales::Host(scale) => {
            params.given = scale;
            None
        }
        DeviceScales::Device(scales) => {
            params.row_scale = RowScale::InMemory as u32;
            Some(scales.read(stream_of_views, "the given scales", 1)?)
        }
    };
    let (codes, _codes) = out.codes.write(stream_of_views, "the codes", CODES_ALIGNMENT)?;
    let (scales, _scales) = out.scales.write(stream_of_views, "the scales", 1)?;
    let (f32_scales, _f32_scales) = out.f32_scales.write(stream_of_views, "the f32 scales", 1)?;
    let per_group = params.row_scale >= RowScale::PerGroup as u32;
    let scales = if per_group { f32_scales } else { scales };
    let row_scales = match &given_scales {
        Some((address, _)) => *address,
        None => f32_scales,
    };
    let strides = if shape.rows > 1 { shape.row_stride * 2 } else { 0 };
    let starts = values | residual | weights | strides as u64;
    params.aligned = u32::from(columns.is_multiple_of(8) && starts.is_multiple_of(16));

    params.spread_rows(operation_of(recipe));

    let mut addresses = [values, residual, weights, codes, scales, row_scales, offsets, scale_offsets];
    if recipe.format == ActivationFormat::Fp8(Fp8Scale::PerTensor) {
        // SAFETY: as below. `least_tensor_scale` stored the scale.
        unsafe { launch(kernels, stream, kernel, &params, addresses)? };
        params.row_scale = RowScale::InMemory as u32;
        if residual != 0 {
            // The first launch stored the sums there.
            (addresses[0], addresses[1]) = (residual, 0);
            params.input_stride = params.residual_stride;
        }
    }
    // SAFETY: the caller checked the lengths that `params` describes; `aligned` is computed from
    // every address. The guards, held past the launch, keep the memory and order its uses.
    unsafe { launch(kernels, stream, kernel, &params, addresses) }
}

/// The row operation of a recipe.
fn operation_of(recipe: &ActivationRecipe) -> activations::RowOperation {
    match recipe.operation {
        RowOperation::None => activations::RowOperation::Plain,
        RowOperation::Glu(..) => activations::RowOperation::Glu,
        RowOperation::RmsNorm(_) => activations::RowOperation::Norm,
    }
}

/// The format of a recipe's output.
fn output_of(recipe: &ActivationRecipe) -> Output {
    match recipe.format {
        ActivationFormat::Fp8(_) => Output::Fp8,
        ActivationFormat::Mxfp8(_) => Output::Mxfp8,
        ActivationFormat::Mxfp4(_) => Output::Mxfp4,
        ActivationFormat::Nvfp4(_) => Output::Nvfp4,
    }
}

/// The kernel that quantizes activations in a dtype by a recipe.
///
/// # Errors
/// [`ActivationFault::Dtype`] for f32.
pub(in crate::gpu) fn kernel_of(recipe: &ActivationRecipe, dtype: Dtype) -> Result<KernelId> {
    let kernel = activations::kernel(operation_of(recipe), output_of(recipe), dtype);
    kernel.ok_or(Error::Activations(ActivationFault::Dtype))
}

/// Enqueues a store of the scale of a tensor without elements, which
/// [`quantize_activations`] raises.
pub(in crate::gpu) fn least_tensor_scale(
    stream: &Arc<CudaStream>,
    scales: &mut DeviceViewMut<'_, f32>,
) -> Result<()> {
    let storing = doing("storing a scale");
    stream.context().bind_to_thread().map_err(&storing)?;
    let (address, _written) = scales.write(stream, "the f32 scales", 1)?;
    // SAFETY: the stream is open. The caller checked that there is a scale, which is borrowed
    // exclusively.
    let status = unsafe { cuMemsetD32Async(address, LEAST_TOKEN_SCALE.to_bits(), 1, stream.cu_stream()) };
    status.result().map_err(storing)
}

/// Enqueues the quantization of rows of f16 or bf16, without gaps, to FP8: per token, or per group
/// of columns.
///
/// # Safety
/// `values` is the address of the rows, and `codes` and `scales` have room for theirs, on 8 and on
/// 4 bytes. Nothing else uses codes and scales until the kernel has ended.
pub(in crate::gpu) unsafe fn quantize_rows_fp8(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    dtype: Dtype,
    [rows, columns]: [usize; 2],
    per_group: bool,
    [values, codes, scales]: [CUdeviceptr; 3],
) -> Result<()> {
    let kernel = activations::kernel(activations::RowOperation::Plain, Output::Fp8, dtype)
        .ok_or(Error::Activations(ActivationFault::Dtype))?;
    let scale = if per_group { Fp8Scale::PerGroup { power_of_two: false } } else { Fp8Scale::PerToken };
    let recipe = ActivationRecipe::new(ActivationFormat::Fp8(scale));
    let mut params = ActivationParams::new(Output::Fp8, rows as u32, columns as u32, recipe.layout);
    params.code_stride = columns as u64;
    describe(&recipe, &mut params);
    params.aligned = u32::from(columns.is_multiple_of(8) && values.is_multiple_of(16));
    params.spread_rows(activations::RowOperation::Plain);
    let addresses = [values, 0, 0, codes, scales, scales, 0, 0];
    // SAFETY: the caller promises the memory that `params` describes.
    unsafe { launch(kernels, stream, kernel, &params, addresses) }
}

/// Enqueues a kernel that quantizes activations, with the addresses that it takes, in order.
///
/// # Safety
/// The addresses and `params` satisfy the kernel's contract.
unsafe fn launch(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: KernelId,
    params: &ActivationParams,
    addresses: [CUdeviceptr; 8],
) -> Result<()> {
    let ActivationLaunch { thread_blocks, threads, shared } = params.launch();
    let launch = Launch {
        kernel,
        thread_blocks: u64::from(thread_blocks),
        threads,
        shared,
        cluster: 1,
        // Kernels after this one rely on it: when it starts, all earlier work has ended.
        programmatic: false,
    };
    let [a, b, c, d, e, f, g, h] = addresses.each_ref().map(argument);
    let mut arguments = [a, b, c, d, e, f, g, h, argument(params)];
    // SAFETY: the arguments are the kernel's, in order, and live until the call returns. The caller
    // promises the rest.
    unsafe { enqueue(kernels, stream, &launch, &mut arguments, "quantizing activations") }
}

/// The address of a view, or 0 without one, and its guard.
fn read<'a, U>(
    view: Option<DeviceView<'a, U>>,
    stream: &'a CudaStream,
    what: &'static str,
) -> Result<(CUdeviceptr, Option<SyncOnDrop<'a>>)> {
    match view {
        Some(view) => view.read(stream, what, 1).map(|(address, guard)| (address, Some(guard))),
        None => Ok((0, None)),
    }
}

/// Sets the parameters of the operation and of scales that no memory decides.
fn describe(recipe: &ActivationRecipe, params: &mut ActivationParams) {
    match recipe.operation {
        RowOperation::None => {}
        RowOperation::Glu(glu, order) => {
            params.interleaved = u32::from(order == GluOrder::Interleaved);
            match glu {
                Glu::Sigmoid(gate) => params.gate = gate,
                Glu::GeluTanh => params.gelu = ActivationParams::GELU_TANH,
                Glu::Gelu => params.gelu = ActivationParams::GELU,
            }
        }
        RowOperation::RmsNorm(norm) => params.norm = norm,
    }
    let groups = u64::from(params.cols).div_ceil(GROUP as u64);
    match recipe.format {
        ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two }) => {
            (params.scale_stride, params.group_stride) = (groups, 1);
            let per_group = if power_of_two { RowScale::PowerOfTwoPerGroup } else { RowScale::PerGroup };
            params.row_scale = per_group as u32;
        }
        ActivationFormat::Nvfp4(ActivationScale::Given(direction)) => {
            params.multiplies = u32::from(direction == Direction::Multiplier);
        }
        ActivationFormat::Fp8(Fp8Scale::PerToken) | ActivationFormat::Nvfp4(ActivationScale::PerToken) => {
            params.row_scale = RowScale::PerToken as u32;
        }
        ActivationFormat::Mxfp8(rule) => params.mantissa_addend = rule.mantissa_addend::<E4m3>(),
        ActivationFormat::Mxfp4(rule) => params.mantissa_addend = rule.mantissa_addend::<E2m1>(),
        ActivationFormat::Fp8(Fp8Scale::PerTensor) => params.row_scale = RowScale::AmaxOfTensor as u32,
        ActivationFormat::Fp8(Fp8Scale::Given) => {}
    }
}
