//! Every method of every instruction set's vectors against the same for each element.

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Isa;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::Neon;
use crate::cpu::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};

/// Numbers of all magnitudes and signs.
fn numbers(random: &mut fastrand::Rng) -> Lanes<f32> {
    std::array::from_fn(|_| {
        let exponent = random.i32(-20..20);
        (random.f32() - 0.5) * 2f32.powi(exponent)
    })
}

/// Calls every method and compares it with f32's own.
fn check<V: Vector>() {
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..if cfg!(miri) { 2 } else { 1000 } {
        let [a, mut b, c] = [(); 3].map(|()| numbers(&mut random));
        b[round % LANES] = a[round % LANES];
        let [va, vb, vc] = [a, b, c].map(|lanes| V::load(&lanes));
        let lanes = |f: fn(f32, f32, f32) -> f32| -> Lanes<f32> {
            std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]))
        };
        assert_eq!(V::store(V::splat(a[0])), [a[0]; LANES]);
        assert_eq!(V::store(V::add(va, vb)), lanes(|a, b, _| a + b));
        assert_eq!(V::store(V::sub(va, vb)), lanes(|a, b, _| a - b));
        assert_eq!(V::store(V::mul(va, vb)), lanes(|a, b, _| a * b));
        assert_eq!(V::store(V::div(va, vb)), lanes(|a, b, _| a / b));
        assert_eq!(V::store(V::fma(va, vb, vc)), lanes(|a, b, c| a.mul_add(b, c)));
        assert_eq!(V::store(V::fnma(va, vb, vc)), lanes(|a, b, c| (-a).mul_add(b, c)));
        assert_eq!(V::store(V::min(va, vb)), lanes(|a, b, _| a.min(b)));
        assert_eq!(V::store(V::max(va, vb)), lanes(|a, b, _| a.max(b)));
        let bits = [a, b].map(|lanes| lanes.map(f32::to_bits));
        let [ba, bb] = [va, vb].map(V::bits);
        let stored = |vector: V::Bits| V::store(V::number(vector)).map(f32::to_bits);
        let each = |f: fn(u32, u32) -> u32| -> Lanes<u32> {
            std::array::from_fn(|lane| f(bits[0][lane], bits[1][lane]))
        };
        assert_eq!(stored(V::splat_bits(bits[0][0])), [bits[0][0]; LANES]);
        assert_eq!(stored(V::and(ba, bb)), each(|a, b| a & b));
        assert_eq!(stored(V::or(ba, bb)), each(|a, b| a | b));
        assert_eq!(stored(V::and_not(ba, bb)), each(|a, b| !a & b));
        let selected = std::array::from_fn(|lane| {
            let [mask, unset] = [0, 1].map(|i| bits[i][lane]);
            mask & c[lane].to_bits() | !mask & unset
        });
        assert_eq!(stored(V::select_bits(ba, V::bits(vc), bb)), selected);
        let limit = b[0].abs();
        assert_eq!(V::store(V::min_magnitude(va, V::splat(limit))), a.map(|a| a.abs().min(limit)));
        assert_eq!(stored(V::max_bits(ba, bb)), each(u32::max));
        assert_eq!(stored(V::add_bits(ba, bb)), each(u32::wrapping_add));
        let halves = bits.map(|bits| bits.map(|bits| bits >> 1));
        let above = (0..LANES).fold(0, |mask, i| mask | u16::from(halves[0][i] > halves[1][i]) << i);
        assert_eq!(V::above(V::shift_right(ba, 1), V::shift_right(bb, 1)), above);
        let magnitudes = V::load(&a.map(f32::abs));
        let bits_of = |half: u16| u32::from(half);
        let narrowed = a.map(|a| bits_of(half::f16::from_f32(a.abs()).to_bits()));
        assert_eq!(stored(V::narrow::<half::f16>(magnitudes)), narrowed);
        assert_eq!(
            V::store(V::widen::<half::f16>(V::narrow::<half::f16>(magnitudes))),
            a.map(|a| half::f16::from_f32(a.abs()).to_f32())
        );
        let narrowed = a.map(|a| bits_of(half::bf16::from_f32(a.abs()).to_bits()));
        assert_eq!(stored(V::narrow::<half::bf16>(magnitudes)), narrowed);
        assert_eq!(
            V::store(V::widen::<half::bf16>(V::narrow::<half::bf16>(magnitudes))),
            a.map(|a| half::bf16::from_f32(a.abs()).to_f32())
        );
        assert_eq!(stored(V::shift_left(ba, 4)), each(|a, _| a << 4));
        assert_eq!(stored(V::shift_right(ba, 20)), each(|a, _| a >> 20));
        assert_eq!(V::low_bytes(ba), bits[0].map(|bits| bits as u8));
        let folded = |lanes: Lanes<u32>| (0..8).map(move |lane| lanes[lane].max(lanes[lane + 8]));
        let expected: Vec<_> = bits.into_iter().flat_map(folded).collect();
        assert_eq!(stored(V::fold_max(ba, bb))[..], expected);

        let (even, odd) = V::deinterleave(va, vb);
        let both = [a, b].concat();
        assert!(V::store(even).iter().eq(both.iter().step_by(2)));
        assert!(V::store(odd).iter().eq(both.iter().skip(1).step_by(2)));
        let halves = V::store(V::halves(a[0], b[0]));
        assert_eq!((halves[..8].to_vec(), halves[8..].to_vec()), (vec![a[0]; 8], vec![b[0]; 8]));
        let vectors: [Lanes<u32>; 8] = std::array::from_fn(|_| std::array::from_fn(|_| random.u32(..)));
        let largest = V::max_of_halves(&vectors.map(|lanes| V::bits(V::load(&lanes.map(f32::from_bits)))));
        let expected = vectors.as_flattened().chunks(8).map(|half| *half.iter().max().unwrap());
        assert!(stored(largest).into_iter().eq(expected));

        let at_most = (0..LANES).fold(0, |mask, lane| mask | u16::from(a[lane] <= b[lane]) << lane);
        assert_eq!(V::at_most(va, vb), at_most);
        let mask = random.u16(..);
        let selected = std::array::from_fn(|lane| if mask >> lane & 1 != 0 { a[lane] } else { b[lane] });
        assert_eq!(V::store(V::select(mask, va, vb)), selected);
    }
}

#[test]
fn portable_vectors_are_sixteen_f32() {
    check::<Portable>();
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_vectors_are_sixteen_f32() {
    check::<Neon>();
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_vectors_are_sixteen_f32() {
    if Isa::available().any(|isa| isa == Isa::Avx2) {
        check::<Avx2>();
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_vectors_are_sixteen_f32() {
    if Isa::available().any(|isa| isa == Isa::Avx512) {
        check::<Avx512>();
    }
}
