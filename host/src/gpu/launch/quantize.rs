//! Launches of quantizers, with plain rounding and with searched scales.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, PushKernelArg};
use microscale_formats::plan::NvPlan;
use microscale_formats::shortcut::NvShortcut;
use microscale_formats::{E2m1, E4m3, E5m2, ScaleLayout, ScaleRule, Search, Ties, mx};
use microscale_kernels_abi::search::Search as SearchKernel;
use microscale_kernels_abi::{BlockGrid, KernelId, MxOptions, NvOptions, Quantize, ScaleGrid};

use crate::element::{Dtype, Element};
use crate::error::{Error, Result};
use crate::gpu::launch::arguments::{Argument, blocks_in_elements, by_rows, config, grid, scale_grid};
use crate::gpu::memory::tensor_view_mut::DeviceTensorViewMut;
use crate::gpu::memory::view::DeviceView;
use crate::gpu::ops::quantize_options::DeviceQuantizeOptions;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use crate::recipe::Recipe;
use crate::scheme::{Global, NonFinite, Scheme};
use crate::shape::{QuantizedShape, Shape};

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<MxOptions> {}
// SAFETY: a `repr(C)` structure of numbers and 32-bit enumerations, whose definition host and
// kernel share.
unsafe impl DeviceRepr for Argument<NvOptions> {}

/// The options that a scheme's kernels take.
pub(super) enum Options {
    /// Options of the MX formats.
    Mx(Argument<MxOptions>),
    /// Options of NVFP4.
    Nv(Argument<NvOptions>),
}

/// The kernel that quantizes by a recipe. `aligned`: every row starts on 16 bytes.
///
/// Kernels that search scales take rows at any address.
///
/// # Errors
/// [`Error::NoKernel`] and [`Error::NoSearch`].
pub(in crate::gpu) fn quantizer(recipe: &Recipe, dtype: Dtype, aligned: bool) -> Result<KernelId> {
    let given = |global| global != Global::FromAmax;
    let ([on_16_bytes, anywhere], searching) = match recipe.scheme {
        Scheme::Mxfp4(arithmetic) if arithmetic.ties == Ties::Even => {
            ([Quantize::Mxfp4EvenAligned, Quantize::Mxfp4EvenUnaligned], Some(SearchKernel::Mxfp4Even))
        }
        Scheme::Mxfp4(_) => (
            [Quantize::Mxfp4OtherTiesAligned, Quantize::Mxfp4OtherTiesUnaligned],
            Some(SearchKernel::Mxfp4OtherTies),
        ),
        Scheme::Nvfp4(_, global) if given(global) => {
            ([Quantize::Nvfp4GivenAligned, Quantize::Nvfp4GivenUnaligned], Some(SearchKernel::Nvfp4Given))
        }
        Scheme::Nvfp4(..) => (
            [Quantize::Nvfp4PlannedAligned, Quantize::Nvfp4PlannedUnaligned],
            Some(SearchKernel::Nvfp4Planned),
        ),
        Scheme::Mxfp8E4m3(_) => ([Quantize::Mxfp8E4m3Aligned, Quantize::Mxfp8E4m3Unaligned], None),
        Scheme::Mxfp8E5m2(_) => ([Quantize::Mxfp8E5m2Aligned, Quantize::Mxfp8E5m2Unaligned], None),
        Scheme::Comparison(_) => return Err(Error::NoKernel { format: recipe.format() }),
    };
    let plain = if aligned { on_16_bytes } else { anywhere };
    match (recipe.search, searching) {
        (Search::None, _) => Ok(plain.of(dtype)),
        (_, Some(searching)) => Ok(searching.of(dtype)),
        (_, None) => Err(Error::NoSearch { format: recipe.format() }),
    }
}

