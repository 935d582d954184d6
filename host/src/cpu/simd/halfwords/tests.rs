//! Every halfword method of every instruction set against the same operation on each value.

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};
use crate::cpu::simd::{Portable, Vector};

/// Compares every method with the operation on single values.
fn check<V: Vector>(simd: V) {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..if cfg!(miri) { 2 } else { 1000 } {
        let [a, b]: [Halfwords; 2] = std::array::from_fn(|_| std::array::from_fn(|_| random.u16(..)));
        let all: [Halfwords; 8] = std::array::from_fn(|_| std::array::from_fn(|_| random.u16(..0x8000)));
        let magnitudes = all.map(|halfwords| simd.load_halfwords(&halfwords));
        let rows: [Row; 2] = std::array::from_fn(|_| {
            let mut row: [u16; 8] = std::array::from_fn(|_| random.u16(..0x8000));
            row.sort();
            Row(row)
        });

        let at_zero = std::array::from_fn(|i| if i % 3 == 0 { 0 } else { all[0][i] });
        let nibbles = all.map(|halfwords| halfwords.map(|halfword| halfword >> 3 & 15));
        let codes = |halfwords: &Halfwords| -> Halfwords {
            std::array::from_fn(|i| {
                rows[i / 16].0[..7].iter().map(|&last| u16::from(halfwords[i] > last)).sum()
            })
        };
        // Two magnitudes that equal a threshold.
        let mut tied = all[1];
        (tied[3], tied[20]) = (rows[0].0[3], rows[1].0[6]);

        // `pack` makes vectors comparable.
        let low = |halfwords: V::Halfwords| simd.pack(&[halfwords; 4])[..16].to_vec();
        let packed = |halfwords: &Halfwords| -> Vec<u8> {
            halfwords.as_chunks::<2>().0.iter().map(|[a, b]| (a & 15 | (b & 15) << 4) as u8).collect()
        };
        assert_eq!(
            simd.pack(
                &nibbles.each_ref().map(|halfwords| simd.load_halfwords(halfwords))[..4].try_into().unwrap()
            )[..],
            nibbles[..4].iter().flat_map(packed).collect::<Vec<_>>()
        );
        let signs = simd.load_halfwords(&b);
        for halfwords in [all[0], tied] {
            let expected = codes(&halfwords);
            let found =
                simd.codes(simd.load_halfwords(&halfwords), simd.two_rows(&rows[0], &rows[1]), simd.steps());
            assert_eq!(low(simd.and_halfwords(found, simd.splat_halfword(7))), packed(&expected));
            let expected = std::array::from_fn(|i| expected[i] | b[i] >> 12 & 8);
            assert_eq!(low(simd.signed(found, signs)), packed(&expected));
        }
        let sign_of = |halfwords: V::Halfwords| {
            low(simd
                .signed(simd.codes(magnitudes[0], simd.one_row(&Row([0x7FFF; 8])), simd.steps()), halfwords))
        };
        let sign = |f: &dyn Fn(usize) -> bool| packed(&std::array::from_fn(|i| u16::from(f(i)) << 3));
        assert_eq!(sign_of(simd.load_halfwords(&a)), sign(&|i| a[i] >= 0x8000));
        assert_eq!(sign_of(simd.above_zero(simd.load_halfwords(&at_zero))), sign(&|i| at_zero[i] != 0));
        assert_eq!(
            sign_of(simd.and_halfwords(simd.load_halfwords(&a), signs)),
            sign(&|i| a[i] & b[i] >= 0x8000)
        );
        assert_eq!(
            sign_of(simd.or_not_halfwords(simd.load_halfwords(&a), signs)),
            sign(&|i| a[i] | !b[i] >= 0x8000)
        );

        assert_eq!(
            simd.max_halfword(simd.magnitudes(simd.load_halfwords(&a))),
            a.map(|a| a & 0x7FFF).into_iter().max().unwrap()
        );
        let larger = simd.max_halfwords(magnitudes[0], magnitudes[1]);
        assert_eq!(simd.max_halfword(larger), all[..2].as_flattened().iter().copied().max().unwrap());
        let halves = all.as_flattened().as_chunks::<16>().0;
        let stored = |bits: V::Bits| simd.store(simd.number(bits)).map(f32::to_bits);
        let largest = |half: &[u16; 16]| u32::from(*half.iter().max().unwrap());
        assert!(stored(simd.max_halfwords_of_halves(&magnitudes)).into_iter().eq(halves.iter().map(largest)));
        let folded = [simd.fold_halfwords(magnitudes[0], magnitudes[1]); 8];
        let expected = all.map(|halfwords| u32::from(*halfwords.iter().max().unwrap()));
        let found = stored(simd.max_halfwords_of_halves(&folded));
        assert_eq!(found[..2], expected[..2]);
    }
}

#[test]
fn portable_halfwords() {
    check(Portable);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_halfwords() {
    check(crate::cpu::simd::Neon);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_halfwords() {
    if let Some(simd) = Avx2::detect() {
        check(simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_halfwords() {
    if let Some(simd) = Avx512::detect() {
        check(simd);
    }
}
