//! Every instruction set against arrays, element by element.

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};

/// Compares both methods with arrays, in range and out of it.
fn check<V: KSteps>(simd: V) {
    let mut random = fastrand::Rng::with_seed(51);
    let mut results = [0; 2];
    for round in 0..if cfg!(miri) { 4 } else { 2000 } {
        let mut number = || f64::from(truncated(random.f64() - 0.5) as f32);
        let terms: [Lanes<f32>; 4] = std::array::from_fn(|_| std::array::from_fn(|_| number() as f32));
        let mut found: Four = std::array::from_fn(|_| number());
        let mut range = Range { lowest: [1e-4; 4], limits: [4.0; 4] };
        match round % 5 {
            0 => found[round % 4] = 0.0,
            1 => found[round % 4] = -5e-5,
            2 => range.limits[round % 4] = 0.1,
            3 => found[round % 4] = f64::INFINITY,
            _ => {}
        }
        let mut expected = found;
        let sums = terms.map(|terms| simd.sums_of_groups(simd.load(&terms)));
        let in_range = simd.add_k_steps(sums, &mut found, &range);
        let right = add_k_steps(&terms.each_ref().map(sums_of_groups), &mut expected, &range);
        assert_eq!((in_range, found.map(f64::to_bits)), (right, expected.map(f64::to_bits)));
        results[usize::from(in_range)] += 1;
    }
    assert!(cfg!(miri) || results.iter().all(|count| *count > 400), "{results:?}");
}

#[test]
fn portable_k_steps() {
    check(Portable);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_k_steps() {
    check(Neon);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_k_steps() {
    if let Some(simd) = Avx2::detect() {
        check(simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_k_steps() {
    if let Some(simd) = Avx512::detect() {
        check(simd);
    }
}
