//! Products of quantized weights and activations of 16 bits: sixteen chunks at a time, a lane a chunk, for up to eight tokens.

use microscale_formats::dot::{CHUNK, STREAMS, Sums};
use microscale_formats::weights::{self, GROUP};
use microscale_formats::{E4m3, E8m0};

use super::Scalars;
use super::gemv::{Row, e4m3_over_256, each_row, finished, nan};
use super::isa::Isa;
use super::products::{Products, TILE, chunk_of_lane};
use super::vector::{LANES, Lanes};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::recipe::Format;
use crate::tensor::QuantizedTensor;

/// Tokens that share one reading of the weights.
pub(super) const TOKENS: usize = 8;

/// See [`crate::gemv_weights`].
pub fn gemv_weights<T: Activation>(
    weights: &QuantizedTensor,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    gemv_weights_with(Isa::best(), weights, activations, tokens, out)
}

/// [`gemv_weights`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`gemv_weights`].
pub fn gemv_weights_with<T: Activation>(
    isa: Isa,
    weights: &QuantizedTensor,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
    let cols = weights.cols();
    if rows == 0 {
        return Ok(());
    }
    let globals = [weights.global_scale()];
    let mut by_row = vec![T::default(); rows * tokens.min(TOKENS)];
    for (block, out) in out[..tokens * rows].chunks_mut(TOKENS * rows).enumerate() {
        let tokens = out.len() / rows;
        let activations = &activations[block * TOKENS * cols..][..tokens * cols];
        let prepared = Prepared::of(activations, cols, tokens);
        let by_row = &mut by_row[..rows * tokens];
        each_row(weights, by_row, tokens, |row, out| {
            let mut sums = [0.0; TOKENS];
            isa.weigh(weights.format(), Row::of(weights, row), &prepared, &mut sums);
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = finished(sum, &globals);
            }
        });
        for (token, out) in out.chunks_mut(rows).enumerate() {
            for (out, row) in out.iter_mut().zip(by_row.chunks(tokens)) {
                *out = row[token];
            }
        }
    }
    Ok(())
}

/// As many activations as a vector has lanes, where no vector is in two cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Aligned(Lanes<f32>);

/// The activations of some tokens.
pub(super) struct Prepared {
    tokens: usize,
    /// By tile, element of a chunk, token and [lane](chunk_of_lane). The last tile is filled up with zeros.
    tiles: Vec<Aligned>,
}

impl Prepared {
    fn of<T: Activation>(activations: &[T], cols: usize, tokens: usize) -> Self {
        let mut tiles = vec![Aligned([0.0; LANES]); cols.div_ceil(CHUNK * LANES) * CHUNK * tokens];
        for token in 0..tokens {
            for (chunk, values) in activations[token * cols..][..cols].chunks(CHUNK).enumerate() {
                let (tile, lane) = (chunk / LANES * CHUNK, chunk_of_lane(chunk % LANES));
                for (i, x) in values.iter().enumerate() {
                    tiles[(tile + i) * tokens + token].0[lane] = x.to_f32();
                }
            }
        }
        Self { tokens, tiles }
    }

    /// A token's activations for a group of weights.
    fn group(&self, token: usize, group: usize) -> [f32; GROUP] {
        let (chunk, first) = (group * GROUP / CHUNK, group * GROUP % CHUNK);
        let first = chunk / LANES * CHUNK + first;
        std::array::from_fn(|i| self.tiles[(first + i) * self.tokens + token].0[chunk_of_lane(chunk % LANES)])
    }
}

/// The definition.
pub(super) fn reference(format: Format, row: Row<'_>, x: &Prepared, sums: &mut [f64; TOKENS]) {
    for (token, sum) in sums[..x.tokens].iter_mut().enumerate() {
        let mut streams = [0.0; STREAMS];
        for (i, codes) in row.codes.chunks(GROUP / 2).enumerate() {
            let eighth = weights::eighth(codes, &x.group(token, i));
            let stream = i * GROUP / CHUNK % STREAMS;
            let scale = row.scales[i * GROUP / format.block()];
            streams[stream] = match format {
                Format::Nvfp4 => {
                    weights::add_nvfp4::<Scalars>(streams[stream], eighth, E4m3::from_bits(scale))
                }
                _ => weights::add_mxfp4::<Scalars>(streams[stream], eighth, E8m0::from_bits(scale)),
            };
        }
        *sum = weights::total(Sums::of(streams.map(f64::from)));
    }
}

/// The first eight chunks' bytes of a tile's scales, or the others', where there are two a chunk: the first or the second.
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

/// What the formats do differently.
trait Scales {
    /// Scales of a tile.
    const COUNT: usize;

    /// Twice the scales of the chunks' first groups, and of the second.
    fn doubled<V: Products>(bytes: &[u8]) -> [V::Number; 2];
}

struct Nvfp4;

impl Scales for Nvfp4 {
    const COUNT: usize = 2 * LANES;

    #[inline(always)]
    fn doubled<V: Products>(bytes: &[u8]) -> [V::Number; 2] {
        const ORDERS: [[[u8; LANES]; 2]; 2] = [[order(0, 0), order(1, 0)], [order(0, 1), order(1, 1)]];
        let [first, second, ..] = bytes.as_chunks().0 else { return [V::splat(0.0); 2] };
        let mut doubled = [V::splat(0.0); 2];
        for group in 0..2 {
            let [low, high] = &ORDERS[group];
            let bytes = V::or(V::bytes(first, low), V::bytes(second, high));
            doubled[group] = V::mul(e4m3_over_256::<V>(bytes), V::splat(512.0));
        }
        doubled
    }
}

