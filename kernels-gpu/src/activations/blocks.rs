//! Outputs in block formats: a piece of a row to codes and scale bytes.

use core::hint::cold_path;
use core::marker::PhantomData;
use core::ptr;

use microscale_formats::layout::{swizzled_8x4_offset, swizzled_offset};
use microscale_formats::nvfp4::Arithmetic;
use microscale_formats::plan::NvPlan;
use microscale_formats::{ActivationLayout, E2m1, E4m3, block};
use microscale_kernels_abi::activations::RowScale;
use microscale_kernels_abi::{ActivationParams, MxOptions};

use super::one_by_one::{chunk_of_step, element, rolled};
use super::output::{Memory, Output, Piece, Place};
use super::row::Row;
use crate::access::{self, Lane, MOST_OWNED, MOST_STEPS};
use crate::dtype::{Chunk, Dtype};
use crate::format::{EVEN, Element, Factor, Format, Mx, Nv};
use crate::hardware::warp;
use crate::quantize::reduce_transposed;

/// MXFP8 or MXFP4.
pub(super) struct MxOutput<E>(PhantomData<E>);

pub(super) const MXFP8: MxOutput<E4m3> = MxOutput(PhantomData);
pub(super) const MXFP4: MxOutput<E2m1> = MxOutput(PhantomData);

impl<E: Element> Output for MxOutput<E> {
    type Scale = Mx<E, EVEN>;
    const PER_TOKEN: bool = false;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(
        &self,
        params: &ActivationParams,
        _: &Memory,
        _: &Row,
        _: f32,
        _: bool,
    ) -> Self::Scale {
        let ActivationParams { mantissa_addend, .. } = *params;
        Mx::new(MxOptions { mantissa_addend, negative_zero: 0, saturate_non_finite: 0, ties: 0 })
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(&self, piece: &Piece<'_>, format: &Self::Scale) {
        // SAFETY: the same contract.
        unsafe { store::<D, _, _>(&piece.chunks, piece.number, piece, format) }
    }
}

/// NVFP4 with Transformer Engine's numerics.
pub(super) struct Nvfp4Output;

impl Output for Nvfp4Output {
    type Scale = Nv;
    const PER_TOKEN: bool = true;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(
        &self,
        params: &ActivationParams,
        memory: &Memory,
        row: &Row,
        amax: f32,
        stores: bool,
    ) -> Nv {
        const NUMERICS: Arithmetic = Arithmetic::TRANSFORMER_ENGINE;
        let divisor = if params.row_scale == RowScale::PerToken as u32 {
            let divisor = NUMERICS.global_scale(amax, |x| x).value();
            if stores {
                // SAFETY: there is a scale for each row that exists.
                unsafe { *memory.row_scales.add(row.number as usize) = 1.0 / divisor };
            }
            divisor
        } else {
            // SAFETY: the same contract.
            let given = unsafe { row.given(params, memory.row_scales) };
            if params.multiplies != 0 { 1.0 / given } else { given }
        };
        Nv::new(NvPlan::new(NUMERICS, divisor), 0)
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(&self, piece: &Piece<'_>, format: &Nv) {
        // SAFETY: the same contract.
        unsafe { store::<D, _, _>(&piece.chunks, piece.number, piece, format) }
    }
}

impl Place for Piece<'_> {
    #[inline(always)]
    fn codes(&self, block: u32, bytes: u32) -> *mut u8 {
        if !self.row.exists || block >= self.params.blocks {
            return ptr::null_mut();
        }
        let row = u64::from(self.row.number) * self.params.code_stride;
        self.memory.codes.wrapping_add(row as usize).wrapping_add((block * bytes) as usize)
    }

