//! The largest magnitude of a matrix: one read. And what NVFP4 makes of it: a plan.
//!
//! A warp goes through a few pieces of 1024 elements. It looks at the counter before it raises it,
//! so that after the first warps hardly any does.

use core::hint::cold_path;

use microscale_formats::plan::NvPlan;
use microscale_formats::shortcut::{NV_CANDIDATES, NV_MANTISSAS, nv_candidate};
use microscale_kernels_abi::amax::AMAX_PIECES;
use microscale_kernels_abi::launch::{THREADS, WARP};
use microscale_kernels_abi::{BlockGrid, GlobalSlot, NvOptions};

use crate::access::{self, Lane};
use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::format::{Blocks, uses_shortcut};
use crate::hardware::{ptx, warp};

/// Blocks of 32: any length would do.
struct Blocks32;

impl Blocks for Blocks32 {
    const BLOCK: u32 = 32;
    const BITS: u32 = 0;
}

/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn amax<D: Dtype, const ALIGNED: bool>(values: *const u8, slot: *mut GlobalSlot, grid: BlockGrid) {
    let warp = u64::from(warp::thread_block()) * u64::from(THREADS / WARP) + u64::from(warp::thread() / WARP);
    let first_piece = warp * u64::from(AMAX_PIECES);
    let mut most = 0;
    let mut piece = 0;
    // Unrolled it would only be longer: a piece has loads enough to keep in flight.
    while piece < ptx::opaque(AMAX_PIECES) {
        let lane = Lane::of_piece::<D, Blocks32>(first_piece + u64::from(piece));
        if lane.first_block < grid.blocks {
            // SAFETY: the same contract.
            most = D::max_magnitudes(most, unsafe { look::<D, ALIGNED>(values, &grid, &lane) });
        }
        piece += 1;
    }
    let most = D::largest(most);
    let mut finite = D::magnitude_to_f32_bits(most);
    if warp::ballot(most >= D::INFINITY) != 0 {
        cold_path();
        // SAFETY: the same contract; the slot is the caller's promise.
        finite = unsafe { look_again::<D>(values, slot, &grid, first_piece) };
    }
    let mut distance = WARP / 2;
    while distance > 0 {
        finite = finite.max(warp::shuffle_xor(finite, distance));
        distance /= 2;
    }
    // SAFETY: a field of the slot, which is touched by atomic operations only.
    unsafe {
        if warp::lane() == 0 && finite > ptx::read_counter(&raw const (*slot).amax_bits) {
            ptx::raise_counter_32(&raw mut (*slot).amax_bits, finite);
        }
    }
}

/// The largest magnitudes in a lane's chunks of a piece, value by value of a word; NaN is the
/// largest.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn look<D: Dtype, const ALIGNED: bool>(values: *const u8, grid: &BlockGrid, lane: &Lane) -> u32 {
    let place = lane.place::<Blocks32>(grid);
    // SAFETY: the same contract; the lane and the place are the warp's.
    let chunks = unsafe { access::load_all::<D, Blocks32, ALIGNED>(values, grid, lane, &place) };
    let mut most = 0;
    for j in 0..D::STEPS as usize {
        let [a, b, c, d] = chunks[j];
        let of_chunk = D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d));
        most = D::max_magnitudes(most, of_chunk);
    }
    most
}

