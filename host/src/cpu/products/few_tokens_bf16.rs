//! Products of quantized weights and few tokens in bf16, by AVX-512 BF16.
//!
//! Sixteen groups of 16 elements at a time, one lane per group.

use std::arch::x86_64::__m512;

use half::bf16;
use microscale_formats::Format;
use microscale_formats::weights::GROUP;

use super::activations::{Aligned, Word};
use super::few_tokens::{AHEAD, ROWS, RowSums, TOKEN_TILE, TOKENS};
use super::rows::Row;
use crate::cpu::memory::prefetch::prefetch;
use crate::cpu::simd::products::{Products, STEP, e4m3_over_256};
use crate::cpu::simd::{Avx512, Avx512Bf16, LANES, Vector};

/// Words of a group: pairs of elements.
const WORDS: usize = GROUP / Word::Bf16Pair.elements();

/// The activations of up to [`TOKENS`] tokens, packed.
pub(in crate::cpu) struct PackedTokenPairs {
    token_tiles: Vec<TokenTile>,
}

/// The activations of up to [`TOKEN_TILE`] tokens.
struct TokenTile {
    tokens: usize,
    /// By step, word of a group, token and group.
    ///
    /// Zeros pad the last step, and a fourth token next to three.
    words: Vec<Aligned>,
}

impl PackedTokenPairs {
    pub(in crate::cpu) fn of(activations: &[bf16], cols: usize, tokens: usize) -> Self {
        let token_tiles = (0..tokens).step_by(TOKEN_TILE).map(|first| {
            let tokens = (tokens - first).min(TOKEN_TILE);
            TokenTile::of(&activations[first * cols..][..tokens * cols], cols, tokens)
        });
        Self { token_tiles: token_tiles.collect() }
    }
}

impl TokenTile {
    fn of(activations: &[bf16], cols: usize, tokens: usize) -> Self {
        let places = tokens.next_power_of_two();
        let mut words = vec![Aligned([0.0; LANES]); cols.div_ceil(LANES * GROUP) * WORDS * places];
        for token in 0..tokens {
            for (group, values) in activations[token * cols..][..cols].chunks(GROUP).enumerate() {
                let mut filled = [bf16::ZERO; GROUP];
                filled[..values.len()].copy_from_slice(values);
                let (step, lane) = (group / LANES * WORDS, group % LANES);
                for word in 0..WORDS {
                    let [low, high] = elements(word).map(|i| u32::from(filled[i].to_bits()));
                    words[(step + word) * places + token].0[lane] = f32::from_bits(low | high << 16);
                }
            }
        }
        Self { tokens: places, words }
    }
}

/// The elements of a group that a word has.
///
/// Half a group has four words. The codes in 16 bits belong to one word each.
const fn elements(word: usize) -> [usize; 2] {
    let first = word / 4 * 8 + word % 4;
    [first, first + 4]
}

