//! Products of quantized weights and activations of many tokens: panels of sixteen rows, a lane a row, whose
//! weights are decoded once for all tokens of a task.

use microscale_formats::dot::CHUNK;
use microscale_formats::weights::{self, SEGMENT};
use microscale_formats::{E2m1, E2m1x2, E4m3, E8m0, Format, GlobalScale};

use super::arranged::{Aligned, Arranged, TOKENS, Word};
use super::prefetch::ask_for;
#[cfg(target_arch = "x86_64")]
use super::products::PairProducts;
use super::products::{Products, TILE, chunk_of_lane};
use super::rows::{Row, finished};
use super::vector::{LANES, Scalars};
use super::weigh::{Mxfp4, Nvfp4, Scales};
use crate::element::Element;

/// Panels that are multiplied together, on processors that have registers for the sums of so many.
pub(super) const PANELS: usize = 3;

/// Rows of these panels.
pub(super) const ROWS: usize = PANELS * LANES;

/// Chunks of a segment.
const CHUNKS: usize = SEGMENT / CHUNK;

/// Chunks of a row that are gathered at once.
const STRETCH: usize = 16 * CHUNKS;

/// Bytes of a row's codes from what is gathered to what is asked for.
const AHEAD: usize = 1024;

/// The sums of a token: a vector for each panel.
pub(super) type TokenSums = [Aligned; PANELS];

/// Rows that are multiplied together.
pub(super) struct PanelRows<'a> {
    rows: [Row<'a>; ROWS],
    /// The number that is added to each row's scales.
    raised: [i16; ROWS],
}

