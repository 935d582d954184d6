//! MXFP4 quantization.
//!
//! A warp takes 32 blocks. Each lane first gets all its loads under way, then the lanes find the 32 largest magnitudes in a
//! transposing reduction that leaves one block's with each lane: that lane computes the scale, once, and stores it, so that
//! a warp's scales leave as 32 consecutive bytes. The scales travel back by shuffles, and each lane encodes its chunks.
//!
//! A warp that meets a NaN or an infinity leaves this way and does its blocks over again, one after another
//! ([`crate::by_block`]): slowly, but without a register or an instruction's cost to the others.

use core::hint::cold_path;

use microscale_formats::mxfp4::{self, BlockEvents};
use microscale_formats::{NegativeZero, Ties};
use microscale_kernels_abi::{BlockGrid, QuantizeOptions, REPORT_SLOTS, ReportSlot};

use crate::access::{self, Lane, Walk};
use crate::by_block;
use crate::dtype::{self, Bf16, Chunk, Dtype, F16, F32};
use crate::{ptx, warp};

/// The most chunks that a lane handles, those of f32.
const MOST_STEPS: usize = 8;

/// Quantizes a warp's blocks.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn quantize<D: Dtype, const TIES: u32, const VECTOR: bool>(
    values: *const u8,
    codes: *mut u8,
    scales: *mut u8,
    report: *mut ReportSlot,
    grid: BlockGrid,
    options: QuantizeOptions,
) {
    let ties = const {
        if TIES == 0 {
            Ties::Even
        } else if TIES == 1 {
            Ties::Away
        } else {
            Ties::Zero
        }
    };
    let lane = Lane::of::<D>(1);
    if lane.first_block >= grid.blocks {
        return; // The whole warp: what follows may shuffle.
    }
    let mut chunks = [[0; 4]; MOST_STEPS];
    let place = lane.place(&grid);
    if VECTOR && place.contiguous {
        for j in 0..D::LANES {
            // SAFETY: the warp's blocks are whole and lie behind each other in the caller's matrix.
            chunks[j as usize] = unsafe { access::load_contiguous::<D>(values, &place, j) };
        }
    } else {
        cold_path();
        let mut walk = Walk::new(&grid, &lane, &place, 0);
        for j in 0..D::LANES {
            let place = walk.place::<D>(j);
            // SAFETY: the caller's matrix is the grid's.
            chunks[j as usize] = unsafe { access::load::<D, VECTOR>(values, &grid, &place) };
        }
    }

    // SAFETY: slots are REPORT_SLOTS in number.
    let report = unsafe { report.add(lane.first_block as usize / 32 % REPORT_SLOTS) };
    let amax = reduce_transposed::<D>(&chunks);
    if warp::ballot(amax >= D::INFINITY) != 0 {
        cold_path();
        let blocks = (grid.blocks - lane.first_block).min(32) as u32;
        for block in 0..blocks {
            let block = lane.first_block + u64::from(block);
            // SAFETY: the same contract; the block exists.
            unsafe {
                by_block::quantize::<D>(values, codes, scales, Some(report), &grid, &options, ties, block)
            };
        }
        return;
    }

    // The lane's own block's scale.
    let own_block = lane.own_block();
    let amax_bits = D::magnitude_to_f32_bits(amax);
    let exponent = mxfp4::rounded_exponent(amax_bits, options.mantissa_addend);
    let scale = mxfp4::scale_from_exponent(exponent);
    if place.whole || own_block < grid.blocks {
        // SAFETY: one byte a block; each block has one owner.
        unsafe { *scales.add(own_block as usize) = scale.to_bits() };
    }
    // SAFETY: the report slot is the caller's promise.
    unsafe { count_events(BlockEvents::of(amax_bits, exponent, ties), report) };

    let zeros = options.negative_zero;
    if zeros == NegativeZero::DropInput as u32 {
        cold_path();
        chunks.iter_mut().for_each(|chunk| *chunk = chunk.map(D::drop_negative_zeros));
    } else if zeros == NegativeZero::Force as u32 {
        cold_path();
        chunks.iter_mut().for_each(|chunk| *chunk = chunk.map(D::force_negative_zeros));
    }
    let mut nibbles = [0; MOST_STEPS];
    for j in 0..D::LANES {
        let scale = warp::shuffle(u32::from(scale.to_bits()), lane.owner::<D>(j));
        nibbles[j as usize] = dtype::encode::<D>(&chunks[j as usize], scale, ties);
    }
    if zeros == NegativeZero::Drop as u32 {
        cold_path();
        nibbles = nibbles.map(dtype::drop_negative_zero_codes);
    }
    for j in 0..D::LANES {
        if place.whole || lane.block(j) < grid.blocks {
            // SAFETY: the block exists; each part of it has one lane.
            unsafe { access::store_codes::<D>(codes, lane.block(j), lane.part, nibbles[j as usize]) };
        }
    }
}

