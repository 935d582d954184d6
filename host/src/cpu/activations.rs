//! Quantizing activations on the CPU: rows in tasks for rayon's threads.

pub(in crate::cpu) mod rows;

use microscale_formats::activations::{GROUP, group_scale, token_scale};
use microscale_formats::nvfp4::{Arithmetic, Direction};
use microscale_formats::{ActivationLayout, E4m3, GlobalScale, mx};
use rayon::prelude::*;

use super::isa::Isa;
use crate::activations::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationRecipe, ActivationScale, ActivationSizes,
    Fp8Scale, QuantizedActivations,
};
use crate::cpu::blocks::output::Output;
use crate::cpu::rounding::params::{FormatParams, QuantizeParams};
use crate::cpu::rounding::thresholds::Thresholds;
use crate::element::{Dtype, Element};
use crate::elements::{Elements, ElementsMut, split_first};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::recipe::Recipe;
use crate::scheme::{Global, NonFinite, Scheme};
use crate::shape::Shape;

/// Minimum elements of a task. They fit a core's L2 cache.
const TASK_ELEMENTS: usize = 1 << 16;

/// Quantizes activations on the CPU, after a row operation.
///
/// Gives the bytes of `Gpu::quantize_activations_on`. `T` may also be f32, which GPUs do not take.
/// NaN and infinities propagate: they make NaN blocks, or NaN codes in FP8.
///
/// # Errors
/// [`Error::Length`] and [`Error::Activations`] if parts of the input do not match.
pub fn quantize_activations<T: Element>(
    input: ActivationInput<'_, T>,
    recipe: &ActivationRecipe,
) -> Result<QuantizedActivations> {
    quantize_activations_with(Isa::best(), input, recipe)
}

/// [`quantize_activations`] with a given instruction set, for tests and comparisons.
///
/// # Errors
/// The errors of [`quantize_activations`].
#[doc(hidden)]
pub fn quantize_activations_with<T: Element>(
    isa: Isa,
    input: ActivationInput<'_, T>,
    recipe: &ActivationRecipe,
) -> Result<QuantizedActivations> {
    let sizes = input.check(recipe)?;
    let ActivationInput { values, shape, residual, weights, scales: given, experts } = input;
    let rows = Rows {
        isa,
        values: Elements::of(values),
        shape,
        residual: residual.map(ElementsMut::of),
        weights: weights.map(Elements::of),
        given,
        experts,
    };
    quantize_rows(rows, sizes, recipe)
}

/// [`ActivationInput`] of any dtype.
struct Rows<'a> {
    isa: Isa,
    values: Elements<'a>,
    shape: Shape,
    residual: Option<ElementsMut<'a>>,
    weights: Option<Elements<'a>>,
    given: &'a [f32],
    experts: Option<ActivationExperts<'a>>,
}

/// Quantizes checked rows. Not generic, so that programs that use the library compile nothing.
fn quantize_rows(
    rows: Rows<'_>,
    sizes: ActivationSizes,
    recipe: &ActivationRecipe,
) -> Result<QuantizedActivations> {
    let masked = matches!(rows.experts, Some(ActivationExperts::Masked { .. }));
    let [codes, scales, f32_scales] = sizes.lengths(recipe, masked)?;
    let mut out = QuantizedActivations {
        codes: vec![0; codes],
        scales: vec![0; scales],
        f32_scales: vec![0.0; f32_scales],
    };
    quantize_into(rows, sizes, recipe, &mut out);
    Ok(out)
}

/// Quantizes to an output of the right lengths.
fn quantize_into(
    rows: Rows<'_>,
    sizes: ActivationSizes,
    recipe: &ActivationRecipe,
    out: &mut QuantizedActivations,
) {
    let Rows { isa, values, shape, mut residual, weights, given, experts } = rows;
    let columns = sizes.columns;
    let (stride, input_columns) = (shape.row_stride, shape.cols);
    let all = Matrix { isa, values, stride, input_columns, columns, exist: sizes.rows, weights };
    if recipe.format == ActivationFormat::Fp8(Fp8Scale::PerTensor) {
        out.f32_scales[0] = all.quantize_per_tensor(recipe, residual, &mut out.codes);
        return;
    }
    let mut rest = Parts { codes: &mut out.codes, scales: &mut out.scales, f32_scales: &mut out.f32_scales };
    let (row_bytes, row_scales) = (recipe.format.row_bytes(columns), recipe.format.f32_scales(columns));
    for expert in 0..sizes.experts {
        // The expert's first row, its rows, how many exist, and its rows of scales.
        let (start, rows, exist, scale_rows) = match experts {
            None => (0, sizes.rows, sizes.rows, sizes.rows),
            Some(ActivationExperts::Masked { counts }) => {
                let rows = sizes.scale_rows;
                (expert * rows, rows, counts[expert] as usize, rows)
            }
            Some(ActivationExperts::Sorted { offsets, scale_offsets }) => {
                let of = |offsets: &[u32]| (offsets[expert + 1] - offsets[expert]) as usize;
                (offsets[expert] as usize, of(offsets), of(offsets), of(scale_offsets))
            }
        };
        let scale_bytes = match recipe.format {
            ActivationFormat::Fp8(_) => 0,
            _ => recipe.layout.bytes(scale_rows, columns.div_ceil(recipe.format.block())).unwrap_or(0),
        };
        let part = rest.split_off([rows * row_bytes, scale_bytes, rows * row_scales]);
        let residual = residual.as_mut().map(|residual| residual.split_off(rows * columns));
        let first = (start * shape.row_stride).min(values.len());
        let values = values.part(first, values.len() - first);
        let matrix = Matrix { values, exist, ..all };
        matrix.quantize(recipe, given.get(expert).copied(), residual, part);
    }
}

