//! The product of two 4-bit vectors: what GEMV computes for each row of its matrix.
//!
//! The product of two blocks is exact. Twice an element is an integer up to 12, so four times the
//! sum of a block's products is an integer too. Multiplied by both block scales, it is a *term*. A
//! term is exact in f64 for any codes and scales. In NVFP4 it is exact in f32: a product of two
//! scales has 8 significant bits, a sum of 16 products 12.
//!
//! Elements are split into chunks of [`CHUNK`]. Chunk c belongs to stream c mod [`STREAMS`], and
//! each stream adds its terms in order. Streams are then added in pairs: those 16 apart, then 8, 4,
//! 2 and 1. All sums are f64. Terms of NVFP4 are multiples of 2^−20, so nothing is rounded while
//! partial sums stay below 2^33. Beyond that, and in MXFP4 where scales differ by more than some
//! 2^40, the order determines the last bits. The order is therefore part of the definition.
//!
//! The sum is multiplied or divided by the matrix's global scale and then by the vector's, in f64.
//! It is rounded once to the output type ([`rounded_to_odd`] describes rounding to 16 bits).

use crate::nvfp4::Direction;
use crate::{E2m1x2, E4m3, E8m0, GlobalScale};

/// Elements per chunk: one block of MXFP4, two of NVFP4.
pub const CHUNK: usize = 32;

/// Number of independent partial sums.
pub const STREAMS: usize = 32;

/// Returns four times the sum of the products of two blocks' elements.
///
/// A pair contributes at most 36 · 4. Blocks may have up to 2^24 bytes.
pub fn quarters(a: &[u8], b: &[u8]) -> i32 {
    let twice = |code: crate::E2m1| (2.0 * code.to_f32()) as i32;
    let pairs = a.iter().zip(b).map(|(a, b)| (E2m1x2::from_bits(*a), E2m1x2::from_bits(*b)));
    pairs.map(|(a, b)| twice(a.low()) * twice(b.low()) + twice(a.high()) * twice(b.high())).sum()
}

/// Returns the exact term of two NVFP4 blocks from their [`quarters`], or NaN if a scale is NaN.
#[inline(always)]
pub fn nvfp4_term(quarters: i32, a: E4m3, b: E4m3) -> f64 {
    f64::from(quarters as f32 * 0.25 * (a.to_f32() * b.to_f32()))
}

/// Returns the exact term of two MXFP4 blocks from their [`quarters`], or NaN if a scale is NaN.
#[inline(always)]
pub fn mxfp4_term(quarters: i32, a: E8m0, b: E8m0) -> f64 {
    f64::from(quarters) * mxfp4_scale(a, b)
}

/// Returns a quarter of the product of two MXFP4 scales.
#[inline(always)]
pub fn mxfp4_scale(a: E8m0, b: E8m0) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    // 2^(a − 127) · 2^(b − 127) / 4: a normal number.
    f64::from_bits((1023 - 256 + u64::from(a.to_bits()) + u64::from(b.to_bits())) << 52)
}

/// The partial sums of one output.
#[derive(Clone, Copy, Debug)]
pub struct Sums([f64; STREAMS]);

impl Default for Sums {
    fn default() -> Self {
        Self([0.0; STREAMS])
    }
}

impl Sums {
    /// Takes partial sums, one per stream, that the caller accumulated itself.
    pub const fn of(streams: [f64; STREAMS]) -> Self {
        Self(streams)
    }

    /// Adds a chunk's term. `chunk` counts from 0, and the terms of one stream must come in order.
    #[inline(always)]
    pub fn add(&mut self, chunk: usize, term: f64) {
        self.0[chunk % STREAMS] += term;
    }

    /// Returns the sum of all streams.
    pub fn total(mut self) -> f64 {
        let mut apart = STREAMS / 2;
        while apart > 0 {
            for stream in 0..apart {
                self.0[stream] += self.0[stream + apart];
            }
            apart /= 2;
        }
        self.0[0]
    }
}

