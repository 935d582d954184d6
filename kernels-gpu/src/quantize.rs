//! Quantization.
//!
//! A warp takes 1024 elements. Each lane first gets all its loads under way, then the lanes find
//! the largest magnitudes of the blocks in a transposing reduction that leaves each block's with
//! one lane: that lane computes the scale, once, and stores it, so that a warp's scales leave as 32
//! consecutive bytes. The scales travel back by shuffles, and each lane encodes its chunks.
//!
//! A warp that meets a NaN or an infinity, or a block that the fast encoding cannot do, leaves this
//! way and does its blocks over again, one after another ([`crate::by_block`]): slowly, but without
//! a register or an instruction's cost to the others.

use core::hint::cold_path;

use microscale_formats::{BlockEvents, E2m1, E4m3, E5m2, NegativeZero};
use microscale_kernels_abi::{
    BlockGrid, GlobalSlot, MxOptions, NvOptions, REPORT_SLOTS, ReportSlot, ScaleGrid,
};

use crate::access::{self, Lane, MOST_OWNED, MOST_STEPS, Scales, Target, WarpPlace};
use crate::by_block;
use crate::dtype::{self, Bf16, Chunk, Dtype, F16, F32};
use crate::format::{EVEN, Factor, Format, Mx, Nv, OTHER};
use crate::hardware::{ptx, warp};

/// Quantizes a warp's blocks.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn quantize<D: Dtype, F: Format, const ALIGNED: bool>(
    format: impl FnOnce() -> F,
    values: *const u8,
    target: Target,
    report: *mut ReportSlot,
    grid: BlockGrid,
) {
    let by_tiles = ALIGNED && target.scale_grid.by_tiles != 0;
    let (lane, place) = if by_tiles {
        Lane::of_tile::<D, F>(&grid, &target.scale_grid)
    } else {
        let lane = Lane::of::<D, F>(1);
        let place = lane.place::<F>(&grid);
        (lane, place)
    };
    if lane.first_block >= grid.blocks {
        return; // The whole warp returns, as it may shuffle below.
    }
    let lanes = const { access::lanes::<D, F>() };
    let owned = const { access::owned::<F>() };
    // SAFETY: the same contract.
    let mut chunks = unsafe {
        if by_tiles {
            access::load_all_in_tile::<D>(values, &grid, &place)
        } else {
            access::load_all::<D, F, ALIGNED>(values, &grid, &lane, &place)
        }
    };

    // After the loads are under way: it may have to be loaded too.
    let format = &format();
    let amax = reduce_transposed::<D, F>(&chunks);
    // The scales of the lane's own blocks.
    let mut factors: [Factor; MOST_OWNED] = [[0; 3]; MOST_OWNED];
    let mut bytes = [0; MOST_OWNED];
    let mut events = [BlockEvents::default(); MOST_OWNED];
    let mut usual = true;
    let mut shortcut = format.has_shortcut::<D>();
    for k in 0..owned as usize {
        let scaled = if shortcut {
            format.shortcut_scale::<D>(D::magnitude_to_f32_bits(amax[k]))
        } else {
            format.usual_scale::<D>(D::magnitude_to_f32_bits(amax[k]))
        };
        usual &= scaled.in_range;
        (bytes[k], factors[k], events[k]) = (scaled.byte, scaled.factor, scaled.events);
    }
    // The factor of the block that the lane meets in step `j`.
    let factor = |factors: &[Factor; MOST_OWNED], j: u32| {
        let own = factors[(j / lanes) as usize];
        let mut factor = [0; 3];
        for word in 0..F::words::<D>() {
            factor[word] = warp::shuffle(own[word], lane.owner::<D, F>(j));
        }
        factor
    };
    // SAFETY: slots are REPORT_SLOTS in number.
    let report =
        unsafe { report.add((lane.first_block / access::warp_blocks::<F>()) as usize % REPORT_SLOTS) };
    if warp::ballot(!usual) != 0 {
        cold_path();
        shortcut = false;
        let mut in_range = true;
        for k in 0..owned as usize {
            let scaled = format.scale::<D>(D::magnitude_to_f32_bits(amax[k]));
            in_range &= scaled.in_range;
            (bytes[k], factors[k], events[k]) = (scaled.byte, scaled.factor, scaled.events);
        }
        if warp::ballot(!in_range) != 0 {
            // A number that the compiler does not know, lest it unroll the loop.
            for number in 0..ptx::opaque(access::warp_blocks::<F>() as u32) {
                let block = lane.warp_block::<D>(number, by_tiles);
                if block < grid.blocks {
                    // SAFETY: the same contract; the block exists.
                    unsafe { by_block::quantize::<D, F>(format, values, target, Some(report), &grid, block) };
                }
            }
            return;
        }
        let mut clipped = false;
        for k in 0..owned as usize {
            clipped |= events[k].clipped;
            // SAFETY: `report` points to a report slot, by the contract.
            unsafe { count_events(events[k], report) };
        }
        if F::LIMITS && warp::ballot(clipped) != 0 {
            for j in 0..D::STEPS {
                chunks[j as usize] = F::limit::<D>(&chunks[j as usize], factor(&factors, j));
            }
        }
    } else if F::USUALLY_EVENTFUL {
        for k in 0..owned as usize {
            // SAFETY: `report` points to a report slot, by the contract.
            unsafe { count_events(events[k], report) };
        }
    }
    // SAFETY: the same contract.
    unsafe { store_scales::<D, F>(target, &grid, &lane, &place, by_tiles, bytes) };

    let zeros = format.negative_zero();
    if zeros == NegativeZero::DropInput as u32 && warp::ballot(may_have_negative_zero::<D>(&chunks)) != 0 {
        cold_path();
        for j in 0..D::STEPS as usize {
            chunks[j] = chunks[j].map(D::drop_negative_zeros);
        }
    } else if zeros == NegativeZero::Force as u32 {
        cold_path();
        for j in 0..D::STEPS as usize {
            chunks[j] = chunks[j].map(D::force_negative_zeros);
        }
    }
    let mut codes = [0; MOST_STEPS];
    if shortcut {
        for j in 0..D::STEPS {
            let factor = warp::shuffle(factors[(j / lanes) as usize][0], lane.owner::<D, F>(j));
            codes[j as usize] = format.shortcut_encode::<D>(&chunks[j as usize], factor);
        }
    } else {
        for j in 0..D::STEPS {
            codes[j as usize] = format.encode::<D>(&chunks[j as usize], factor(&factors, j));
        }
    }
    if F::BITS == 4 && zeros == NegativeZero::Drop as u32 {
        cold_path();
        codes = codes.map(|codes| u64::from(dtype::drop_negative_zero_codes(codes as u32)));
    }
    // SAFETY: the same contract.
    unsafe { store_codes::<D, F>(target, &grid, &lane, &place, by_tiles, codes) };
}

