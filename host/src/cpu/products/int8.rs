//! Products of quantized weights and activations in INT8: sixteen groups at a time, one per lane.
//!
//! Activations are rounded to INT8, or are in FP4: twice an element is an integer.
//!
//! Rows form panels. A segment of each row is decoded once, and multiplied with all tokens of a
//! task.

use microscale_formats::int8::{self, BLOCK};
use microscale_formats::weights::GROUP;
use microscale_formats::{E4m3, E8m0, Format, GlobalScale};

use super::activations::Aligned;
use super::rows::{Row, scale_and_round};
use crate::cpu::memory::prefetch::prefetch;
use crate::cpu::simd::int8::{Int8Products, Quarters};
use crate::cpu::simd::products::{OFFSET, Products, STEP, e4m3_over_256};
use crate::cpu::simd::{LANES, Lanes, Scalars, Vector};
use crate::element::Element;

/// Rows per panel.
pub(in crate::cpu) const ROWS: usize = 16;

/// Most tokens per tile.
const TILE_TOKENS: usize = 8;

/// Elements per step: a group in each lane.
pub(in crate::cpu) const ELEMENTS: usize = LANES * GROUP;

/// The start of a group's sum, without the surplus of its raised weights.
const START: i32 = int8::ROUND.to_bits() as i32;

/// The largest MXFP4 scale byte whose double times [`int8::ROUND`] is below f32's infinity.
const LARGEST_VECTOR_SCALE: u8 = 230;

/// Steps per segment. Its decoded rows and a tile's activations fit the L1 cache.
const STEPS: usize = 4;

/// Sixteen groups of a token's activations.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Activations {
    codes: Quarters,
    /// The bits of [`int8::ROUND`], minus [`OFFSET`] times the sum of each group's codes: a group's
    /// sum starts here. An integer below 2^22 added to these bits is added to the number.
    start: Lanes<i32>,
    /// The scale of each group's block.
    scales: Lanes<f32>,
}

impl Activations {
    const ZEROS: Self = Self { codes: [[[0; 4]; LANES]; 4], start: [START; LANES], scales: [0.0; LANES] };
}

/// Sixteen groups of a decoded row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Weights {
    /// Twice each weight, plus [`OFFSET`].
    raised: Quarters,
    /// The scale of each group: divided by 256 for NVFP4, doubled for MXFP4.
    scales: Lanes<f32>,
}

impl Weights {
    const ZEROS: Self = Self { raised: [[[0; 4]; LANES]; 4], scales: [0.0; LANES] };
}

/// The activations of some tokens, as integers and packed.
///
/// Tokens form tiles of 8, 4, 2 and 1. A tile has its activations by step, then by token.
pub(in crate::cpu) struct Int8Tokens {
    tokens: usize,
    steps: usize,
    activations: Vec<Activations>,
}

impl Int8Tokens {
    /// Allocates zeros for tokens of `cols` elements.
    pub(in crate::cpu) fn new(cols: usize, tokens: usize) -> Self {
        let steps = cols.div_ceil(ELEMENTS);
        Self { tokens, steps, activations: vec![Activations::ZEROS; steps * tokens] }
    }

    /// Returns each tile's first token, number of tokens and activations.
    pub(in crate::cpu) fn tiles_mut(&mut self) -> impl Iterator<Item = (usize, usize, &mut [Activations])> {
        let mut rest = &mut self.activations[..];
        let steps = self.steps;
        tiles(self.tokens).map(move |(first, tokens)| {
            let (tile, after) = std::mem::take(&mut rest).split_at_mut(steps * tokens);
            rest = after;
            (first, tokens, tile)
        })
    }

    /// The activations of a tile of `tokens` tokens.
    fn tile(&self, first: usize, tokens: usize) -> &[Activations] {
        &self.activations[first * self.steps..][..tokens * self.steps]
    }
}

/// The first token of each tile and its number of tokens: eight, and then powers of two.
fn tiles(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let rest = tokens - first;
        let count = if rest >= TILE_TOKENS { TILE_TOKENS } else { 1 << rest.checked_ilog2()? };
        first += count;
        Some((first - count, count))
    })
}

/// Rounds and packs one token of a tile. Its activations are `stride` apart.
#[inline(always)]
pub(in crate::cpu) fn pack<T: Element, V: Vector>(
    simd: V,
    values: &[T],
    activations: &mut [Activations],
    stride: usize,
) {
    let steps = activations.iter_mut().step_by(stride);
    for (step, values) in steps.zip(values.chunks(ELEMENTS)) {
        if let Some(values) = values.first_chunk() {
            pack_step::<T, V>(simd, values, step);
        } else {
            let mut filled = [T::default(); ELEMENTS];
            filled[..values.len()].copy_from_slice(values);
            pack_step::<T, V>(simd, &filled, step);
        }
    }
}

