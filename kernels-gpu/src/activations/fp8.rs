//! The output FP8: E4M3 codes under f32 scales.

use core::hint::cold_path;

use microscale_formats::activations::{GROUP, encode_fp8, group_scale, token_scale};
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, nvfp4};
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::RowScale;

use super::one_by_one::{chunk_of_step, element, finite_amax_of_chunk, rolled, select};
use super::output::{Memory, Output, Piece};
use super::row::Row;
use super::source::{column, step};
use crate::access::MOST_STEPS;
use crate::arithmetic::Ptx;
use crate::dtype::{Chunk, Dtype};
#[cfg(microscale_sm90)]
use crate::hardware::ptx::e4m3x2;
use crate::hardware::warp;

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
    unsafe fn store<D: Dtype>(piece: &Piece<'_>, row_scale: &f32) {
        let params = piece.params;
        let per_group = params.row_scale >= RowScale::PerGroup as u32;
        let codes =
            piece.memory.codes.wrapping_add((u64::from(piece.row.number) * params.code_stride) as usize);
        let exists = |j: u32| piece.row.exists && column::<D>(piece.number, j) < params.cols;
        let mut scales = [*row_scale; MOST_STEPS];
        let mut usual = true;
        for j in 0..D::STEPS {
            let chunk = &piece.chunks[j as usize];
            let [a, b, c, d] = *chunk;
            let most = D::largest(D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)));
            if per_group {
                // SAFETY: the same contract.
                scales[j as usize] =
                    unsafe { group::<D>(piece, chunk, most, column::<D>(piece.number, j), exists(j)) };
            }
            usual &= is_usual::<D>(most, scales[j as usize]);
        }
        let usual = warp::ballot(!usual) == 0;
        if usual && params.aligned != 0 {
            for j in 0..D::STEPS {
                let packed = encode::<D>(&piece.chunks[j as usize], scales[j as usize]);
                if exists(j) {
                    let start = codes.wrapping_add(column::<D>(piece.number, j) as usize);
                    // SAFETY: the columns exist, and this lane has them. Rows of codes start on 8
                    // bytes, and columns are a multiple of 8.
                    unsafe { *start.cast::<u64>() = packed };
                }
            }
            return;
        }
        cold_path();
        let [a, b, c, d, ..] = scales.map(f32::to_bits);
        rolled!(j below D::STEPS => {
            let scale = f32::from_bits(select(&[a, b, c, d], j));
            let (chunk, column) = (chunk_of_step(&piece.chunks, j), column::<D>(piece.number, j));
            rolled!(i below D::CHUNK => {
                if piece.row.exists && column + i < params.cols {
                    let code = encode_fp8(element::<D>(&chunk, i), scale);
                    // SAFETY: the column exists, and this lane has it.
                    unsafe { *codes.add((column + i) as usize) = code.to_bits() };
                }
            });
        });
    }
}

/// The scale of a chunk's group, which the group's first lane stores.
///
/// # Safety
/// The contract of the kernels in [`super`].
#[inline(always)]
unsafe fn group<D: Dtype>(piece: &Piece<'_>, chunk: &Chunk, most: u32, column: u32, exists: bool) -> f32 {
    let params = piece.params;
    let lanes = GROUP as u32 / D::CHUNK;
    let mut amax = D::magnitude_to_f32_bits(most);
    if warp::ballot(most >= D::INFINITY) != 0 {
        cold_path();
        amax = finite_amax_of_chunk::<D>(chunk);
    }
    let mut distance = lanes / 2;
    while distance > 0 {
        amax = amax.max(warp::shuffle_xor(amax, distance));
        distance /= 2;
    }
    let power_of_two = params.row_scale == RowScale::PowerOfTwoPerGroup as u32;
    let scale = group_scale(f32::from_bits(amax), power_of_two, over_most);
    if exists && warp::lane() % lanes == 0 {
        let group = u64::from(column / GROUP as u32);
        let offset = u64::from(piece.row.number) * params.scale_stride + group * params.group_stride;
        // SAFETY: each group of a row that exists has a scale.
        unsafe { *piece.memory.scales.cast::<f32>().add(offset as usize) = scale };
    }
    scale
}

/// x / 448, rounded, for an x of 16 bits or [`LEAST_GROUP_AMAX`]. A division would be a function.
///
/// [`LEAST_GROUP_AMAX`]: microscale_formats::activations::LEAST_GROUP_AMAX
#[inline(always)]
pub(crate) fn over_most(x: f32) -> f32 {
    nvfp4::quotient::<Ptx>(x, nvfp4::reciprocal::<Ptx>(E4m3::MAX), E4m3::MAX, true)
}

/// The codes of a chunk, the first in the lowest byte, for finite values and a scale near 1.
#[inline(always)]
fn encode<D: Dtype>(chunk: &Chunk, scale: f32) -> u64 {
    let inverse = nvfp4::reciprocal_from_below::<Ptx>(scale);
    let mut packed = 0;
    for i in 0..D::CHUNK / 2 {
        let [low, high] =
            [2 * i, 2 * i + 1].map(|i| nvfp4::quotient::<Ptx>(D::widen(chunk, i), inverse, scale, true));
        #[cfg(microscale_sm90)]
        let pair = e4m3x2(high, low);
        #[cfg(not(microscale_sm90))]
        let pair = u32::from(E4m3::from_f32(low).to_bits()) | u32::from(E4m3::from_f32(high).to_bits()) << 8;
        packed |= u64::from(pair) << (16 * i);
    }
    packed
}

/// The codes of a chunk under any scale. All lanes of the warp call it.
#[inline(always)]
pub(crate) fn encode_any<D: Dtype>(chunk: &Chunk, scale: f32) -> u64 {
    let [a, b, c, d] = *chunk;
    let most = D::largest(D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)));
    if warp::ballot(!is_usual::<D>(most, scale)) == 0 {
        return encode::<D>(chunk, scale);
    }
    cold_path();
    let mut packed = 0;
    rolled!(i below D::CHUNK => {
        packed |= u64::from(encode_fp8(element::<D>(chunk, i), scale).to_bits()) << (8 * i);
    });
    packed
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
