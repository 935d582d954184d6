//! Every product method of every instruction set against the same operation on each element.

use microscale_formats::{E2m1x2, dot};

use super::*;
use crate::cpu::simd::Portable;
use crate::cpu::simd::products::packed_index;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512, Avx512Bf16};

fn bits<V: Vector>(simd: V, bits: V::Bits) -> Lanes<u32> {
    simd.store(simd.number(bits)).map(f32::to_bits)
}

/// Compares every method with the operation on single elements.
fn check<V: Products>(simd: V) {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..if cfg!(miri) { 2 } else { 500 } {
        let codes: [u8; TILE] = std::array::from_fn(|_| random.u8(..));
        let (codes, others) = (&codes, codes.first_chunk::<STEP>().unwrap());
        let first = codes.last_chunk::<STEP>().unwrap();

        let by = DoubledCodes::of(others);
        let products = |group: usize| dot::quarters(&first[8 * group..][..8], &others[8 * group..][..8]);
        let expected: Lanes<i32> = std::array::from_fn(|lane| products(lane % 8 * 2 + lane / 8));
        let quarters = simd.quarters(first, &by);
        assert_eq!(bits(simd, quarters).map(|bits| bits as i32), expected);
        assert_eq!(simd.store(simd.numbers(quarters)), expected.map(|integer| integer as f32));

        let terms: Lanes<f32> = std::array::from_fn(|_| random.f32() - 0.5);
        let sums = simd.add_halves(simd.no_sums(), simd.load(&terms));
        let sum = |i: usize| f64::from(terms[i]) + f64::from(terms[i + 8]);
        assert_eq!(simd.store_sums(sums), std::array::from_fn(sum));
        let bytes: [u8; 8] = std::array::from_fn(|_| random.u8(..255));
        // Miri makes `powi` inexact on purpose.
        let power = |exponent: i32| f64::from_bits(((1023 + exponent) as u64) << 52);
        let powers: [f64; 8] = std::array::from_fn(|_| power(random.i32(-129..126)));
        let scaled = |i: usize| {
            let term = f64::from(expected[i] + expected[i + 8]) * power(i32::from(bytes[i]) - 127);
            sum(i) + term * powers[i]
        };
        let found = simd.store_sums(simd.add_scaled(sums, quarters, &bytes, &powers));
        assert_eq!(found, std::array::from_fn(scaled));

        let some = codes.first_chunk().unwrap();
        let order: [u8; LANES] = std::array::from_fn(|_| if random.bool() { random.u8(..16) } else { 0x80 });
        let picked = order.map(|i| if i < 16 { u32::from(some[usize::from(i)]) } else { 0 });
        assert_eq!(bits(simd, simd.bytes(some, &order)), picked);

        let tables: [[u16; 16]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| random.u16(..)));
        let of_chunk = codes.first_chunk().unwrap();
        let mut lookup = [0; LANES];
        for i in 0..CHUNK {
            let (place, code) = (packed_index(i), codes[i / 2] >> (i % 2 * 4) & 15);
            lookup[place / 2] |= u32::from(tables[i / 16][usize::from(code)]) << (place % 2 * 16);
        }
        assert_eq!(bits(simd, simd.lookup(of_chunk, [&tables[0], &tables[1]])), lookup);

        for (i, column) in simd.columns(codes).into_iter().enumerate() {
            for (j, found) in simd.fractions(column).into_iter().enumerate() {
                let expected: Lanes<f32> = std::array::from_fn(|lane| {
                    let pair = E2m1x2::from_bits(codes[16 * chunk_of_lane(lane) + 4 * i + j / 2]);
                    if j % 2 == 0 { pair.low() } else { pair.high() }.to_f32() / 128.0
                });
                assert_eq!(simd.store(found).map(f32::to_bits), expected.map(f32::to_bits));
            }
        }
    }
}

#[test]
fn portable_products() {
    check(Portable);
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_products() {
    check(crate::cpu::simd::Neon);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_products() {
    if let Some(simd) = Avx2::detect() {
        check(simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_products() {
    if let Some(simd) = Avx512::detect() {
        check(simd);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_bf16_products() {
    let Some(pairs) = Avx512Bf16::detect() else { return };
    let simd = pairs.avx512();
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..500 {
        let codes: [u8; STEP] = std::array::from_fn(|_| random.u8(..));
        let weight = |group: usize, i: usize| {
            let pair = E2m1x2::from_bits(codes[8 * group + i / 2]);
            [pair.low(), pair.high()][i % 2].to_f32()
        };
        for (half, halves) in pairs.halves_of_groups(&codes).into_iter().enumerate() {
            for i in 0..4 {
                let weights = pairs.weights(simd.shift_right(halves, 4 * i as u32));
                let x: Lanes<[u16; 2]> =
                    std::array::from_fn(|_| [random.u16(0x3F80..0x4000), random.u16(0xBF80..0xC000)]);
                let words = x.map(|[low, high]| f32::from_bits(u32::from(low) | u32::from(high) << 16));
                let found = simd.store(pairs.add_pairs(simd.splat(0.5), weights, simd.load(&words)));
                let first = 8 * half + i;
                // So few bits that nothing is rounded.
                let expected: Lanes<f32> = std::array::from_fn(|lane| {
                    let [low, high] = x[lane].map(|bits| f32::from_bits(u32::from(bits) << 16));
                    0.5 + weight(lane, first) * low + weight(lane, first + 4) * high
                });
                assert_eq!(found, expected);
            }
        }
    }
}