/// Stores the scale bytes that a lane owns.
///
/// # Safety
/// The kernel's contract; the lane and the place are the warp's.
#[inline(always)]
unsafe fn store_scales<D: Dtype, F: Format>(
    target: Target,
    grid: &BlockGrid,
    lane: &Lane,
    place: &WarpPlace,
    by_tiles: bool,
    bytes: [u8; MOST_OWNED],
) {
    let owned = const { access::owned::<F>() };
    if place.whole && target.scale_grid.tiles_per_row == 0 {
        for k in 0..owned {
            // SAFETY: `scales` has a byte per block, and each block one owner.
            unsafe { *target.scales.add(lane.own_block::<D, F>(k) as usize) = bytes[k as usize] };
        }
    } else if by_tiles {
        for k in 0..owned {
            // SAFETY: the matrix is whole tiles, so all blocks exist; each has one owner.
            unsafe {
                *target.scales.add(lane.scale_in_tile::<D, F>(place, &target.scale_grid, k)) =
                    bytes[k as usize]
            };
        }
    } else {
        let scales = Scales::new(target.scale_grid, lane.first_block);
        for k in 0..owned {
            let block = lane.own_block::<D, F>(k);
            if place.whole || block < grid.blocks {
                // SAFETY: the block exists; it has one owner.
                unsafe { *target.scales.add(scales.offset(block)) = bytes[k as usize] };
            }
        }
    }
}

