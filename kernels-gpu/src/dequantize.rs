//! Dequantization: the way of [`crate::quantize`] backwards. Each lane loads the scale bytes of the
//! blocks that it owns, and the scales travel to the lanes that need them by shuffles.

use microscale_formats::{E2m1, E4m3, E5m2};
use microscale_kernels_abi::dequantize::DEQUANTIZE_CHUNKS;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{ApplyGlobal, BlockGrid, GlobalSlot, ScaleGrid};

use crate::access::{self, Lane, MOST_OWNED, Scales, Walk};
use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::format::{Decode, EVEN, Mx, NvDecoder};
use crate::hardware::warp;

/// Dequantizes a warp's blocks.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn dequantize<D: Dtype, F: Decode, const ALIGNED: bool>(
    format: &F,
    codes: *const u8,
    scales: *const u8,
    values: *mut u8,
    grid: BlockGrid,
    scale_grid: ScaleGrid,
) {
    // Warps that share 1024 elements. Shifted stores need the chunk before each of theirs, so they
    // keep to one.
    let split = if ALIGNED { D::STEPS / DEQUANTIZE_CHUNKS } else { 1 };
    let lane = Lane::of::<D, F>(split);
    let steps = D::STEPS / split;
    let first_step = warp::thread() / WARP % split * steps;
    if lane.first_block >= grid.blocks {
        return; // The whole warp returns, as it may shuffle below.
    }
    let lanes = const { access::lanes::<D, F>() };
    let place = lane.place::<F>(&grid);
    let mut packed = [0; 8];
    for i in 0..steps {
        let block = lane.block(first_step + i);
        if place.whole || block < grid.blocks {
            // SAFETY: the block exists.
            packed[i as usize] = unsafe { access::load_codes::<D, F>(codes, block, lane.part) };
        }
    }
    // A warp with few steps needs only one of the scales that each lane owns.
    let first_owned = first_step / lanes;
    let mut factors = [0; MOST_OWNED];
    let scale_places = Scales::new(scale_grid, lane.first_block);
    for k in 0..steps.div_ceil(lanes) {
        let block = lane.own_block::<D, F>(first_owned + k);
        let exists = place.whole || block < grid.blocks;
        // SAFETY: one byte a block, read only if the block exists.
        let scale = if exists { unsafe { *scales.add(scale_places.offset(block)) } } else { 0 };
        factors[k as usize] = format.factor(scale).to_bits();
    }

    let mut walk = Walk::new(&grid, &lane, &place, first_step);
    let mut last = [0; 4];
    for i in 0..steps {
        let j = first_step + i;
        let factor = f32::from_bits(warp::shuffle(factors[(i / lanes) as usize], lane.owner::<D, F>(j)));
        let decoded = F::decode(packed[i as usize]).map(|value| value * factor);
        let mut chunk = if factor.is_nan() { [D::NAN_WORD; 4] } else { D::narrow(&decoded) };
        if F::HAS_SPECIALS {
            for i in 0..D::CHUNK {
                if decoded[i as usize].is_nan() {
                    D::replace(&mut chunk, i, D::NAN_WORD);
                }
            }
        }
        // SAFETY: `values` has the grid's matrix, and each element one lane. Where the place is
        // contiguous, the warp's blocks are whole and consecutive.
        unsafe {
            if ALIGNED && place.contiguous {
                access::store_contiguous::<D>(values, &place, j, &chunk);
            } else if ALIGNED {
                access::store::<D>(values, &walk.place::<D, F>(j), &chunk);
            } else {
                access::store_shifted::<D>(values, &walk.place::<D, F>(j), j, &last, &chunk);
            }
        }
        last = chunk;
    }
}

/// The MX formats' entry points: `name<dtype, element, vector access>`.
macro_rules! mx_entries {
    ($($name:ident<$dtype:ty, $element:ty, $vector:literal>)+) => {$(
        /// Dequantizes packed codes and scale bytes to the matrix at `values`.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype, and in the
        /// aligned variants starts on 16 bytes, as do its rows; `codes` (aligned to 8) holds
        /// `grid.blocks` blocks, `scales` their bytes where `scale_grid` puts them, and nothing
        /// writes them meanwhile. All in global memory, and none overlap. The launch shape is the
        /// one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            values: *mut u8,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
        ) {
            let format = Mx::<$element, EVEN>::decoder();
            // SAFETY: the same contract.
            unsafe { dequantize::<$dtype, _, $vector>(&format, codes, scales, values, grid, scale_grid) }
        }
    )+};
}

mx_entries! {
    mxfp4_dequantize_f32_aligned<F32, E2m1, true>
    mxfp4_dequantize_f16_aligned<F16, E2m1, true>
    mxfp4_dequantize_bf16_aligned<Bf16, E2m1, true>
    mxfp4_dequantize_f32_unaligned<F32, E2m1, false>
    mxfp4_dequantize_f16_unaligned<F16, E2m1, false>
    mxfp4_dequantize_bf16_unaligned<Bf16, E2m1, false>
    mxfp8_e4m3_dequantize_f32_aligned<F32, E4m3, true>
    mxfp8_e4m3_dequantize_f16_aligned<F16, E4m3, true>
    mxfp8_e4m3_dequantize_bf16_aligned<Bf16, E4m3, true>
    mxfp8_e4m3_dequantize_f32_unaligned<F32, E4m3, false>
    mxfp8_e4m3_dequantize_f16_unaligned<F16, E4m3, false>
    mxfp8_e4m3_dequantize_bf16_unaligned<Bf16, E4m3, false>
    mxfp8_e5m2_dequantize_f32_aligned<F32, E5m2, true>
    mxfp8_e5m2_dequantize_f16_aligned<F16, E5m2, true>
    mxfp8_e5m2_dequantize_bf16_aligned<Bf16, E5m2, true>
    mxfp8_e5m2_dequantize_f32_unaligned<F32, E5m2, false>
    mxfp8_e5m2_dequantize_f16_unaligned<F16, E5m2, false>
    mxfp8_e5m2_dequantize_bf16_unaligned<Bf16, E5m2, false>
}

/// NVFP4's entry points: `name<dtype, vector access>`.
macro_rules! nv_entries {
    ($($name:ident<$dtype:ty, $vector:literal>)+) => {$(
        /// Dequantizes packed codes, scale bytes and the global scale to the matrix at `values`.
        ///
        /// # Safety
        /// As for the MX formats; `global` points to a slot in global memory that nothing writes
        /// meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            values: *mut u8,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            apply: ApplyGlobal,
        ) {
            // SAFETY: the same contract.
            let format = NvDecoder { global: unsafe { (*global).scale }, apply };
            // SAFETY: the same contract.
            unsafe { dequantize::<$dtype, _, $vector>(&format, codes, scales, values, grid, scale_grid) }
        }
    )+};
}

nv_entries! {
    nvfp4_dequantize_f32_aligned<F32, true>
    nvfp4_dequantize_f16_aligned<F16, true>
    nvfp4_dequantize_bf16_aligned<Bf16, true>
    nvfp4_dequantize_f32_unaligned<F32, false>
    nvfp4_dequantize_f16_unaligned<F16, false>
    nvfp4_dequantize_bf16_unaligned<Bf16, false>
}
