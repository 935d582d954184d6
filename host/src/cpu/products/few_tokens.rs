//! Products of quantized weights and few tokens: sixteen chunks at a time, one lane per chunk.
//!
//! Several rows and tokens share loads and decoding.

use microscale_formats::dot::{CHUNK, STREAMS, Sums};
use microscale_formats::weights::{self, GROUP};
use microscale_formats::{E4m3, E8m0, Format};

use super::activations::Aligned;
use super::rows::Row;
use crate::cpu::memory::prefetch::prefetch;
use crate::cpu::simd::products::{Products, TILE, chunk_of_lane, e4m3_over_256};
use crate::cpu::simd::{LANES, Lanes, Scalars};
use crate::element::{Dtype, Element};
use crate::elements::{Elements, by_dtype};

/// Tokens per pass over the weights.
pub(in crate::cpu) const TOKENS: usize = 8;

/// Tokens per decoding of weights. Their sums fit registers.
pub(in crate::cpu) const TOKEN_TILE: usize = 4;

/// Rows that share the loads of activations.
pub(in crate::cpu) const ROWS: usize = 4;

/// Prefetch distance in bytes of codes: about the latency of memory.
pub(in crate::cpu) const AHEAD: usize = 1024;

/// Sums by row and token.
pub(in crate::cpu) type RowSums = [[f64; TOKENS]; ROWS];

/// The activations of up to [`TOKENS`] tokens, packed.
pub(in crate::cpu) struct PackedTokens {
    token_tiles: Vec<TokenTile>,
}

/// The activations of up to [`TOKEN_TILE`] tokens.
struct TokenTile {
    tokens: usize,
    /// True if products with 128ths of weights are exact in f32.
    is_exact: bool,
    /// By tile, element of a chunk, token and [lane](chunk_of_lane).
    ///
    /// Zeros pad the last tile, and a fourth token next to three.
    tiles: Vec<Aligned>,
}

impl PackedTokens {
    pub(in crate::cpu) fn of(activations: Elements<'_>, cols: usize, tokens: usize) -> Self {
        let token_tiles = (0..tokens).step_by(TOKEN_TILE).map(|first| {
            let tokens = (tokens - first).min(TOKEN_TILE);
            let activations = activations.part(first * cols, tokens * cols);
            by_dtype!(Elements, activations => TokenTile::of(activations, cols, tokens))
        });
        Self { token_tiles: token_tiles.collect() }
    }
}

impl TokenTile {
    fn of<T: Element>(activations: &[T], cols: usize, tokens: usize) -> Self {
        let places = tokens.next_power_of_two();
        let mut tiles = vec![Aligned([0.0; LANES]); cols.div_ceil(CHUNK * LANES) * CHUNK * places];
        for token in 0..tokens {
            for (chunk, values) in activations[token * cols..][..cols].chunks(CHUNK).enumerate() {
                let (tile, lane) = (chunk / LANES * CHUNK, chunk_of_lane(chunk % LANES));
                for (i, x) in values.iter().enumerate() {
                    tiles[(tile + i) * places + token].0[lane] = x.to_f32();
                }
            }
        }
        Self { tokens: places, is_exact: T::DTYPE != Dtype::F32, tiles }
    }

    /// The activations of one token for one group of weights.
    fn group(&self, token: usize, group: usize) -> [f32; GROUP] {
        let (chunk, first) = (group * GROUP / CHUNK, group * GROUP % CHUNK);
        let first = chunk / LANES * CHUNK + first;
        std::array::from_fn(|i| self.tiles[(first + i) * self.tokens + token].0[chunk_of_lane(chunk % LANES)])
    }
}

