//! Every method of every instruction set against the same operation on each element.

use microscale_formats::int8;

use super::*;
use crate::cpu::simd::Portable;
use crate::cpu::simd::products::OFFSET;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512, Avx512Vnni};

/// Compares every method with the definition.
fn check<V: Products, D: Int8Products<V>>(simd: V, bytes: D) {
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..if cfg!(miri) { 2 } else { 300 } {
        // The largest products, then any.
        let codes: [u8; STEP] = std::array::from_fn(|_| if round == 0 { 0x77 } else { random.u8(..) });
        let x: [i8; 16 * LANES] = std::array::from_fn(|_| match round {
            0 => -127,
            1 => 127,
            _ => random.i8(-127..=127),
        });
        let mut quarters: Quarters = [[[0; 4]; LANES]; 4];
        for (i, x) in x.iter().enumerate() {
            quarters[i % 16 / 8 * 2 + i % 2][i / 16][i % 8 / 2] = *x;
        }
        let surplus: Lanes<i32> = std::array::from_fn(|group| {
            -OFFSET * x[16 * group..][..16].iter().map(|x| i32::from(*x)).sum::<i32>()
        });
        let expected: Lanes<i32> =
            std::array::from_fn(|group| int8::twice_sum(&codes[8 * group..][..8], &x[16 * group..][..16]));
        let loaded = quarters.map(|quarter| bytes.store(bytes.load(&quarter)));
        assert_eq!(loaded, quarters);
        let found =
            bytes.add_groups(&surplus, bytes.raised(&codes), quarters.map(|quarter| bytes.load(&quarter)));
        assert_eq!(simd.store(simd.numbers(found)), expected.map(|sum| sum as f32));
    }
}

#[test]
fn portable_bytes() {
    check(Portable, Portable);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_bytes() {
    check(crate::cpu::simd::Neon, crate::cpu::simd::Neon);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_bytes() {
    if let Some(simd) = Avx2::detect() {
        check(simd, simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_bytes() {
    if let Some(simd) = Avx512::detect() {
        check(simd, simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_vnni_bytes() {
    if let Some(vnni) = Avx512Vnni::detect() {
        check(vnni.avx512(), vnni);
    }
}