/// Parts of the output.
struct Parts<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    f32_scales: &'a mut [f32],
}

impl<'a> Parts<'a> {
    /// Takes the first elements off.
    fn split_off(&mut self, [codes, scales, f32_scales]: [usize; 3]) -> Parts<'a> {
        Parts {
            codes: split_first(&mut self.codes, codes),
            scales: split_first(&mut self.scales, scales),
            f32_scales: split_first(&mut self.f32_scales, f32_scales),
        }
    }
}

/// The rows of one matrix.
struct Matrix<'a> {
    isa: Isa,
    values: Elements<'a>,
    stride: usize,
    input_columns: usize,
    columns: usize,
    /// Rows that exist.
    exist: usize,
    weights: Option<Elements<'a>>,
}

impl Matrix<'_> {
    /// Quantizes to FP8 with one scale, and returns the scale.
    ///
    /// Rows are kept in f32 from the search of amax to the quotients.
    fn quantize_per_tensor(
        &self,
        recipe: &ActivationRecipe,
        mut residual: Option<ElementsMut<'_>>,
        codes: &mut [u8],
    ) -> f32 {
        let (isa, columns) = (self.isa, self.columns);
        if columns == 0 {
            return token_scale(0.0);
        }
        let residuals: Vec<_> =
            (0..self.exist).map(|_| residual.as_mut().map(|residual| residual.split_off(columns))).collect();
        let mut computed = vec![0.0; self.exist * columns];
        let rows = computed.par_chunks_mut(columns).zip(residuals).enumerate();
        let amax = rows.map_init(Vec::new, |wide, (number, (row, residual))| {
            let values = self.values.part(number * self.stride, self.input_columns);
            isa.compute_row(&recipe.operation, values, residual, self.weights, wide, row);
            isa.finite_amax(row)
        });
        let scale = token_scale(amax.reduce(|| 0.0, f32::max));
        let rows = computed.par_chunks(columns).zip(codes.par_chunks_mut(columns));
        rows.for_each(|(row, codes)| isa.encode_fp8(row, scale, codes));
        scale
    }

    /// Quantizes in tasks of whole tiles of scales.
    fn quantize(
        &self,
        recipe: &ActivationRecipe,
        given: Option<f32>,
        residual: Option<ElementsMut<'_>>,
        out: Parts<'_>,
    ) {
        let columns = self.columns;
        if columns == 0 {
            return;
        }
        let row_bytes = recipe.format.row_bytes(columns);
        let blocks = columns.div_ceil(recipe.format.block());
        let tile_rows = recipe.layout.tile_rows();
        let rows = (TASK_ELEMENTS / columns).max(1).next_multiple_of(tile_rows);
        let tasks = out.codes.len().div_ceil(rows * row_bytes).max(if out.scales.is_empty() {
            0
        } else {
            out.scales.len().div_ceil(rows * recipe.layout.padded_blocks(blocks))
        });
        let f32_per_row = recipe.format.f32_scales(columns);
        let quantizer = RowQuantizer::new(self.isa, recipe, given);
        let (codes, scales, f32_scales) = (
            chunks(out.codes, rows * row_bytes, tasks),
            chunks(out.scales, rows * recipe.layout.padded_blocks(blocks), tasks),
            chunks(out.f32_scales, rows * f32_per_row, tasks),
        );
        let mut residual = residual;
        let residuals: Vec<_> = (0..tasks)
            .map(|_| residual.as_mut().map(|residual| residual.split_off(rows * columns)))
            .collect();
        let all = codes.into_par_iter().zip(scales).zip(f32_scales).zip(residuals).enumerate();
        all.for_each(|(task, (((codes, scales), f32_scales), mut residual))| {
            let (mut row, mut wide) = (vec![0.0; columns], Vec::new());
            let mut linear = vec![0; blocks];
            scales.fill(0);
            for i in 0..rows {
                let number = task * rows + i;
                if number >= self.exist {
                    break;
                }
                let residual = residual.as_mut().map(|residual| residual.split_off(columns));
                let values = self.values.part(number * self.stride, self.input_columns);
                let operation = &recipe.operation;
                self.isa.compute_row(operation, values, residual, self.weights, &mut wide, &mut row);
                let f32_scales = f32_scales.get_mut(i * f32_per_row..).unwrap_or_default();
                quantizer.quantize(&row, &mut codes[i * row_bytes..][..row_bytes], &mut linear, f32_scales);
                if !scales.is_empty() {
                    scatter(recipe.layout, i, &linear, scales);
                }
            }
        });
    }
}