#[inline(always)]
fn pack_step<T: Element, V: Vector>(simd: V, values: &[T; ELEMENTS], step: &mut Activations) {
    let wide = simd.widen_block(values);
    let groups = wide.as_chunks::<LANES>().0;
    let magnitudes = simd.splat_bits(0x7FFF_FFFF);
    let mut largest = [magnitudes; LANES / 2];
    for (i, largest) in largest.iter_mut().enumerate() {
        let [a, b] = [simd.load(&groups[2 * i]), simd.load(&groups[2 * i + 1])];
        let (a, b) = (simd.and(simd.bits(a), magnitudes), simd.and(simd.bits(b), magnitudes));
        *largest = simd.max_bits(a, b);
    }
    // Two per block.
    let halves = simd.store(simd.number(simd.max_of_halves(&largest))).map(f32::to_bits);
    let mut inverses = [0.0; LANES];
    for (i, halves) in halves.as_chunks::<2>().0.iter().enumerate() {
        let (scale, inverse) = int8::scales(f32::from_bits(halves[0].max(halves[1])));
        step.scales[2 * i..][..2].fill(scale);
        inverses[2 * i..][..2].fill(inverse);
    }
    for group in 0..LANES {
        let products = simd.mul(simd.load(&groups[group]), simd.splat(inverses[group]));
        let codes = simd.low_bytes(simd.bits(simd.add(products, simd.splat(int8::ROUND))));
        let mut sum = 0;
        for code in codes {
            sum += i32::from(code as i8);
        }
        step.start[group] = START - OFFSET * sum;
        for (half, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            let codes = u64::from_le_bytes(*codes);
            for odd in 0..2 {
                step.codes[2 * half + odd][group] =
                    every_other_byte(codes >> (8 * odd)).to_le_bytes().map(|code| code as i8);
            }
        }
    }
}

/// Packs one token of a tile, given its row in FP4. Its activations are `stride` apart.
///
/// Codes are twice the elements, under half of their scales.
#[inline(always)]
pub(in crate::cpu) fn pack_fp4<V: Products, D: Int8Products<V>>(
    bytes: D,
    format: Format,
    row: Row<'_>,
    activations: &mut [Activations],
    stride: usize,
) {
    for (step, activations) in activations.iter_mut().step_by(stride).enumerate() {
        let mut filled = None;
        let (codes, scales) = step_of(row, step, ELEMENTS / format.block(), &mut filled);
        activations.start = [START; LANES];
        for (codes, raised) in activations.codes.iter_mut().zip(bytes.raised(codes)) {
            *codes = bytes.store(raised);
            for (codes, start) in codes.iter_mut().zip(&mut activations.start) {
                for code in codes {
                    *code -= OFFSET as i8;
                    *start -= OFFSET * i32::from(*code);
                }
            }
        }
        for (group, scale) in activations.scales.iter_mut().enumerate() {
            *scale = int8::scale_of_twice(format, scales[group * GROUP / format.block()]);
        }
    }
}

/// Bytes 0, 2, 4 and 6.
#[inline(always)]
const fn every_other_byte(bytes: u64) -> u32 {
    let bytes = bytes & 0x00FF_00FF_00FF_00FF;
    let bytes = (bytes | bytes >> 8) & 0x0000_FFFF_0000_FFFF;
    (bytes | bytes >> 16) as u32
}

/// Buffers of a task, reused by the thread's next task.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    /// The decoded segments of a panel, if there are several tiles.
    decoded: Vec<Weights>,
    /// Sums by tile, row and token.
    lanes: Vec<Aligned>,
}

/// Returns whether a row's scales are out of range for the vectors.
fn needs_reference(format: Format, row: Row<'_>) -> bool {
    row.max_scale() > if format == Format::Nvfp4 { 0x7E } else { LARGEST_VECTOR_SCALE }
}

