//! Products of quantized weights and many tokens.
//!
//! Rows form panels. The weights of a panel are decoded once per segment, for all tokens of a task.

use microscale_formats::dot::CHUNK;
use microscale_formats::weights::{self, SEGMENT};
use microscale_formats::{E2m1, E2m1x2, E4m3, E8m0, Format, GlobalScale};

use super::activations::{Aligned, PackedActivations, TOKENS, Word, transposed};
use super::rows::{Row, scale_and_round};
use super::weight_tables::WeightTables;
use crate::cpu::memory::prefetch::prefetch;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes, Scalars};
use crate::element::Element;

/// Rows per panel.
pub(in crate::cpu) const ROWS: usize = 48;

/// Chunks per segment.
const CHUNKS: usize = SEGMENT / CHUNK;

/// Bytes of a segment's codes.
const CODES: usize = SEGMENT / 2;

/// Prefetch distance in bytes of a row's codes.
const AHEAD: usize = 256;

/// Rows to decode between calls of [`Microkernel::keep_awake`]: about 0.1 µs.
const AWAKE: usize = 8;

/// The sums of a token, by row.
pub(in crate::cpu) type TokenSums = [f32; ROWS];

/// One vector per row: a line of decoded words, or the sums of a tile's tokens.
pub(in crate::cpu) type Lines = [Aligned; ROWS];

const NO_SUMS: Lines = [Aligned([0.0; LANES]); ROWS];

/// Rows that are multiplied together, with their largest scale bytes.
pub(in crate::cpu) struct Panel<'a> {
    rows: [Row<'a>; ROWS],
    largest: [u8; ROWS],
}

impl<'a> Panel<'a> {
    /// Makes a panel of up to [`ROWS`] rows. The last row fills the array.
    pub(in crate::cpu) fn of(rows: &[Row<'a>]) -> Self {
        let rows: [_; ROWS] = std::array::from_fn(|i| rows[i.min(rows.len() - 1)]);
        Self { rows, largest: rows.map(Row::max_scale) }
    }

    /// The factor of each row's sums.
    pub(in crate::cpu) fn factors(&self, format: Format) -> [f64; ROWS] {
        self.largest.map(|largest| match format {
            Format::Nvfp4 => weights::NVFP4_FACTOR,
            _ => f64::from_bits((1023 - 127 + u64::from(largest)) << 52),
        })
    }

    /// Returns for each row whether it [needs the slow path](needs_slow_path).
    pub(in crate::cpu) fn slow_rows(&self, format: Format) -> [bool; ROWS] {
        std::array::from_fn(|i| needs_slow_path(format, self.rows[i], self.largest[i]))
    }
}

/// Returns whether weights under their scales are NaN or subnormal, relative to the largest scale.
pub(in crate::cpu) fn needs_slow_path(format: Format, row: Row<'_>, largest: u8) -> bool {
    if format.is_nan_scale(largest) {
        return true;
    }
    if format != Format::Mxfp4 {
        return false;
    }
    let below = |scale: u8| largest - scale > weights::SPAN;
    // Most rows have no such scale, or only blocks of zeros under it.
    below(row.scales.iter().fold(largest, |least, scale| least.min(*scale)))
        && row
            .codes
            .chunks(format.block_bytes())
            .zip(row.scales)
            .any(|(codes, scale)| below(*scale) && codes.iter().any(|codes| codes & 0x77 != 0))
}

/// Rounds the products of some tokens and all rows, by token, given sums and factors.
///
/// Returns false if a product is not finite. Then none of the output is valid.
#[inline(always)]
pub(in crate::cpu) fn round_sums<T: Element>(
    sums: &[TokenSums],
    factors: &[f64; ROWS],
    global: Option<GlobalScale>,
    out: &mut [T],
) -> bool {
    let mut are_finite = true;
    for (sums, out) in sums.iter().zip(out.as_chunks_mut::<ROWS>().0) {
        for ((out, sum), factor) in out.iter_mut().zip(sums).zip(factors) {
            let sum = factor * f64::from(*sum);
            are_finite &= sum.is_finite();
            *out = scale_and_round(sum, &[global]);
        }
    }
    are_finite
}

/// The reference, for a row that does not [need the slow path](needs_slow_path).
pub(in crate::cpu) fn reference(format: Format, row: Row<'_>, x: &[f32]) -> f32 {
    let largest = E8m0::from_bits(row.max_scale());
    let scaled = |(k, code): (usize, E2m1)| {
        let scale = row.scales[k / format.block()];
        match format {
            Format::Nvfp4 => weights::nvfp4_weight(code, E4m3::from_bits(scale)),
            _ => weights::mxfp4_weight(code, E8m0::from_bits(scale), largest),
        }
    };
    let pairs = row.codes.iter().map(|codes| E2m1x2::from_bits(*codes));
    let row: Vec<_> = pairs.flat_map(|pair| [pair.low(), pair.high()]).enumerate().map(scaled).collect();
    let segments = row.chunks(SEGMENT).zip(x.chunks(SEGMENT));
    segments.fold(0.0, |sum, (weights, x)| sum + weights::segment::<Scalars>(weights, x))
}

/// Multiplies a segment of decoded weights by tiles of tokens.
pub(in crate::cpu) trait Microkernel<V: Products> {
    /// The words that weights are decoded to.
    const WORD: Word;

