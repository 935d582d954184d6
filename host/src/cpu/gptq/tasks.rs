//! Cuts a matrix into tasks of rows for rayon's threads.

use std::borrow::Cow;

use microscale_formats::nvfp4::Quantizer;
use microscale_formats::search::PowersOfTwo;
use microscale_formats::{GlobalScale, Search, Ties};
use rayon::prelude::*;

use super::block::{BlockFactor, ScaleRange};
use super::factor::GptqFactor;
use super::lanes::ScaleTable;
use super::load::{LoadedRows, load};
use super::loop_state::{Blocks, LoopParams, TaskRows};
use super::operands::ScaleFactors;
use super::reference::Definition;
use super::reference_task;
use super::rows;
use crate::cpu::blocks::format::Mx;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::isa::Isa;
use crate::cpu::search::{AnyMxfp4, AnyNvfp4};
use crate::cpu::simd::LANES;
use crate::cpu::simd::products::Products;
use crate::elements::{Elements, by_dtype};
use crate::report::{Position, Report};
use crate::scheme::{NonFinite, Scheme};
use crate::shape::Strided;
use crate::tensor::QuantizedTensor;

/// The most groups of rows in a task: its factors are read once for all of them.
const GROUPS: usize = 16;

/// The rows of a task: a few groups, and enough tasks for all threads.
fn rows_per_task(rows: usize) -> usize {
    let groups = rows.div_ceil(LANES);
    groups.div_ceil(rayon::current_num_threads()).clamp(1, GROUPS) * LANES
}

/// Quantizes the rows of a task.
#[inline(always)]
pub(in crate::cpu) fn quantize_task<V: Products>(
    simd: V,
    params: &LoopParams<'_>,
    blocks: &Blocks,
    task: &mut TaskRows<'_>,
) -> Tally {
    match blocks {
        Blocks::Mxfp4(format, blocks) => rows::quantize(simd, params, blocks, format, task),
        Blocks::Nvfp4(format, blocks) => rows::quantize(simd, params, blocks, format, task),
    }
}

/// A matrix to quantize.
pub(super) struct Request<'a> {
    pub(super) isa: Isa,
    /// The values. They are checked to hold the shape, which is not empty.
    pub(super) values: Elements<'a>,
    pub(super) shape: Strided,
    pub(super) policy: NonFinite,
    pub(super) factor: &'a GptqFactor,
    /// `[rows, blocks]`: scales that are chosen already.
    pub(super) chosen: Option<Cow<'a, [u8]>>,
}

impl Request<'_> {
    /// Quantizes to a tensor with linear scales. Returns its squared error in the factor's unit.
    pub(super) fn quantize(
        &self,
        scheme: Scheme,
        search: Search,
        global: Option<GlobalScale>,
        tensor: &mut QuantizedTensor,
    ) -> (Report, f64) {
        let factor = self.factor;
        let (blocks, table, range, definition) = prepare(factor, scheme, search, global);
        let nan = tensor.format().facts().scale.nan() as u8;
        let params = LoopParams { factor, table, range, search, nan };
        let (rows, row_blocks) = (tensor.rows(), tensor.blocks_per_row());
        let row_bytes = row_blocks * tensor.format().block_bytes();
        let per_task = rows_per_task(rows);
        let mut errors = vec![0.0; rows];
        let (codes, scales) = tensor.parts_mut();
        let tasks = codes
            .par_chunks_mut(per_task * row_bytes)
            .zip(scales.par_chunks_mut(per_task * row_blocks))
            .zip(errors.par_chunks_mut(per_task));
        let report = tasks
            .enumerate()
            .map(|(i, ((codes, scales), errors))| {
                let (first, rows) = (i * per_task, errors.len());
                let (values, block) = (self.values, factor.format.block());
                let LoadedRows { weights, poisoned, report } = by_dtype!(Elements, values => {
                    load(values, &self.shape, self.policy, &factor.order, block, (first, rows))
                });
                let chosen = self.chosen.as_deref().map(|chosen| &chosen[first * row_blocks..]);
                let mut task = TaskRows { rows, weights, poisoned, chosen, codes, scales, errors };
                let tally = match self.isa {
                    Isa::Reference => reference_task::quantize(&params, &definition, &blocks, &mut task),
                    isa => isa.quantize_gptq(&params, &blocks, &mut task),
                };
                report.plus(tally.placed(|_| Position { row: 0, col: 0 }))
            })
            .reduce(Report::default, Report::plus);
        (report, errors.iter().sum())
    }
}