impl<'a> PanelRows<'a> {
    /// Up to [`ROWS`] rows; the last one fills up the array.
    pub(super) fn of(format: Format, rows: &[Row<'a>]) -> Self {
        let rows: [_; ROWS] = std::array::from_fn(|i| rows[i.min(rows.len() - 1)]);
        Self { rows, raised: rows.map(|row| raised(format, row)) }
    }
}

/// The number that is added to a row's scales, so that 2^6 is the largest in MXFP4: 64 times what the definition has,
/// which is undone as [`Scales`] take 64ths.
fn raised(format: Format, row: Row<'_>) -> i16 {
    if format == Format::Mxfp4 { 127 + 6 - i16::from(row.most()) } else { 0 }
}

/// Returns whether weights of a row under their scales are no numbers, or below those of f32.
pub(super) fn is_unusual(format: Format, row: Row<'_>) -> bool {
    let most = row.most();
    if format.is_nan_scale(most) {
        return true;
    }
    let below = |scale: u8| format == Format::Mxfp4 && most - scale > weights::SPAN;
    // Most rows have no such scale, or only over zeros.
    row.scales.iter().any(|scale| below(*scale))
        && row
            .codes
            .chunks(format.block_bytes())
            .zip(row.scales)
            .any(|(codes, scale)| below(*scale) && codes.iter().any(|codes| codes & 0x77 != 0))
}

/// The factor of a row's sums.
pub(super) fn factor(format: Format, row: Row<'_>) -> f64 {
    match format {
        Format::Nvfp4 => weights::NVFP4_FACTOR,
        _ => f64::from_bits((1023 - 127 + u64::from(row.most())) << 52),
    }
}

/// Rounds the products of some tokens and all rows, by token, given their sums and the rows' factors. Returns false if some are no
/// numbers, and then none counts.
#[inline(always)]
pub(super) fn finish<T: Element>(
    sums: &[TokenSums],
    factors: &[f64; ROWS],
    global: Option<GlobalScale>,
    out: &mut [T],
) -> bool {
    let mut are_finite = true;
    for (sums, out) in sums.iter().zip(out.as_chunks_mut::<ROWS>().0) {
        let mut by_row = [0.0; ROWS];
        for (i, sum) in by_row.iter_mut().enumerate() {
            *sum = sums[i / LANES].0[lane_of_row(i % LANES)];
        }
        for ((out, sum), factor) in out.iter_mut().zip(by_row).zip(factors) {
            let sum = factor * f64::from(sum);
            are_finite &= sum.is_finite();
            *out = finished(sum, &[global]);
        }
    }
    are_finite
}

/// The definition, for a row that is not [unusual](is_unusual).
pub(super) fn reference(format: Format, row: Row<'_>, x: &[f32]) -> f32 {
    let largest = E8m0::from_bits(row.most());
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

/// How the weights of a lane are packed into words.
pub(super) trait Packing<V: Products> {
    /// The word, which activations are arranged for.
    const WORD: Word;

    /// The words of eight weights.
    fn words(weights: [V::Number; 8]) -> [V::Number; 8];
}

/// The terms that are multiplied and added in a lane: an element, or a pair of elements.
pub(super) trait Terms<V: Products>: Packing<V> {
    /// Adds the products of a word of weights and a word of activations.
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number;
}

/// f32.
pub(super) struct Singles;

impl<V: Products> Packing<V> for Singles {
    const WORD: Word = Word::Single;

    #[inline(always)]
    fn words(weights: [V::Number; 8]) -> [V::Number; 8] {
        weights
    }
}

impl<V: Products> Terms<V> for Singles {
    #[inline(always)]
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number {
        V::fma(weights, x, sum)
    }
}

/// Two bf16, that with the even index below the other.
pub(super) struct Pairs;

impl<V: Products> Packing<V> for Pairs {
    const WORD: Word = Word::Pair;

    /// Weights under their scales have six bits, so that their lower 16 are zeros.
    #[inline(always)]
    fn words(weights: [V::Number; 8]) -> [V::Number; 8] {
        let mut words = [V::splat(0.0); 8];
        for i in 0..4 {
            let even = V::shift_right(V::bits(weights[2 * i]), 16);
            words[i] = V::number(V::or(even, V::bits(weights[2 * i + 1])));
        }
        words
    }
}

#[cfg(target_arch = "x86_64")]
impl<V: PairProducts> Terms<V> for Pairs {
    #[inline(always)]
    fn add(sum: V::Number, weights: V::Number, x: V::Number) -> V::Number {
        V::add_pairs(sum, weights, x)
    }
}

/// Memory for a task, which the next one takes over.
pub(super) struct Scratch {
    /// A stretch of each group of rows.
    pub(super) stretches: Vec<Stretch>,
    /// A segment's weights.
    pub(super) decoded: Vec<[Aligned; PANELS]>,
}

/// A stretch of each row's codes and scales, chunk by chunk.
pub(super) struct Stretch {
    codes: Vec<[[u8; CHUNK / 2]; ROWS]>,
    scales: Vec<[[u8; 2 * LANES]; PANELS]>,
}

impl Scratch {
    /// For so many groups of [`ROWS`] rows.
    pub(super) fn new(groups: usize) -> Self {
        let stretch = || Stretch {
            codes: vec![[[0; CHUNK / 2]; ROWS]; STRETCH],
            scales: vec![[[0; 2 * LANES]; PANELS]; STRETCH],
        };
        Self {
            stretches: std::iter::repeat_with(stretch).take(groups).collect(),
            decoded: vec![[Aligned([0.0; LANES]); PANELS]; SEGMENT],
        }
    }
}

/// Adds to the sums of some token tiles, by token.
#[inline(always)]
pub(super) fn multiply<V: Products, A: Terms<V>>(
    format: Format,
    rows: &PanelRows<'_>,
    x: &Arranged,
    first_tile: usize,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    match format {
        Format::Nvfp4 => of_format::<V, A, Nvfp4>(rows, x, first_tile, sums, scratch),
        _ => of_format::<V, A, Mxfp4>(rows, x, first_tile, sums, scratch),
    }
}

#[inline(always)]
fn of_format<V: Products, A: Terms<V>, S: Scales>(
    rows: &PanelRows<'_>,
    x: &Arranged,
    first_tile: usize,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    for (segment, elements) in x.segments().enumerate() {
        let decoded = &mut scratch.decoded[..elements / A::WORD.elements()];
        decode_segment::<V, A, S>(rows, segment, &mut scratch.stretches[0], decoded);
        for (tile, sums) in sums.chunks_mut(TOKENS).enumerate() {
            of_tile::<V, A>(decoded, x.part(first_tile + tile, segment), sums);
        }
    }
}

/// Decodes a segment of each row, the segments after each other: the words of each panel, as many as there is room for.
#[inline(always)]
pub(super) fn decode_segment<V: Products, P: Packing<V>, S: Scales>(
    rows: &PanelRows<'_>,
    segment: usize,
    stretch: &mut Stretch,
    decoded: &mut [[Aligned; PANELS]],
) {
    let chunk = segment * CHUNKS % STRETCH;
    if chunk == 0 {
        gather::<S>(rows, segment * CHUNKS, stretch);
    }
    let chunks = stretch.codes[chunk..].iter().zip(&stretch.scales[chunk..]);
    for ((codes, scales), decoded) in chunks.zip(decoded.chunks_mut(CHUNK / P::WORD.elements())) {
        for panel in 0..PANELS {
            let codes = codes.as_flattened().as_chunks().0;
            decode::<V, P, S>(&codes[panel], &scales[panel], panel, decoded);
        }
    }
}

/// Copies a stretch of each row, from a chunk on. Where a row has ended, there are zeros.
#[inline(always)]
fn gather<S: Scales>(rows: &PanelRows<'_>, first: usize, stretch: &mut Stretch) {
    let scales_a_chunk = S::COUNT / LANES;
    for (four, rows_of_four) in rows.rows.as_chunks::<4>().0.iter().enumerate() {
        let chunks = rows_of_four[0].codes.len().div_ceil(CHUNK / 2) - first;
        let all = stretch.codes.iter_mut().zip(&mut stretch.scales);
        for (chunk, (codes, scales)) in (first..first + chunks).zip(all) {
            for (i, row) in rows_of_four.iter().enumerate() {
                let (at, lane) = (4 * four + i, (4 * four + i) % LANES);
                let of_row = &row.codes[chunk * CHUNK / 2..];
                if let Some(whole) = of_row.first_chunk() {
                    codes[at] = *whole;
                } else {
                    codes[at] = [0; CHUNK / 2];
                    codes[at][..of_row.len()].copy_from_slice(of_row);
                }
                let scales = &mut scales[at / LANES];
                let of_row = &row.scales[chunk * scales_a_chunk..];
                if scales_a_chunk == 1 {
                    // Below the lowest there are only zeros.
                    scales[lane] = (i16::from(of_row[0]) + rows.raised[at]).max(0) as u8;
                } else {
                    let scales = &mut scales.as_chunks_mut().0[lane];
                    *scales = *of_row.first_chunk::<2>().unwrap_or(&[of_row[0], 0]);
                }
                if chunk % 4 == 0 {
                    ask_ahead(*row, chunk);
                }
            }
        }
    }
}

/// Asks for what is [`AHEAD`] of a chunk, which at the end of some rows is what as many others begin with: processors
/// do not read ahead far enough in several places.
#[inline(always)]
fn ask_ahead(row: Row<'_>, chunk: usize) {
    let ahead = chunk * CHUNK / 2 + AHEAD;
    let others = if ahead < row.codes.len() { 0 } else { 3 * row.codes.len() };
    ask_for(row.codes.as_ptr().wrapping_add(ahead + others), 64);
}

/// Decodes a chunk of each row of a panel, one word of each row after the other.
#[inline(always)]
fn decode<V: Products, P: Packing<V>, S: Scales>(
    codes: &[u8; TILE],
    scales: &[u8; 2 * LANES],
    panel: usize,
    decoded: &mut [[Aligned; PANELS]],
) {
    let columns = V::columns(codes);
    let doubled = S::doubled::<V>(&scales[..S::COUNT]);
    let words = 8 / P::WORD.elements();
    let decoded = &mut decoded[..4 * words];
    for column in 0..4 {
        let mut weights = V::fractions(columns[column]);
        for weight in &mut weights {
            *weight = V::mul(*weight, doubled[column / 2]);
        }
        let weights = P::words(weights);
        for i in 0..words {
            decoded[column * words + i][panel] = Aligned(V::store(weights[i]));
        }
    }
}

/// Adds to the sums of a tile's tokens.
#[inline(always)]
fn of_tile<V: Products, A: Terms<V>>(decoded: &[[Aligned; PANELS]], x: &[u32], sums: &mut [TokenSums]) {
    match sums.len() {
        1 => by_registers::<V, A, 1>(decoded, x, sums),
        2 => by_registers::<V, A, 2>(decoded, x, sums),
        3..=4 => by_registers::<V, A, 4>(decoded, x, sums),
        _ => by_registers::<V, A, TOKENS>(decoded, x, sums),
    }
}

/// As many panels and tokens at once as there are registers for; N tokens are in a word's row of the
/// activations.
#[inline(always)]
fn by_registers<V: Products, A: Terms<V>, const N: usize>(
    decoded: &[[Aligned; PANELS]],
    x: &[u32],
    sums: &mut [TokenSums],
) {
    if V::MANY_REGISTERS {
        return at_once::<V, A, N, PANELS, N>(decoded, x, sums, 0, 0);
    }
    for panel in 0..PANELS {
        if N == TOKENS {
            at_once::<V, A, N, 1, { TOKENS / 2 }>(decoded, x, sums, panel, 0);
            at_once::<V, A, N, 1, { TOKENS / 2 }>(decoded, x, sums, panel, TOKENS / 2);
        } else {
            at_once::<V, A, N, 1, N>(decoded, x, sums, panel, 0);
        }
    }
}

/// P panels from one on and T tokens from one on.
#[inline(always)]
fn at_once<V: Products, A: Terms<V>, const N: usize, const P: usize, const T: usize>(
    decoded: &[[Aligned; PANELS]],
    x: &[u32],
    sums: &mut [TokenSums],
    panel: usize,
    token: usize,
) {
    let mut of_segment = [[V::splat(0.0); P]; T];
    for (words, x) in decoded.iter().zip(x.as_chunks::<N>().0) {
        let mut weights = [V::splat(0.0); P];
        for p in 0..P {
            weights[p] = V::load(&words[panel + p].0);
        }
        for t in 0..T {
            let x = V::splat(f32::from_bits(x[token + t]));
            for p in 0..P {
                of_segment[t][p] = A::add(of_segment[t][p], weights[p], x);
            }
        }
    }
    for (sums, of_segment) in sums.iter_mut().skip(token).zip(of_segment) {
        for p in 0..P {
            let sum = &mut sums[panel + p].0;
            *sum = V::store(V::add(V::load(sum), of_segment[p]));
        }
    }
}

/// The lane of a row of a panel.
pub(super) const fn lane_of_row(row: usize) -> usize {
    // Rows of four and columns are exchanged either way.
    chunk_of_lane(row)
}