    /// Adds the products with some tiles of tokens to their sums, by tile and row.
    ///
    /// Each chunk of weights has one line of pairs at [packed
    /// positions](crate::cpu::simd::products::packed_index), or two lines of single elements: even
    /// positions, then odd positions.
    fn add(&self, simd: V, x: &[Lanes<f32>], weights: &[Lines], sums: &mut [Lines]);

    /// Gives work to a unit that becomes slow when idle. Called while weights are decoded.
    #[inline(always)]
    fn keep_awake(&self) {}
}

/// Buffers of a task, reused by the thread's next task.
pub(in crate::cpu) struct Scratch {
    /// The decoded weights of a segment.
    decoded: Vec<Lines>,
    /// Sums by panel and tile of tokens.
    sums: Vec<Lines>,
}

impl Scratch {
    pub(in crate::cpu) fn new() -> Self {
        Self { decoded: vec![NO_SUMS; 2 * CHUNKS], sums: Vec::new() }
    }
}

/// Panels, and the activations to multiply, from tile `first_tile` on.
pub(in crate::cpu) struct Operands<'a> {
    pub(in crate::cpu) format: Format,
    pub(in crate::cpu) panels: &'a [Panel<'a>],
    pub(in crate::cpu) x: &'a PackedActivations,
    pub(in crate::cpu) first_tile: usize,
}

/// Computes the sums of some tokens, by panel and token.
#[inline(always)]
pub(in crate::cpu) fn multiply<V: Products, P: Microkernel<V>>(
    simd: V,
    products: &P,
    operands: &Operands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    match operands.format {
        Format::Nvfp4 => multiply_format::<V, P, true>(simd, products, operands, sums, scratch),
        _ => multiply_format::<V, P, false>(simd, products, operands, sums, scratch),
    }
}

#[inline(always)]
fn multiply_format<V: Products, P: Microkernel<V>, const NVFP4: bool>(
    simd: V,
    products: &P,
    operands: &Operands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    let Operands { format, panels, x, first_tile } = *operands;
    let tables = WeightTables::of(format);
    let tokens = sums.len() / panels.len();
    let tiles = tokens.div_ceil(TOKENS);
    scratch.sums.clear();
    scratch.sums.resize(panels.len() * tiles, NO_SUMS);
    for (segment, elements) in x.segments().enumerate() {
        let decoded = &mut scratch.decoded[..elements / CHUNK * lines_per_chunk(P::WORD)];
        let x = x.part(segment, first_tile, tiles);
        for (panel, sums) in panels.iter().zip(scratch.sums.chunks_exact_mut(tiles)) {
            decode::<V, P, NVFP4>(simd, products, panel, segment, tables, decoded);
            products.add(simd, x, decoded, sums);
        }
    }
    for (sums, by_tile) in sums.chunks_exact_mut(tokens).zip(scratch.sums.chunks_exact(tiles)) {
        for (sums, tile_sums) in sums.chunks_mut(TOKENS).zip(by_tile) {
            by_token(simd, tile_sums, sums);
        }
    }
}