struct Mxfp4;

impl Scales for Mxfp4 {
    const COUNT: usize = LANES;

    #[inline(always)]
    fn doubled<V: Products>(bytes: &[u8]) -> [V::Number; 2] {
        const ORDER: [u8; LANES] = {
            let mut order = [0; LANES];
            let mut lane = 0;
            while lane < LANES {
                order[lane] = chunk_of_lane(lane) as u8;
                lane += 1;
            }
            order
        };
        let bytes = V::bytes(bytes.first_chunk().unwrap_or(&[0; LANES]), &ORDER);
        [V::number(V::shift_left(V::add_bits(bytes, V::splat_bits(1)), 23)); 2]
    }
}

/// The sums of a row's products with each token's activations.
#[inline(always)]
pub(super) fn weigh<V: Products>(format: Format, row: Row<'_>, x: &Prepared, sums: &mut [f64; TOKENS]) {
    // Scales that are NaN, or whose double is no number.
    if row.most() >= nan(format) - u8::from(format == Format::Mxfp4) {
        return reference(format, row, x, sums);
    }
    match format {
        Format::Nvfp4 => of_format::<V, Nvfp4>(row, x, sums),
        _ => of_format::<V, Mxfp4>(row, x, sums),
    }
}

#[inline(always)]
fn of_format<V: Products, S: Scales>(row: Row<'_>, x: &Prepared, sums: &mut [f64; TOKENS]) {
    macro_rules! by_tokens {
        ($($tokens:literal)*) => {
            match x.tokens {
                $($tokens => of_tokens::<V, S, $tokens>(row, &x.tiles, sums),)*
                _ => {}
            }
        };
    }
    by_tokens!(1 2 3 4 5 6 7 8);
}

/// Two tiles have a chunk for each stream.
#[inline(always)]
fn of_tokens<V: Products, S: Scales, const N: usize>(row: Row<'_>, x: &[Aligned], sums: &mut [f64; TOKENS]) {
    let mut streams = [[V::splat(0.0); N]; 2];
    let (codes, last_codes) = row.codes.as_chunks::<{ 2 * TILE }>();
    let (scales, last_scales) = row.scales.split_at(codes.len() * 2 * S::COUNT);
    let (pairs, last) = x.split_at(codes.len() * 2 * CHUNK * N);
    for ((codes, scales), x) in
        codes.iter().zip(scales.chunks_exact(2 * S::COUNT)).zip(pairs.chunks_exact(2 * CHUNK * N))
    {
        for i in 0..2 {
            let codes = &codes.as_chunks().0[i];
            streams[i] = tile::<V, S, N>(streams[i], codes, &scales[i * S::COUNT..], &x[i * CHUNK * N..]);
        }
    }
    if !last.is_empty() {
        let (mut codes, mut scales) = ([0; 2 * TILE], [0; 4 * LANES]);
        codes[..last_codes.len()].copy_from_slice(last_codes);
        scales[..last_scales.len()].copy_from_slice(last_scales);
        for i in 0..2 {
            if let Some(x) = last.get(i * CHUNK * N..).filter(|x| !x.is_empty()) {
                let codes = &codes.as_chunks().0[i];
                streams[i] = tile::<V, S, N>(streams[i], codes, &scales[i * S::COUNT..], x);
            }
        }
    }
    for token in 0..N {
        sums[token] = total(V::store(streams[0][token]), V::store(streams[1][token]));
    }
}

#[inline(always)]
fn tile<V: Products, S: Scales, const N: usize>(
    mut streams: [V::Number; N],
    codes: &[u8; TILE],
    scales: &[u8],
    x: &[Aligned],
) -> [V::Number; N] {
    let scales = S::doubled::<V>(scales);
    let columns = V::columns(codes);
    let x = &x[..CHUNK * N];
    for group in 0..2 {
        let mut sums = [V::splat(0.0); N];
        for column in 0..2 {
            let eighths = V::eighths(columns[2 * group + column]);
            for i in 0..8 {
                for token in 0..N {
                    let x = V::load(&x[(16 * group + 8 * column + i) * N + token].0);
                    // Exact, so that it is the same.
                    sums[token] = if V::FUSED {
                        V::fma(eighths[i], x, sums[token])
                    } else {
                        V::add(V::mul(eighths[i], x), sums[token])
                    };
                }
            }
        }
        for token in 0..N {
            streams[token] = V::fma(sums[token], scales[group], streams[token]);
        }
    }
    streams
}

/// [`weights::total`] of streams that lie as [lanes](chunk_of_lane) do.
#[inline(always)]
fn total(first: Lanes<f32>, second: Lanes<f32>) -> f64 {
    let mut sums = [0.0; LANES];
    for lane in 0..LANES {
        sums[lane] = f64::from(first[lane]) + f64::from(second[lane]);
    }
    // Four lanes in a row are chunks 4 apart.
    let mut quarters = [0.0; 4];
    for i in 0..4 {
        quarters[i] = (sums[4 * i] + sums[4 * i + 2]) + (sums[4 * i + 1] + sums[4 * i + 3]);
    }
    4.0 * ((quarters[0] + quarters[2]) + (quarters[1] + quarters[3]))
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