/// Prepares everything that tasks share.
fn prepare(
    factor: &GptqFactor,
    scheme: Scheme,
    search: Search,
    global: Option<GlobalScale>,
) -> (Blocks, ScaleTable, ScaleRange, Definition) {
    match scheme {
        Scheme::Nvfp4(arithmetic, _) => {
            let quantizer = Quantizer::new(arithmetic, global.map_or(1.0, GlobalScale::value));
            let table = ScaleTable::new(ScaleFactors::of(scheme, global), Ties::Even);
            let blocks = Blocks::Nvfp4(AnyNvfp4(quantizer), block_factors(factor));
            let range = ScaleRange::of::<Option<GlobalScale>>(search);
            (blocks, table, range, Definition::Nvfp4(quantizer, global))
        }
        Scheme::Mxfp4(arithmetic) => {
            let table = ScaleTable::new(ScaleFactors::of(scheme, None), arithmetic.ties);
            let blocks = Blocks::Mxfp4(AnyMxfp4(Mx::new(arithmetic)), block_factors(factor));
            (blocks, table, ScaleRange::of::<PowersOfTwo>(search), Definition::Mxfp4(arithmetic))
        }
        _ => unreachable!("checked by `check_format`"),
    }
}

fn block_factors<const N: usize>(factor: &GptqFactor) -> Vec<BlockFactor<N>> {
    (0..factor.order.len() / N).into_par_iter().map(|block| BlockFactor::of(factor, block * N)).collect()
}

/// The squared norms of (quantized − values)·R and of values·R, in the factor's unit.
///
/// `quantized` is `[rows, columns]`.
pub(super) fn norms(
    factor: &GptqFactor,
    values: Elements<'_>,
    shape: &Strided,
    quantized: &[f32],
) -> (f64, f64) {
    let (rows, isa, block) = (shape.shape().rows, Isa::best(), factor.format.block());
    if shape.is_empty() {
        return (0.0, 0.0);
    }
    let per_task = rows_per_task(rows);
    let dense = Strided::of_rows(crate::shape::Shape::new(rows, shape.cols));
    let mut norms = vec![(0.0, 0.0); rows];
    norms.par_chunks_mut(per_task).enumerate().for_each(|(i, norms)| {
        let part = (i * per_task, norms.len());
        let order = &factor.order;
        // NaN and infinities become blocks of zeros.
        let mut weights = by_dtype!(Elements, values => {
            load(values, shape, NonFinite::Propagate, order, block, part)
        })
        .weights;
        let dequantized = load(quantized, &dense, NonFinite::Propagate, order, block, part);
        let [mut error, mut energy] = [(); 2].map(|()| vec![0.0; norms.len()]);
        isa.add_gptq_norms(factor, &weights, &mut energy);
        let blocks = order.len() / block;
        for (i, (weights, values)) in weights.iter_mut().zip(&dequantized.weights).enumerate() {
            let (group, position) = (i / order.len(), i % order.len());
            let nan = dequantized.poisoned[group * blocks + order.block_at(position)];
            for lane in 0..LANES {
                let rest = values[lane] - weights[lane];
                weights[lane] = if nan >> lane & 1 != 0 { 0.0 } else { rest };
            }
        }
        isa.add_gptq_norms(factor, &weights, &mut error);
        for (norms, both) in norms.iter_mut().zip(error.into_iter().zip(energy)) {
            *norms = both;
        }
    });
    norms.iter().fold((0.0, 0.0), |(error, energy), of_row| (error + of_row.0, energy + of_row.1))
}
