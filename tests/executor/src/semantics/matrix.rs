//! Elements of `mma` and `wgmma` (ISA 9.7.14, 9.7.15): a sum of products and an addend, in f32.
//!
//! For 16-bit factors, the ISA asks for at least single precision and leaves order and rounding
//! open. An [`Approximation`] chooses them. Subnormals are preserved, as on all measured GPUs. E4M3
//! factors have the arithmetic of Hopper, which [`fp8_dot`] defines. No approximation changes it.

use microscale_formats::{E4m3, fp8_dot};

use super::minifloat::{Bf16, F16, decode};
use super::reciprocal::scatter;
use super::round::{NEAREST, ZERO, canonical, sum, to_f32, to_odd, two_sum};
use crate::approximation::Approximation;

/// Products per sum of 16-bit factors.
pub(crate) const DEPTH: usize = 16;
/// Bytes of the factors of a sum of `wgmma`, of any type.
pub(crate) const DEPTH_BYTES: usize = 2 * DEPTH;

/// The type of the factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Multiplicand {
    F16,
    Bf16,
    E4m3,
}

impl Multiplicand {
    /// Returns the number that a code encodes.
    pub(crate) fn value(self, code: u32) -> f64 {
        match self {
            Self::F16 => decode::<F16>(code),
            Self::Bf16 => decode::<Bf16>(code),
            Self::E4m3 => E4m3::from_bits(code as u8).to_f32().into(),
        }
    }
}

/// A row of A or a column of B of an instruction of `wgmma`.
#[derive(Clone, Debug)]
pub(crate) enum Factors {
    /// 16-bit numbers.
    Wide([f64; DEPTH]),
    E4m3([E4m3; DEPTH_BYTES]),
}

impl Factors {
    /// Decodes factors.
    pub(crate) fn new(element: Multiplicand, bytes: &[u8; DEPTH_BYTES]) -> Self {
        match element {
            Multiplicand::E4m3 => Self::E4m3(bytes.map(E4m3::from_bits)),
            _ => Self::Wide(std::array::from_fn(|i| {
                element.value(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).into())
            })),
        }
    }

    /// Returns c + Σ a·b as f32 bits. Both have the same type.
    pub(crate) fn dot(&self, b: &Self, c: u32, choice: &Approximation) -> u32 {
        match (self, b) {
            (Self::Wide(a), Self::Wide(b)) => dot(a, b, c, choice),
            (Self::E4m3(a), Self::E4m3(b)) => {
                let sum = fp8_dot::step(f32::from_bits(c), a, b);
                if sum.is_nan() { canonical(sum) } else { sum.to_bits() }
            }
            _ => unreachable!("an instruction has one type of factors"),
        }
    }
}

/// Returns c + Σ a·b as f32 bits.
///
/// Products of two numbers of at most 11 bits are exact in f64 and far from the limits of its
/// range.
pub(crate) fn dot(a: &[f64; DEPTH], b: &[f64; DEPTH], c: u32, choice: &Approximation) -> u32 {
    let mut addends = [f64::from(f32::from_bits(c)); DEPTH + 1];
    for (addend, (a, b)) in addends[1..].iter_mut().zip(a.iter().zip(b)) {
        *addend = a * b;
    }
    let plain = addends[1..].iter().fold(addends[0], |sum, addend| sum + addend);
    if !plain.is_finite() {
        return canonical(plain as f32);
    }
    match choice {
        Approximation::Nearest | Approximation::Table(_) => to_f32::<NEAREST>(exact(&addends)),
        Approximation::Low => aligned(&addends),
        Approximation::High => in_order(&addends),
        Approximation::Scattered(seed) => {
            shuffle(&mut addends, seed ^ plain.to_bits());
            in_order(&addends)
        }
    }
}

/// Returns the whole sum, rounded to odd, by Shewchuk's partial sums.
///
/// They do not overlap, so the first lost part has the sign of the whole loss.
fn exact(addends: &[f64]) -> f64 {
    let mut parts: Vec<f64> = Vec::with_capacity(addends.len());
    for &addend in addends {
        let mut carried = addend;
        let mut kept = 0;
        for i in 0..parts.len() {
            let (s, lacks) = two_sum(carried, parts[i]);
            if lacks != 0.0 {
                parts[kept] = lacks;
                kept += 1;
            }
            carried = s;
        }
        parts.truncate(kept);
        parts.push(carried);
    }
    let mut high = parts.pop().unwrap_or(0.0);
    while let Some(part) = parts.pop() {
        let (s, lacks) = two_sum(high, part);
        if lacks != 0.0 {
            return to_odd(s, lacks);
        }
        high = s;
    }
    high
}

/// Returns the sum as tensor cores compute it.
///
/// Every addend is truncated to the unit of the largest addend's 24th bit, and the sum of the
/// truncated addends is truncated to 24 bits.
fn aligned(addends: &[f64]) -> u32 {
    let largest = addends.iter().fold(0f64, |largest, addend| largest.max(addend.abs()));
    if largest == 0.0 {
        return 0;
    }
    let unit = f64::from_bits(((largest.to_bits() >> 52) - 23) << 52);
    let units: i64 = addends.iter().map(|addend| (addend / unit) as i64).sum();
    to_f32::<ZERO>(units as f64 * unit)
}

/// Adds one addend after the other, each sum rounded to f32. Overflow to infinity is permanent.
fn in_order(addends: &[f64]) -> u32 {
    let add = |s, addend: &f64| f64::from(f32::from_bits(to_f32::<NEAREST>(sum::<NEAREST>(s, *addend))));
    to_f32::<NEAREST>(addends[1..].iter().fold(addends[0], add))
}

fn shuffle(addends: &mut [f64], mut seed: u64) {
    for i in (1..addends.len()).rev() {
        seed = scatter(seed);
        addends.swap(i, (seed % (i as u64 + 1)) as usize);
    }
}