/// The largest magnitude of the block that the lane owns.
///
/// Every lane holds a part of `LANES` blocks, and `LANES` lanes hold the parts of the same ones. In each round a lane keeps
/// half of its blocks, gives its part of the others to the lane across, and gets that lane's part of its own.
#[inline(always)]
fn reduce_transposed<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> u32 {
    let mut most = [0; MOST_STEPS];
    for j in 0..D::LANES as usize {
        let [a, b, c, d] = chunks[j];
        most[j] = D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d));
    }
    let lane = warp::lane();
    let mut round = |distance: u32| {
        let upper = lane & distance != 0;
        for i in 0..distance as usize {
            let (low, high) = (most[i], most[i + distance as usize]);
            let (kept, given) = if upper { (high, low) } else { (low, high) };
            most[i] = D::max_magnitudes(kept, warp::shuffle_xor(given, distance));
        }
    };
    if D::LANES == 8 {
        round(4);
    }
    round(2);
    round(1);
    D::largest(most[0])
}

/// Adds the events of the blocks that the lanes own. Entered by the whole warp; blocks past the end are zero and have none.
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

/// The entry points: `name<dtype, ties, vector access>`.
macro_rules! entries {
    ($($name:ident<$dtype:ty, $ties:literal, $vector:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, adding to the report.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which nothing writes meanwhile and which is aligned to its dtype, and in
        /// the vector variants starts on 16 bytes, as do its rows; `codes` (aligned to 4) and `scales` have room for
        /// `grid.blocks` blocks; `report` points to `REPORT_SLOTS` slots. All in global memory, and none overlap. The launch
        /// shape is the one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            report: *mut ReportSlot,
            grid: BlockGrid,
            options: QuantizeOptions,
        ) {
            // SAFETY: the same contract.
            unsafe { quantize::<$dtype, $ties, $vector>(values, codes, scales, report, grid, options) }
        }
    )+};
}

entries! {
    mxfp4_quantize_f32_even_vector<F32, 0, true>
    mxfp4_quantize_f16_even_vector<F16, 0, true>
    mxfp4_quantize_bf16_even_vector<Bf16, 0, true>
    mxfp4_quantize_f32_even_element<F32, 0, false>
    mxfp4_quantize_f16_even_element<F16, 0, false>
    mxfp4_quantize_bf16_even_element<Bf16, 0, false>
    mxfp4_quantize_f32_away_vector<F32, 1, true>
    mxfp4_quantize_f16_away_vector<F16, 1, true>
    mxfp4_quantize_bf16_away_vector<Bf16, 1, true>
    mxfp4_quantize_f32_away_element<F32, 1, false>
    mxfp4_quantize_f16_away_element<F16, 1, false>
    mxfp4_quantize_bf16_away_element<Bf16, 1, false>
    mxfp4_quantize_f32_zero_vector<F32, 2, true>
    mxfp4_quantize_f16_zero_vector<F16, 2, true>
    mxfp4_quantize_bf16_zero_vector<Bf16, 2, true>
    mxfp4_quantize_f32_zero_element<F32, 2, false>
    mxfp4_quantize_f16_zero_element<F16, 2, false>
    mxfp4_quantize_bf16_zero_element<Bf16, 2, false>
}
