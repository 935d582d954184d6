//! The rule in integers against the same rule in f64, step by step as MMA-Sim has it.

use super::*;

/// Returns a power of two.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// `math.frexp` as MMA-Sim uses it: a significand from 1 to 2 and an exponent of at least
/// `smallest`.
fn significand_and_exponent(x: f64, smallest: i32) -> (f64, i32) {
    if x == 0.0 {
        return (0.0, -126);
    }
    let exponent = ((x.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(smallest);
    (x / power(exponent), exponent)
}

/// `nv_fused_dot_add_with_block_scale`, for sums of groups and the values of their scales.
fn in_f64(accumulator: f32, sums: [f64; GROUPS], scales: [[f64; 2]; GROUPS], smallest: i32) -> f32 {
    let (significand, exponent) = significand_and_exponent(accumulator.into(), -126);
    let (mut significands, mut exponents) = ([significand; GROUPS + 1], [exponent; GROUPS + 1]);
    for group in 0..GROUPS {
        let [a, b] = scales[group].map(|scale| significand_and_exponent(scale, smallest));
        significands[group] = sums[group] * a.0 * b.0;
        exponents[group] = a.1 + b.1;
    }
    let largest = exponents.into_iter().max().unwrap();
    let unit = power(35);
    let truncated = |i: usize| (significands[i] * unit * power(exponents[i] - largest)).trunc() / unit;
    let sum: f64 = (0..=GROUPS).map(truncated).sum();
    let (significand, exponent) = significand_and_exponent(sum * power(largest), -126);
    let significand = (significand * power(23)).trunc() / power(23);
    // Exact, or infinite.
    (significand * power(exponent)) as f32 + 0.0
}

/// Accumulators of every kind.
const ACCUMULATORS: [u32; 22] = [
    0,
    1,
    0x8000_0001,
    0x007F_FFFF,
    0x0080_0000,
    0x8080_0001,
    0x0C00_0001,
    0x8FFF_FFFF,
    0x2F80_0003,
    0x3400_0001,
    0xB612_3457,
    0x387F_FFFF,
    0x3F80_0000,
    0xBF80_0001,
    0x4249_F0F1,
    0xC77F_FFFD,
    0x4B80_0001,
    0xD000_0001,
    0x5F12_3457,
    0x7EFF_FFFF,
    0x7F7F_FFFF,
    0xFF7F_FFFF,
];

/// Quarters of the groups of a k-step: alike, cancelling, the largest, and zeros under scales.
const QUARTERS: [[i32; GROUPS]; 6] = [
    [1, 1, 1, 1],
    [2304, -2303, 1, -1],
    [2304, 2304, 2304, 2304],
    [-1151, 0, 0, 3],
    [0, 0, 0, -1],
    [0, 0, 0, 0],
];

/// Compares a k-step whose first groups have one pair of scales and whose last group another.
fn check(
    accumulator: u32,
    quarters: [i32; GROUPS],
    term: impl Fn(usize, i32) -> Term,
    scales: [[f64; 2]; GROUPS],
    smallest: i32,
) {
    let accumulator = f32::from_bits(accumulator);
    let found = step(accumulator, core::array::from_fn(|i| Some(term(i, quarters[i]))));
    let right = in_f64(accumulator, quarters.map(|quarters| f64::from(quarters) / 4.0), scales, smallest);
    assert_eq!(
        found.to_bits(),
        right.to_bits(),
        "{accumulator:e} {quarters:?} {scales:?}: {found:e} {right:e}"
    );
}

#[test]
fn every_pair_of_nvfp4_scales_follows_the_rule() {
    for a in 0..0x7F {
        for b in 0..0x7F {
            let [a, b] = [a, b].map(E4m3::from_bits);
            let last = [E4m3::from_bits(0x7E - a.to_bits()), E4m3::from_bits(b.to_bits() / 3)];
            let of = |i: usize| if i < 3 { [a, b] } else { last };
            let scales = core::array::from_fn(|i| of(i).map(|scale| f64::from(scale.to_f32())));
            for (i, accumulator) in ACCUMULATORS.into_iter().enumerate() {
                let quarters = QUARTERS[(i + usize::from(a.to_bits())) % QUARTERS.len()];
                let term = |i, quarters| Term::nvfp4(quarters, of(i)[0], of(i)[1]).unwrap();
                check(accumulator, quarters, term, scales, -6);
            }
        }
    }
}

#[test]
fn every_pair_of_mxfp4_scales_follows_the_rule() {
    for a in 0..255 {
        for b in 0..255 {
            let last = [a ^ 5, b / 3 + 100].map(E8m0::from_bits);
            let first = [a, b].map(E8m0::from_bits);
            let of = |i: usize| if i < 2 { first } else { last };
            if last.iter().any(|scale| scale.is_nan()) {
                continue;
            }
            let scales = core::array::from_fn(|i| of(i).map(|scale| f64::from(scale.to_f32())));
            for (i, accumulator) in ACCUMULATORS.into_iter().enumerate() {
                let quarters = QUARTERS[(i + usize::from(a)) % QUARTERS.len()];
                let term = |i, quarters| Term::mxfp4(quarters, of(i)[0], of(i)[1]).unwrap();
                check(accumulator, quarters, term, scales, -127);
            }
        }
    }
}

/// One group of every pair of codes, and the same pair in all groups.
#[test]
fn every_pair_of_codes_is_multiplied() {
    for (a, b) in (0..=255u8).flat_map(|a| (0..=255u8).map(move |b| (a, b))) {
        let value = |code: u8| crate::E2m1::from_bits(code).to_f32();
        let product = value(a) * value(b) + value(a >> 4) * value(b >> 4);
        let mut codes = ([0; 32], [0; 32]);
        (codes.0[9], codes.1[9]) = (a, b);
        let found = row(Format::Nvfp4, (&codes.0, &[0x38; 4]), (&codes.1, &[0x40; 4]));
        assert_eq!(found, 2.0 * product);
        let found = row(Format::Mxfp4, (&[a; 48], &[127; 3]), (&[b; 48], &[126; 3]));
        assert_eq!(found, 24.0 * product);
    }
}

/// From +0, a k-step of NVFP4 truncates the exact sum once, unless scales are 2^28 apart.
#[test]
fn a_first_k_step_is_the_truncated_exact_sum() {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as i32
    };
    for _ in 0..20_000 {
        let mut exact = 0i64;
        let terms = core::array::from_fn(|_| {
            let quarters = random() % 2305;
            let [a, b] = [random(), random()].map(|x| E4m3::from_bits((8 + x % 0x70) as u8));
            // Quarters, and scales in multiples of 2^−9.
            let [s, t] = [a, b].map(|scale| (512.0 * scale.to_f32()) as i64);
            exact += i64::from(quarters) * s * t;
            Term::nvfp4(quarters, a, b)
        });
        let found = step(0.0, terms);
        let nearest = exact as f32;
        let truncated = match (nearest as i64).unsigned_abs() > exact.unsigned_abs() {
            true => f32::from_bits(nearest.to_bits() - 1),
            false => nearest,
        };
        assert_eq!(found, truncated / (1 << 20) as f32);
    }
}

#[test]
fn special_values_follow_the_rule() {
    let one = |quarters| Term::nvfp4(quarters, E4m3::ONE, E4m3::ONE);
    let none = Some(Term::ZERO);
    assert_eq!(Term::nvfp4(1, E4m3::NAN, E4m3::ONE), None);
    assert_eq!(Term::nvfp4(1, E4m3::ONE, E4m3::from_bits(0xFF)), None);
    assert_eq!(Term::nvfp4(1, E4m3::from_bits(0xB8), E4m3::ONE), one(1));
    assert_eq!(Term::mxfp4(1, E8m0::NAN, E8m0::MIN), None);
    assert_eq!(Term::mxfp4(1, E8m0::MIN, E8m0::NAN), None);
    for (accumulator, terms) in [(1.0, [none, none, None, none]), (-f32::NAN, [none; 4])] {
        assert_eq!(step(accumulator, terms).to_bits(), NAN);
    }
    for infinite in [f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(step(infinite, [one(-4), none, none, one(9)]), infinite);
        assert_eq!(step(infinite, [None; 4]).to_bits(), NAN);
    }
    // Zero is +0.
    assert_eq!(step(-0.0, [none; 4]).to_bits(), 0);
    assert_eq!(step(-1.0, [one(4), none, none, none]).to_bits(), 0);
    // Below the smallest number, a sum of either sign is +0.
    let tiny = Term { significand: -1, exponent: -126 - 16 };
    assert_eq!(step(0.0, [Some(tiny), none, none, none]).to_bits(), 0);
    // The smallest number, and subnormal results.
    let scaled = |byte| Term::mxfp4(4, E8m0::from_bits(byte), E8m0::from_bits(64));
    for exponent in -149..-126 {
        let byte = (exponent + 127 + 63) as u8;
        assert_eq!(step(0.0, [scaled(byte), none, none, none]).to_bits(), 1 << (exponent + 149));
    }
    // Sums beyond the largest number are infinite, sums below 2^128 are it.
    let large = |quarters, exponent| Some(Term { significand: 64 * quarters, exponent });
    assert_eq!(step(f32::MAX, [large(3, 102), none, none, none]), f32::MAX);
    assert_eq!(step(f32::MAX, [large(4, 104), none, none, none]), f32::INFINITY);
    assert_eq!(step(f32::MIN, [large(-4, 104), none, none, none]), f32::NEG_INFINITY);
    assert_eq!(step(f32::MIN, [large(4, 104), none, none, none]), f32::from_bits(0xFF7F_FFFE));
}

/// A term of zeros under large scales costs the accumulator its low bits.
#[test]
fn exponents_of_scales_count_even_for_zeros() {
    let under = |scale| [Term::nvfp4(0, scale, scale), Some(Term::ZERO), Some(Term::ZERO), Some(Term::ZERO)];
    let x = f32::from_bits(0x3F80_0001);
    assert_eq!(step(x, under(E4m3::ONE)), x);
    // e is 16, so multiples of 2^−19 survive.
    assert_eq!(step(x, under(E4m3::from_bits(0x7E))), 1.0);
    // A scale of zero has no exponent.
    assert_eq!(step(x, [Term::nvfp4(9, E4m3::from_bits(0x7E), E4m3::from_bits(0)); 4]), x);
}
