//! Quantizing matrices whose rows are contiguous: the input is checked, cut into pieces and spread over
//! rayon's threads.

use half::{bf16, f16};
use microscale_formats::layout::{TILE_BYTES, TILE_COLS, TILE_ROWS};
use microscale_formats::{GlobalScale, ScaleLayout};
use rayon::prelude::*;

use super::amax::amax_of;
use super::by_definition;
use super::hessian::HessianStore;
use super::isa::Isa;
use super::piece::Output;
use super::pieces::{Part, Pieces, TASK_BLOCKS};
use super::rule::{Kind, Rule};
use crate::amax::Amax;
use crate::element::{Dtype, Element};
use crate::elements::{Elements, by_dtype};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::layout::scatter_row;
use crate::recipe::{Recipe, check_importance};
use crate::report::{Position, Report};
use crate::scheme::Scheme;
use crate::shape::{QuantizedShape, Shape, Strided};
use crate::tensor::{Quantized, QuantizedTensor};

/// Quantizes the matrix that `shape` describes in `values`, on the CPU.
///
/// # Errors
/// [`Error::Length`], [`Error::RowStride`] or [`Error::TooLarge`] if the shape does not fit,
/// [`Error::NonFinite`] if the recipe refuses what the input holds, and [`Error::GlobalScale`] or
/// [`Error::GlobalScaleDirection`] if its global scale cannot be one.
pub fn quantize<T: Element>(values: &[T], shape: Shape, recipe: &Recipe) -> Result<Quantized> {
    QuantizeRequest::new(Isa::best(), Elements::of(values), shape, recipe)?.quantize_anew()
}

/// [`quantize`] into a tensor that exists already.
///
/// # Errors
/// Those of [`quantize`], and [`Error::QuantizedShape`] if `out` is a tensor of another shape, format or
/// scale layout.
pub fn quantize_into<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    quantize_with(Isa::best(), values, shape, recipe, out)
}

/// [`quantize_into`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`quantize_into`].
pub fn quantize_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    QuantizeRequest::new(isa, Elements::of(values), shape, recipe)?.quantize(out)
}

/// [`quantize`], weighting errors by column in the search for scales (`recipe.search`): one number for each,
/// such as the mean square of the activations that it meets.
///
/// # Errors
/// Those of [`quantize`], and [`Error::Importance`] if there are not as many numbers as columns, or one is
/// negative or not finite.
pub fn quantize_weighted<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    importance: &[f32],
) -> Result<Quantized> {
    let request = QuantizeRequest::new(Isa::best(), Elements::of(values), shape, recipe)?;
    request.by_columns(Some(importance))?.quantize_anew()
}

/// [`quantize_weighted`] on a chosen instruction set, into a tensor that exists already; without importance
/// all are 1.
///
/// # Errors
/// Those of [`quantize_weighted`] and [`quantize_into`].
pub fn quantize_weighted_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    importance: Option<&[f32]>,
    out: &mut QuantizedTensor,
) -> Result<Report> {
    QuantizeRequest::new(isa, Elements::of(values), shape, recipe)?.by_columns(importance)?.quantize(out)
}

/// [`quantize`], searching scales (`recipe.search`) by the error that they make in what a layer
/// computes: rᵀHr, with r what the codes of a scale leave of a block and H the block's Hessian.
///
/// `hessian` is `[blocks in a row, N, N]`, row by row, with N the format's block: 16 for NVFP4 and 32 for
/// MXFP4. It is shared by all rows. Block j is the j-th of the diagonal blocks of XᵀX, with X the inputs
/// `[tokens, columns]` that the layer meets, in any unit. Rows and columns behind the last column of the
/// matrix are ignored. With [`crate::Search::Full`] the result is the least error that any scale has, in the
/// arithmetic of [`microscale_formats::hessian`]; [`crate::Search::Window`] and [`crate::Search::FourSix`]
/// look at fewer scales.
///
/// # Errors
/// Those of [`quantize`]; [`Error::HessianWithoutSearch`] if the recipe has no search and [`Error::NoSearch`]
/// if the format has none; [`Error::HessianLength`] and [`Error::HessianEntry`] if there are not as many
/// entries as needed, or one is not finite, not symmetric (beyond 1/256 of the geometric mean of its diagonal
/// entries), or negative on the diagonal.
pub fn quantize_hessian<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    hessian: &[f32],
) -> Result<Quantized> {
    let request = QuantizeRequest::new(Isa::best(), Elements::of(values), shape, recipe)?;
    request.by_hessians(&HessianStore::new(hessian, recipe, shape.cols)?).quantize_anew()
}

