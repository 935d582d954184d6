//! Products of 4-bit weights and FP8 activations: each pack of a row is decoded once for all tokens
//! of a task.
//!
//! `microscale_formats::fp8_dot` defines a k-step in integers. The loop here computes the same bits
//! in f32, which every instruction set has vectors of: products of two E4M3 numbers have eight bits
//! or fewer, and multiplying by powers of two is exact.

use std::borrow::Cow;

use microscale_formats::fp8_dot::{self, FRACTION_BITS, PACK, STEP, Scales, Steps, Weights};
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, Format};

use super::rows::Row;
use crate::cpu::simd::{LANES, Scalars};

/// Rows that are decoded together, so that a token's pack is read once for them.
pub(in crate::cpu) const ROWS: usize = 8;

/// The fraction bits of an f32 that a sum of a k-step does not have.
const LOST: u32 = (1 << (f32::MANTISSA_DIGITS as i32 - 1 - FRACTION_BITS)) - 1;

/// The bits of an f32's exponent.
const EXPONENT: u32 = 0x7F80_0000;

/// The numbers of a pack as f32, in the order of its k-steps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Numbers {
    /// The numbers; zeros for NaN.
    values: [f32; PACK],
    /// The powers of two of the numbers: the smallest normal one for subnormal numbers, 0 for zeros.
    powers: [f32; PACK],
    has_nan: bool,
}

impl Numbers {
    const ZEROS: Self = Self { values: [0.0; PACK], powers: [0.0; PACK], has_nan: false };

    #[inline(always)]
    fn of(steps: &Steps) -> Self {
        const SMALLEST: f32 = power_of_two(-6);
        let mut numbers = Self::ZEROS;
        let places = numbers.values.iter_mut().zip(&mut numbers.powers);
        for (code, (value, power)) in steps.as_flattened().iter().zip(places) {
            let number = code.to_f32();
            numbers.has_nan |= number.is_nan();
            *value = if number.is_nan() { 0.0 } else { number };
            let of_value = f32::from_bits(value.to_bits() & EXPONENT);
            *power = if of_value == 0.0 { 0.0 } else { of_value.max(SMALLEST) };
        }
        numbers
    }

    /// [`fp8_dot::Pack::sum`] of two packs.
    #[inline(always)]
    fn sum(&self, x: &Self) -> f32 {
        if self.has_nan || x.has_nan {
            return f32::NAN;
        }
        let mut sum = 0f32;
        for step in 0..PACK / STEP {
            let part =
                |numbers: &[f32; PACK]| -> [f32; STEP] { std::array::from_fn(|i| numbers[step * STEP + i]) };
            let (a, b) = (part(&self.values), part(&x.values));
            let (of_a, of_b) = (part(&self.powers), part(&x.powers));
            // The power of two of the sum; 0 for 0.
            let mut powers = [f32::from_bits(sum.to_bits() & EXPONENT); LANES];
            for i in 0..STEP {
                let power = of_a[i] * of_b[i];
                let largest = &mut powers[i % LANES];
                *largest = if power > *largest { power } else { *largest };
            }
            let largest = powers.iter().fold(0f32, |largest, power| largest.max(*power));
            if largest == 0.0 {
                continue;
            }
            // 2^FRACTION_BITS / largest. It is a normal number: products have exponents from -12 on,
            // and sums of a pack are multiples of 2^-25 below 2^25.
            let inverse = f32::from_bits(((2 * 127 + FRACTION_BITS as u32) << 23) - largest.to_bits());
            // Casts truncate. Terms are below 2^15, so that their sum is exact.
            let mut terms = [0i32; LANES];
            for i in 0..STEP {
                terms[i % LANES] += (a[i] * b[i] * inverse) as i32;
            }
            let total = terms.iter().sum::<i32>() + (sum * inverse) as i32;
            let truncated = f32::from_bits((total as f32).to_bits() & !LOST);
            sum = truncated * (largest * const { power_of_two(-FRACTION_BITS) });
        }
        sum
    }
}

/// Activations in FP8, `[N, K]`.
pub(in crate::cpu) struct Fp8Matrix<'a> {
    /// K.
    pub(in crate::cpu) cols: usize,
    /// Codes of E4M3, `[N, K]`.
    pub(in crate::cpu) codes: Cow<'a, [u8]>,
    /// Scales, `[N, token_scales]`.
    pub(in crate::cpu) scales: Cow<'a, [f32]>,
    /// Scales per token.
    pub(in crate::cpu) token_scales: usize,
}

