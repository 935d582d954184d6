//! Products of codes in arrays, element by element.

use super::{
    CHUNK, DoubledCodes, FRACTIONS, LANES, Lanes, Products, RAISED, STEP, TILE, Table, chunk_of_lane,
    packed_index,
};
use crate::cpu::simd::tokens::Portable;

impl Products for Portable {
    type Sums = [f64; 8];
    type Column = Lanes<[u8; 4]>;

    #[inline(always)]
    fn no_sums(self) -> [f64; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    fn store_sums(self, sums: [f64; 8]) -> [f64; 8] {
        sums
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> Lanes<u32> {
        let mut lanes = [0; LANES];
        for (lane, i) in lanes.iter_mut().zip(order) {
            *lane = if *i < 128 { bytes[usize::from(*i % 16)].into() } else { 0 };
        }
        lanes
    }

    #[inline(always)]
    fn numbers(self, integers: Lanes<u32>) -> Lanes<f32> {
        let mut numbers = [0.0; LANES];
        for (number, integer) in numbers.iter_mut().zip(integers) {
            *number = integer as i32 as f32;
        }
        numbers
    }

    #[inline(always)]
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> Lanes<u32> {
        let mut sums = [0; LANES];
        for (group, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            let (even, odd) = (&by.even[8 * group..][..8], &by.odd[8 * group..][..8]);
            let lane = group % 2 * 8 + group / 2;
            let mut sum = -by.surplus[lane];
            for i in 0..8 {
                let raised = [codes[i] & 15, codes[i] >> 4].map(|code| i32::from(RAISED[usize::from(code)]));
                sum += raised[0] * i32::from(even[i]) + raised[1] * i32::from(odd[i]);
            }
            sums[lane] = sum as u32;
        }
        sums
    }

    #[inline(always)]
    fn add_halves(self, mut sums: [f64; 8], terms: Lanes<f32>) -> [f64; 8] {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = *sum + f64::from(terms[i]) + f64::from(terms[i + 8]);
        }
        sums
    }

    #[inline(always)]
    fn add_scaled(
        self,
        mut sums: [f64; 8],
        integers: Lanes<u32>,
        bytes: &[u8; 8],
        powers: &[f64; 8],
    ) -> [f64; 8] {
        for (i, sum) in sums.iter_mut().enumerate() {
            let integer = integers[i].wrapping_add(integers[i + 8]) as i32;
            let scale = f64::from_bits((u64::from(bytes[i]) + 1023 - 127) << 52);
            *sum += f64::from(integer) * (scale * powers[i]);
        }
        sums
    }

    #[inline(always)]
    fn columns(self, codes: &[u8; TILE]) -> [Lanes<[u8; 4]>; 4] {
        let words = codes.as_chunks::<4>().0;
        let mut columns = [[[0; 4]; LANES]; 4];
        for (i, column) in columns.iter_mut().enumerate() {
            for (lane, word) in column.iter_mut().enumerate() {
                *word = words[4 * chunk_of_lane(lane) + i];
            }
        }
        columns
    }

    #[inline(always)]
    fn fractions(self, column: Lanes<[u8; 4]>) -> [Lanes<f32>; 8] {
        let mut weights = [[0.0; LANES]; 8];
        for (i, weights) in weights.iter_mut().enumerate() {
            for (weight, word) in weights.iter_mut().zip(column) {
                *weight = FRACTIONS[usize::from(word[i / 2] >> (i % 2 * 4) & 15)];
            }
        }
        weights
    }

    #[inline(always)]
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> Lanes<u32> {
        let mut entries = [0; CHUNK];
        for (i, codes) in codes.iter().enumerate() {
            let table = tables[i / 8];
            entries[packed_index(2 * i)] = table[usize::from(codes & 15)];
            entries[packed_index(2 * i + 1)] = table[usize::from(codes >> 4)];
        }
        let mut pairs = [0; LANES];
        for (pair, entries) in pairs.iter_mut().zip(entries.as_chunks::<2>().0) {
            *pair = u32::from(entries[0]) | u32::from(entries[1]) << 16;
        }
        pairs
    }
}
