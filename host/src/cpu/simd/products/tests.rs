//! Every method of every instruction set's vectors against the same for each element.

#[cfg(target_arch = "x86_64")]
use microscale_formats::arithmetic::Machine;
use microscale_formats::{E2m1x2, dot};

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Isa;
use crate::cpu::simd::Portable;
use crate::cpu::simd::products::packed_index;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};

fn bits<V: Vector>(bits: V::Bits) -> Lanes<u32> {
    V::store(V::number(bits)).map(f32::to_bits)
}

/// Calls every method and compares it with what it is for each element.
fn check<V: Products>() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..if cfg!(miri) { 2 } else { 500 } {
        let codes: [u8; TILE] = std::array::from_fn(|_| random.u8(..));
        let (codes, others) = (&codes, codes.first_chunk::<STEP>().unwrap());
        let first = codes.last_chunk::<STEP>().unwrap();

        let by = DoubledCodes::of(others);
        let products = |group: usize| dot::quarters(&first[8 * group..][..8], &others[8 * group..][..8]);
        let expected: Lanes<i32> = std::array::from_fn(|lane| products(lane % 8 * 2 + lane / 8));
        let quarters = V::quarters(first, &by);
        assert_eq!(bits::<V>(quarters).map(|bits| bits as i32), expected);
        assert_eq!(V::store(V::numbers(quarters)), expected.map(|integer| integer as f32));

        let terms: Lanes<f32> = std::array::from_fn(|_| random.f32() - 0.5);
        let sums = V::add_halves(V::no_sums(), V::load(&terms));
        let sum = |i: usize| f64::from(terms[i]) + f64::from(terms[i + 8]);
        assert_eq!(V::store_sums(sums), std::array::from_fn(sum));
        let bytes: [u8; 8] = std::array::from_fn(|_| random.u8(..255));
        // Not `powi`, which Miri makes inexact on purpose.
        let power = |exponent: i32| f64::from_bits(((1023 + exponent) as u64) << 52);
        let powers: [f64; 8] = std::array::from_fn(|_| power(random.i32(-129..126)));
        let scaled = |i: usize| {
            let term = f64::from(expected[i] + expected[i + 8]) * power(i32::from(bytes[i]) - 127);
            sum(i) + term * powers[i]
        };
        let found = V::store_sums(V::add_scaled(sums, quarters, &bytes, &powers));
        assert_eq!(found, std::array::from_fn(scaled));

        let some = codes.first_chunk().unwrap();
        let order: [u8; LANES] = std::array::from_fn(|_| if random.bool() { random.u8(..16) } else { 0x80 });
        let picked = order.map(|i| if i < 16 { u32::from(some[usize::from(i)]) } else { 0 });
        assert_eq!(bits::<V>(V::bytes(some, &order)), picked);

        let tables: [[u16; 16]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| random.u16(..)));
        let of_chunk = codes.first_chunk().unwrap();
        let mut lookup = [0; LANES];
        for i in 0..CHUNK {
            let (place, code) = (packed_index(i), codes[i / 2] >> (i % 2 * 4) & 15);
            lookup[place / 2] |= u32::from(tables[i / 16][usize::from(code)]) << (place % 2 * 16);
        }
        assert_eq!(bits::<V>(V::lookup(of_chunk, [&tables[0], &tables[1]])), lookup);

        for (i, column) in V::columns(codes).into_iter().enumerate() {
            for (j, found) in V::fractions(column).into_iter().enumerate() {
                let expected: Lanes<f32> = std::array::from_fn(|lane| {
                    let pair = E2m1x2::from_bits(codes[16 * chunk_of_lane(lane) + 4 * i + j / 2]);
                    if j % 2 == 0 { pair.low() } else { pair.high() }.to_f32() / 128.0
                });
                assert_eq!(V::store(found).map(f32::to_bits), expected.map(f32::to_bits));
            }
        }
    }
}

#[test]
fn portable_products() {
    check::<Portable>();
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_products() {
    check::<crate::cpu::simd::Neon>();
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_products() {
    if Isa::available().any(|isa| isa == Isa::Avx2) {
        check::<Avx2>();
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_products() {
    if Isa::available().any(|isa| isa == Isa::Avx512) {
        check::<Avx512>();
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_bf16_products() {
    if !Isa::available().any(|isa| isa == Isa::Avx512Bf16) {
        return;
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..500 {
        let codes: [u8; STEP] = std::array::from_fn(|_| random.u8(..));
        let weight = |group: usize, i: usize| {
            let pair = E2m1x2::from_bits(codes[8 * group + i / 2]);
            [pair.low(), pair.high()][i % 2].to_f32()
        };
        for (half, halves) in Avx512::halves_of_groups(&codes).into_iter().enumerate() {
            for i in 0..4 {
                let pairs = Avx512::pairs(Avx512::shift_right(halves, 4 * i as u32));
                let x: Lanes<[u16; 2]> =
                    std::array::from_fn(|_| [random.u16(0x3F80..0x4000), random.u16(0xBF80..0xC000)]);
                let words = x.map(|[low, high]| f32::from_bits(u32::from(low) | u32::from(high) << 16));
                let found = Avx512::store(Avx512::add_pairs(Avx512::splat(0.5), pairs, Avx512::load(&words)));
                let first = 8 * half + i;
                // Few bits, so that nothing is rounded.
                let expected: Lanes<f32> = std::array::from_fn(|lane| {
                    let [low, high] = x[lane].map(|bits| f32::from_bits(u32::from(bits) << 16));
                    0.5 + weight(lane, first) * low + weight(lane, first + 4) * high
                });
                assert_eq!(found, expected);
            }
        }
    }
}