/// Applies a global scale to a sum.
#[inline(always)]
pub fn scaled(sum: f64, global: Option<GlobalScale>) -> f64 {
    let Some(global) = global else { return sum };
    match global.direction() {
        Direction::Divisor => sum / f64::from(global.value()),
        Direction::Multiplier => sum * f64::from(global.value()),
    }
}

/// Rounds to f32 toward zero and sets the last bit if that was inexact.
///
/// Rounding the result again, to a format with at least two bits less, equals rounding `x` once.
/// Source: Sylvie Boldo and Guillaume Melquiond, 2008, emulation of FMA and correctly rounded sums.
#[inline(always)]
pub fn rounded_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    if back == x || x.is_nan() {
        return nearest;
    }
    // Magnitudes order like their bits, and infinity is above all numbers.
    let away = u32::from(back.abs() > x.abs());
    f32::from_bits((nearest.to_bits() - away) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarters_are_four_times_the_sum() {
        // 6 · 6 + 1.5 · −4 + 0.5 · 0.5 = 30.25
        let (a, b) = ([0x37, 0x01], [0xE7, 0x01]);
        assert_eq!(quarters(&a, &b), 121);
        assert_eq!(quarters(&[0x77; 8], &[0xFF; 8]), -16 * 144);
    }

    #[test]
    fn terms_are_exact() {
        for a in (0..=0x7E).map(E4m3::from_bits) {
            for b in (0..=0x7E).map(E4m3::from_bits) {
                for quarters in [1, 2303, 2304, -1151] {
                    let exact = f64::from(quarters) / 4.0 * f64::from(a.to_f32()) * f64::from(b.to_f32());
                    assert_eq!(nvfp4_term(quarters, a, b), exact);
                }
            }
            assert!(nvfp4_term(0, a, E4m3::NAN).is_nan() && nvfp4_term(0, E4m3::NAN, a).is_nan());
        }
        let scale = |bits| E8m0::from_bits(bits);
        let power = |bits: u8| f64::from_bits((u64::from(bits) + 1023 - 127) << 52);
        for a in 0..=254 {
            for b in [0, 1, 126, 127, 254] {
                assert_eq!(mxfp4_term(-4607, scale(a), scale(b)), -4607.0 / 4.0 * power(a) * power(b));
            }
            assert!(
                mxfp4_term(0, scale(a), E8m0::NAN).is_nan() && mxfp4_term(0, E8m0::NAN, scale(a)).is_nan()
            );
        }
    }

    #[test]
    fn every_chunk_counts_once() {
        let mut sums = Sums::default();
        for chunk in 0..5 * STREAMS + 3 {
            sums.add(chunk, (1u64 << (chunk % 40)) as f64);
        }
        let expected: f64 = (0..5 * STREAMS + 3).map(|chunk| (1u64 << (chunk % 40)) as f64).sum();
        assert_eq!(sums.total(), expected);
    }

    #[test]
    fn rounding_to_odd_first_gives_the_directly_rounded_result() {
        // Rounds to 8 bits, at a midpoint and its neighbours. Rounding to nearest f32 first would
        // turn both neighbours into ties.
        let to_bf16 = |x: f32| {
            let bits = x.to_bits();
            (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        };
        let midpoint = f64::from(f32::from_bits(0x3F80_8000));
        for (x, expected) in [
            (midpoint, 0x3F80),
            (midpoint * (1.0 + f64::EPSILON), 0x3F81),
            (midpoint * (1.0 - f64::EPSILON), 0x3F80),
            (f64::from(f32::from_bits(0x3F81_8000)) * (1.0 - f64::EPSILON), 0x3F81),
            (1e39, 0x7F80),
            (f64::MIN_POSITIVE, 0),
        ] {
            assert_eq!(to_bf16(rounded_to_odd(x)), expected, "{x:e}");
            assert_eq!(rounded_to_odd(-x), -rounded_to_odd(x));
        }
        assert_eq!(rounded_to_odd(1e39), f32::MAX);
        assert_eq!(rounded_to_odd(f64::INFINITY), f32::INFINITY);
        assert_eq!(rounded_to_odd(0.0).to_bits(), 0);
        assert!(rounded_to_odd(f64::NAN).is_nan());
    }
}
