//! 16-bit values in arrays, as signed integers, which every CPU compares.

use super::{Row, ValueRow, WORDS, WordVector, Words};
use crate::cpu::machines::{Lanes, Portable};

/// An array of a value for each of the 16-bit values, made in a loop, for the compiler sees vectors in loops.
macro_rules! words {
    ($word:ident => $value:expr) => {{
        let mut words = [0; WORDS];
        for $word in 0..WORDS {
            words[$word] = $value;
        }
        words
    }};
}

impl WordVector for Portable {
    type Words = [i16; WORDS];
    type Bits = Lanes<u32>;
    type Rows = [Row; 2];
    type Steps = ();

    #[inline(always)]
    fn steps() {}

    #[inline(always)]
    fn load_words(words: &Words) -> [i16; WORDS] {
        words!(word => words[word] as i16)
    }

    #[inline(always)]
    fn store_words(words: [i16; WORDS]) -> Words {
        words!(word => words[word] as u16)
    }

    #[inline(always)]
    fn splat_word(word: u16) -> [i16; WORDS] {
        [word as i16; WORDS]
    }

    #[inline(always)]
    fn larger(a: [i16; WORDS], b: [i16; WORDS]) -> [i16; WORDS] {
        words!(word => a[word].max(b[word]))
    }

    #[inline(always)]
    fn largest(magnitudes: [i16; WORDS]) -> u16 {
        let mut largest = 0;
        for magnitude in magnitudes {
            largest = magnitude.max(largest);
        }
        largest as u16
    }

    #[inline(always)]
    fn folded_words(a: [i16; WORDS], b: [i16; WORDS]) -> [i16; WORDS] {
        let mut words = [0; WORDS];
        for word in 0..WORDS / 2 {
            words[word] = a[word].max(a[word + WORDS / 2]);
            words[word + WORDS / 2] = b[word].max(b[word + WORDS / 2]);
        }
        words
    }

    #[inline(always)]
    fn largest_words_of_halves(magnitudes: &[[i16; WORDS]; 8]) -> Lanes<u32> {
        let mut all = [0; 16];
        let halves = magnitudes.as_flattened().as_chunks::<{ WORDS / 2 }>().0;
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
    fn one_row(row: &Row) -> [Row; 2] {
        [*row; 2]
    }

    #[inline(always)]
    fn two_rows(first: &Row, second: &Row) -> [Row; 2] {
        [*first, *second]
    }

    #[inline(always)]
    fn codes(magnitudes: [i16; WORDS], rows: [Row; 2], (): ()) -> [i16; WORDS] {
        let mut codes = [0; WORDS];
        let halves = magnitudes.as_chunks::<{ WORDS / 2 }>().0;
        for ((codes, magnitudes), row) in
            codes.as_chunks_mut::<{ WORDS / 2 }>().0.iter_mut().zip(halves).zip(rows)
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
    fn above_zero(magnitudes: [i16; WORDS]) -> [i16; WORDS] {
        words!(word => magnitudes[word].wrapping_add(0x7FFF))
    }

    #[inline(always)]
    fn and_words(a: [i16; WORDS], b: [i16; WORDS]) -> [i16; WORDS] {
        words!(word => a[word] & b[word])
    }

    #[inline(always)]
    fn or_not_words(a: [i16; WORDS], b: [i16; WORDS]) -> [i16; WORDS] {
        words!(word => a[word] | !b[word])
    }

    #[inline(always)]
    fn signed(codes: [i16; WORDS], signs: [i16; WORDS]) -> [i16; WORDS] {
        words!(word => codes[word] & 7 | signs[word] >> 12 & 8)
    }

    #[inline(always)]
    fn pack(nibbles: &[[i16; WORDS]; 4]) -> [u8; 2 * WORDS] {
        let mut bytes = [0; 2 * WORDS];
        for (byte, [first, second]) in bytes.iter_mut().zip(nibbles.as_flattened().as_chunks::<2>().0) {
            *byte = (*first | *second << 4) as u8;
        }
        bytes
    }

    #[inline(always)]
    fn decode(codes: &[u8; WORDS], rows: [&ValueRow; 4]) -> [[i16; WORDS]; 2] {
        let mut values = [[0; WORDS]; 2];
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