/// [`quantize_hessian`] on a chosen instruction set, into a tensor that exists already.
///
/// # Errors
/// Those of [`quantize_hessian`] and [`quantize_into`].
pub fn quantize_hessian_with<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    hessian: &[f32],
    out: &mut QuantizedTensor,
) -> Result<Report> {
    let request = QuantizeRequest::new(isa, Elements::of(values), shape, recipe)?;
    request.by_hessians(&HessianStore::new(hessian, recipe, shape.cols)?).quantize(out)
}

/// The importance of errors in a search for scales.
#[derive(Clone, Copy)]
enum Importance<'a> {
    None,
    /// A number for each column.
    Columns(&'a [f32]),
    /// A Hessian for each block of columns.
    Hessians(&'a HessianStore),
}

/// A matrix to quantize, and how. Its values were found to hold its shape.
struct QuantizeRequest<'a> {
    isa: Isa,
    values: Elements<'a>,
    shape: Shape,
    recipe: &'a Recipe,
    importance: Importance<'a>,
}

impl<'a> QuantizeRequest<'a> {
    /// Makes a request with errors that are not weighted.
    fn new(isa: Isa, values: Elements<'a>, shape: Shape, recipe: &'a Recipe) -> Result<Self> {
        shape.check("the input", values.len())?;
        Ok(Self { isa, values, shape, recipe, importance: Importance::None })
    }

    /// Adds importance by column, if there is any.
    fn by_columns(self, importance: Option<&'a [f32]>) -> Result<Self> {
        check_importance(importance, self.shape)?;
        Ok(Self { importance: importance.map_or(Importance::None, Importance::Columns), ..self })
    }

    /// Adds a Hessian for each block of columns.
    fn by_hessians(self, store: &'a HessianStore) -> Self {
        Self { importance: Importance::Hessians(store), ..self }
    }

    /// Quantizes to a new tensor. The input was checked before: a shape that it does not hold may be one that
    /// memory does not hold either.
    fn quantize_anew(&self) -> Result<Quantized> {
        let mut tensor = QuantizedTensor::zeros(QuantizedShape::of(self.recipe, self.shape))?;
        let report = self.quantize(&mut tensor)?;
        Ok(Quantized { tensor, report })
    }

    /// Quantizes to a tensor.
    fn quantize(&self, out: &mut QuantizedTensor) -> Result<Report> {
        let quantized = QuantizedShape::of(self.recipe, self.shape);
        out.shape().require(quantized)?;
        let Self { isa, values, shape, recipe, .. } = *self;
        recipe.check()?;
        if let Scheme::Comparison(format) = recipe.scheme {
            let strided = Strided::of_rows(shape);
            return by_dtype!(Elements, values => {
                by_definition::quantize(values, &strided, recipe, format, out)
            });
        }
        let (rule, global_scale) = rule_of(isa, values, recipe, || amax_of(isa, values, shape));
        out.set_global_scale(if shape.is_empty() { None } else { global_scale });
        let (codes, scales) = out.parts_mut();
        let report = match recipe.scale_layout {
            _ if shape.is_empty() => Report::default(),
            ScaleLayout::Linear => self.linear(&rule, quantized, codes, scales),
            ScaleLayout::Swizzled => self.swizzled(&rule, quantized, codes, scales),
        };
        recipe.accept(report)
    }

