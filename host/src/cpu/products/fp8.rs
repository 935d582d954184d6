//! Products of 4-bit weights and FP8 activations: a lane has a row, and each pack of sixteen rows
//! is decoded once for all tokens of a task.
//!
//! `microscale_formats::fp8_dot` defines a k-step in integers. The loop here computes the same bits
//! in f32: products of two E4M3 numbers have eight bits or fewer, and multiplying by powers of two
//! is exact.

use std::borrow::Cow;

use microscale_formats::fp8_dot::{self, FRACTION_BITS, PACK, STEP, Scales, Weights};
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, Format};

use super::rows::Row;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes, Scalars};

/// Rows of a panel.
pub(in crate::cpu) const ROWS: usize = LANES;

/// The bits of an f32's exponent.
const EXPONENT: u32 = 0x7F80_0000;

/// The fraction bits of an f32 that a sum of a k-step does not have.
const LOST: u32 = (1 << (f32::MANTISSA_DIGITS as i32 - 1 - FRACTION_BITS)) - 1;

/// A number of E4M3 as f32.
#[derive(Clone, Copy)]
struct Number {
    /// The number; 0 for NaN.
    value: f32,
    /// Its power of two: the smallest normal one for subnormal numbers, 0 for zeros.
    power: f32,
    is_nan: bool,
}

impl Number {
    const ZERO: Self = Self { value: 0.0, power: 0.0, is_nan: false };

    fn of(code: E4m3) -> Self {
        let value = code.to_f32();
        if value.is_nan() || value == 0.0 {
            return Self { is_nan: value.is_nan(), ..Self::ZERO };
        }
        let power = f32::from_bits(value.to_bits() & EXPONENT).max(const { power_of_two(-6) });
        Self { value, power, is_nan: false }
    }
}

/// The numbers of a pack of a token, in the order of its k-steps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct TokenPack {
    values: [f32; PACK],
    powers: [f32; PACK],
    /// NaN if a number is, and else 0.
    nan: f32,
}

impl TokenPack {
    const ZEROS: Self = Self { values: [0.0; PACK], powers: [0.0; PACK], nan: 0.0 };

    /// The pack of up to [`PACK`] codes, given the number of each code.
    fn of(codes: &[E4m3], numbers: &[Number]) -> Self {
        let mut pack = Self::ZEROS;
        for (column, code) in codes.iter().enumerate() {
            let (place, number) = (fp8_dot::place(column), numbers[usize::from(code.to_bits())]);
            (pack.values[place], pack.powers[place]) = (number.value, number.power);
            if number.is_nan {
                pack.nan = f32::NAN;
            }
        }
        pack
    }
}

/// The numbers of a pack of sixteen rows, as in [`TokenPack`], and the factors of their sums.
struct Panel {
    values: [Lanes<f32>; PACK],
    powers: [Lanes<f32>; PACK],
    nan: Lanes<f32>,
    factors: Lanes<f32>,
}

impl Panel {
    const ZEROS: Self = Self {
        values: [[0.0; LANES]; PACK],
        powers: [[0.0; LANES]; PACK],
        nan: [0.0; LANES],
        factors: [0.0; LANES],
    };

