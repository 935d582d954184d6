//! NVFP4 step by step.
//!
//! Each step is one f32 operation, which Rust rounds correctly. E4M3 and E2M1 codes are searched in
//! f64.

use microscale::formats::nvfp4::{Arithmetic, Direction, GlobalScale};
use microscale::formats::{NegativeZero, Ties};
use microscale::{NonFinite, Numerics};

use super::element::{E4M3, MAGNITUDES, e4m3_value, nearest};
use super::{Block, Exact};

/// Elements of a block.
pub const BLOCK: usize = 16;

/// Returns the E4M3 byte of a magnitude: to nearest, ties to even, saturating at 448.
pub fn e4m3(magnitude: f32) -> u8 {
    nearest(&E4M3, magnitude.into(), Ties::Even)
}

/// Returns the value of an E4M3 byte that is a number, as f32.
fn number(byte: u8) -> f32 {
    e4m3_value(byte) as f32
}

/// Returns the numerics of an arithmetic, ignoring its sign of zeros.
///
/// A test checks that the other fields are the numerics'.
pub fn numerics(arithmetic: Arithmetic) -> Numerics {
    let numerics =
        [Numerics::Torchao, Numerics::CompressedTensors, Numerics::Modelopt, Numerics::TransformerEngine];
    let same = |numerics: &Numerics| {
        let named = numerics.nvfp4().expect("numerics of NVFP4");
        Arithmetic { negative_zero: arithmetic.negative_zero, ..named } == arithmetic
    };
    numerics.into_iter().find(same).unwrap_or_else(|| panic!("{arithmetic:?} is of no library"))
}

/// Returns the direction of the global scale in numerics' libraries.
pub fn direction(numerics: Numerics) -> Direction {
    match numerics {
        Numerics::CompressedTensors | Numerics::TransformerEngine => Direction::Divisor,
        Numerics::Torchao | Numerics::Modelopt => Direction::Multiplier,
        other => panic!("{other:?} has no NVFP4"),
    }
}

/// Returns the global scale that numerics compute for a tensor of `T` with this finite amax.
///
/// compressed-tensors rounds to `T` twice. Where that leaves `T`'s range it uses 1, which is not
/// reproduced: the global scale is 2688 / amax there.
pub fn global_scale<T: Exact>(numerics: Numerics, amax: f32) -> GlobalScale {
    let in_type = |value: f32| T::round_f64(value.into()).to_f64() as f32;
    let zero = amax == 0.0;
    match numerics {
        Numerics::Torchao | Numerics::Modelopt => {
            let scale = amax / 2688.0;
            let scale = if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale };
            GlobalScale::Multiplier(if zero { 1.0 } else { scale })
        }
        Numerics::CompressedTensors | Numerics::TransformerEngine => {
            let inverse = in_type(1.0 / amax);
            let in_type = in_type(inverse * 2688.0);
            let rounded = numerics == Numerics::CompressedTensors && in_type <= T::LARGEST as f32;
            let scale = if rounded { in_type } else { 2688.0 / amax };
            let scale = if scale > f32::MAX { f32::MAX } else { scale };
            GlobalScale::Divisor(if zero { 1.0 } else { scale })
        }
        other => panic!("{other:?} has no NVFP4"),
    }
}

/// Returns the amax of the finite elements. With `Saturate`, infinities count as the largest value.
pub fn tensor_amax<T: Exact>(values: impl IntoIterator<Item = T>, policy: NonFinite) -> f32 {
    let mut amax = 0.0f64;
    for value in values.into_iter().map(Exact::to_f64) {
        let counted = match policy {
            NonFinite::Saturate if value.is_infinite() => T::LARGEST,
            _ if value.is_finite() => value.abs(),
            _ => 0.0,
        };
        amax = amax.max(counted);
    }
    amax as f32
}

/// The operation that scales a block's elements into the range of E2M1.
#[derive(Clone, Copy, Debug)]
pub enum Scaling {
    /// x · this.
    Times(f32),
    /// x / this.
    Over(f32),
}

impl Scaling {
    /// Returns the scaled element, rounded once.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Times(factor) => x * factor,
            Self::Over(divisor) => x / divisor,
        }
    }

    /// Returns the x that would give this quotient without rounding.
    pub fn undo(self, quotient: f64) -> f64 {
        match self {
            Self::Times(factor) => quotient / f64::from(factor),
            Self::Over(divisor) => quotient * f64::from(divisor),
        }
    }
}

