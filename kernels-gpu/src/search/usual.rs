//! The fast search: blocks with sixteen elements per lane, searched and encoded together by a warp.

use core::hint::cold_path;
use core::marker::PhantomData;

use microscale_formats::NegativeZero;
use microscale_formats::search::{self, Search};
use microscale_kernels_abi::search::SEARCH_EACH;
use microscale_kernels_abi::{BlockGrid, ReportSlot};

use super::lane::{self, Importance, Lane, each, lanes, most};
use super::options::{SearchOptions, importance};
use super::report::{Counts, add_to_report};
use crate::access::{Scales, Target};
use crate::dtype::{self, Chunk, Dtype};
use crate::format::{Blocks, Plain, Searched};
use crate::hardware::warp;

/// A lane's part of a block.
pub(super) struct Share<'a, F> {
    pub(super) grid: &'a BlockGrid,
    pub(super) block: u64,
    pub(super) format: PhantomData<F>,
}

impl<F: Blocks> Share<'_, F> {
    #[inline(always)]
    fn exists(&self) -> bool {
        self.block < self.grid.blocks
    }

    /// The lane's number within its block.
    #[inline(always)]
    fn part(&self) -> u32 {
        warp::lane() % const { lanes::<F>() }
    }

    /// Its first element's number in the block.
    #[inline(always)]
    pub(super) fn first_element(&self) -> u32 {
        self.part() * SEARCH_EACH
    }
}

/// Quantizes the blocks whose elements the lanes hold, if all are usual; else it does nothing.
/// Entered by the whole warp.
///
/// # Safety
/// The contract of the kernels of [`crate::search`].
#[inline(always)]
pub(super) unsafe fn usual<D: Dtype, F: Searched>(
    format: &F,
    mut chunks: [Chunk; 4],
    share: &Share<F>,
    target: Target,
    report: *mut ReportSlot,
    options: &SearchOptions,
) -> bool {
    let exists = share.exists();
    let amax_bits = amax::<D, F>(&chunks);
    let amax = f32::from_bits(amax_bits);
    let Plain { byte: plain, near_least, usual } = format.plain::<D>(amax_bits);
    if warp::ballot(exists && !(usual && search::is_near(amax_bits))) != 0 {
        return false;
    }
    let (plain, near_least) = (u32::from(plain), u32::from(near_least));
    let mut larger = plain;
    if matches!(options.search(), Search::FourSix) {
        larger = u32::from(format.plain::<D>((amax * 1.5).to_bits()).byte);
    }
    let lane = Lane::<F> {
        of_lane: format.candidates_of_lanes(),
        a: each!(16, i => D::widen(&chunks[i / D::CHUNK as usize], i as u32 % D::CHUNK).abs()),
        amax,
        format: PhantomData,
    };
    let found = if options.importance.is_null() {
        lane.search(options.search(), plain, near_least, larger, None)
    } else {
        cold_path();
        let first = share.first_element();
        let (start, count) = importance::<F>(options.importance, share.grid, share.block, first);
        if warp::ballot(exists && (count < SEARCH_EACH || !start.addr().is_multiple_of(16))) != 0 {
            return false;
        }
        // Lanes without a block read the first column's importance.
        let importance = Importance(if exists { start } else { options.importance });
        lane.search(options.search(), plain, near_least, larger, Some(importance))
    };
    let Some((byte, tried)) = found else { return false };
    let byte = byte as u8;

    let mut shortcut = format.has_shortcut::<D>();
    let mut under = format.usual_under::<D>(amax_bits, byte);
    if warp::ballot(exists && !under.in_range) != 0 {
        cold_path();
        shortcut = false;
        under = format.scale_under::<D>(amax_bits, byte);
        if warp::ballot(exists && !under.in_range) != 0 {
            return false;
        }
        if F::LIMITS && warp::ballot(under.events.clipped) != 0 {
            chunks = each!(4, k => F::limit::<D>(&chunks[k], under.factor));
        }
    }
    let zeros = format.negative_zero();
    if zeros == NegativeZero::DropInput as u32 {
        chunks = each!(4, k => chunks[k].map(D::drop_negative_zeros));
    } else if zeros == NegativeZero::Force as u32 {
        cold_path();
        chunks = each!(4, k => chunks[k].map(D::force_negative_zeros));
    }
    let mut codes = if shortcut {
        pack_chunks::<D>(each!(4, k => format.shortcut_encode::<D>(&chunks[k], under.factor[0])))
    } else {
        pack_chunks::<D>(each!(4, k => format.encode::<D>(&chunks[k], under.factor)))
    };
    if zeros == NegativeZero::Drop as u32 {
        cold_path();
        codes = codes.map(dtype::drop_negative_zero_codes);
    }
    if exists {
        let [low, high] = codes.map(u64::from);
        let place = share.block * u64::from(F::BYTES) + u64::from(share.part() * (SEARCH_EACH / 2));
        // SAFETY: eight code bytes, aligned as codes are, and one scale byte a block, each written
        // by one lane.
        unsafe {
            *target.codes.add(place as usize).cast::<u64>() = high << 32 | low;
            if share.part() == 0 {
                *target.scales.add(Scales::new(target.scale_grid, share.block).offset(share.block)) = byte;
            }
        }
    }
    let changed = u32::from(byte) != plain;
    let counts = Counts::of_lanes(exists && share.part() == 0, under.events, changed, tried);
    if warp::lane() == 0 {
        // SAFETY: `report` points to a report slot, by the contract.
        unsafe { add_to_report(&counts, report) };
    }
    true
}

/// The bits of a block's amax, from its lanes' chunks.
#[inline(always)]
fn amax<D: Dtype, F: Blocks>(chunks: &[Chunk; 4]) -> u32 {
    let [a, b, c, d] = each!(4, k => {
        let [a, b, c, d] = chunks[k];
        D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d))
    });
    let mut word = D::max_magnitudes(a, b);
    if const { lane::chunks::<D>() } == 4 {
        word = D::max_magnitudes(word, D::max_magnitudes(c, d));
    }
    most::<F>(D::magnitude_to_f32_bits(D::largest(word)))
}

/// The codes of a lane's chunks, the first in the lowest bits of the first word.
#[inline(always)]
fn pack_chunks<D: Dtype>(codes: [u64; 4]) -> [u32; 2] {
    let [a, b, c, d] = codes.map(|codes| codes as u32);
    // Above four codes are other bits.
    if D::CHUNK == 8 { [a, b] } else { [a & 0xFFFF | b << 16, c & 0xFFFF | d << 16] }
}
