//! Loops over one row of activations. The compiler vectorizes them.

use microscale_formats::activations::{RmsNorm, SUM_COLUMNS, SUM_PIECE, SquareRoot, tree_sum};
use microscale_formats::{E4m3, Glu};

use crate::activations::{GluOrder, RowOperation};
use crate::cpu::simd::Scalars;
use crate::element::Element;

impl SquareRoot for Scalars {
    #[inline(always)]
    fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
}

/// A value rounded to `T`, as f32.
#[inline(always)]
fn rounded<T: Element>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

/// Computes a row: see [`Isa::compute_row`](crate::cpu::isa::Isa).
#[inline(always)]
pub(in crate::cpu) fn compute<T: Element>(
    operation: &RowOperation,
    values: &[T],
    residual: Option<&mut [T]>,
    weights: Option<&[T]>,
    row: &mut [f32],
) {
    match operation {
        RowOperation::None => widen(values, row),
        RowOperation::Glu(of, order) => glu(*of, *order, values, row),
        RowOperation::RmsNorm(norm) => {
            match residual {
                Some(residual) => add_residual(values, residual, row),
                None => widen(values, row),
            }
            normalize(norm, weights, row);
        }
    }
}

/// Widens a row.
#[inline(always)]
fn widen<T: Element>(values: &[T], out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = value.to_f32();
    }
}

/// Computes a gate's results, rounded to `T`.
#[inline(always)]
fn glu<T: Element>(glu: Glu, order: GluOrder, values: &[T], out: &mut [f32]) {
    match order {
        GluOrder::Halves => {
            let (gates, ups) = values.split_at(values.len() / 2);
            for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
                *out = rounded::<T>(glu.of::<Scalars>(gate.to_f32(), up.to_f32()));
            }
        }
        GluOrder::Interleaved => {
            for (out, [gate, up]) in out.iter_mut().zip(values.as_chunks::<2>().0) {
                *out = rounded::<T>(glu.of::<Scalars>(gate.to_f32(), up.to_f32()));
            }
        }
    }
}

/// Adds a residual in place, rounds the sums to `T`, and widens them to `out`.
#[inline(always)]
fn add_residual<T: Element>(values: &[T], residual: &mut [T], out: &mut [f32]) {
    for ((out, value), residual) in out.iter_mut().zip(values).zip(residual) {
        *residual = T::from_f32(value.to_f32() + residual.to_f32());
        *out = residual.to_f32();
    }
}

/// Normalizes a row in place, and rounds it to `T`.
#[inline(always)]
fn normalize<T: Element>(norm: &RmsNorm, weights: Option<&[T]>, row: &mut [f32]) {
    let inverse_columns = 1.0 / row.len() as f32;
    let inverse_rms = norm.inverse_rms::<Scalars>(sum_of_squares(row), inverse_columns);
    match weights {
        Some(weights) => {
            for (x, weight) in row.iter_mut().zip(weights) {
                *x = rounded::<T>(norm.of(*x, inverse_rms, Some(weight.to_f32()), rounded::<T>));
            }
        }
        None => {
            for x in row {
                *x = rounded::<T>(norm.of(*x, inverse_rms, None, rounded::<T>));
            }
        }
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
