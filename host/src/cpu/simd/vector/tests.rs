//! Every vector method of every instruction set against the same operation on each element.

use super::*;
use crate::cpu::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};

/// Random numbers of many magnitudes and both signs.
fn numbers(random: &mut fastrand::Rng) -> Lanes<f32> {
    std::array::from_fn(|_| {
        let exponent = random.i32(-20..20);
        (random.f32() - 0.5) * 2f32.powi(exponent)
    })
}

/// Compares every method with the operation of f32 or u32.
fn check<V: Vector>(simd: V) {
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..if cfg!(miri) { 2 } else { 1000 } {
        let [a, mut b, c] = [(); 3].map(|()| numbers(&mut random));
        b[round % LANES] = a[round % LANES];
        let [va, vb, vc] = [a, b, c].map(|lanes| simd.load(&lanes));
        let lanes = |f: fn(f32, f32, f32) -> f32| -> Lanes<f32> {
            std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]))
        };
        assert_eq!(simd.store(simd.splat(a[0])), [a[0]; LANES]);
        assert_eq!(simd.store(simd.add(va, vb)), lanes(|a, b, _| a + b));
        assert_eq!(simd.store(simd.sub(va, vb)), lanes(|a, b, _| a - b));
        assert_eq!(simd.store(simd.mul(va, vb)), lanes(|a, b, _| a * b));
        assert_eq!(simd.store(simd.div(va, vb)), lanes(|a, b, _| a / b));
        assert_eq!(simd.store(simd.fma(va, vb, vc)), lanes(|a, b, c| a.mul_add(b, c)));
        assert_eq!(simd.store(simd.fnma(va, vb, vc)), lanes(|a, b, c| (-a).mul_add(b, c)));
        assert_eq!(simd.store(simd.min(va, vb)), lanes(|a, b, _| a.min(b)));
        assert_eq!(simd.store(simd.max(va, vb)), lanes(|a, b, _| a.max(b)));
        let bits = [a, b].map(|lanes| lanes.map(f32::to_bits));
        let [ba, bb] = [va, vb].map(|numbers| simd.bits(numbers));
        let stored = |vector: V::Bits| simd.store(simd.number(vector)).map(f32::to_bits);
        let each = |f: fn(u32, u32) -> u32| -> Lanes<u32> {
            std::array::from_fn(|lane| f(bits[0][lane], bits[1][lane]))
        };
        assert_eq!(stored(simd.splat_bits(bits[0][0])), [bits[0][0]; LANES]);
        assert_eq!(stored(simd.and(ba, bb)), each(|a, b| a & b));
        assert_eq!(stored(simd.or(ba, bb)), each(|a, b| a | b));
        assert_eq!(stored(simd.and_not(ba, bb)), each(|a, b| !a & b));
        let selected = std::array::from_fn(|lane| {
            let [mask, unset] = [0, 1].map(|i| bits[i][lane]);
            mask & c[lane].to_bits() | !mask & unset
        });
        assert_eq!(stored(simd.select_bits(ba, simd.bits(vc), bb)), selected);
        let limit = b[0].abs();
        assert_eq!(simd.store(simd.min_magnitude(va, simd.splat(limit))), a.map(|a| a.abs().min(limit)));
        assert_eq!(stored(simd.max_bits(ba, bb)), each(u32::max));
        assert_eq!(stored(simd.add_bits(ba, bb)), each(u32::wrapping_add));
        assert_eq!(stored(simd.truncate(va)), a.map(|a| a as i32 as u32));
        let halves = bits.map(|bits| bits.map(|bits| bits >> 1));
        let above = (0..LANES).fold(0, |mask, i| mask | u16::from(halves[0][i] > halves[1][i]) << i);
        assert_eq!(simd.above(simd.shift_right(ba, 1), simd.shift_right(bb, 1)), above);
        let magnitudes = simd.load(&a.map(f32::abs));
        let bits_of = |half: u16| u32::from(half);
        let narrowed = a.map(|a| bits_of(half::f16::from_f32(a.abs()).to_bits()));
        assert_eq!(stored(simd.narrow::<half::f16>(magnitudes)), narrowed);
        assert_eq!(
            simd.store(simd.widen::<half::f16>(simd.narrow::<half::f16>(magnitudes))),
            a.map(|a| half::f16::from_f32(a.abs()).to_f32())
        );
        let narrowed = a.map(|a| bits_of(half::bf16::from_f32(a.abs()).to_bits()));
        assert_eq!(stored(simd.narrow::<half::bf16>(magnitudes)), narrowed);
        assert_eq!(
            simd.store(simd.widen::<half::bf16>(simd.narrow::<half::bf16>(magnitudes))),
            a.map(|a| half::bf16::from_f32(a.abs()).to_f32())
        );
        assert_eq!(stored(simd.shift_left(ba, 4)), each(|a, _| a << 4));
        assert_eq!(stored(simd.shift_right(ba, 20)), each(|a, _| a >> 20));
        assert_eq!(simd.low_bytes(ba), bits[0].map(|bits| bits as u8));
        let folded = |lanes: Lanes<u32>| (0..8).map(move |lane| lanes[lane].max(lanes[lane + 8]));
        let expected: Vec<_> = bits.into_iter().flat_map(folded).collect();
        assert_eq!(stored(simd.fold_max(ba, bb))[..], expected);

        let (even, odd) = simd.deinterleave(va, vb);
        let both = [a, b].concat();
        assert!(simd.store(even).iter().eq(both.iter().step_by(2)));
        assert!(simd.store(odd).iter().eq(both.iter().skip(1).step_by(2)));
        let halves = simd.store(simd.halves(a[0], b[0]));
        assert_eq!((halves[..8].to_vec(), halves[8..].to_vec()), (vec![a[0]; 8], vec![b[0]; 8]));
        let vectors: [Lanes<u32>; 8] = std::array::from_fn(|_| std::array::from_fn(|_| random.u32(..)));
        let largest =
            simd.max_of_halves(&vectors.map(|lanes| simd.bits(simd.load(&lanes.map(f32::from_bits)))));
        let expected = vectors.as_flattened().chunks(8).map(|half| *half.iter().max().unwrap());
        assert!(stored(largest).into_iter().eq(expected));

        let at_most = (0..LANES).fold(0, |mask, lane| mask | u16::from(a[lane] <= b[lane]) << lane);
        assert_eq!(simd.at_most(va, vb), at_most);
        let mask = random.u16(..);
        let selected = std::array::from_fn(|lane| if mask >> lane & 1 != 0 { a[lane] } else { b[lane] });
        assert_eq!(simd.store(simd.select(mask, va, vb)), selected);
    }
}

#[test]
fn portable_vectors_are_sixteen_f32() {
    check(Portable);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_vectors_are_sixteen_f32() {
    check(crate::cpu::simd::Neon);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_vectors_are_sixteen_f32() {
    if let Some(simd) = Avx2::detect() {
        check(simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_vectors_are_sixteen_f32() {
    if let Some(simd) = Avx512::detect() {
        check(simd);
    }
}