/// The block arithmetic under a global scale in the numerics' direction.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The numerics.
    pub numerics: Numerics,
    /// G or s, or 1 without a global scale.
    pub global: f32,
    /// How a zero's sign is encoded.
    pub negative_zero: NegativeZero,
}

impl Rule {
    /// Returns the scale that a block of this amax wants, before clamping.
    pub fn wanted<T: Exact>(self, amax: f32) -> f32 {
        let global = self.global;
        match self.numerics {
            Numerics::Torchao => {
                let sixth = amax / 6.0;
                sixth / global
            }
            Numerics::CompressedTensors => {
                let sixth = amax / 6.0;
                let in_type = T::round_f64(sixth.into()).to_f64() as f32;
                global * in_type
            }
            Numerics::Modelopt => {
                let six = 6.0 * global;
                amax / six
            }
            Numerics::TransformerEngine => {
                let one_sixth = 1.0f32 / 6.0;
                let factor = global * one_sixth;
                amax * factor
            }
            other => panic!("{other:?} has no NVFP4"),
        }
    }

    /// Returns the scale byte to store for a wanted scale.
    pub fn byte(self, wanted: f32) -> u8 {
        match self.numerics {
            Numerics::Torchao => e4m3(wanted.clamp(0.015625, 448.0)),
            Numerics::CompressedTensors => match e4m3(wanted) {
                0 => 0x20,
                byte => byte,
            },
            Numerics::Modelopt => {
                let replaced = if wanted == 0.0 { 1.0 } else { wanted };
                e4m3(replaced.clamp(0.001953125, 448.0))
            }
            _ => e4m3(wanted),
        }
    }

    /// Returns the operation that scales the elements.
    pub fn scaling(self, byte: u8) -> Scaling {
        let (scale, global) = (number(byte), self.global);
        let at_most_largest = |factor: f32| if factor > f32::MAX { f32::MAX } else { factor };
        match self.numerics {
            Numerics::Torchao => {
                let inverse = 1.0 / global;
                Scaling::Times(at_most_largest(inverse / scale))
            }
            Numerics::CompressedTensors => Scaling::Over(scale / global),
            Numerics::Modelopt => Scaling::Over(scale * global),
            _ => {
                let inverse = 1.0 / global;
                let product = scale * inverse;
                Scaling::Times(at_most_largest(1.0 / product))
            }
        }
    }

    /// Quantizes a block of finite elements.
    pub(super) fn quantize<T: Exact>(self, block: &[f64]) -> Block {
        let amax = block.iter().fold(0.0, |amax: f64, value| amax.max(value.abs())) as f32;
        let wanted = self.wanted::<T>(amax);
        let byte = self.byte(wanted);
        let scaling = self.scaling(byte);
        let code = |value: &f64| {
            let quotient = scaling.apply(*value as f32);
            assert!(!quotient.is_nan(), "{self:?}: the quotient of {value:e} by {scaling:?}");
            let magnitude = nearest(&MAGNITUDES, f64::from(quotient).abs(), Ties::Even);
            let negative = super::is_negative(magnitude, *value, self.negative_zero);
            magnitude | if negative { 8 } else { 0 }
        };
        let codes: Vec<u8> = block.iter().map(code).collect();
        let least = match self.numerics {
            Numerics::Torchao => 0.015625,
            Numerics::Modelopt => 0.001953125,
            _ => 0.0,
        };
        let saturated = wanted > 464.0 || wanted < least || e4m3(wanted) == 0;
        let zeros = byte == 0 || codes.iter().all(|code| code % 8 == 0);
        Block {
            scale: byte,
            // The block scale is rounded to 4 bits, so up to 6 · 17/16 is due to rounding.
            clipped: scaling.apply(amax) > 6.5,
            flushed: amax != 0.0 && zeros,
            scale_saturated: amax != 0.0 && saturated,
            codes,
        }
    }
}

/// Returns the dequantization factor: sf/G or sf·s, rounded to f32.
pub fn factor(scale: u8, global: Option<GlobalScale>) -> f32 {
    match global {
        None => number(scale),
        Some(GlobalScale::Divisor(divisor)) => number(scale) / divisor,
        Some(GlobalScale::Multiplier(multiplier)) => number(scale) * multiplier,
    }
}