/// The bits, as f32, of the largest finite magnitude in the warp's pieces, element by element.
/// Marks NaN and infinities.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn look_again<D: Dtype>(
    values: *const u8,
    slot: *mut GlobalSlot,
    grid: &BlockGrid,
    first_piece: u64,
) -> u32 {
    let (mut finite, mut nan, mut infinite) = (0, false, false);
    let blocks = access::warp_blocks::<Blocks32>();
    let first = first_piece * blocks;
    let last = grid.blocks.min(first + u64::from(AMAX_PIECES) * blocks);
    let mut block = first;
    while block < last {
        // SAFETY: the block exists.
        let bits = unsafe { access::element::<D, Blocks32>(values, grid, block, warp::lane()) };
        let value = f32::from_bits(bits);
        nan |= value.is_nan();
        infinite |= value.is_infinite();
        finite = finite.max(if value.is_finite() { bits & 0x7FFF_FFFF } else { 0 });
        block += 1;
    }
    // SAFETY: fields of the slot, which is touched by atomic operations only.
    unsafe {
        if nan {
            ptx::raise_counter_32(&raw mut (*slot).nan, 1);
        }
        if infinite {
            ptx::raise_counter_32(&raw mut (*slot).infinite, 1);
        }
    }
    finite
}

/// The entry points: `name<dtype, rows are aligned>`.
macro_rules! entries {
    ($($name:ident<$dtype:ty, $aligned:literal>)+) => {$(
        /// Raises the slot's amax to the amax of the matrix at `values`, and marks NaN and
        /// infinities.
        ///
        /// # Safety
        /// `values` has the matrix of `grid`, which is made for blocks of 32. It is aligned to its
        /// dtype, and in the aligned variants each row to 16 bytes; nothing writes it during the
        /// kernel. Only atomic operations use `slot` during the kernel. Both are global memory and
        /// do not overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(values: *const u8, slot: *mut GlobalSlot, grid: BlockGrid) {
            // SAFETY: the same contract.
            unsafe { amax::<$dtype, $aligned>(values, slot, grid) }
        }
    )+};
}

entries! {
    amax_f32_aligned<F32, true>
    amax_f16_aligned<F16, true>
    amax_bf16_aligned<Bf16, true>
    amax_f32_unaligned<F32, false>
    amax_f16_unaligned<F16, false>
    amax_bf16_unaligned<Bf16, false>
}

/// The plans' entry points: `name<dtype>`.
macro_rules! plan_entries {
    ($($name:ident<$dtype:ty>)+) => {$(
        /// Works out the plan of a tensor whose amax is in the slot, or, unless `given` is 0, whose
        /// global scale is.
        ///
        /// # Safety
        /// `global` points to a slot in global memory that nothing else touches meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(global: *mut GlobalSlot, options: NvOptions, given: u32) {
            // SAFETY: only this warp touches the slot; it reads the amax or the scale, and writes
            // the plan.
            unsafe {
                let saturated = (*global).infinite != 0 && options.saturate_non_finite != 0;
                let amax = if saturated { <$dtype>::MAX } else { f32::from_bits((*global).amax_bits) };
                let arithmetic = *options.plan.quantizer.arithmetic();
                let computed = arithmetic.global_scale(amax, <$dtype>::round).value();
                let scale = if given != 0 { (*global).scale } else { computed };
                let mut plan = NvPlan::new(arithmetic, scale);
                // `NvShortcut::new`, a mantissa a lane; the plan has none yet.
                if const { uses_shortcut::<$dtype>() } {
                    let mantissa = (warp::lane() % NV_MANTISSAS as u32) as u8;
                    let (mut number, mut factor) = (0, None);
                    // A number that the compiler does not know, lest it unroll the loop.
                    while factor.is_none() && number < ptx::opaque(NV_CANDIDATES) {
                        factor = nv_candidate(&plan.quantizer, <$dtype>::SIGNIFICAND, mantissa, number);
                        number += 1;
                    }
                    plan.shortcut.complete = u32::from(warp::ballot(factor.is_some()) == u32::MAX);
                    plan.shortcut.factors = [0, 1, 2, 3, 4, 5, 6, 7]
                        .map(|mantissa| warp::shuffle(factor.unwrap_or(0), mantissa));
                }
                if warp::lane() == 0 {
                    (*global).plan = plan;
                }
            }
        }
    )+};
}

plan_entries! {
    nvfp4_plan_f32<F32>
    nvfp4_plan_f16<F16>
    nvfp4_plan_bf16<Bf16>
}
