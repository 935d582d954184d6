//! The output FP8: E4M3 codes under f32 scales.

use core::hint::cold_path;

use microscale_formats::activations::{GROUP, encode_fp8, group_scale, token_scale};
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, nvfp4};
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::RowScale;

use super::amax::{most_of_chunk, most_of_piece};
use super::one_by_one::{chunk_of_step, element, finite_amax_of_chunk, rolled};
use super::output::{Memory, Output, Piece};
use super::row::Row;
use super::source::{column, step};
use crate::access::MOST_STEPS;
use crate::arithmetic::Ptx;
use crate::dtype::{Chunk, Dtype};
#[cfg(microscale_sm90)]
use crate::hardware::ptx::e4m3x4;
use crate::hardware::{ptx, warp};

/// E4M3 under f32 scales.
pub(super) struct Fp8Output;

impl Output for Fp8Output {
    type Scale = f32;
    const PER_TOKEN: bool = true;
    const PER_TENSOR: bool = true;
    #[cfg(microscale_sm90)]
    const BEFORE_PRODUCTS: bool = true;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(
        &self,
        params: &ActivationParams,
        memory: &Memory,
        row: &Row,
        amax: f32,
        stores: bool,
    ) -> f32 {
        if params.row_scale != RowScale::PerToken as u32 {
            // SAFETY: the same contract.
            return unsafe { row.given(params, memory.row_scales) };
        }
        let scale = token_scale(amax);
        if stores {
            // SAFETY: there is a scale for each row that exists.
            unsafe { *memory.row_scales.add(row.number as usize) = scale };
        }
        scale
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(&self, piece: &Piece<'_>, row_scale: &f32) {
        let (params, row, cols) = (piece.params, u64::from(piece.row.number), piece.params.cols);
        let codes = piece.memory.codes.wrapping_add((row * params.code_stride) as usize);
        let scales = piece.memory.scales.cast::<f32>().wrapping_add((row * params.scale_stride) as usize);
        let stores_scale = per_group(piece) && warp::lane() % LANES_OF_GROUP == 0;
        encode_piece::<D>(
            piece,
            *row_scale,
            LINEAR,
            #[inline(always)]
            |j, words, scale| {
                let column = column::<D>(piece.number, j);
                if !piece.row.exists || column >= cols {
                    return;
                }
                let packed = u64::from(words[0]) | u64::from(words[1]) << 32;
                let start = codes.wrapping_add(column as usize);
                // SAFETY: the columns exist, and this lane has them. Rows of codes start on 8 bytes
                // and columns are a multiple of 8 if they are aligned. Each group has a scale.
                unsafe {
                    if stores_scale {
                        let group = u64::from(column / GROUP as u32);
                        *scales.wrapping_add((group * params.group_stride) as usize) = scale;
                    }
                    if params.aligned != 0 {
                        *start.cast::<u64>() = packed;
                        return;
                    }
                    cold_path();
                    rolled!(i below D::CHUNK.min(cols - column) => {
                        *start.wrapping_add(i as usize) = (packed >> (8 * i)) as u8;
                    });
                }
            },
        );
    }
}

/// Lanes that have a chunk each of the same group.
pub(super) const LANES_OF_GROUP: u32 = GROUP as u32 / 8;

/// Scales are of groups of columns.
#[inline(always)]
fn per_group(piece: &Piece<'_>) -> bool {
    piece.params.row_scale >= RowScale::PerGroup as u32
}

/// An order of a chunk's codes in two words.
type Order = [[u32; 4]; 2];
pub(super) const LINEAR: Order = [[0, 1, 2, 3], [4, 5, 6, 7]];
/// Even codes and odd ones.
#[cfg(microscale_wgmma)]
pub(super) const EVEN_ODD: Order = [[0, 2, 4, 6], [1, 3, 5, 7]];

/// Gives `store` the number, the codes and the scale of each of a lane's chunks. All lanes of the
/// warp call it.
#[inline(always)]
pub(super) fn encode_piece<D: Dtype>(
    piece: &Piece<'_>,
    row_scale: f32,
    order: Order,
    store: impl Fn(u32, [u32; 2], f32),
) {
    if per_group(piece) {
        let mut scales = [0.0; MOST_STEPS];
        let mut usual = true;
        for j in 0..D::STEPS as usize {
            let most = most_of_chunk::<D>(&piece.chunks[j]);
            scales[j] = scale_of_group::<D>(piece.params, &piece.chunks[j], most);
            usual &= is_usual::<D>(most, scales[j]);
        }
        if warp::ballot(!usual) == 0 {
            for j in 0..D::STEPS {
                // Opaque, so that LLVM does not widen all values for both cases at once, which
                // takes 32 registers.
                let [a, b, c, d] = piece.chunks[j as usize];
                let chunk = [ptx::opaque(a), ptx::opaque(b), ptx::opaque(c), ptx::opaque(d)];
                let scale = scales[j as usize];
                store(j, encode::<D>(&chunk, &Divisor::new(scale), order), scale);
            }
            return;
        }
    } else {
        let usual = is_usual::<D>(most_of_piece::<D>(&piece.chunks), row_scale);
        if warp::ballot(!usual) == 0 {
            // One scale takes one reciprocal.
            let divisor = Divisor::new(row_scale);
            for j in 0..D::STEPS {
                store(j, encode::<D>(&piece.chunks[j as usize], &divisor, order), row_scale);
            }
            return;
        }
    }
    cold_path();
    rolled!(j below D::STEPS => {
        let chunk = chunk_of_step(&piece.chunks, j);
        let scale = if per_group(piece) {
            scale_of_group::<D>(piece.params, &chunk, most_of_chunk::<D>(&chunk))
        } else {
            row_scale
        };
        store(j, encode_one_by_one::<D>(&chunk, scale, order), scale);
    });
}

/// The scale of a chunk's group, for the chunk's largest magnitude. All lanes of the warp call it.
#[inline(always)]
fn scale_of_group<D: Dtype>(params: &ActivationParams, chunk: &Chunk, most: u32) -> f32 {
    let mut amax = D::magnitude_to_f32_bits(most);
    if warp::ballot(most >= D::INFINITY) != 0 {
        cold_path();
        amax = finite_amax_of_chunk::<D>(chunk);
    }
    let mut distance = LANES_OF_GROUP / 2;
    while distance > 0 {
        amax = amax.max(warp::shuffle_xor(amax, distance));
        distance /= 2;
    }
    let power_of_two = params.row_scale == RowScale::PowerOfTwoPerGroup as u32;
    group_scale(f32::from_bits(amax), power_of_two, over_most)
}

/// x / 448, rounded, for an x of 16 bits or [`LEAST_GROUP_AMAX`]. A division would be a function.
///
/// [`LEAST_GROUP_AMAX`]: microscale_formats::activations::LEAST_GROUP_AMAX
#[inline(always)]
fn over_most(x: f32) -> f32 {
    nvfp4::quotient::<Ptx>(x, nvfp4::reciprocal::<Ptx>(E4m3::MAX), E4m3::MAX, true)
}

/// A scale and its reciprocal, to divide by.
struct Divisor {
    scale: f32,
    inverse: [f32; 2],
}

impl Divisor {
    #[inline(always)]
    fn new(scale: f32) -> Self {
        Self { scale, inverse: nvfp4::reciprocal_from_below::<Ptx>(scale) }
    }
}

/// The codes of a chunk.
#[inline(always)]
fn encode<D: Dtype>(chunk: &Chunk, divisor: &Divisor, [first, second]: Order) -> [u32; 2] {
    let &Divisor { scale, inverse } = divisor;
    let word = |[a, b, c, d]: [u32; 4]| {
        let quotient = |i| nvfp4::quotient::<Ptx>(D::widen(chunk, i), inverse, scale, true);
        e4m3x4(quotient(a), quotient(b), quotient(c), quotient(d))
    };
    [word(first), word(second)]
}

/// Four values rounded to E4M3, ties to even, saturating: the first one goes to the lowest byte.
#[cfg(not(microscale_sm90))]
#[inline(always)]
fn e4m3x4(a: f32, b: f32, c: f32, d: f32) -> u32 {
    let code = |x| u32::from(E4m3::from_f32(x).to_bits());
    code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24
}

/// The codes of a chunk under any scale, the first one in the lowest byte. All lanes of the warp
/// call it.
#[inline(always)]
pub(super) fn encode_any<D: Dtype>(chunk: &Chunk, scale: f32) -> u64 {
    let [low, high] = if warp::ballot(!is_usual::<D>(most_of_chunk::<D>(chunk), scale)) == 0 {
        encode::<D>(chunk, &Divisor::new(scale), LINEAR)
    } else {
        cold_path();
        encode_one_by_one::<D>(chunk, scale, LINEAR)
    };
    u64::from(low) | u64::from(high) << 32
}

/// [`encode`] one by one, for any values and scale.
#[inline(always)]
fn encode_one_by_one<D: Dtype>(chunk: &Chunk, scale: f32, order: Order) -> [u32; 2] {
    let mut codes = 0;
    rolled!(i below D::CHUNK => {
        codes |= u64::from(encode_fp8(element::<D>(chunk, i), scale).to_bits()) << (8 * i);
    });
    order.map(|[a, b, c, d]| {
        let selector = a | b << 4 | c << 8 | d << 12;
        ptx::permute(codes as u32, (codes >> 32) as u32, selector)
    })
}

/// Whether [`encode`] can do it: beyond these magnitudes and scales the quotient's steps may
/// underflow or overflow.
#[inline(always)]
fn is_usual<D: Dtype>(most: u32, scale: f32) -> bool {
    D::magnitude_to_f32_bits(most) < const { power_of_two(60).to_bits() }
        && scale >= power_of_two(-60)
        && scale <= power_of_two(60)
}

const _: () = assert!(step::<crate::dtype::Bf16>() as usize % GROUP == 0 && E4m3::MAX == 448.0);
