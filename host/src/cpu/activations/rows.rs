//! Loops over one row of activations. The compiler vectorizes them.

use microscale_formats::activations::{RmsNorm, SUM_COLUMNS, SUM_PIECE, SquareRoot, tree_sum};
use microscale_formats::gate::gelu;
use microscale_formats::{E4m3, Glu};

use crate::activations::GluOrder;
use crate::cpu::simd::Scalars;
use crate::element::Element;

impl SquareRoot for Scalars {
    #[inline(always)]
    fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
}

/// Widens a row. Loops that compute have one instance for all dtypes, over f32.
#[inline(always)]
pub(in crate::cpu) fn widen<T: Element>(values: &[T], row: &mut [f32]) {
    for (x, value) in row.iter_mut().zip(values) {
        *x = value.to_f32();
    }
}

/// Adds a residual to a row, rounds the sums to `T`, and puts them in the residual's place too.
#[inline(always)]
pub(in crate::cpu) fn add_residual<T: Element>(residual: &mut [T], row: &mut [f32]) {
    for (x, residual) in row.iter_mut().zip(residual) {
        *residual = T::from_f32(*x + residual.to_f32());
        *x = residual.to_f32();
    }
}

/// Rounds a row to `T`.
#[inline(always)]
pub(in crate::cpu) fn round<T: Element>(_like: &[T], row: &mut [f32]) {
    for x in row {
        *x = T::from_f32(*x).to_f32();
    }
}

/// Computes a gate's results from a row of twice the length, before they are rounded.
#[inline(always)]
pub(in crate::cpu) fn glu(glu: Glu, order: GluOrder, values: &[f32], row: &mut [f32]) {
    match glu {
        Glu::Gelu => each_pair(order, values, row, gelu::<Scalars>),
        _ => each_pair(order, values, row, |gate, up| glu.of::<Scalars>(gate, up)),
    }
}

/// Computes the results of the pairs of a row.
#[inline(always)]
fn each_pair(order: GluOrder, values: &[f32], row: &mut [f32], of: impl Fn(f32, f32) -> f32) {
    match order {
        GluOrder::Halves => {
            let (gates, ups) = values.split_at(values.len() / 2);
            for ((x, gate), up) in row.iter_mut().zip(gates).zip(ups) {
                *x = of(*gate, *up);
            }
        }
        GluOrder::Interleaved => {
            for (x, [gate, up]) in row.iter_mut().zip(values.as_chunks::<2>().0) {
                *x = of(*gate, *up);
            }
        }
    }
}

/// Multiplies a row by 1 / RMS.
#[inline(always)]
pub(in crate::cpu) fn normalize(norm: &RmsNorm, row: &mut [f32]) {
    let inverse_columns = 1.0 / row.len() as f32;
    let inverse_rms = norm.inverse_rms::<Scalars>(sum_of_squares(row), inverse_columns);
    for x in row {
        *x *= inverse_rms;
    }
}

/// Multiplies a row by RMSNorm's weights.
#[inline(always)]
pub(in crate::cpu) fn weigh<T: Element>(norm: &RmsNorm, weights: &[T], row: &mut [f32]) {
    for (x, weight) in row.iter_mut().zip(weights) {
        *x *= weight.to_f32() + norm.offset;
    }
}

/// The sum of squares, in the order of [`microscale_formats::activations::sum_of_squares`].
#[inline(always)]
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut sum = 0.0;
    for piece in row.chunks(SUM_PIECE) {
        let mut partial = [0.0; SUM_COLUMNS];
        for step in piece.chunks(SUM_COLUMNS) {
            for (partial, x) in partial.iter_mut().zip(step) {
                *partial = x.mul_add(*x, *partial);
            }
        }
        sum += tree_sum(&mut partial);
    }
    sum
}

/// The largest finite magnitude.
#[inline(always)]
pub(in crate::cpu) fn finite_amax(row: &[f32]) -> f32 {
    let mut most = 0;
    for x in row {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        most = most.max(if magnitude < f32::INFINITY.to_bits() { magnitude } else { 0 });
    }
    f32::from_bits(most)
}

/// Encodes a row in FP8 under one scale.
#[inline(always)]
pub(in crate::cpu) fn encode(row: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(row) {
        // `encode_fp8` without branches, so that the loop vectorizes.
        let finite = x.to_bits() & 0x7FFF_FFFF < f32::INFINITY.to_bits();
        let number = E4m3::from_number(if finite { *x } else { 0.0 } / scale).to_bits();
        *code = if finite { number } else { E4m3::NAN.to_bits() };
    }
}
