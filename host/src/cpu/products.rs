//! What multiplying codes needs of vectors: as [`super::vector`], one trait and a thin file for each instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use microscale_formats::e2m1;

use super::vector::{LANES, Lanes, Vector};

/// Bytes of codes whose products are summed at once: of eight chunks, or sixteen groups of 16 elements.
pub(super) const STEP: usize = 128;

/// Bytes of codes that are decoded at once: of a chunk for each lane.
pub(super) const TILE: usize = 256;

/// What is added to twice a code of the matrix, so that it is not negative, as x86 asks of one of two factors.
pub(super) const OFFSET: i32 = 12;

/// The codes of [`STEP`] bytes of a vector, to be multiplied with.
#[repr(C, align(64))]
pub(super) struct Twice {
    /// Twice the elements with an even index.
    pub(super) even: [i8; STEP],
    /// Twice the others.
    pub(super) odd: [i8; STEP],
    /// What the offset adds to the groups' sums: of those with an even index, then of the others.
    pub(super) surplus: Lanes<i32>,
}

impl Twice {
    pub(super) fn of(codes: &[u8; STEP]) -> Self {
        let [even, odd] =
            [0, 4].map(|shift| codes.map(|byte| RAISED[usize::from(byte >> shift & 15)] - OFFSET as i8));
        let mut surplus = [0; LANES];
        for (i, twice) in
            even.iter().zip(&odd).map(|(even, odd)| i32::from(*even) + i32::from(*odd)).enumerate()
        {
            let group = i / 8;
            surplus[group % 2 * 8 + group / 2] += OFFSET * twice;
        }
        Self { even, odd, surplus }
    }
}

/// The chunk whose elements a lane has where lanes are chunks: rows of four and columns are exchanged, which costs vectors least.
pub(super) const fn chunk_of_lane(lane: usize) -> usize {
    lane % 4 * 4 + lane / 4
}

/// Twice each code and [`OFFSET`].
const RAISED: [i8; 16] = {
    let twice = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut raised = [0; 16];
    let mut code = 0;
    while code < 16 {
        raised[code] = (OFFSET + if code < 8 { twice[code] } else { -twice[code - 8] }) as i8;
        code += 1;
    }
    raised
};

/// A 128th of each code.
pub(super) const FRACTIONS: Lanes<f32> = {
    let mut fractions = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        let magnitude = e2m1::VALUES[code % 8] / 128.0;
        fractions[code] = if code < 8 { magnitude } else { -magnitude };
        code += 1;
    }
    fractions
};

/// The upper bytes of [`FRACTIONS`], whose lower two are 0, from bit `shift` on.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn bytes_of_fractions(shift: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = (FRACTIONS[code].to_bits() >> shift) as u8;
        code += 1;
    }
    bytes
}

/// Vectors that multiply codes.
pub(super) trait Products: Vector {
    /// Eight f64.
    type Sums: Copy;

    /// Four bytes of codes in each lane.
    type Column: Copy;

    /// Rows of weights that are multiplied at once: several, where there are registers for the sums of all.
    const ROWS: usize = 1;

    /// Zeros.
    fn no_sums() -> Self::Sums;

    /// To memory.
    fn store_sums(sums: Self::Sums) -> [f64; 8];

    /// Some bytes, each in a lane: by their index, and 0 where that is above 127.
    fn bytes(bytes: &[u8; LANES], order: &[u8; LANES]) -> Self::Bits;

    /// The numbers of signed integers.
    fn numbers(integers: Self::Bits) -> Self::Number;

    /// Four times the sums of the products of each two groups: of those with an even index, then of the others.
    fn quarters(codes: &[u8; STEP], by: &Twice) -> Self::Bits;

    /// Adds the first eight numbers, then the others.
    fn add_halves(sums: Self::Sums, terms: Self::Number) -> Self::Sums;

    /// Adds the first eight integers and the others, together, times 2^(byte − 127) and a power of two: without rounding before the sum.
    fn add_scaled(sums: Self::Sums, integers: Self::Bits, bytes: &[u8; 8], powers: &[f64; 8]) -> Self::Sums;

    /// The codes of sixteen [chunks](chunk_of_lane), eight elements of each at a time.
    fn columns(codes: &[u8; TILE]) -> [Self::Column; 4];

    /// A 128th of each of their weights, the elements in order.
    fn fractions(column: Self::Column) -> [Self::Number; 8];
}

#[cfg(test)]
mod tests {
    use microscale_formats::{E2m1x2, dot};

    use super::*;
    use crate::cpu::vector::Portable;
    #[cfg(target_arch = "x86_64")]
    use crate::cpu::{
        Isa,
        vector::{Avx2, Avx512},
    };

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

            let by = Twice::of(others);
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
            let order: [u8; LANES] =
                std::array::from_fn(|_| if random.bool() { random.u8(..16) } else { 0x80 });
            let picked = order.map(|i| if i < 16 { u32::from(some[usize::from(i)]) } else { 0 });
            assert_eq!(bits::<V>(V::bytes(some, &order)), picked);

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
        check::<crate::cpu::vector::Neon>();
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
}