/// Stores a lane's codes.
///
/// # Safety
/// The kernel's contract; the lane and the place are the warp's.
#[inline(always)]
unsafe fn store_codes<D: Dtype, F: Format>(
    target: Target,
    grid: &BlockGrid,
    lane: &Lane,
    place: &WarpPlace,
    by_tiles: bool,
    codes: [u64; MOST_STEPS],
) {
    if by_tiles {
        for j in 0..D::STEPS {
            let block = lane.block_in_tile::<D>(j);
            // SAFETY: the block exists; each part of it has one lane.
            unsafe { access::store_codes::<D, F>(target.codes, block, lane.part, codes[j as usize]) };
        }
    } else if place.whole {
        for j in 0..D::STEPS {
            // SAFETY: the block exists; each part of it has one lane.
            unsafe { access::store_codes::<D, F>(target.codes, lane.block(j), lane.part, codes[j as usize]) };
        }
    } else {
        cold_path();
        for j in 0..D::STEPS {
            if lane.block(j) < grid.blocks {
                // SAFETY: the block exists; each part of it has one lane.
                unsafe {
                    access::store_codes::<D, F>(target.codes, lane.block(j), lane.part, codes[j as usize])
                };
            }
        }
    }
}

/// Whether there may be a −0 among the values.
#[inline(always)]
fn may_have_negative_zero<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> bool {
    let mut least = chunks[0][0];
    for j in 0..D::STEPS as usize {
        let [a, b, c, d] = chunks[j];
        least =
            D::min_as_integers(least, D::min_as_integers(D::min_as_integers(a, b), D::min_as_integers(c, d)));
    }
    D::has_least_integer(least)
}

/// The largest magnitudes of the blocks that the lane owns.
///
/// Every lane has a part of one block per step, and the lanes of a block have parts of the same
/// blocks. In each round a lane keeps half of its blocks. It gives its parts of the other half to
/// its partner, and gets the partner's parts of its own.
#[inline(always)]
pub(crate) fn reduce_transposed<D: Dtype, F: Format>(chunks: &[Chunk; MOST_STEPS]) -> [u32; MOST_OWNED] {
    let lanes = const { access::lanes::<D, F>() as usize };
    let mut most = [0; MOST_STEPS];
    for j in 0..D::STEPS as usize {
        let [a, b, c, d] = chunks[j];
        most[j] = D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d));
    }
    let lane = warp::lane();
    let mut round = |distance: u32| {
        let upper = lane & distance != 0;
        for k in 0..access::owned::<F>() as usize {
            for i in 0..distance as usize {
                let i = k * lanes + i;
                let (low, high) = (most[i], most[i + distance as usize]);
                let (kept, given) = if upper { (high, low) } else { (low, high) };
                most[i] = D::max_magnitudes(kept, warp::shuffle_xor(given, distance));
            }
        }
    };
    if lanes == 8 {
        round(4);
    }
    if lanes >= 4 {
        round(2);
    }
    round(1);
    let mut owned = [0; MOST_OWNED];
    for k in 0..access::owned::<F>() as usize {
        owned[k] = D::largest(most[k * lanes]);
    }
    owned
}

/// Adds the events of the blocks that the lanes own. Entered by the whole warp; blocks past the end
/// are zero and have none.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
unsafe fn count_events(events: BlockEvents, report: *mut ReportSlot) {
    let clipped = warp::ballot(events.clipped).count_ones();
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        if clipped != 0 && warp::lane() == 0 {
            ptx::add_to_counter(&raw mut (*report).clipped, u64::from(clipped));
        }
        if events.scale_saturated {
            cold_path();
            ptx::add_to_counter(&raw mut (*report).scale_saturated, 1);
            ptx::add_to_counter(&raw mut (*report).flushed, u64::from(events.flushed));
        }
    }
}

/// The MX formats' entry points: `name<dtype, element, ties, rows are aligned>`.
macro_rules! mx_entries {
    ($($name:ident<$dtype:ty, $element:ty, $ties:ident, $aligned:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, adding to the report.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which nothing writes meanwhile and which is
        /// aligned to its dtype, in the aligned variants with all its rows to 16 bytes (no others
        /// go by tiles); `codes` (aligned to 8) has room for `grid.blocks` blocks, and `scales` for
        /// their bytes where `scale_grid` puts them; `report` points to `REPORT_SLOTS` slots. All
        /// in global memory, and none overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: MxOptions,
        ) {
            let format = || Mx::<$element, $ties>::new(options);
            let target = Target { codes, scales, scale_grid };
            // SAFETY: the same contract.
            unsafe { quantize::<$dtype, _, $aligned>(format, values, target, report, grid) }
        }
    )+};
}

