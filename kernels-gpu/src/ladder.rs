//! The ladder: the quantizer as one would write it first, a thread a block, and second, a warp a block. Kept
//! as baselines that `bench --ladder` runs beside the shipped kernels. They use the definition of
//! `microscale_formats` as it stands: ties to even, −0 kept, blocks with non-finite values become NaN; no
//! report.

use microscale_formats::mx::{self, BLOCK};
use microscale_formats::{E2m1, E2m1x2, E8m0, NegativeZero, Ties, block};
use microscale_kernels_abi::ladder::LADDER_THREADS;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{BlockGrid, MxOptions, ScaleGrid};

use crate::access::{self, Target};
use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::format::{Blocks, EVEN, Mx};
use crate::{by_block, ptx, warp};

/// What the ladder quantizes to.
type Mxfp4 = Mx<E2m1, EVEN>;
const BLOCK_BYTES: usize = Mxfp4::BYTES as usize;

/// The scale of a block and the factor to encode with, for the bits of its amax: NaN blocks are encoded as
/// zeros.
#[inline(always)]
fn scale(amax_bits: u32, options: &MxOptions) -> (E8m0, Option<f32>) {
    if block::is_non_finite(amax_bits) {
        return (E8m0::NAN, None);
    }
    let scale = mx::scale_from_exponent::<E2m1>(mx::rounded_exponent(amax_bits, options.mantissa_addend));
    (scale, Some(scale.reciprocal()))
}

#[inline(always)]
unsafe fn thread_a_block<D: Dtype>(
    values: *const u8,
    codes: *mut u8,
    scales: *mut u8,
    grid: BlockGrid,
    options: MxOptions,
) {
    let block = u64::from(warp::thread_block()) * u64::from(LADDER_THREADS) + u64::from(warp::thread());
    if block >= grid.blocks {
        return;
    }
    let mut amax = 0;
    // As loops: unrolled, a baseline would be a large part of all PTX.
    for i in 0..ptx::opaque(BLOCK as u32) {
        // SAFETY: the block exists.
        amax = amax.max(unsafe { access::element::<D, Mxfp4>(values, &grid, block, i) } & 0x7FFF_FFFF);
    }
    let (scale, factor) = scale(amax, &options);
    // SAFETY: one byte a block.
    unsafe { *scales.add(block as usize) = scale.to_bits() };
    for pair in 0..ptx::opaque(BLOCK_BYTES as u32) {
        let [low, high] = [2 * pair, 2 * pair + 1].map(|i| {
            // SAFETY: the block exists.
            let value = f32::from_bits(unsafe { access::element::<D, Mxfp4>(values, &grid, block, i) });
            factor.map_or_else(E2m1::default, |factor| {
                E2m1::from_bits(mx::encode::<E2m1>(value, factor, Ties::Even, NegativeZero::Keep))
            })
        });
        // SAFETY: 16 bytes a block.
        unsafe {
            *codes.add((block * BLOCK_BYTES as u64 + u64::from(pair)) as usize) =
                E2m1x2::new(low, high).to_bits()
        };
    }
}

#[inline(always)]
unsafe fn warp_a_block<D: Dtype>(
    values: *const u8,
    codes: *mut u8,
    scales: *mut u8,
    grid: BlockGrid,
    options: MxOptions,
) {
    let warps = u64::from(LADDER_THREADS / WARP);
    let block = u64::from(warp::thread_block()) * warps + u64::from(warp::thread() / WARP);
    if block < grid.blocks {
        let options =
            MxOptions { negative_zero: NegativeZero::Keep as u32, saturate_non_finite: 0, ..options };
        let target = Target {
            codes,
            scales,
            scale_grid: ScaleGrid { row_blocks: grid.row_blocks, tiles_per_row: 0, by_tiles: 0 },
        };
        // SAFETY: the same contract; the block exists, for the whole warp.
        unsafe { by_block::quantize::<D, _>(&Mxfp4::new(options), values, target, None, &grid, block) };
    }
}

/// The entry points: `name = body<dtype>`.
macro_rules! entries {
    ($($name:ident = $body:ident<$dtype:ty>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype and which nothing writes
        /// meanwhile; `codes` and `scales` have room for `grid.blocks` blocks. All in global memory, and none
        /// overlap. The launch shape is the one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            grid: BlockGrid,
            options: MxOptions,
        ) {
            // SAFETY: the same contract.
            unsafe { $body::<$dtype>(values, codes, scales, grid, options) }
        }
    )+};
}

entries! {
    mxfp4_quantize_f32_thread_a_block = thread_a_block<F32>
    mxfp4_quantize_f16_thread_a_block = thread_a_block<F16>
    mxfp4_quantize_bf16_thread_a_block = thread_a_block<Bf16>
    mxfp4_quantize_f32_warp_a_block = warp_a_block<F32>
    mxfp4_quantize_f16_warp_a_block = warp_a_block<F16>
    mxfp4_quantize_bf16_warp_a_block = warp_a_block<Bf16>
}
