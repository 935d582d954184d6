//! 16-bit values in arrays. They are signed integers, which every CPU can compare.

use super::{HALFWORDS, HalfwordVector, Halfwords, Row, ValueRow};
use crate::cpu::simd::tokens::{Lanes, Portable};

/// An array with one value per lane, filled by a loop, because the compiler vectorizes loops.
macro_rules! halfwords {
    ($halfword:ident => $value:expr) => {{
        let mut halfwords = [0; HALFWORDS];
        for $halfword in 0..HALFWORDS {
            halfwords[$halfword] = $value;
        }
        halfwords
    }};
}

impl HalfwordVector for Portable {
    type Halfwords = [i16; HALFWORDS];
    type Bits = Lanes<u32>;
    type Rows = [Row; 2];
    type Steps = ();

    #[inline(always)]
    fn steps(self) {}

    #[inline(always)]
    fn load_halfwords(self, halfwords: &Halfwords) -> [i16; HALFWORDS] {
        halfwords!(halfword => halfwords[halfword] as i16)
    }

    #[inline(always)]
    fn store_halfwords(self, halfwords: [i16; HALFWORDS]) -> Halfwords {
        halfwords!(halfword => halfwords[halfword] as u16)
    }

    #[inline(always)]
    fn splat_halfword(self, halfword: u16) -> [i16; HALFWORDS] {
        [halfword as i16; HALFWORDS]
    }

    #[inline(always)]
    fn max_halfwords(self, a: [i16; HALFWORDS], b: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        halfwords!(halfword => a[halfword].max(b[halfword]))
    }

    #[inline(always)]
    fn max_halfword(self, magnitudes: [i16; HALFWORDS]) -> u16 {
        let mut largest = 0;
        for magnitude in magnitudes {
            largest = magnitude.max(largest);
        }
        largest as u16
    }

    #[inline(always)]
    fn fold_halfwords(self, a: [i16; HALFWORDS], b: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        let mut halfwords = [0; HALFWORDS];
        for halfword in 0..HALFWORDS / 2 {
            halfwords[halfword] = a[halfword].max(a[halfword + HALFWORDS / 2]);
            halfwords[halfword + HALFWORDS / 2] = b[halfword].max(b[halfword + HALFWORDS / 2]);
        }
        halfwords
    }

    #[inline(always)]
    fn max_halfwords_of_halves(self, magnitudes: &[[i16; HALFWORDS]; 8]) -> Lanes<u32> {
        let mut all = [0; 16];
        let halves = magnitudes.as_flattened().as_chunks::<{ HALFWORDS / 2 }>().0;
        for (all, half) in all.iter_mut().zip(halves) {
            let mut largest = 0;
            for magnitude in half {
                largest = (*magnitude).max(largest);
            }
            *all = largest as u32;
        }
        all
    }

    #[inline(always)]
    fn one_row(self, row: &Row) -> [Row; 2] {
        [*row; 2]
    }

    #[inline(always)]
    fn two_rows(self, first: &Row, second: &Row) -> [Row; 2] {
        [*first, *second]
    }

    #[inline(always)]
    fn codes(self, magnitudes: [i16; HALFWORDS], rows: [Row; 2], (): ()) -> [i16; HALFWORDS] {
        let mut codes = [0; HALFWORDS];
        let halves = magnitudes.as_chunks::<{ HALFWORDS / 2 }>().0;
        for ((codes, magnitudes), row) in
            codes.as_chunks_mut::<{ HALFWORDS / 2 }>().0.iter_mut().zip(halves).zip(rows)
        {
            for last in &row.0[..7] {
                for (code, magnitude) in codes.iter_mut().zip(magnitudes) {
                    *code += i16::from(*magnitude > *last as i16);
                }
            }
        }
        codes
    }

    #[inline(always)]
    fn above_zero(self, magnitudes: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        halfwords!(halfword => magnitudes[halfword].wrapping_add(0x7FFF))
    }

    #[inline(always)]
    fn and_halfwords(self, a: [i16; HALFWORDS], b: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        halfwords!(halfword => a[halfword] & b[halfword])
    }

    #[inline(always)]
    fn or_not_halfwords(self, a: [i16; HALFWORDS], b: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        halfwords!(halfword => a[halfword] | !b[halfword])
    }

    #[inline(always)]
    fn signed(self, codes: [i16; HALFWORDS], signs: [i16; HALFWORDS]) -> [i16; HALFWORDS] {
        halfwords!(halfword => codes[halfword] & 7 | signs[halfword] >> 12 & 8)
    }

    #[inline(always)]
    fn pack(self, nibbles: &[[i16; HALFWORDS]; 4]) -> [u8; 2 * HALFWORDS] {
        let mut bytes = [0; 2 * HALFWORDS];
        for (byte, [first, second]) in bytes.iter_mut().zip(nibbles.as_flattened().as_chunks::<2>().0) {
            *byte = (*first | *second << 4) as u8;
        }
        bytes
    }

    #[inline(always)]
    fn decode(self, codes: &[u8; HALFWORDS], rows: [&ValueRow; 4]) -> [[i16; HALFWORDS]; 2] {
        let mut values = [[0; HALFWORDS]; 2];
        let blocks = values.as_flattened_mut().as_chunks_mut::<16>().0.iter_mut();
        for ((values, codes), row) in blocks.zip(codes.as_chunks::<8>().0).zip(rows) {
            for (values, byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                let (first, second) = (usize::from(byte & 15), usize::from(byte >> 4));
                values[0] = i16::from_le_bytes([row.low[first], row.high[first]]);
                values[1] = i16::from_le_bytes([row.low[second], row.high[second]]);
            }
        }
        values
    }
}