/// The reference.
pub(in crate::cpu) fn reference(format: Format, row: Row<'_>, x: &PackedTokens, sums: &mut [f64; TOKENS]) {
    for (token_tile, sums) in x.token_tiles.iter().zip(sums.as_chunks_mut::<TOKEN_TILE>().0) {
        for (token, sum) in sums[..token_tile.tokens].iter_mut().enumerate() {
            let mut streams = [0.0; STREAMS];
            for (i, codes) in row.codes.chunks(GROUP / 2).enumerate() {
                let fraction = weights::fraction::<Scalars>(codes, &token_tile.group(token, i));
                let stream = &mut streams[i * GROUP / CHUNK % STREAMS];
                let scale = row.scales[i * GROUP / format.block()];
                *stream = match format {
                    Format::Nvfp4 => weights::add_nvfp4::<Scalars>(*stream, fraction, E4m3::from_bits(scale)),
                    _ => weights::add_mxfp4::<Scalars>(*stream, fraction, E8m0::from_bits(scale)),
                };
            }
            *sum = weights::total(Sums::of(streams.map(f64::from)));
        }
    }
}

/// The order that picks the scales of chunks 0 to 7 or 8 to 15 (`half`) for [`Products::bytes`].
///
/// Chunks have two scales here; `group` selects one.
const fn order(half: usize, group: usize) -> [u8; LANES] {
    let mut order = [0x80; LANES];
    let mut lane = 0;
    while lane < LANES {
        let chunk = chunk_of_lane(lane);
        if chunk / 8 == half {
            order[lane] = (chunk % 8 * 2 + group) as u8;
        }
        lane += 1;
    }
    order
}

/// The arithmetic that differs between the formats.
trait Scales {
    /// Scales per tile.
    const COUNT: usize;

    /// Twice the scales of the first group of each chunk, and of the second group.
    fn doubled<V: Products>(simd: V, bytes: &[u8]) -> [V::Number; 2];
}

struct Nvfp4;

impl Scales for Nvfp4 {
    const COUNT: usize = 2 * LANES;

    #[inline(always)]
    fn doubled<V: Products>(simd: V, bytes: &[u8]) -> [V::Number; 2] {
        const ORDERS: [[[u8; LANES]; 2]; 2] = [[order(0, 0), order(1, 0)], [order(0, 1), order(1, 1)]];
        let [first, second, ..] = bytes.as_chunks().0 else { return [simd.splat(0.0); 2] };
        let mut doubled = [simd.splat(0.0); 2];
        for group in 0..2 {
            let [low, high] = &ORDERS[group];
            let bytes = simd.or(simd.bytes(first, low), simd.bytes(second, high));
            doubled[group] = simd.mul(e4m3_over_256(simd, bytes), simd.splat(512.0));
        }
        doubled
    }
}

struct Mxfp4;

impl Scales for Mxfp4 {
    const COUNT: usize = LANES;

    #[inline(always)]
    fn doubled<V: Products>(simd: V, bytes: &[u8]) -> [V::Number; 2] {
        const ORDER: [u8; LANES] = {
            let mut order = [0; LANES];
            let mut lane = 0;
            while lane < LANES {
                order[lane] = chunk_of_lane(lane) as u8;
                lane += 1;
            }
            order
        };
        let bytes = simd.bytes(bytes.first_chunk().unwrap_or(&[0; LANES]), &ORDER);
        [simd.number(simd.shift_left(simd.add_bits(bytes, simd.splat_bits(1)), 23)); 2]
    }
}