    /// Decodes pack number `pack` of each row.
    fn decode(&mut self, format: Format, rows: &[Row<'_>], pack: usize) {
        let block_bytes = format.block_bytes();
        for (lane, row) in rows.iter().enumerate() {
            let weights = weights(format, *row);
            (self.nan[lane], self.factors[lane]) = (0.0, weights.pack_factor(pack));
            let blocks = row.codes.chunks_exact(block_bytes).enumerate();
            let mut column = 0;
            for (block, codes) in blocks.skip(pack * PACK / format.block()).take(PACK / format.block()) {
                let magnitudes = weights.magnitudes(block).map(Number::of);
                if magnitudes.iter().any(|number| number.is_nan) {
                    self.nan[lane] = f32::NAN;
                }
                for code in codes.iter().flat_map(|codes| [codes & 15, codes >> 4]) {
                    let Number { value, power, .. } = magnitudes[usize::from(code & 7)];
                    let place = fp8_dot::place(column);
                    self.values[place][lane] = if code & 8 == 0 { value } else { -value };
                    self.powers[place][lane] = power;
                    column += 1;
                }
            }
            for place in (column..PACK).map(fp8_dot::place) {
                (self.values[place][lane], self.powers[place][lane]) = (0.0, 0.0);
            }
        }
    }

    /// The sums of the products of each row with a token: four k-steps of the definition.
    #[inline(always)]
    fn sums<V: Products>(&self, simd: V, x: &TokenPack) -> V::Number {
        // These bits minus the bits of a power of two are 2^FRACTION_BITS divided by it.
        const INVERSE: u32 = (2 * 127 + FRACTION_BITS as u32) << 23;
        let mut sums = simd.splat(0.0);
        for step in 0..PACK / STEP {
            let mut largest = [simd.splat(0.0); 4];
            largest[0] = simd.number(simd.and(simd.bits(sums), simd.splat_bits(EXPONENT)));
            for i in 0..STEP {
                let place = step * STEP + i;
                let power = simd.mul(simd.load(&self.powers[place]), simd.splat(x.powers[place]));
                largest[i % 4] = simd.max(power, largest[i % 4]);
            }
            let [a, b, c, d] = largest;
            let largest = simd.max(simd.max(a, b), simd.max(c, d));
            // 2^FRACTION_BITS / largest is a normal number: products have exponents from -12 on,
            // and sums are multiples of 2^-25 below 2^25. For 0 it is some number, and all terms
            // are zeros.
            let minus_one = simd.splat_bits(u32::MAX);
            let negated = simd.add_bits(simd.and_not(simd.bits(largest), minus_one), simd.splat_bits(1));
            let inverse = simd.number(simd.add_bits(simd.splat_bits(INVERSE), negated));
            // Terms are below 2^15, so that their sum has fewer than 24 bits.
            let mut total = simd.truncate(simd.mul(sums, inverse));
            for i in 0..STEP {
                let place = step * STEP + i;
                let product = simd.mul(simd.load(&self.values[place]), simd.splat(x.values[place]));
                total = simd.add_bits(total, simd.truncate(simd.mul(product, inverse)));
            }
            let kept = simd.and(simd.bits(simd.numbers(total)), simd.splat_bits(!LOST));
            let unit = simd.mul(largest, simd.splat(const { power_of_two(-FRACTION_BITS) }));
            sums = simd.mul(simd.number(kept), unit);
        }
        simd.add(sums, simd.add(simd.load(&self.nan), simd.splat(x.nan)))
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
    packs: Vec<TokenPack>,
    /// Codes by token, for blocks that are left out of packs.
    codes: Vec<E4m3>,
    matrix: Fp8Matrix<'a>,
}

impl<'a> Fp8Tokens<'a> {
    /// Packs the activations of `tokens` tokens.
    pub(in crate::cpu) fn new(matrix: Fp8Matrix<'a>, tokens: usize) -> Self {
        let cols = matrix.cols;
        let codes: Vec<_> = matrix.codes[..tokens * cols].iter().map(|code| E4m3::from_bits(*code)).collect();
        let numbers: Vec<_> = (0..=u8::MAX).map(|code| Number::of(E4m3::from_bits(code))).collect();
        let pack = |(pack, token): (usize, usize)| {
            let x = &codes[token * cols..][..cols];
            TokenPack::of(&x[pack * PACK..cols.min((pack + 1) * PACK)], &numbers)
        };
        let all = (0..cols.div_ceil(PACK)).flat_map(|pack| (0..tokens).map(move |token| (pack, token)));
        let packs = all.map(pack).collect();
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
pub(in crate::cpu) fn multiply<V: Products>(
    simd: V,
    format: Format,
    rows: &[Row<'_>],
    x: &Fp8Tokens<'_>,
    tokens: &[usize],
    sums: &mut [Lanes<f32>],
) {
    let mut panel = Panel::ZEROS;
    sums.fill([0.0; LANES]);
    for pack in 0..x.packs.len() / x.tokens.max(1) {
        panel.decode(format, rows, pack);
        for (token, sums) in tokens.iter().zip(&mut *sums) {
            let products = panel.sums(simd, &x.packs[pack * x.tokens + token]);
            let factors = match x.scales(*token) {
                Scales::Token(_) => simd.load(&panel.factors),
                Scales::Packs(scales) => simd.mul(simd.load(&panel.factors), simd.splat(scales[pack])),
            };
            *sums = simd.store(simd.fma(products, factors, simd.load(sums)));
        }
    }
    for (token, sums) in tokens.iter().zip(&mut *sums) {
        *sums = sums.map(|sum| x.scales(*token).finish(sum));
    }
    for (lane, row) in rows.iter().enumerate() {
        let row = weights(format, *row);
        if row.leaves_out() {
            for (token, sums) in tokens.iter().zip(&mut *sums) {
                sums[lane] = row.add_left_out::<Scalars>(x.codes(*token), x.scales(*token), sums[lane]);
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
    sums: &mut [Lanes<f32>],
) {
    for (token, sums) in tokens.iter().zip(sums) {
        for (row, sum) in rows.iter().zip(sums) {
            *sum = fp8_dot::row::<Scalars>(weights(format, *row), x.codes(*token), x.scales(*token));
        }
    }
}
