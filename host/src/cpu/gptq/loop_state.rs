//! The parameters and the state of the loop, and the steps that all rules for scales share.

use microscale_formats::{Search, mx, nvfp4, search};

use super::block::{BlockFactor, ScaleRange};
use super::factor::GptqFactor;
use super::lanes::{Descent, Group, ScaleTable, finite_or, magnitude};
use crate::cpu::search::{AnyMxfp4, AnyNvfp4};
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// A format, and the factor of each block of columns.
pub(in crate::cpu) enum Blocks {
    Mxfp4(AnyMxfp4, Vec<BlockFactor<{ mx::BLOCK }>>),
    Nvfp4(AnyNvfp4, Vec<BlockFactor<{ nvfp4::BLOCK }>>),
}

/// The parameters of the loop, which all tasks share.
pub(in crate::cpu) struct LoopParams<'a> {
    pub(super) factor: &'a GptqFactor,
    pub(super) table: ScaleTable,
    pub(super) range: ScaleRange,
    pub(super) search: Search,
    /// The scale byte of a NaN block.
    pub(super) nan: u8,
}

/// The rows of a task, padded to whole groups, and their output.
pub(in crate::cpu) struct TaskRows<'a> {
    /// Rows, without padding.
    pub(super) rows: usize,
    /// `[groups, positions]`: the weights, and the residuals of the columns that are done.
    pub(super) weights: Vec<Lanes<f32>>,
    /// `[groups, blocks]`: bit `i` is set if the block of lane `i` is a NaN block.
    pub(super) poisoned: Vec<u16>,
    /// `[rows, blocks]`: scales that are chosen already.
    pub(super) chosen: Option<&'a [u8]>,
    /// `[rows, blocks, block bytes]`.
    pub(super) codes: &'a mut [u8],
    /// `[rows, blocks]`.
    pub(super) scales: &'a mut [u8],
    /// The squared errors of each row, in the factor's unit.
    pub(super) errors: &'a mut [f64],
}

/// The place of sixteen blocks of columns, by position.
#[derive(Clone, Copy)]
pub(super) struct Place<'a, const N: usize> {
    /// The factor of their columns.
    pub(super) factor: &'a BlockFactor<N>,
    pub(super) group: usize,
    /// The position of their first column.
    pub(super) position: usize,
}

impl<const N: usize> Place<'_, N> {
    /// Bit `i` of entry k is set if the column at position k is in a NaN block in lane `i`.
    #[inline(always)]
    pub(super) fn poisoned(&self, params: &LoopParams<'_>, task: &TaskRows<'_>) -> [u16; N] {
        let order = &params.factor.order;
        let of_group = &task.poisoned[self.group * order.len() / N..];
        let mut poisoned = [0; N];
        for (k, poisoned) in poisoned.iter_mut().enumerate() {
            *poisoned = of_group[order.block_at(self.position + k)];
        }
        poisoned
    }

    /// The weights of these columns.
    #[inline(always)]
    pub(super) fn weights<'a>(
        &self,
        params: &LoopParams<'_>,
        weights: &'a mut [Lanes<f32>],
    ) -> &'a mut [Lanes<f32>; N] {
        let of_group = &mut weights[self.group * params.factor.order.len()..];
        &mut of_group[self.position..].as_chunks_mut().0[0]
    }
}

/// Applies the columns of a block to each other: the updated weights, and the amax of each block.
#[inline(always)]
pub(super) fn group_of<'a, V: Products, const N: usize>(
    simd: V,
    factor: &'a BlockFactor<N>,
    weights: &[Lanes<f32>; N],
    updated: &[Lanes<f32>; N],
    poisoned: &[u16; N],
) -> (Group<'a, V, N>, Lanes<f32>) {
    let zero = simd.splat(0.0);
    let mut of_group = [zero; N];
    for k in 0..N {
        of_group[k] = simd.load(&updated[k]);
    }
    let mut amax = zero;
    for k in 0..N {
        let original = simd.load(&weights[k]);
        let values = simd.select(poisoned[k], zero, finite_or(simd, of_group[k], original));
        let change = simd.sub(values, original);
        for (later, feedback) in of_group.iter_mut().zip(&factor.feedback[k]).skip(k + 1) {
            *later = simd.fnma(change, simd.splat(*feedback), *later);
        }
        of_group[k] = values;
        amax = simd.max(magnitude(simd, values), amax);
    }
    let amax = simd.store(amax);
    let (mut units, mut in_units) = ([1.0; LANES], amax);
    for lane in 0..LANES {
        units[lane] = search::unit(amax[lane].to_bits());
        in_units[lane] *= units[lane];
    }
    (Group { simd, factor, updated: of_group, units, amax: in_units }, amax)
}

/// Replaces weights by residuals, and adds the squared errors. Returns the weights that were
/// rounded.
#[inline(always)]
pub(super) fn finish<V: Products, const N: usize>(
    simd: V,
    params: &LoopParams<'_>,
    task: &mut TaskRows<'_>,
    place: Place<'_, N>,
    poisoned: &[u16; N],
    descent: &Descent<V, N>,
) -> [Lanes<f32>; N] {
    let weights = place.weights(params, &mut task.weights);
    let mut errors = [0.0; LANES];
    let mut rounded_from = [[0.0; LANES]; N];
    for k in 0..N {
        let residual = simd.sub(descent.dequantized[k], simd.load(&weights[k]));
        weights[k] = simd.store(simd.select(poisoned[k], simd.splat(0.0), residual));
        rounded_from[k] = simd.store(descent.rounded_from[k]);
        let dequantized = simd.store(descent.dequantized[k]);
        let pivot = f64::from(place.factor.pivots[k]);
        for lane in 0..LANES {
            let rest = f64::from(rounded_from[k][lane]) - f64::from(dequantized[lane]);
            let weighted = if poisoned[k] >> lane & 1 != 0 { 0.0 } else { rest * pivot };
            errors[lane] += weighted * weighted;
        }
    }
    for (sum, error) in task.errors[place.group * LANES..].iter_mut().zip(errors) {
        *sum += error;
    }
    rounded_from
}
