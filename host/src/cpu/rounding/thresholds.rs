//! Thresholds of 16-bit values: per scale byte, the largest magnitude that gets each E2M1 code.
//!
//! Scaling and rounding are monotonic: a larger magnitude never gets a smaller code. So seven
//! thresholds determine the codes of all 32,768 magnitudes of a dtype under a scale. This module
//! finds them by evaluating scaling and rounding. Quantizing then only compares.

use std::sync::{Arc, OnceLock};

use microscale_formats::nvfp4::{Quantizer, Scaling};
use microscale_formats::{E4m3, E8m0, Ties, e2m1};

use crate::cpu::simd::halfwords::Row;
use crate::cpu::simd::{LANES, Lanes, Vector};
use crate::element::{Dtype, Element, halfword_from_f32, halfword_to_f32};

/// One row of thresholds per scale byte. Rows of NaN are unused.
pub(in crate::cpu) struct Thresholds([Row; 256]);

impl Thresholds {
    /// The thresholds of f32: unused.
    pub(in crate::cpu) fn none() -> Arc<Self> {
        static NONE: OnceLock<Arc<Thresholds>> = OnceLock::new();
        NONE.get_or_init(|| Arc::new(Self([Row::default(); 256]))).clone()
    }

    /// The thresholds of MXFP4, computed once per dtype and rule of ties.
    #[inline(always)]
    pub(in crate::cpu) fn mxfp4<T: Element, V: Vector>(simd: V, ties: Ties) -> Arc<Self> {
        static ALL: [[OnceLock<Arc<Thresholds>>; 3]; 2] = [const { [const { OnceLock::new() }; 3] }; 2];
        let known = match T::DTYPE {
            Dtype::F32 => return Self::none(),
            Dtype::F16 => &ALL[0][ties as usize],
            Dtype::Bf16 => &ALL[1][ties as usize],
        };
        if let Some(known) = known.get() {
            return known.clone();
        }
        let (mut units, mut operands) = ([1.0; 256], [1.0; 256]);
        for byte in 0..E8m0::NAN.to_bits() {
            let scale = E8m0::from_bits(byte);
            (units[usize::from(byte)], operands[usize::from(byte)]) = (scale.to_f32(), scale.reciprocal());
        }
        // `get_or_init` would not do: closures are compiled without the instance's instruction set.
        let new = Arc::new(Self(rows::<T, V, false>(simd, ties, &units, &operands)));
        // If another thread was first, it stored the same value.
        let _ = known.set(new.clone());
        new
    }

    /// The thresholds of NVFP4 under a tensor's global scale.
    #[inline(always)]
    pub(in crate::cpu) fn nvfp4<T: Element, V: Vector>(simd: V, quantizer: &Quantizer) -> Arc<Self> {
        if T::DTYPE == Dtype::F32 {
            return Self::none();
        }
        let (mut units, mut operands, mut divides) = ([1.0; 256], [1.0; 256], false);
        // The scale of a block has no sign and is not NaN.
        for byte in 0..E4m3::NAN.to_bits() {
            let (unit, operand) = (&mut units[usize::from(byte)], &mut operands[usize::from(byte)]);
            match quantizer.scaling(E4m3::from_bits(byte)) {
                Scaling::Multiply(factor) => (*unit, *operand) = (1.0 / factor, factor),
                Scaling::Divide(divisor) => (*unit, *operand, divides) = (divisor, divisor, true),
            }
        }
        Arc::new(Self(if divides {
            rows::<T, V, true>(simd, Ties::Even, &units, &operands)
        } else {
            rows::<T, V, false>(simd, Ties::Even, &units, &operands)
        }))
    }

    /// The thresholds under a scale byte.
    #[inline(always)]
    pub(in crate::cpu) fn row(&self, byte: u8) -> &Row {
        &self.0[usize::from(byte)]
    }
}

/// Finds the thresholds of all scales.
///
/// `operands` has each scale's factor or divisor, `units` the approximate magnitude that scales to
/// 1.
#[inline(always)]
fn rows<T: Element, V: Vector, const DIVIDES: bool>(
    simd: V,
    ties: Ties,
    units: &[f32; 256],
    operands: &[f32; 256],
) -> [Row; 256] {
    let mut rows = [Row::default(); 256];
    let scales = units.as_chunks::<LANES>().0.iter().zip(operands.as_chunks::<LANES>().0);
    for (rows, (units, operands)) in rows.as_chunks_mut::<LANES>().0.iter_mut().zip(scales) {
        for code in 0..e2m1::MIDPOINTS.len() {
            let (last_magnitudes, wrong) =
                last_magnitudes::<T, V, DIVIDES>(simd, code, ties, simd.load(units), simd.load(operands));
            for (row, last) in rows.iter_mut().zip(last_magnitudes) {
                row.0[code] = last as u16;
            }
            if wrong != 0 {
                scan::<T, DIVIDES>(code, ties, wrong, operands, rows);
            }
        }
    }
    rows
}