/// The dot products of rows with each token's activations.
#[inline(always)]
pub(in crate::cpu) fn multiply<V: Products>(
    simd: V,
    format: Format,
    rows: &[Row<'_>],
    x: &PackedTokens,
    sums: &mut RowSums,
) {
    // NaN scales need the reference, and so do scales of MXFP4 whose double overflows.
    let doubled = |most: u8| if format == Format::Mxfp4 { most.saturating_add(1) } else { most };
    let common = |row: &Row<'_>| !format.is_nan_scale(doubled(row.max_scale()));
    if let Ok(all) = rows.try_into()
        && rows.iter().all(common)
    {
        return multiply_format::<V, ROWS>(simd, format, all, x, sums);
    }
    for (row, sums) in rows.iter().zip(sums) {
        if common(row) {
            multiply_format::<V, 1>(simd, format, [*row], x, std::array::from_mut(sums));
        } else {
            reference(format, *row, x, sums);
        }
    }
}

#[inline(always)]
fn multiply_format<V: Products, const R: usize>(
    simd: V,
    format: Format,
    rows: [Row<'_>; R],
    x: &PackedTokens,
    sums: &mut [[f64; TOKENS]; R],
) {
    match format {
        Format::Nvfp4 => multiply_token_tiles::<V, Nvfp4, R>(simd, rows, x, sums),
        _ => multiply_token_tiles::<V, Mxfp4, R>(simd, rows, x, sums),
    }
}

#[inline(always)]
fn multiply_token_tiles<V: Products, S: Scales, const R: usize>(
    simd: V,
    rows: [Row<'_>; R],
    x: &PackedTokens,
    sums: &mut [[f64; TOKENS]; R],
) {
    for (i, token_tile) in x.token_tiles.iter().enumerate() {
        match token_tile.tokens {
            1 => multiply_token_tile::<V, S, 1, R>(simd, rows, token_tile, sums, i * TOKEN_TILE),
            2 => multiply_token_tile::<V, S, 2, R>(simd, rows, token_tile, sums, i * TOKEN_TILE),
            _ => multiply_token_tile::<V, S, TOKEN_TILE, R>(simd, rows, token_tile, sums, i * TOKEN_TILE),
        }
    }
}

/// Multiplies rows with a tile of tokens. Two tiles of codes have one chunk per stream.
#[inline(always)]
fn multiply_token_tile<V: Products, S: Scales, const N: usize, const R: usize>(
    simd: V,
    rows: [Row<'_>; R],
    x: &TokenTile,
    sums: &mut [[f64; TOKENS]; R],
    first: usize,
) {
    let is_exact = x.is_exact;
    let mut streams = [[[simd.splat(0.0); N]; R]; 2];
    let mut tiles = x.tiles.chunks_exact(CHUNK * N);
    let whole = rows[0].codes.len() / (2 * TILE);
    for pair in 0..whole {
        for (i, streams) in streams.iter_mut().enumerate() {
            let Some(x) = tiles.next() else { break };
            let mut codes = [&[0; TILE]; R];
            let mut scales = [&[][..]; R];
            for r in 0..R {
                codes[r] = &rows[r].codes.as_chunks().0[2 * pair + i];
                scales[r] = &rows[r].scales[(2 * pair + i) * S::COUNT..];
                // The first token tile brings the weights into the cache.
                if first == 0 {
                    prefetch_ahead::<S>(rows[r], 2 * pair + i, R);
                }
            }
            if V::ROWS == R {
                tile::<V, S, N, R>(simd, streams, codes, scales, x, is_exact);
            } else {
                for r in 0..R {
                    let streams = std::array::from_mut(&mut streams[r]);
                    tile::<V, S, N, 1>(simd, streams, [codes[r]], [scales[r]], x, is_exact);
                }
            }
        }
    }
    for (i, x) in tiles.enumerate() {
        let mut filled = [([0; TILE], [0; 2 * LANES]); R];
        for r in 0..R {
            let codes = &rows[r].codes[(2 * whole + i) * TILE..];
            let scales = &rows[r].scales[(2 * whole + i) * S::COUNT..];
            let (codes, scales) = (&codes[..codes.len().min(TILE)], &scales[..scales.len().min(S::COUNT)]);
            copy_start(&mut filled[r].0, codes);
            copy_start(&mut filled[r].1, scales);
        }
        let mut codes = [&[0; TILE]; R];
        let mut scales = [&[][..]; R];
        for r in 0..R {
            (codes[r], scales[r]) = (&filled[r].0, &filled[r].1);
        }
        tile::<V, S, N, R>(simd, &mut streams[i], codes, scales, x, is_exact);
    }
    for r in 0..R {
        for token in 0..N {
            sums[r][first + token] =
                total(simd.store(streams[0][r][token]), simd.store(streams[1][r][token]));
        }
    }
}

/// Copies `from` to the start of `to`, by 16 bytes: a call of `memcpy` takes longer for short rows.
#[inline(always)]
fn copy_start(to: &mut [u8], from: &[u8]) {
    let (to, to_rest) = to[..from.len()].as_chunks_mut::<16>();
    let (from, from_rest) = from.as_chunks::<16>();
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = *from;
    }
}

/// Prefetches the codes [`AHEAD`] bytes after a tile, and the scales of the next `rows` rows.
///
/// At the end of a row, the codes are the start of the next `rows` rows. Hardware prefetchers do
/// not run far enough ahead in this many streams.
#[inline(always)]
fn prefetch_ahead<S: Scales>(row: Row<'_>, tile: usize, rows: usize) {
    let ahead = tile * TILE + AHEAD;
    let others = if ahead < row.codes.len() { 0 } else { (rows - 1) * row.codes.len() };
    prefetch(row.codes.as_ptr().wrapping_add(ahead + others), TILE);
    prefetch(row.scales.as_ptr().wrapping_add(rows * row.scales.len() + tile * S::COUNT), 1);
}

#[inline(always)]
fn tile<V: Products, S: Scales, const N: usize, const R: usize>(
    simd: V,
    streams: &mut [[V::Number; N]; R],
    codes: [&[u8; TILE]; R],
    bytes: [&[u8]; R],
    x: &[Aligned],
    is_exact: bool,
) {
    let zeros = simd.splat(0.0);
    let (mut scales, mut columns) = ([[zeros; R]; 2], [simd.columns(codes[0]); R]);
    for r in 0..R {
        [scales[0][r], scales[1][r]] = S::doubled(simd, bytes[r]);
        columns[r] = simd.columns(codes[r]);
    }
    let x = &x[..CHUNK * N];
    for (group, scales) in scales.into_iter().enumerate() {
        let mut sums = [[zeros; N]; R];
        for column in 2 * group..2 * group + 2 {
            let mut fractions = [[zeros; 8]; R];
            for r in 0..R {
                fractions[r] = simd.fractions(columns[r][column]);
            }
            for i in 0..8 {
                for token in 0..N {
                    let x = simd.load(&x[(8 * column + i) * N + token].0);
                    for r in 0..R {
                        // Both are equal if the product is exact.
                        sums[r][token] = if V::FUSED || !is_exact {
                            simd.fma(fractions[r][i], x, sums[r][token])
                        } else {
                            simd.add(simd.mul(fractions[r][i], x), sums[r][token])
                        };
                    }
                }
            }
        }
        for r in 0..R {
            for token in 0..N {
                streams[r][token] = simd.fma(sums[r][token], scales[r], streams[r][token]);
            }
        }
    }
}

/// [`weights::total`] of streams in the order of [lanes](chunk_of_lane).
#[inline(always)]
fn total(first: Lanes<f32>, second: Lanes<f32>) -> f64 {
    let mut sums = [0.0; LANES];
    for lane in 0..LANES {
        sums[lane] = f64::from(first[lane]) + f64::from(second[lane]);
    }
    // Adjacent lanes hold chunks that are 4 apart.
    let mut quarters = [0.0; 4];
    for i in 0..4 {
        quarters[i] = (sums[4 * i] + sums[4 * i + 2]) + (sums[4 * i + 1] + sums[4 * i + 3]);
    }
    64.0 * ((quarters[0] + quarters[2]) + (quarters[1] + quarters[3]))
}

const _: () = assert!(TILE == LANES * CHUNK / 2 && STREAMS == 2 * LANES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_added_in_the_order_of_the_definition() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..100 {
            let streams: [f32; STREAMS] =
                std::array::from_fn(|_| (random.f32() - 0.5) * 2f32.powi(random.i32(-60..60)));
            let lanes = |first: usize| std::array::from_fn(|lane| streams[first + chunk_of_lane(lane)]);
            let expected = weights::total(Sums::of(streams.map(f64::from)));
            assert_eq!(total(lanes(0), lanes(LANES)), expected);
        }
    }
}