/// The activations of all tokens, packed.
pub(in crate::cpu) struct Fp8Tokens<'a> {
    tokens: usize,
    /// By pack, then by token.
    packs: Vec<Numbers>,
    /// Codes by token, for blocks that are left out of packs.
    codes: Vec<E4m3>,
    matrix: Fp8Matrix<'a>,
}

impl<'a> Fp8Tokens<'a> {
    /// Packs the activations of `tokens` tokens.
    pub(in crate::cpu) fn new(matrix: Fp8Matrix<'a>, tokens: usize) -> Self {
        let cols = matrix.cols;
        let codes: Vec<_> = matrix.codes[..tokens * cols].iter().map(|code| E4m3::from_bits(*code)).collect();
        let mut packs = vec![Numbers::ZEROS; cols.div_ceil(PACK) * tokens];
        for (i, numbers) in packs.iter_mut().enumerate() {
            let (pack, token) = (i / tokens, i % tokens);
            let x = &codes[token * cols..][..cols];
            let zero = E4m3::from_bits(0);
            *numbers = Numbers::of(&fp8_dot::in_steps(|column| {
                x.get(pack * PACK + column).copied().unwrap_or(zero)
            }));
        }
        Self { tokens, packs, codes, matrix }
    }

    /// The codes of a token.
    fn codes(&self, token: usize) -> &[E4m3] {
        &self.codes[token * self.matrix.cols..][..self.matrix.cols]
    }

    /// The scales of a token.
    fn scales(&self, token: usize) -> Scales<'_> {
        match self.matrix.token_scales {
            1 => Scales::Token(self.matrix.scales[token]),
            each => Scales::Packs(&self.matrix.scales[token * each..][..each]),
        }
    }
}

/// A row as the definition takes it.
fn weights(format: Format, row: Row<'_>) -> Weights<'_> {
    Weights { format, codes: row.codes, scales: row.scales }
}

/// Computes the products of up to [`ROWS`] rows and the listed tokens, by token.
#[inline(always)]
pub(in crate::cpu) fn multiply(
    format: Format,
    rows: &[Row<'_>],
    x: &Fp8Tokens<'_>,
    tokens: &[usize],
    sums: &mut [f32],
) {
    let mut decoded = [(Numbers::ZEROS, 0.0); ROWS];
    let decoded = &mut decoded[..rows.len()];
    sums.fill(0.0);
    for pack in 0..x.packs.len() / x.tokens.max(1) {
        for (row, decoded) in rows.iter().zip(decoded.iter_mut()) {
            let of_row = weights(format, *row).pack(pack);
            *decoded = (Numbers::of(&of_row.steps), of_row.factor);
        }
        for (token, sums) in tokens.iter().zip(sums.chunks_exact_mut(rows.len())) {
            let (numbers, scales) = (&x.packs[pack * x.tokens + token], x.scales(*token));
            for ((weights, factor), sum) in decoded.iter().zip(sums) {
                *sum = weights.sum(numbers).mul_add(scales.factor(*factor, pack), *sum);
            }
        }
    }
    for (token, sums) in tokens.iter().zip(sums.chunks_exact_mut(rows.len())) {
        sums.iter_mut().for_each(|sum| *sum = x.scales(*token).finish(*sum));
    }
    for (i, row) in rows.iter().enumerate() {
        let row = weights(format, *row);
        if row.leaves_out() {
            for (token, sums) in tokens.iter().zip(sums.chunks_exact_mut(rows.len())) {
                sums[i] = row.add_left_out::<Scalars>(x.codes(*token), x.scales(*token), sums[i]);
            }
        }
    }
}

/// The definition of [`multiply`].
pub(in crate::cpu) fn multiply_reference(
    format: Format,
    rows: &[Row<'_>],
    x: &Fp8Tokens<'_>,
    tokens: &[usize],
    sums: &mut [f32],
) {
    for (token, sums) in tokens.iter().zip(sums.chunks_exact_mut(rows.len())) {
        for (row, sum) in rows.iter().zip(sums) {
            *sum = fp8_dot::row::<Scalars>(weights(format, *row), x.codes(*token), x.scales(*token));
        }
    }
}
