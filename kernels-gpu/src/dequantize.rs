//! MXFP4 dequantization: the way of [`crate::quantize`] backwards. Each lane loads one scale byte, and the scales travel to
//! the lanes that need them by shuffles.

use microscale_formats::E8m0;
use microscale_kernels_abi::{BlockGrid, DEQUANTIZE_CHUNKS, WARP};

use crate::access::{self, Lane, Walk};
use crate::dtype::{self, Bf16, Dtype, F16, F32};
use crate::warp;

/// Dequantizes a warp's blocks.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn dequantize<D: Dtype, const VECTOR: bool>(
    codes: *const u8,
    scales: *const u8,
    values: *mut u8,
    grid: BlockGrid,
) {
    // Warps that share 32 blocks. Shifted stores need the chunk before each of theirs, so they keep to one.
    let split = if VECTOR { D::LANES / DEQUANTIZE_CHUNKS } else { 1 };
    let lane = Lane::of::<D>(split);
    let steps = D::LANES / split;
    let first_step = warp::thread() / WARP % split * steps;
    if lane.first_block >= grid.blocks {
        return; // The whole warp: what follows may shuffle.
    }
    let place = lane.place(&grid);
    let mut nibbles = [0; 8];
    for i in 0..steps {
        let block = lane.block(first_step + i);
        if place.whole || block < grid.blocks {
            // SAFETY: the block exists.
            nibbles[i as usize] = unsafe { access::load_codes::<D>(codes, block, lane.part) };
        }
    }
    let own_block = lane.own_block();
    // SAFETY: one byte a block, read only if the block exists.
    let scale =
        if place.whole || own_block < grid.blocks { unsafe { *scales.add(own_block as usize) } } else { 0 };
    let factor = E8m0::from_bits(scale).to_f32().to_bits();

    let mut walk = Walk::new(&grid, &lane, &place, first_step);
    let mut last = [0; 4];
    for i in 0..steps {
        let j = first_step + i;
        let factor = f32::from_bits(warp::shuffle(factor, lane.owner::<D>(j)));
        let decoded = dtype::decode(nibbles[i as usize]).map(|value| value * factor);
        let chunk = if factor.is_nan() { [D::NAN_WORD; 4] } else { D::narrow(&decoded) };
        // SAFETY: the caller's matrix is the grid's, and each element has one lane; where the place is contiguous, the warp's
        // blocks are whole and lie behind each other.
        unsafe {
            if VECTOR && place.contiguous {
                access::store_contiguous::<D>(values, &place, j, &chunk);
            } else if VECTOR {
                access::store::<D>(values, &walk.place::<D>(j), &chunk);
            } else {
                access::store_shifted::<D>(values, &walk.place::<D>(j), j, &last, &chunk);
            }
        }
        last = chunk;
    }
}

/// The entry points: `name<dtype, vector access>`.
macro_rules! entries {
    ($($name:ident<$dtype:ty, $vector:literal>)+) => {$(
        /// Dequantizes packed codes and scale bytes to the matrix at `values`.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype, and in the vector variants starts on 16
        /// bytes, as do its rows; `codes` (aligned to 4) and `scales` hold `grid.blocks` blocks and nothing writes them
        /// meanwhile. All in global memory, and none overlap. The launch shape is the one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(codes: *const u8, scales: *const u8, values: *mut u8, grid: BlockGrid) {
            // SAFETY: the same contract.
            unsafe { dequantize::<$dtype, $vector>(codes, scales, values, grid) }
        }
    )+};
}

entries! {
    mxfp4_dequantize_f32_vector<F32, true>
    mxfp4_dequantize_f16_vector<F16, true>
    mxfp4_dequantize_bf16_vector<Bf16, true>
    mxfp4_dequantize_f32_element<F32, false>
    mxfp4_dequantize_f16_element<F16, false>
    mxfp4_dequantize_bf16_element<Bf16, false>
}