    /// Quantizes with linear scales, in tasks of [`TASK_BLOCKS`].
    fn linear(&self, rule: &Rule, quantized: QuantizedShape, codes: &mut [u8], scales: &mut [u8]) -> Report {
        let pieces = match self.importance {
            Importance::None => Pieces::of(self.shape, quantized.format.block()),
            Importance::Columns(_) | Importance::Hessians(_) => {
                Pieces::by_row(self.shape, quantized.format.block())
            }
        };
        let block_bytes = quantized.format.block_bytes();
        let one = |(task, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
            self.blocks(rule, &pieces, task * TASK_BLOCKS, Output { codes, scales })
        };
        if scales.len() <= TASK_BLOCKS {
            return one((0, (codes, scales)));
        }
        let tasks = codes.par_chunks_mut(TASK_BLOCKS * block_bytes).zip(scales.par_chunks_mut(TASK_BLOCKS));
        tasks.enumerate().map(one).reduce(Report::default, Report::plus)
    }

    /// Quantizes with swizzled scales, in tasks of the 128 rows whose scales lie together. Each row's scales
    /// are put into their places while they are in the cache. Padding is written too.
    fn swizzled(
        &self,
        rule: &Rule,
        quantized: QuantizedShape,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Report {
        let row_blocks = quantized.blocks_per_row();
        let row_bytes = row_blocks * quantized.format.block_bytes();
        let pieces = Pieces::by_row(self.shape, quantized.format.block());
        let one = |(task, (tiles, codes)): (usize, (&mut [u8], &mut [u8]))| {
            tiles.fill(0);
            let mut report = Report::default();
            let mut linear = vec![0; row_blocks];
            for (row, codes) in codes.chunks_mut(row_bytes).enumerate() {
                let first = (task * TILE_ROWS + row) * row_blocks;
                report += self.blocks(rule, &pieces, first, Output { codes, scales: &mut linear });
                scatter_row(&linear, row, tiles);
            }
            report
        };
        if scales.len() <= TASK_BLOCKS && codes.len() <= TILE_ROWS * row_bytes {
            return one((0, (scales, codes)));
        }
        let tasks = scales.par_chunks_mut(row_blocks.div_ceil(TILE_COLS) * TILE_BYTES);
        let tasks = tasks.zip(codes.par_chunks_mut(TILE_ROWS * row_bytes)).enumerate();
        tasks.map(one).reduce(Report::default, Report::plus)
    }

    /// Quantizes the blocks that the output has room for, from block `first` on.
    fn blocks(&self, rule: &Rule, pieces: &Pieces, first: usize, mut output: Output<'_>) -> Report {
        let Self { isa, shape, importance, .. } = *self;
        let mut report = Report::default();
        let mut done = 0;
        for Part { start, len, blocks } in pieces.in_blocks(first, output.scales.len()) {
            let values = self.values.part(start, len);
            let output = output.blocks(done, blocks);
            let col = start % shape.row_stride;
            let tally = match importance {
                Importance::None => isa.quantize(values, None, rule, output),
                Importance::Columns(importance) => {
                    isa.quantize(values, Some(&importance[col..][..len]), rule, output)
                }
                Importance::Hessians(store) => {
                    isa.quantize_hessian(values, store.blocks(col / pieces.block, blocks), rule, output)
                }
            };
            report += tally.placed(|offset| {
                let offset = start + offset;
                Position { row: offset / shape.row_stride, col: offset % shape.row_stride }
            });
            done += blocks;
        }
        report
    }
}

/// The rule of a recipe for values of a dtype, given how their amax is found, and the global scale to store.
/// The caller has checked the recipe.
pub(super) fn rule_of(
    isa: Isa,
    values: Elements<'_>,
    recipe: &Recipe,
    amax: impl FnOnce() -> Amax,
) -> (Rule, Option<GlobalScale>) {
    let (kind, global_scale) = Kind::of(recipe, values.dtype(), |arithmetic| {
        let amax = amax();
        match values.dtype() {
            Dtype::F32 => amax.global_scale::<f32>(arithmetic, recipe.non_finite),
            Dtype::F16 => amax.global_scale::<f16>(arithmetic, recipe.non_finite),
            Dtype::Bf16 => amax.global_scale::<bf16>(arithmetic, recipe.non_finite),
        }
    });
    let thresholds = isa.thresholds(values, &kind);
    (Rule::new(recipe, kind, thresholds, global_scale), global_scale)
}
