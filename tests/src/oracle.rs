//! MXFP4 the slow and obvious way, written from the formats' definitions and sharing no code with the library.
//!
//! Values, scales and quotients are f64, in which all of them are exact, so nothing is rounded but the codes.

use half::{bf16, f16};
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Element, NonFinite, Position, Recipe, Report, Shape};

/// The magnitudes of E2M1's codes 0 to 7.
pub const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Elements of a block.
pub const BLOCK: usize = 32;

/// An element with its exact conversions to and from f64.
pub trait Exact: Element {
    /// The largest finite value.
    const LARGEST: f64;
    /// The exponent of the smallest subnormal.
    const SMALLEST_EXPONENT: i32;
    /// Bits of the type.
    const BITS: u32;

    /// Widens.
    fn to_f64(self) -> f64;

    /// Rounds to nearest, ties to even; NaN gives the canonical quiet NaN.
    fn round_f64(value: f64) -> Self;

    /// From the low bits of a word.
    fn of_bits(bits: u32) -> Self;

    /// The bits.
    fn bits(self) -> u32;
}

impl Exact for f32 {
    const LARGEST: f64 = f32::MAX as f64;
    const SMALLEST_EXPONENT: i32 = -149;
    const BITS: u32 = 32;

    fn to_f64(self) -> f64 {
        self.into()
    }

    fn round_f64(value: f64) -> Self {
        if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value as f32 }
    }

    fn of_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

/// Both 16-bit types by the same text; the conversions are the `half` crate's.
macro_rules! exact_16_bit {
    ($type:ident, $largest:expr, $smallest:literal, $nan:literal) => {
        impl Exact for $type {
            const LARGEST: f64 = $largest;
            const SMALLEST_EXPONENT: i32 = $smallest;
            const BITS: u32 = 16;

            fn to_f64(self) -> f64 {
                $type::to_f64(self)
            }

            fn round_f64(value: f64) -> Self {
                if value.is_nan() { $type::from_bits($nan) } else { $type::from_f64(value) }
            }

            fn of_bits(bits: u32) -> Self {
                $type::from_bits(bits as u16)
            }

            fn bits(self) -> u32 {
                self.to_bits().into()
            }
        }
    };
}
exact_16_bit!(f16, 65504.0, -24, 0x7E00);
exact_16_bit!(bf16, 255.0 / 128.0 * (1u128 << 127) as f64, -133, 0x7FC0);