/// Transposes the sums of a tile. `sums` has the number of tokens.
#[inline(always)]
fn by_token<V: Products>(simd: V, tile_sums: &Lines, sums: &mut [TokenSums]) {
    for (i, of_rows) in tile_sums.as_chunks::<LANES>().0.iter().enumerate() {
        let mut rows = [simd.splat(0.0); LANES];
        for (row, sums) in rows.iter_mut().zip(of_rows) {
            *row = simd.load(&sums.0);
        }
        for (sums, of_token) in sums.iter_mut().zip(transposed(simd, rows)) {
            sums.as_chunks_mut().0[i] = simd.store(of_token);
        }
    }
}

/// Decodes a segment of each row of a panel. `decoded` has the lines of the segment.
#[inline(always)]
fn decode<V: Products, P: Microkernel<V>, const NVFP4: bool>(
    simd: V,
    products: &P,
    panel: &Panel<'_>,
    segment: usize,
    tables: &WeightTables,
    decoded: &mut [Lines],
) {
    let scales_per_segment = if NVFP4 { 2 * CHUNKS } else { CHUNKS };
    let lines_per_segment = CHUNKS * lines_per_chunk(P::WORD);
    for (i, (row, largest)) in panel.rows.iter().zip(panel.largest).enumerate() {
        prefetch_ahead(*row, segment * CODES);
        if i.is_multiple_of(AWAKE) {
            products.keep_awake();
        }
        let codes = &row.codes[segment * CODES..];
        let scales = &row.scales[segment * scales_per_segment..];
        // Slices of constant length need no bounds checks.
        if let Some(codes) = codes.first_chunk()
            && scales.len() >= scales_per_segment
            && decoded.len() == lines_per_segment
        {
            let (scales, decoded) = (&scales[..scales_per_segment], &mut decoded[..lines_per_segment]);
            decode_row::<V, P, NVFP4>(simd, codes, scales, largest, tables, decoded, i);
        } else {
            let (codes, scales) = pad_with_zeros(codes, scales);
            let scales = &scales[..scales_per_segment];
            decode_row::<V, P, NVFP4>(simd, &codes, scales, largest, tables, decoded, i);
        }
    }
}

/// Pads the codes and scales of a row's last segment with zeros.
#[cold]
fn pad_with_zeros(codes: &[u8], scales: &[u8]) -> ([u8; CODES], [u8; 2 * CHUNKS]) {
    let mut filled = ([0; CODES], [0; 2 * CHUNKS]);
    filled.0[..codes.len()].copy_from_slice(codes);
    filled.1[..scales.len()].copy_from_slice(scales);
    filled
}

/// Lines per chunk.
pub(in crate::cpu) const fn lines_per_chunk(word: Word) -> usize {
    CHUNK / word.elements() / LANES
}

/// Decodes a segment of row `i`.
#[inline(always)]
fn decode_row<V: Products, P: Microkernel<V>, const NVFP4: bool>(
    simd: V,
    codes: &[u8; CODES],
    scales: &[u8],
    largest: u8,
    tables: &WeightTables,
    decoded: &mut [Lines],
    i: usize,
) {
    let scales_per_chunk = scales.len() / CHUNKS;
    let chunks = decoded.chunks_exact_mut(lines_per_chunk(P::WORD));
    for ((codes, scales), decoded) in
        codes.as_chunks().0.iter().zip(scales.chunks_exact(scales_per_chunk)).zip(chunks)
    {
        let first = tables.at::<NVFP4>(scales[0], largest);
        let second = if NVFP4 { tables.at::<NVFP4>(scales[1], largest) } else { first };
        let pairs = simd.lookup(codes, [first, second]);
        if P::WORD == Word::Bf16Pair {
            decoded[0][i] = Aligned(simd.store(simd.number(pairs)));
        } else {
            decoded[0][i] = Aligned(simd.store(simd.number(simd.shift_left(pairs, 16))));
            decoded[1][i] = Aligned(simd.store(simd.number(simd.and(pairs, simd.splat_bits(0xFFFF_0000)))));
        }
    }
}

/// Prefetches the codes [`AHEAD`] bytes after `byte`.
///
/// At the end of a row, these start the next panel.
///
/// Hardware prefetchers do not follow this many streams.
#[inline(always)]
fn prefetch_ahead(row: Row<'_>, byte: usize) {
    let ahead = byte + AHEAD;
    let others = if ahead < row.codes.len() { 0 } else { (ROWS - 1) * row.codes.len() };
    prefetch(row.codes.as_ptr().wrapping_add(ahead + others), CODES);
}