mx_entries! {
    mxfp4_quantize_f32_even_aligned<F32, E2m1, EVEN, true>
    mxfp4_quantize_f16_even_aligned<F16, E2m1, EVEN, true>
    mxfp4_quantize_bf16_even_aligned<Bf16, E2m1, EVEN, true>
    mxfp4_quantize_f32_other_ties_aligned<F32, E2m1, OTHER, true>
    mxfp4_quantize_f16_other_ties_aligned<F16, E2m1, OTHER, true>
    mxfp4_quantize_bf16_other_ties_aligned<Bf16, E2m1, OTHER, true>
    mxfp8_e4m3_quantize_f32_aligned<F32, E4m3, EVEN, true>
    mxfp8_e4m3_quantize_f16_aligned<F16, E4m3, EVEN, true>
    mxfp8_e4m3_quantize_bf16_aligned<Bf16, E4m3, EVEN, true>
    mxfp8_e5m2_quantize_f32_aligned<F32, E5m2, EVEN, true>
    mxfp8_e5m2_quantize_f16_aligned<F16, E5m2, EVEN, true>
    mxfp8_e5m2_quantize_bf16_aligned<Bf16, E5m2, EVEN, true>
    mxfp4_quantize_f32_even_unaligned<F32, E2m1, EVEN, false>
    mxfp4_quantize_f16_even_unaligned<F16, E2m1, EVEN, false>
    mxfp4_quantize_bf16_even_unaligned<Bf16, E2m1, EVEN, false>
    mxfp4_quantize_f32_other_ties_unaligned<F32, E2m1, OTHER, false>
    mxfp4_quantize_f16_other_ties_unaligned<F16, E2m1, OTHER, false>
    mxfp4_quantize_bf16_other_ties_unaligned<Bf16, E2m1, OTHER, false>
    mxfp8_e4m3_quantize_f32_unaligned<F32, E4m3, EVEN, false>
    mxfp8_e4m3_quantize_f16_unaligned<F16, E4m3, EVEN, false>
    mxfp8_e4m3_quantize_bf16_unaligned<Bf16, E4m3, EVEN, false>
    mxfp8_e5m2_quantize_f32_unaligned<F32, E5m2, EVEN, false>
    mxfp8_e5m2_quantize_f16_unaligned<F16, E5m2, EVEN, false>
    mxfp8_e5m2_quantize_bf16_unaligned<Bf16, E5m2, EVEN, false>
}

/// NVFP4's entry points: `name<dtype, plan from the slot, rows are aligned>`.
macro_rules! nv_entries {
    ($($name:ident<$dtype:ty, $from_slot:literal, $aligned:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, adding to the report.
        /// The global scale comes from the plan in the options or, in the `planned` variants, from
        /// the plan in the slot at `global`; it is written there.
        ///
        /// # Safety
        /// As for the MX formats; `global` points to a slot in global memory, whose scale only this
        /// kernel writes and whose other fields nothing writes meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            global: *mut GlobalSlot,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: NvOptions,
        ) {
            let format = || {
                // SAFETY: nothing writes the plan during the kernel, and one thread the scale.
                unsafe {
                    let plan = if $from_slot { (*global).plan } else { options.plan };
                    if warp::thread_block() == 0 && warp::thread() == 0 {
                        (*global).scale = plan.global_scale;
                    }
                    Nv::new(plan, options.saturate_non_finite)
                }
            };
            let target = Target { codes, scales, scale_grid };
            // SAFETY: the same contract.
            unsafe { quantize::<$dtype, _, $aligned>(format, values, target, report, grid) }
        }
    )+};
}

nv_entries! {
    nvfp4_quantize_f32_given_aligned<F32, false, true>
    nvfp4_quantize_f16_given_aligned<F16, false, true>
    nvfp4_quantize_bf16_given_aligned<Bf16, false, true>
    nvfp4_quantize_f32_planned_aligned<F32, true, true>
    nvfp4_quantize_f16_planned_aligned<F16, true, true>
    nvfp4_quantize_bf16_planned_aligned<Bf16, true, true>
    nvfp4_quantize_f32_given_unaligned<F32, false, false>
    nvfp4_quantize_f16_given_unaligned<F16, false, false>
    nvfp4_quantize_bf16_given_unaligned<Bf16, false, false>
    nvfp4_quantize_f32_planned_unaligned<F32, true, false>
    nvfp4_quantize_f16_planned_unaligned<F16, true, false>
    nvfp4_quantize_bf16_planned_unaligned<Bf16, true, false>
}