/// Cuts a slice into `count` chunks; the last ones may be empty.
fn chunks<T>(mut all: &mut [T], len: usize, count: usize) -> Vec<&mut [T]> {
    (0..count).map(|_| split_first(&mut all, len)).collect()
}

/// Puts a row's scales in their places in a task's tiles.
fn scatter(layout: ActivationLayout, row: usize, linear: &[u8], scales: &mut [u8]) {
    if layout == ActivationLayout::Linear {
        scales[row * linear.len()..][..linear.len()].copy_from_slice(linear);
        return;
    }
    for (block, scale) in linear.iter().enumerate() {
        scales[layout.offset(row, block, linear.len())] = *scale;
    }
}

/// Quantizes computed rows.
enum RowQuantizer {
    Fp8 {
        isa: Isa,
        scale: Fp8Scale,
        given: f32,
    },
    Blocks {
        isa: Isa,
        params: Box<QuantizeParams>,
    },
    /// NVFP4 with a global scale per row.
    PerToken {
        isa: Isa,
    },
}

impl RowQuantizer {
    fn new(isa: Isa, recipe: &ActivationRecipe, given: Option<f32>) -> Self {
        let scheme = match recipe.format {
            ActivationFormat::Fp8(scale) => {
                return Self::Fp8 { isa, scale, given: given.unwrap_or(1.0) };
            }
            ActivationFormat::Nvfp4(ActivationScale::PerToken) => return Self::PerToken { isa },
            ActivationFormat::Mxfp8(rule) => Scheme::Mxfp8E4m3(rule),
            ActivationFormat::Mxfp4(scale_rule) => {
                Scheme::Mxfp4(mx::Arithmetic { scale_rule, ..mx::Arithmetic::default() })
            }
            ActivationFormat::Nvfp4(ActivationScale::Given(direction)) => {
                let params = Box::new(nvfp4_params(direction, given.unwrap_or(1.0)));
                return Self::Blocks { isa, params };
            }
        };
        Self::Blocks { isa, params: Box::new(params(scheme)) }
    }

    /// Quantizes a row to codes, linear block scales and f32 scales.
    fn quantize(&self, row: &[f32], codes: &mut [u8], scales: &mut [u8], f32_scales: &mut [f32]) {
        match self {
            Self::Blocks { isa, params } => {
                isa.quantize(Elements::F32(row), None, params, Output { codes, scales });
            }
            Self::PerToken { isa } => {
                let amax = isa.finite_amax(row);
                let divisor = Arithmetic::TRANSFORMER_ENGINE.global_scale(amax, |x| x);
                f32_scales[0] = 1.0 / divisor.value();
                let params = nvfp4_params(Direction::Divisor, divisor.value());
                isa.quantize(Elements::F32(row), None, &params, Output { codes, scales });
            }
            // `Matrix::quantize_per_tensor` encodes rows under one computed scale.
            Self::Fp8 { isa, scale: Fp8Scale::Given | Fp8Scale::PerTensor, given } => {
                isa.encode_fp8(row, *given, codes);
            }
            Self::Fp8 { isa, scale: Fp8Scale::PerToken, .. } => {
                f32_scales[0] = token_scale(isa.finite_amax(row));
                isa.encode_fp8(row, f32_scales[0], codes);
            }
            Self::Fp8 { isa, scale: Fp8Scale::PerGroup { power_of_two }, .. } => {
                let groups = row.chunks(GROUP).zip(codes.chunks_mut(GROUP)).zip(f32_scales);
                for ((row, codes), scale) in groups {
                    *scale = group_scale(isa.finite_amax(row), *power_of_two, |amax| amax / E4m3::MAX);
                    isa.encode_fp8(row, *scale, codes);
                }
            }
        }
    }
}

/// The parameters of NVFP4 under a global scale, for rows in f32 that are rounded already.
pub(in crate::cpu) fn nvfp4_params(direction: Direction, scale: f32) -> QuantizeParams {
    let divisor = match direction {
        Direction::Divisor => scale,
        Direction::Multiplier => 1.0 / scale,
    };
    let global = Global::Given(GlobalScale::Divisor(divisor));
    params(Scheme::Nvfp4(Arithmetic::TRANSFORMER_ENGINE, global))
}

/// The parameters for rows in f32, which are rounded already.
fn params(scheme: Scheme) -> QuantizeParams {
    let recipe = Recipe { scheme, non_finite: NonFinite::Propagate, ..Recipe::default() };
    let (format, global) = FormatParams::of(&recipe, Dtype::F32, |_| GlobalScale::Divisor(1.0));
    QuantizeParams::new(&recipe, format, Thresholds::none(), global)
}