/// The largest magnitude whose code is at most `code`, for sixteen scales.
///
/// The second result has a bit for each scale whose magnitude is wrong.
#[inline(always)]
fn last_magnitudes<T: Element, V: Vector, const DIVIDES: bool>(
    simd: V,
    code: usize,
    ties: Ties,
    units: V::Number,
    operands: V::Number,
) -> (Lanes<u32>, u16) {
    // Counts how many of the three magnitudes around an estimate have the code.
    let guess = simd.narrow::<T>(simd.mul(units, simd.splat(e2m1::MIDPOINTS[code])));
    let mut next = simd.add_bits(simd.max_bits(guess, simd.splat_bits(2)), simd.splat_bits(u32::MAX));
    let mut last = simd.add_bits(next, simd.splat_bits(u32::MAX));
    for _ in 0..3 {
        let exceeds = exceeds::<T, V, DIVIDES>(simd, code, ties, next, operands);
        let one = simd.select(exceeds, simd.number(simd.splat_bits(0)), simd.number(simd.splat_bits(1)));
        last = simd.add_bits(last, simd.bits(one));
        next = simd.add_bits(next, simd.splat_bits(1));
    }
    next = simd.add_bits(last, simd.splat_bits(1));
    let right = exceeds::<T, V, DIVIDES>(simd, code, ties, next, operands)
        & !exceeds::<T, V, DIVIDES>(simd, code, ties, last, operands);
    (simd.store(simd.number(last)).map(f32::to_bits), !right)
}

/// Bit `i` is set if magnitude `i` gets a code above `code`.
#[inline(always)]
fn exceeds<T: Element, V: Vector, const DIVIDES: bool>(
    simd: V,
    code: usize,
    ties: Ties,
    magnitudes: V::Bits,
    operands: V::Number,
) -> u16 {
    let x = simd.widen::<T>(magnitudes);
    let scaled = if DIVIDES { simd.div(x, operands) } else { simd.mul(x, operands) };
    let midpoint = simd.splat(e2m1::MIDPOINTS[code]);
    let ties_pass = usize::from(e2m1::magnitude_code(e2m1::MIDPOINTS[code], ties)) > code;
    if ties_pass { simd.at_most(midpoint, scaled) } else { !simd.at_most(scaled, midpoint) }
}

/// Corrects the wrong thresholds, one magnitude at a time.
#[cold]
#[inline(never)]
fn scan<T: Element, const DIVIDES: bool>(
    code: usize,
    ties: Ties,
    wrong: u16,
    operands: &Lanes<f32>,
    rows: &mut [Row; LANES],
) {
    let largest = halfword_from_f32::<T>(T::MAX);
    for lane in (0..LANES).filter(|lane| wrong >> lane & 1 != 0) {
        let exceeds = |magnitude: u16| {
            let x = halfword_to_f32::<T>(magnitude);
            let scaled = if DIVIDES { x / operands[lane] } else { x * operands[lane] };
            usize::from(e2m1::magnitude_code(scaled, ties)) > code
        };
        let last = &mut rows[lane].0[code];
        *last = (*last).min(largest);
        while *last > 0 && exceeds(*last) {
            *last -= 1;
        }
        while *last < largest && !exceeds(*last + 1) {
            *last += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use microscale_formats::nvfp4::Arithmetic;
    use microscale_formats::{E2m1, NegativeZero, mx};

    use super::*;
    use crate::cpu::simd::Portable;

    /// Compares the codes of all magnitudes under all scales with the reference.
    fn check<T: Element>(thresholds: &Thresholds, scales: u8, code: impl Fn(u8, f32) -> u8) {
        for scale in 0..scales {
            let row = thresholds.row(scale);
            // Ascending order visits each magnitude once.
            let mut expected = 0;
            for bits in 0..0x7C00 {
                let x = halfword_to_f32::<T>(bits);
                while expected < 7 && bits > row.0[expected] {
                    expected += 1;
                }
                assert_eq!(usize::from(code(scale, x)), expected, "{:?} {bits:#06x} {scale:#04x}", T::DTYPE);
            }
        }
    }

    fn check_both<T: Element>() {
        for ties in <Ties as microscale_formats::Words>::values() {
            let thresholds = Thresholds::mxfp4::<T, Portable>(Portable, ties);
            check::<T>(&thresholds, 0xFF, |scale, x| {
                mx::encode::<E2m1>(x, E8m0::from_bits(scale).reciprocal(), ties, NegativeZero::Keep)
            });
        }
        let numerics = [Arithmetic::TORCHAO, Arithmetic::COMPRESSED_TENSORS, Arithmetic::MODELOPT];
        for arithmetic in numerics {
            for global in [1.0, 24436.363, 1e-30, 3e35] {
                let quantizer = Quantizer::new(arithmetic, global);
                let thresholds = Thresholds::nvfp4::<T, Portable>(Portable, &quantizer);
                // Under scale 0, some rules turn zeros into NaN. Only blocks of zeros get that
                // scale.
                check::<T>(&thresholds, 0x7F, |scale, x| {
                    let code = quantizer.encode(x, quantizer.scaling(E4m3::from_bits(scale)));
                    if x == 0.0 { 0 } else { code & 7 }
                });
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "twenty million values")]
    fn every_f16_has_the_code_of_the_definition_under_every_scale() {
        check_both::<f16>();
    }

    #[test]
    #[cfg_attr(miri, ignore = "twenty million values")]
    fn every_bf16_has_the_code_of_the_definition_under_every_scale() {
        check_both::<bf16>();
    }
}