/// The dot products of rows with each token's activations. No scale may be NaN.
#[inline(always)]
pub(in crate::cpu) fn multiply(
    pairs: Avx512Bf16,
    format: Format,
    rows: &[Row<'_>],
    x: &PackedTokenPairs,
    sums: &mut RowSums,
) {
    // Repeats the last row to fill the array.
    let all: [_; ROWS] = std::array::from_fn(|i| rows[i.min(rows.len() - 1)]);
    for (i, tile) in x.token_tiles.iter().enumerate() {
        let first = i * TOKEN_TILE;
        match (format, tile.tokens) {
            (Format::Nvfp4, 1) => multiply_tile::<true, 1>(pairs, all, &tile.words, sums, first),
            (Format::Nvfp4, 2) => multiply_tile::<true, 2>(pairs, all, &tile.words, sums, first),
            (Format::Nvfp4, _) => multiply_tile::<true, TOKEN_TILE>(pairs, all, &tile.words, sums, first),
            (_, 1) => multiply_tile::<false, 1>(pairs, all, &tile.words, sums, first),
            (_, 2) => multiply_tile::<false, 2>(pairs, all, &tile.words, sums, first),
            (_, _) => multiply_tile::<false, TOKEN_TILE>(pairs, all, &tile.words, sums, first),
        }
    }
}

#[inline(always)]
fn multiply_tile<const NVFP4: bool, const N: usize>(
    pairs: Avx512Bf16,
    rows: [Row<'_>; ROWS],
    x: &[Aligned],
    sums: &mut [[f64; TOKENS]; ROWS],
    first: usize,
) {
    let simd = pairs.avx512();
    let scales_per_step = if NVFP4 { LANES } else { LANES / 2 };
    let mut of_lanes = [[simd.splat(0.0); N]; ROWS];
    for (i, x) in x.chunks_exact(WORDS * N).enumerate() {
        let (mut codes, mut bytes) = ([&[0; STEP]; ROWS], [[0; LANES]; ROWS]);
        let filled;
        if rows[0].codes.len() >= (i + 1) * STEP && rows[0].scales.len() >= (i + 1) * scales_per_step {
            for r in 0..ROWS {
                codes[r] = &rows[r].codes.as_chunks().0[i];
                let scales = &rows[r].scales[i * scales_per_step..][..scales_per_step];
                bytes[r][..scales_per_step].copy_from_slice(scales);
                // The first token tile brings the weights into the cache.
                if first == 0 {
                    prefetch_ahead(rows[r], i);
                }
            }
        } else {
            filled = pad_with_zeros(rows, i, scales_per_step);
            for r in 0..ROWS {
                (codes[r], bytes[r]) = (&filled[r].0, filled[r].1);
            }
        }
        let (mut halves, mut scales) = ([[simd.splat_bits(0); 2]; ROWS], [simd.splat(0.0); ROWS]);
        for r in 0..ROWS {
            halves[r] = pairs.halves_of_groups(codes[r]);
            scales[r] = scales_of::<NVFP4>(simd, &bytes[r]);
        }
        let mut of_step = [[simd.splat(0.0); N]; ROWS];
        for word in 0..WORDS {
            let mut weights = [simd.splat(0.0); ROWS];
            for r in 0..ROWS {
                weights[r] = pairs.weights(simd.shift_right(halves[r][word / 4], (word % 4 * 4) as u32));
            }
            for token in 0..N {
                let x = simd.load(&x[word * N + token].0);
                for r in 0..ROWS {
                    of_step[r][token] = pairs.add_pairs(of_step[r][token], weights[r], x);
                }
            }
        }
        for r in 0..ROWS {
            for token in 0..N {
                of_lanes[r][token] = simd.fma(of_step[r][token], scales[r], of_lanes[r][token]);
            }
        }
    }
    for r in 0..ROWS {
        for token in 0..N {
            let [a, b, c, d, e, f, g, h] =
                simd.store_sums(simd.add_halves(simd.no_sums(), of_lanes[r][token]));
            let sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
            sums[r][first + token] = sum * if NVFP4 { 256.0 } else { 0.5 };
        }
    }
}

/// The remaining codes and scales of rows, padded with zeros.
#[cold]
fn pad_with_zeros(
    rows: [Row<'_>; ROWS],
    step: usize,
    scales_per_step: usize,
) -> [([u8; STEP], [u8; LANES]); ROWS] {
    rows.map(|row| {
        let (mut codes, mut scales) = ([0; STEP], [0; LANES]);
        for (to, from) in codes.iter_mut().zip(&row.codes[step * STEP..]) {
            *to = *from;
        }
        for (to, from) in scales[..scales_per_step].iter_mut().zip(&row.scales[step * scales_per_step..]) {
            *to = *from;
        }
        (codes, scales)
    })
}

/// The scales of a step's groups: divided by 256 for NVFP4, doubled for MXFP4.
#[inline(always)]
fn scales_of<const NVFP4: bool>(simd: Avx512, bytes: &[u8; LANES]) -> __m512 {
    const EACH: [u8; LANES] = {
        let mut order = [0; LANES];
        let mut lane = 0;
        while lane < LANES {
            order[lane] = lane as u8;
            lane += 1;
        }
        order
    };
    const TWICE: [u8; LANES] = {
        let mut order = [0; LANES];
        let mut lane = 0;
        while lane < LANES {
            order[lane] = lane as u8 / 2;
            lane += 1;
        }
        order
    };
    if NVFP4 {
        e4m3_over_256(simd, simd.bytes(bytes, &EACH))
    } else {
        simd.number(simd.shift_left(simd.add_bits(simd.bytes(bytes, &TWICE), simd.splat_bits(1)), 23))
    }
}

/// Prefetches the codes [`AHEAD`] bytes after a step. At the end of a row, these start new rows.
#[inline(always)]
fn prefetch_ahead(row: Row<'_>, step: usize) {
    let ahead = step * STEP + AHEAD;
    let others = if ahead < row.codes.len() { 0 } else { (ROWS - 1) * row.codes.len() };
    prefetch(row.codes.as_ptr().wrapping_add(ahead + others), STEP);
}

const _: () = assert!(STEP == LANES * GROUP / 2);
