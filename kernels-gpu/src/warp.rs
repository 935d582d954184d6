//! Where a thread stands, and what the lanes of a warp do together.
//!
//! The convergent operations are LLVM intrinsics: LLVM knows that they must not be moved across branches.

use core::arch::nvptx::{_block_idx_x, _thread_idx_x};

use microscale_kernels_abi::WARP;

const ALL: u32 = u32::MAX;

unsafe extern "llvm-intrinsic" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_sync_bfly(mask: u32, value: u32, lane_mask: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: u32, predicate: bool) -> u32;
}

/// The lane's number in its warp. Thread blocks are one-dimensional and whole warps.
#[inline(always)]
pub(crate) fn lane() -> u32 {
    thread() % WARP
}

/// The thread's number in its block.
#[inline(always)]
pub(crate) fn thread() -> u32 {
    // SAFETY: reads a special register.
    unsafe { _thread_idx_x() as u32 }
}

/// The thread block's number in the grid.
#[inline(always)]
pub(crate) fn thread_block() -> u32 {
    // SAFETY: reads a special register.
    unsafe { _block_idx_x() as u32 }
}

/// The value of the lane whose number differs in the bits of `lane_mask`. All lanes of the warp take part.
#[inline(always)]
pub(crate) fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { shfl_sync_bfly(ALL, value, lane_mask, WARP - 1) }
}

/// The value of a given lane. All lanes of the warp take part.
#[inline(always)]
pub(crate) fn shuffle(value: u32, lane: u32) -> u32 {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { shfl_sync_idx(ALL, value, lane, WARP - 1) }
}

/// [`shuffle_xor`] of 64 bits.
#[inline(always)]
pub(crate) fn shuffle_xor_f64(value: f64, lane_mask: u32) -> f64 {
    by_halves(value, |half| shuffle_xor(half, lane_mask))
}

/// [`shuffle`] of 64 bits.
#[inline(always)]
pub(crate) fn shuffle_f64(value: f64, lane: u32) -> f64 {
    by_halves(value, |half| shuffle(half, lane))
}

#[inline(always)]
fn by_halves(value: f64, moved: impl Fn(u32) -> u32) -> f64 {
    let bits = value.to_bits();
    let [low, high] = [bits as u32, (bits >> 32) as u32].map(moved);
    f64::from_bits(u64::from(low) | u64::from(high) << 32)
}

/// One bit a lane: for which the predicate holds. All lanes of the warp take part.
#[inline(always)]
pub(crate) fn ballot(predicate: bool) -> u32 {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { vote_ballot_sync(ALL, predicate) }
}