    #[inline(always)]
    fn scale(&self, block: u32) -> *mut u8 {
        const ROWS_128: u32 = ActivationLayout::Swizzled128x4 as u32;
        const ROWS_8: u32 = ActivationLayout::Swizzled8x4 as u32;
        let (params, row) = (self.params, self.row.scale_row);
        if !self.row.has_scales || block >= params.padded_blocks {
            return ptr::null_mut();
        }
        let [row, block, tiles] = [row, block, params.tiles_per_row()].map(u64::from);
        let offset = match params.tile_rows {
            ROWS_128 => swizzled_offset(row, block, tiles),
            ROWS_8 => swizzled_8x4_offset(row, block, tiles),
            _ => row * u64::from(params.padded_blocks) + block,
        };
        self.memory.scales.wrapping_add(offset as usize)
    }
}

/// Quantizes a piece of a row, and stores its codes and scales.
///
/// # Safety
/// The place has the addresses of the piece's blocks in global memory. Only one warp stores a
/// block. Codes start on 4 bytes.
#[inline(always)]
pub(super) unsafe fn store<D: Dtype, F: Format, P: Place>(
    chunks: &[Chunk; MOST_STEPS],
    piece: u32,
    place: &P,
    format: &F,
) {
    let lanes = const { access::lanes::<D, F>() };
    let owned = const { access::owned::<F>() };
    let lane = Lane::of_piece::<D, F>(u64::from(piece));
    let amax = reduce_transposed::<D, F>(chunks).map(D::magnitude_to_f32_bits);
    let mut factors: [Factor; MOST_OWNED] = [[0; 3]; MOST_OWNED];
    let mut bytes = [0; MOST_OWNED];
    let mut usual = true;
    for k in 0..owned as usize {
        let scaled = format.usual_scale::<D>(amax[k]);
        usual &= scaled.in_range;
        (bytes[k], factors[k]) = (scaled.byte, scaled.factor);
    }
    let mut in_range = true;
    let mut clipped = false;
    if warp::ballot(!usual) != 0 {
        cold_path();
        for k in 0..owned as usize {
            let scaled = format.scale::<D>(amax[k]);
            in_range &= scaled.in_range;
            clipped |= scaled.events.clipped;
            (bytes[k], factors[k]) = (scaled.byte, scaled.factor);
        }
    }
    let by_reference = warp::ballot(!in_range) != 0;
    if by_reference {
        cold_path();
        for k in 0..owned as usize {
            let finite = !block::is_non_finite(amax[k]);
            bytes[k] = if finite { format.define::<D>(amax[k]).0 } else { F::NAN_SCALE };
        }
    }
    for k in 0..owned {
        let scale = place.scale(lane.own_block::<D, F>(k) as u32);
        if !scale.is_null() {
            // SAFETY: the block has a scale, which this lane stores.
            unsafe { *scale = bytes[k as usize] };
        }
    }
    if by_reference {
        cold_path();
        // SAFETY: the same contract.
        unsafe { store_by_reference::<D, F, P>(chunks, place, format, &lane, amax, bytes) };
        return;
    }
    let limits = F::LIMITS && warp::ballot(clipped) != 0;
    for j in 0..D::STEPS {
        // The factor of the block that the lane meets in this step.
        let own = factors[(j / lanes) as usize];
        let mut factor = [0; 3];
        for word in 0..F::words::<D>() {
            factor[word] = warp::shuffle(own[word], lane.owner::<D, F>(j));
        }
        let chunk = chunks[j as usize];
        let chunk = if limits { F::limit::<D>(&chunk, factor) } else { chunk };
        let packed = format.encode::<D>(&chunk, factor);
        let codes = place.codes(lane.block(j) as u32, F::BYTES);
        if !codes.is_null() {
            // SAFETY: the block exists; each part of it has one lane.
            unsafe { access::store_codes::<D, F>(codes, 0, lane.part, packed) };
        }
    }
}

/// Stores codes by the reference, element by element. Blocks that are not finite get codes 0.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
unsafe fn store_by_reference<D: Dtype, F: Format, P: Place>(
    chunks: &[Chunk; MOST_STEPS],
    place: &P,
    format: &F,
    lane: &Lane,
    amax: [u32; MOST_OWNED],
    bytes: [u8; MOST_OWNED],
) {
    let lanes = const { access::lanes::<D, F>() };
    rolled!(j below D::STEPS => {
        // The lane's own block of the step: its first or its second.
        let second = j / lanes != 0;
        let [own_amax, own_byte] =
            if second { [amax[1], u32::from(bytes[1])] } else { [amax[0], u32::from(bytes[0])] };
        let amax = warp::shuffle(own_amax, lane.owner::<D, F>(j));
        let byte = warp::shuffle(own_byte, lane.owner::<D, F>(j));
        let finite = !block::is_non_finite(amax);
        let (scaling, _) = format.define_under::<D>(amax, byte as u8);
        let chunk = chunk_of_step(chunks, j);
        let mut packed = 0;
        rolled!(i below D::CHUNK => {
            let code = if finite { format.code(element::<D>(&chunk, i), scaling) } else { 0 };
            packed |= u64::from(code) << (F::BITS * i);
        });
        let codes = place.codes(lane.block(j) as u32, F::BYTES);
        if !codes.is_null() {
            // SAFETY: the block exists; each part of it has one lane.
            unsafe { access::store_codes::<D, F>(codes, 0, lane.part, packed) };
        }
    });
}