/// The sums of a row and a token. `x` has the token's activations.
fn reference(format: Format, row: Row<'_>, x: &mut dyn Iterator<Item = &Activations>) -> f32 {
    let mut lanes = [0.0; LANES];
    let codes = row.codes.chunks(STEP).zip(row.scales.chunks(ELEMENTS / format.block()));
    for ((codes, scales), x) in codes.zip(x) {
        for (group, codes) in codes.chunks(GROUP / 2).enumerate() {
            let mut elements = [0; GROUP];
            for (i, element) in elements.iter_mut().enumerate() {
                *element = x.codes[i / 8 * 2 + i % 2][group][i % 8 / 2];
            }
            let (sum, by) = (int8::twice_sum(codes, &elements), x.scales[group]);
            let scale = scales[group * GROUP / format.block()];
            lanes[group] = match format {
                Format::Nvfp4 => int8::add_nvfp4::<Scalars>(lanes[group], sum, E4m3::from_bits(scale), by),
                _ => int8::add_mxfp4::<Scalars>(lanes[group], sum, E8m0::from_bits(scale), by),
            };
        }
    }
    int8::total(lanes)
}

/// The reference: the sums of some rows and all tokens, by token.
pub(in crate::cpu) fn multiply_reference(
    format: Format,
    rows: &[Row<'_>],
    x: &Int8Tokens,
    wanted: impl Fn(Row<'_>) -> bool,
    sums: &mut [f32],
) {
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| wanted(**row)) {
        for (first, tokens) in tiles(x.tokens) {
            for token in 0..tokens {
                let tile = x.tile(first, tokens);
                sums[(first + token) * rows.len() + i] =
                    reference(format, *row, &mut tile.iter().skip(token).step_by(tokens));
            }
        }
    }
}

/// The sums of up to [`ROWS`] rows and all tokens, by token.
#[inline(always)]
pub(in crate::cpu) fn multiply<V: Products, D: Int8Products<V>>(
    simd: V,
    bytes: D,
    format: Format,
    rows: &[Row<'_>],
    x: &Int8Tokens,
    sums: &mut [f32],
    scratch: &mut Scratch,
) {
    scratch.lanes.clear();
    // Rows in pairs.
    scratch.lanes.resize(rows.len().next_multiple_of(2) * x.tokens, Aligned([0.0; LANES]));
    match format {
        Format::Nvfp4 => add_segments::<V, D, true>(simd, bytes, rows, x, scratch),
        _ => add_segments::<V, D, false>(simd, bytes, rows, x, scratch),
    }
    let paired = rows.len().next_multiple_of(2);
    for (first, tokens) in tiles(x.tokens) {
        let lanes = &scratch.lanes[first * paired..][..tokens * paired];
        for (i, lanes) in lanes.chunks(LANES).enumerate() {
            // Tiles have a power of two of tokens, so a chunk has whole rows or one row's tokens.
            let (row, totals) = ((i * LANES) >> tokens.ilog2(), totals(simd, lanes));
            let totals = totals.chunks_exact(tokens).take(rows.len() - row);
            for (row, totals) in (row..).zip(totals) {
                for (token, total) in (first..).zip(totals) {
                    sums[token * rows.len() + row] = *total;
                }
            }
        }
    }
    let needs_reference = |row: Row<'_>| needs_reference(format, row);
    if rows.iter().any(|row| needs_reference(*row)) {
        multiply_reference(format, rows, x, needs_reference, sums);
    }
}

/// Adds the products of all segments to the lanes.
#[inline(always)]
fn add_segments<V: Products, D: Int8Products<V>, const NVFP4: bool>(
    simd: V,
    bytes: D,
    rows: &[Row<'_>],
    x: &Int8Tokens,
    scratch: &mut Scratch,
) {
    // The last row fills the pair.
    let pair = |i: usize| [rows[2 * i], rows[(2 * i + 1).min(rows.len() - 1)]];
    let pairs = rows.len().div_ceil(2);
    if x.tokens <= TILE_TOKENS && x.tokens.is_power_of_two() {
        let steps = STEPS * TILE_TOKENS / x.tokens;
        for first in (0..x.steps).step_by(steps) {
            let activations = &x.activations[first * x.tokens..];
            let activations = &activations[..activations.len().min(steps * x.tokens)];
            for (i, lanes) in scratch.lanes.chunks_exact_mut(2 * x.tokens).enumerate() {
                let weights = pair(i).map(|row| Coded::<NVFP4> { row, first });
                multiply_tile(simd, bytes, weights, activations, lanes, x.tokens);
            }
        }
        return;
    }
    scratch.decoded.resize(ROWS * STEPS, Weights::ZEROS);
    for first in (0..x.steps).step_by(STEPS) {
        let steps = (x.steps - first).min(STEPS);
        for (i, decoded) in scratch.decoded.chunks_exact_mut(2 * STEPS).take(pairs).enumerate() {
            for (row, decoded) in pair(i).into_iter().zip(decoded.chunks_exact_mut(STEPS)) {
                let coded = Coded::<NVFP4> { row, first };
                for (step, decoded) in decoded[..steps].iter_mut().enumerate() {
                    let (raised, scales) = coded.step(simd, bytes, step);
                    for (quarter, raised) in decoded.raised.iter_mut().zip(raised) {
                        *quarter = bytes.store(raised);
                    }
                    decoded.scales = simd.store(scales);
                }
            }
        }
        for (token, tokens) in tiles(x.tokens) {
            let activations = &x.tile(token, tokens)[first * tokens..][..steps * tokens];
            let lanes = &mut scratch.lanes[token * 2 * pairs..][..tokens * 2 * pairs];
            let decoded = scratch.decoded.chunks_exact(2 * STEPS);
            for (weights, lanes) in decoded.zip(lanes.chunks_exact_mut(2 * tokens)) {
                let weights = [Decoded(&weights[..STEPS]), Decoded(&weights[STEPS..])];
                multiply_tile(simd, bytes, weights, activations, lanes, tokens);
            }
        }
    }
}

/// A segment of a row.
trait Segment<V: Products, D: Int8Products<V>>: Copy {
    /// The weights of a step, [raised](Int8Products::raised), and their scales.
    fn step(self, simd: V, bytes: D, step: usize) -> ([D::Bytes; 4], V::Number);
}

/// The decoded steps of a segment.
#[derive(Clone, Copy)]
struct Decoded<'a>(&'a [Weights]);

impl<V: Products, D: Int8Products<V>> Segment<V, D> for Decoded<'_> {
    #[inline(always)]
    fn step(self, simd: V, bytes: D, step: usize) -> ([D::Bytes; 4], V::Number) {
        (load(bytes, &self.0[step].raised), simd.load(&self.0[step].scales))
    }
}

/// A segment from step `first` on, decoded step by step.
#[derive(Clone, Copy)]
struct Coded<'a, const NVFP4: bool> {
    row: Row<'a>,
    first: usize,
}