impl Options {
    pub(super) fn of<T: Element>(recipe: &Recipe) -> Result<Self> {
        let saturate_non_finite = u32::from(recipe.non_finite == NonFinite::Saturate);
        let mx = |arithmetic: mx::Arithmetic, mantissa_addend| {
            let (ties, negative_zero) = (arithmetic.ties as u32, arithmetic.negative_zero as u32);
            let options = MxOptions { mantissa_addend, ties, negative_zero, saturate_non_finite };
            Self::Mx(Argument(options))
        };
        let with_rule = |scale_rule: ScaleRule| mx::Arithmetic { scale_rule, ..Default::default() };
        Ok(match recipe.scheme {
            Scheme::Mxfp4(arithmetic) => mx(arithmetic, arithmetic.scale_rule.mantissa_addend::<E2m1>()),
            Scheme::Mxfp8E4m3(rule) => mx(with_rule(rule), rule.mantissa_addend::<E4m3>()),
            Scheme::Mxfp8E5m2(rule) => mx(with_rule(rule), rule.mantissa_addend::<E5m2>()),
            Scheme::Nvfp4(arithmetic, global) => {
                let global_scale = match global {
                    Global::Given(given) => given.value(),
                    // The plan kernel replaces it.
                    Global::FromAmax | Global::Absent => 1.0,
                };
                let mut plan = NvPlan::new(arithmetic, global_scale);
                plan.shortcut = NvShortcut::new(&plan.quantizer, T::SIGNIFICAND);
                Self::Nv(Argument(NvOptions { plan, saturate_non_finite }))
            }
            Scheme::Comparison(_) => return Err(Error::NoKernel { format: recipe.format() }),
        })
    }
}

/// Enqueues quantization of a matrix.
///
/// The caller has checked that `values` holds `shape`, that `out` has the shape that the recipe
/// gives it, and that the amax in `out`'s slot is the input's if the recipe needs one.
pub(in crate::gpu) fn quantize<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    values: DeviceView<'_, T>,
    shape: Shape,
    recipe: &Recipe,
    request: DeviceQuantizeOptions<'_>,
    mut out: DeviceTensorViewMut<'_>,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.read(stream, "the input", 1)?;
    let options = Options::of::<T>(recipe)?;
    let (grid, scale_grid) = if recipe.search == Search::None {
        quantize_grids::<T>(values, shape, out.shape())?
    } else {
        // Importance is per column, and a flat grid has no columns.
        let grid = if request.importance.is_some() { by_rows } else { grid };
        (grid(shape, recipe.format().block())?, scale_grid(out.shape()))
    };
    let ready = kernels.ready(quantizer(recipe, T::DTYPE, grid.is_aligned::<T>(values))?)?;
    let importance =
        request.importance.map(|importance| importance.read(stream, "importance", 1)).transpose()?;
    let importance_at = importance.as_ref().map_or(0, |(address, _)| *address);
    let search = recipe.search as u32;
    let unread = kernels.unread_report();
    let ([codes, scales, global], _written) = out.write(stream)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&values).arg(&codes).arg(&scales);
    if let Options::Nv(..) = options {
        launch.arg(&global);
    }
    match request.report {
        Some(report) => launch.arg(report.slots_mut()),
        None => launch.arg(&unread),
    };
    launch.arg(&grid).arg(&scale_grid);
    match &options {
        Options::Mx(options) => launch.arg(options),
        Options::Nv(options) => launch.arg(options),
    };
    if recipe.search != Search::None {
        launch.arg(&importance_at).arg(&search);
    }
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`,
    // whose length the caller checked. Codes and scales have room for its blocks because `out` has
    // the shape, and `write` checked their alignment. The report and the global scale have whole
    // slots. The kernel for aligned rows is chosen only if every row starts on 16 bytes. The caller
    // checked that importance, if given, has one number per column. The borrows, held past the
    // launch, keep the buffers from overlapping.
    unsafe { launch.launch(config(&ready.kernel, blocks_in_elements(&grid, recipe.format()))?) }
        .map_err(doing("launching a quantize kernel"))?;
    Ok(())
}

/// The grids of a quantizer that uses tiles where possible.
fn quantize_grids<T: Element>(
    values: u64,
    shape: Shape,
    out: QuantizedShape,
) -> Result<(Argument<BlockGrid>, Argument<ScaleGrid>)> {
    let Shape { rows, cols, .. } = shape;
    let mut scale_grid = scale_grid(out);
    if out.scale_layout == ScaleLayout::Swizzled {
        let by_rows = by_rows(shape, out.format.block())?;
        if by_rows.is_aligned::<T>(values)
            && ScaleGrid::can_go_by_tiles(rows as u64, cols as u64, by_rows.0.blocks)
        {
            scale_grid.0.by_tiles = 1;
            return Ok((by_rows, scale_grid));
        }
    }
    Ok((grid(shape, out.format.block())?, scale_grid))
}
