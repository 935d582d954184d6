//! `rcp.approx` (ISA 9.7.3, `rcp`). The ISA permits an error of one unit in the last place.

use super::float::flush;
use super::round::{NEAREST, canonical, quotient, to_f32};
use crate::approximation::Approximation;

/// Returns one of the permitted results: within 1 ulp of the exact one, or the table's special
/// value.
///
/// With `.ftz`, subnormal operands count as zeros and subnormal results become zeros.
pub(crate) fn reciprocal(bits: u32, ftz: bool, choice: &Approximation) -> u32 {
    let operand = if ftz { flush(bits) } else { bits };
    let x = f32::from_bits(operand);
    if x == 0.0 || !x.is_finite() {
        return canonical(1.0 / x);
    }
    if let Approximation::Table(table) = choice {
        return table(bits);
    }
    let sign = operand & 0x8000_0000;
    let magnitude = f64::from(x.abs());
    let nearest = to_f32::<NEAREST>(quotient(1.0, magnitude));
    let flushed = if ftz { flush(nearest) } else { nearest };
    if !f32::from_bits(flushed).is_normal() {
        return sign | flushed;
    }
    let range = permitted(magnitude, nearest);
    let chosen = match choice {
        Approximation::Low => range.0,
        Approximation::High => range.1,
        Approximation::Scattered(seed) => {
            let span = u64::from(range.1 - range.0 + 1);
            range.0 + (scatter(*seed ^ u64::from(bits)) % span) as u32
        }
        Approximation::Nearest | Approximation::Table(_) => nearest,
    };
    sign | chosen
}

/// Returns the lowest and highest normal float within one ulp of 1/x.
///
/// The ulp is the unit of 1/x's binade. r is within it if (r ± ulp)·x is beyond 1. That is exact in
/// f64: a float plus an ulp has at most 26 bits, and x has 24.
fn permitted(x: f64, nearest: u32) -> (u32, u32) {
    // The binade of 1/x itself: rounding may have gone up to the next power of two.
    let down = if f64::from(f32::from_bits(nearest)) * x > 1.0 { nearest - 1 } else { nearest };
    let exponent = (down >> 23) as i32 - 127 - 23;
    let ulp = f64::from_bits(((exponent + 1023) as u64) << 52);
    let value = |bits: u32| f64::from(f32::from_bits(bits));
    let (mut low, mut high) = (nearest, nearest);
    while (value(low - 1) + ulp) * x >= 1.0 && f32::from_bits(low - 1).is_normal() {
        low -= 1;
    }
    while (value(high + 1) - ulp) * x <= 1.0 && f32::from_bits(high + 1).is_normal() {
        high += 1;
    }
    (low, high)
}

/// SplitMix64's mixing function.
pub(super) fn scatter(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_cases_match_the_isa_table() {
        let choice = Approximation::High;
        let of = |bits: u32| reciprocal(bits, true, &choice);
        assert_eq!(of(0xff80_0000), 0x8000_0000);
        assert_eq!(of(0x8000_0001), 0xff80_0000);
        assert_eq!(of(0x8000_0000), 0xff80_0000);
        assert_eq!(of(1), 0x7f80_0000);
        assert_eq!(of(0x7f80_0000), 0);
        assert_eq!(of(0xffff_ffff), 0x7fff_ffff);
        // 1 / MAX is subnormal.
        assert_eq!(of(0xff7f_ffff), 0x8000_0000);
    }

    #[test]
    fn choices_are_the_farthest_within_one_ulp() {
        let mut random = fastrand::Rng::with_seed(8);
        for _ in 0..100_000 {
            let x = f32::from_bits(random.u32(0x0080_0000..0x7e80_0000) & !0 << random.u32(..24));
            let exact = 1.0 / f64::from(x);
            let ulp = 2f64.powi(exact.log2().floor() as i32 - 23);
            let of = |choice: &Approximation| f32::from_bits(reciprocal(x.to_bits(), true, choice));
            let (low, high) = (of(&Approximation::Low), of(&Approximation::High));
            let distance = |r: f32| (f64::from(r) - exact).abs() / ulp;
            if !x.is_normal() || !(exact as f32).is_normal() || !low.next_down().is_normal() {
                continue;
            }
            assert!(distance(low) < 1.0 + 1e-9 && distance(low.next_down()) > 1.0 - 1e-9, "{x:e}");
            assert!(distance(high) < 1.0 + 1e-9 && distance(high.next_up()) > 1.0 - 1e-9, "{x:e}");
            let scattered = of(&Approximation::Scattered(random.u64(..)));
            assert!((low..=high).contains(&scattered) && (low..=high).contains(&of(&Approximation::Nearest)));
        }
    }
}