impl<V: Products, D: Int8Products<V>, const NVFP4: bool> Segment<V, D> for Coded<'_, NVFP4> {
    #[inline(always)]
    fn step(self, simd: V, bytes: D, step: usize) -> ([D::Bytes; 4], V::Number) {
        let count = if NVFP4 { LANES } else { LANES / 2 };
        let step = self.first + step;
        prefetch_ahead(self.row, step, count);
        let mut filled = None;
        let (codes, of_groups) = step_of(self.row, step, count, &mut filled);
        (bytes.raised(codes), scales_of::<V, NVFP4>(simd, &of_groups))
    }
}

/// The codes and the `count` scales of a row's step. At the end of a row, zeros fill them.
#[inline(always)]
fn step_of<'a>(
    row: Row<'a>,
    step: usize,
    count: usize,
    filled: &'a mut Option<[u8; STEP]>,
) -> (&'a [u8; STEP], [u8; LANES]) {
    let (codes, scales) = (&row.codes[step * STEP..], &row.scales[step * count..]);
    let mut of_groups = [0; LANES];
    if let Some(codes) = codes.first_chunk()
        && scales.len() >= count
    {
        of_groups[..count].copy_from_slice(&scales[..count]);
        return (codes, of_groups);
    }
    of_groups[..scales.len()].copy_from_slice(scales);
    (filled.insert(padded(codes)), of_groups)
}

/// Pads the codes of a row's last step with zeros.
#[cold]
fn padded(codes: &[u8]) -> [u8; STEP] {
    let mut filled = [0; STEP];
    filled[..codes.len()].copy_from_slice(codes);
    filled
}

/// Prefetch distance in bytes of codes.
const AHEAD: usize = 1024;

/// Prefetches the codes [`AHEAD`] bytes after a step, and the scales of the next panel's row.
///
/// At the end of a row, the codes are the start of the next panel's row.
#[inline(always)]
fn prefetch_ahead(row: Row<'_>, step: usize, scales: usize) {
    let ahead = step * STEP + AHEAD;
    let others = if ahead < row.codes.len() { 0 } else { (ROWS - 1) * row.codes.len() };
    prefetch(row.codes.as_ptr().wrapping_add(ahead + others), STEP);
    prefetch(row.scales.as_ptr().wrapping_add(ROWS * row.scales.len() + step * scales), 1);
}

/// The scales of a step's groups: divided by 256 for NVFP4, doubled for MXFP4.
#[inline(always)]
fn scales_of<V: Products, const NVFP4: bool>(simd: V, bytes: &[u8; LANES]) -> V::Number {
    const EACH: [u8; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    const TWICE: [u8; LANES] = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];
    if NVFP4 {
        e4m3_over_256(simd, simd.bytes(bytes, &EACH))
    } else {
        simd.number(simd.shift_left(simd.add_bits(simd.bytes(bytes, &TWICE), simd.splat_bits(1)), 23))
    }
}

