//! Launching quantizers, by plain rounding and with searched scales.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, PushKernelArg};
use microscale_formats::plan::NvPlan;
use microscale_formats::shortcut::NvShortcut;
use microscale_formats::{E2m1, E4m3, E5m2, ScaleLayout, ScaleRule, Search, Ties, mx};
use microscale_kernels_abi::search::Search as SearchKernel;
use microscale_kernels_abi::{BlockGrid, NvQuantizeOptions, Quantize, QuantizeOptions, ScaleGrid};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::gpu::arguments::{Argument, blocks_in_elements, by_rows, config, grid, kernel_dtype, scale_grid};
use crate::gpu::driver::doing;
use crate::gpu::kernels::Kernels;
use crate::gpu::tensor::{DeviceReport, DeviceTensor};
use crate::recipe::Recipe;
use crate::scheme::{Global, NonFinite, Scheme};
use crate::shape::{QuantizedShape, Shape};

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<QuantizeOptions> {}
// SAFETY: as above; its enumerations are of 32 bits, and the kernel knows the same values.
unsafe impl DeviceRepr for Argument<NvQuantizeOptions> {}

/// What a scheme tells its kernels.
pub(super) enum Options {
    /// Of the MX formats.
    Mx(Argument<QuantizeOptions>),
    /// Of NVFP4.
    Nv(Argument<NvQuantizeOptions>),
}

/// The kernels of a scheme, with their options.
pub(super) struct Quantizer {
    pub(super) options: Options,
    plain: Quantize,
    /// None for formats whose scales are not searched.
    searching: Option<SearchKernel>,
}

impl Quantizer {
    pub(super) fn of<T: Element>(recipe: &Recipe) -> Result<Self> {
        let saturate_non_finite = u32::from(recipe.non_finite == NonFinite::Saturate);
        let mx = |arithmetic: mx::Arithmetic, mantissa_addend, plain, searching| {
            let (ties, negative_zero) = (arithmetic.ties as u32, arithmetic.negative_zero as u32);
            let options = QuantizeOptions { mantissa_addend, ties, negative_zero, saturate_non_finite };
            Self { options: Options::Mx(Argument(options)), plain, searching }
        };
        let with_rule = |scale_rule: ScaleRule| mx::Arithmetic { scale_rule, ..Default::default() };
        Ok(match recipe.scheme {
            Scheme::Mxfp4(arithmetic) => {
                let to_even = arithmetic.ties == Ties::Even;
                let plain = if to_even { Quantize::Mxfp4Even } else { Quantize::Mxfp4OtherTies };
                let addend = arithmetic.scale_rule.mantissa_addend::<E2m1>();
                mx(arithmetic, addend, plain, Some(SearchKernel::Mxfp4))
            }
            Scheme::Mxfp8E4m3(rule) => {
                mx(with_rule(rule), rule.mantissa_addend::<E4m3>(), Quantize::Mxfp8E4m3, None)
            }
            Scheme::Mxfp8E5m2(rule) => {
                mx(with_rule(rule), rule.mantissa_addend::<E5m2>(), Quantize::Mxfp8E5m2, None)
            }
            Scheme::Nvfp4(arithmetic, global) => {
                let (global_scale, plain, searching) = match global {
                    Global::Given(given) => (given.value(), Quantize::Nvfp4Given, SearchKernel::Nvfp4Given),
                    Global::Absent => (1.0, Quantize::Nvfp4Given, SearchKernel::Nvfp4Given),
                    // The plan's kernel puts in another.
                    Global::FromAmax => (1.0, Quantize::Nvfp4Planned, SearchKernel::Nvfp4Planned),
                };
                let mut plan = NvPlan::new(arithmetic, global_scale);
                plan.shortcut = NvShortcut::new(&plan.quantizer, T::SIGNIFICAND);
                let options = Options::Nv(Argument(NvQuantizeOptions { plan, saturate_non_finite }));
                Self { options, plain, searching: Some(searching) }
            }
            Scheme::Comparison(_) => return Err(Error::NoKernel { format: recipe.format() }),
        })
    }
}

/// Enqueues quantization. The caller has checked that `values` holds `shape`, that `out` is what the recipe makes of
/// it, and that the amax in `out`'s slot is the input's if the recipe asks for it.
#[expect(clippy::too_many_arguments, reason = "those of `Gpu::quantize_weighted_on`")]
pub(in crate::gpu) fn quantize<T: Element>(
    kernels: &Kernels,
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
    let Quantizer { options, plain, searching } = Quantizer::of::<T>(recipe)?;
    let dtype = kernel_dtype(T::DTYPE);
    let (kernel, (grid, scale_grid)) = if recipe.search == Search::None {
        (plain.of(dtype), quantize_grids::<T>(values, shape, out.shape())?)
    } else {
        // Weights go by column, which a flat grid has not.
        let grid = if importance.is_some() { by_rows } else { grid };
        let searching = searching.ok_or(Error::NoSearch { format: recipe.format() })?;
        (searching.of(dtype), (grid(shape, recipe.format().block())?, scale_grid(out.shape())))
    };
    let ready = kernels.ready(kernel)?;
    let importance = importance.map(|importance| importance.device_ptr(stream));
    let importance = importance.as_ref().map_or(0, |(importance, _)| *importance);
    let search = recipe.search as u32;
    let (codes, scales, global) = out.parts_mut();
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&values).arg(codes).arg(scales);
    if let Options::Nv(..) = options {
        launch.arg(global);
    }
    launch.arg(report.slots_mut()).arg(&grid).arg(&scale_grid);
    match &options {
        Options::Mx(options) => launch.arg(options),
        Options::Nv(options) => launch.arg(options),
    };
    if recipe.search != Search::None {
        launch.arg(&importance).arg(&search);
    }
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`, whose length the caller
    // checked; codes and scales have room for its blocks because `out` has the shape; the report and the global scale
    // have their slots; there are as many weights as
    // columns, or none. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(&ready.kernel, blocks_in_elements(&grid, recipe.format()))?) }
        .map_err(doing("launching a quantize kernel"))?;
    Ok(())
}

/// The grids of a quantizer, with which it goes by tiles where it can.
fn quantize_grids<T: Element>(
    values: u64,
    shape: Shape,
    out: QuantizedShape,
) -> Result<(Argument<BlockGrid>, Argument<ScaleGrid>)> {
    let Shape { rows, cols, .. } = shape;
    let mut scale_grid = scale_grid(out);
    if out.scale_layout == ScaleLayout::Swizzled {
        let by_rows = by_rows(shape, out.format.block())?.at::<T>(values);
        if by_rows.0.rows_are_aligned()
            && ScaleGrid::can_go_by_tiles(rows as u64, cols as u64, by_rows.0.blocks)
        {
            scale_grid.0.by_tiles = 1;
            return Ok((by_rows, scale_grid));
        }
    }
    Ok((grid(shape, out.format.block())?.at::<T>(values), scale_grid))
}