/// 2^`exponent`.
pub fn power_of_two(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// The code 0 to 7 whose value is nearest to `magnitude` ≥ 0.
pub fn magnitude_code(magnitude: f64, ties: Ties) -> u8 {
    // Saturation first: far out, f64 could not tell the distances apart.
    let magnitude = magnitude.min(6.0);
    let distance = |code: u8| (MAGNITUDES[usize::from(code)] - magnitude).abs();
    let mut nearest = 0;
    for code in 1..8u8 {
        let tie_goes_up = match ties {
            Ties::Even => code.is_multiple_of(2),
            Ties::Away => true,
            Ties::Zero => false,
        };
        let tie = distance(code) == distance(nearest);
        if distance(code) < distance(nearest) || (tie && tie_goes_up) {
            nearest = code;
        }
    }
    nearest
}

/// The exponent of the scale of a block with this finite `amax` > 0, before clamping.
///
/// - floor: 2^k is the exponent of amax less 2, so 4·2^k ≤ amax < 8·2^k.
/// - ceil: the same, rounded up unless amax is a power of two: 2·2^k < amax ≤ 4·2^k.
/// - even: amax plus a quarter of its power of two, then floor; the step is at 1.75: 3.5·2^k ≤ amax < 7·2^k.
/// - rceil: the smallest 2^k ≥ amax / 6.
pub fn scale_exponent(amax: f64, rule: ScaleRule) -> i32 {
    // The smallest f32 is 2^-149.
    let mut exponents = -155..=127;
    let found = match rule {
        ScaleRule::Floor => exponents.rfind(|k| 4.0 * power_of_two(*k) <= amax),
        ScaleRule::Ceil => exponents.find(|k| 4.0 * power_of_two(*k) >= amax),
        ScaleRule::Even => exponents.rfind(|k| 3.5 * power_of_two(*k) <= amax),
        ScaleRule::Rceil => exponents.find(|k| 6.0 * power_of_two(*k) >= amax),
    };
    found.expect("amax is positive and finite")
}

/// The code 0 to 15 of a finite element.
pub fn code(value: f64, scale: f64, ties: Ties, negative_zero: NegativeZero) -> u8 {
    let magnitude = magnitude_code((value / scale).abs(), ties);
    let negative = match negative_zero {
        _ if magnitude != 0 => value < 0.0,
        NegativeZero::Keep => value.is_sign_negative(),
        NegativeZero::DropInput => value < 0.0,
        NegativeZero::Drop => false,
        NegativeZero::Force => value <= 0.0,
    };
    magnitude | u8::from(negative) << 3
}

/// What a matrix quantizes to, whatever its non-finite policy: `error` gives what `propagate` gives.
#[derive(Debug, Default, PartialEq)]
pub struct Expected {
    /// Packed codes.
    pub codes: Vec<u8>,
    /// Scale bytes.
    pub scales: Vec<u8>,
    /// The counts.
    pub report: Report,
}

/// Quantizes a matrix.
pub fn quantize<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) -> Expected {
    let mut expected = Expected::default();
    for row in 0..shape.rows {
        for first in (0..shape.cols).step_by(BLOCK) {
            let mut block = [0.0; BLOCK];
            for col in first..shape.cols.min(first + BLOCK) {
                let value = values[row * shape.row_stride + col].to_f64();
                block[col - first] = value;
                expected.report.nan += u64::from(value.is_nan());
                expected.report.infinite += u64::from(value.is_infinite());
                if !value.is_finite() && expected.report.first_non_finite.is_none() {
                    expected.report.first_non_finite = Some(Position { row, col });
                }
            }
            if recipe.non_finite == NonFinite::Saturate {
                let saturate = |v: f64| if v.is_nan() { 0.0 } else { v.clamp(-T::LARGEST, T::LARGEST) };
                block = block.map(saturate);
            }
            expected.add_block(&block, recipe);
        }
    }
    expected
}

impl Expected {
    fn add_block(&mut self, block: &[f64; BLOCK], recipe: &Recipe) {
        let arithmetic = &recipe.arithmetic;
        if block.iter().any(|value| !value.is_finite()) {
            self.scales.push(255);
            self.codes.extend([0; BLOCK / 2]);
            return;
        }
        let amax = block.iter().fold(0.0, |amax: f64, value| amax.max(value.abs()));
        let exponent = if amax == 0.0 { -127 } else { scale_exponent(amax, arithmetic.scale_rule) };
        let clamped = exponent.clamp(-127, 127);
        let scale = power_of_two(clamped);
        let codes = block.map(|value| code(value, scale, arithmetic.ties, arithmetic.negative_zero));
        self.scales.push(u8::try_from(clamped + 127).expect("clamped"));
        self.codes.extend(codes.chunks(2).map(|pair| pair[0] + 16 * pair[1]));
        self.report.clipped_blocks += u64::from(amax > 6.0 * scale);
        self.report.flushed_blocks += u64::from(amax > 0.0 && codes.iter().all(|code| code % 8 == 0));
        self.report.saturated_scales += u64::from(clamped != exponent);
    }
}

/// The exact value of a code 0 to 15 with a scale byte.
pub fn value(code: u8, scale: u8) -> f64 {
    if scale == 255 {
        return f64::NAN;
    }
    let magnitude = MAGNITUDES[usize::from(code % 8)] * power_of_two(i32::from(scale) - 127);
    if code >= 8 { -magnitude } else { magnitude }
}

/// Takes packed codes apart, the low nibble first.
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|byte| [byte % 16, byte / 16]).collect()
}