/// Adds the products of two rows' segments and a tile of tokens, by row and token.
#[inline(always)]
fn multiply_tile<V: Products, D: Int8Products<V>, S: Segment<V, D>>(
    simd: V,
    bytes: D,
    weights: [S; 2],
    x: &[Activations],
    lanes: &mut [Aligned],
    tokens: usize,
) {
    match tokens {
        1 => multiply_tokens::<V, D, S, 1>(simd, bytes, weights, x, lanes),
        2 => multiply_tokens::<V, D, S, 2>(simd, bytes, weights, x, lanes),
        4 => multiply_tokens::<V, D, S, 4>(simd, bytes, weights, x, lanes),
        _ => multiply_tokens::<V, D, S, TILE_TOKENS>(simd, bytes, weights, x, lanes),
    }
}

#[inline(always)]
fn multiply_tokens<V: Products, D: Int8Products<V>, S: Segment<V, D>, const N: usize>(
    simd: V,
    bytes: D,
    weights: [S; 2],
    x: &[Activations],
    lanes: &mut [Aligned],
) {
    let Some([first, second]) = lanes.as_chunks_mut::<N>().0.first_chunk_mut() else { return };
    let mut sums = [[simd.splat(0.0); N]; 2];
    for token in 0..N {
        sums[0][token] = simd.load(&first[token].0);
        sums[1][token] = simd.load(&second[token].0);
    }
    for (step, x) in x.as_chunks::<N>().0.iter().enumerate() {
        let (first_raised, first_scales) = weights[0].step(simd, bytes, step);
        let (second_raised, second_scales) = weights[1].step(simd, bytes, step);
        let [first_offset, second_offset] =
            [first_scales, second_scales].map(|scales| simd.mul(scales, simd.splat(-int8::ROUND)));
        for token in 0..N {
            let codes = load(bytes, &x[token].codes);
            let scales = simd.load(&x[token].scales);
            // `ROUND` plus twice the sum of each group: as bits of f32, an integer needs no
            // conversion. The first fused multiplication takes `ROUND` off. It is exact.
            let of_first = simd.number(bytes.add_groups(&x[token].start, first_raised, codes));
            let of_second = simd.number(bytes.add_groups(&x[token].start, second_raised, codes));
            let of_first = simd.fma(of_first, first_scales, first_offset);
            let of_second = simd.fma(of_second, second_scales, second_offset);
            sums[0][token] = simd.fma(of_first, scales, sums[0][token]);
            sums[1][token] = simd.fma(of_second, scales, sums[1][token]);
        }
    }
    for token in 0..N {
        first[token].0 = simd.store(sums[0][token]);
        second[token].0 = simd.store(sums[1][token]);
    }
}

#[inline(always)]
fn load<V: Products, D: Int8Products<V>>(bytes: D, [a, b, c, d]: &Quarters) -> [D::Bytes; 4] {
    [bytes.load(a), bytes.load(b), bytes.load(c), bytes.load(d)]
}

/// [`int8::total`] of up to sixteen vectors.
#[inline(always)]
fn totals<V: Vector>(simd: V, lanes: &[Aligned]) -> Lanes<f32> {
    let mut sums = [simd.splat(0.0); LANES];
    for (sum, lanes) in sums.iter_mut().zip(lanes) {
        *sum = simd.load(&lanes.0);
    }
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for i in 0..count {
            let (even, odd) = simd.deinterleave(sums[2 * i], sums[2 * i + 1]);
            sums[i] = simd.add(even, odd);
        }
    }
    simd.store(sums[0])
}

/// Rounds sums, given the factor of the format.
#[inline(always)]
pub(in crate::cpu) fn round_sums<T: Element>(
    sums: &[f32],
    factor: f64,
    global: Option<GlobalScale>,
    out: &mut [T],
) {
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = scale_and_round(f64::from(*sum) * factor, &[global]);
    }
}

const _: () = {
    assert!(BLOCK == 2 * GROUP && int8::LANES == LANES && STEP == ELEMENTS / 2);
    let doubled = LARGEST_VECTOR_SCALE as u32 + 1;
    assert!((int8::ROUND * f32::from_bits(doubled << 23)).is_finite());
    assert!(!(int8::ROUND * f32::from_bits((doubled + 1) << 23)).is_finite());
};
