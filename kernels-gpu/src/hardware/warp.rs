//! A thread's position, and the convergent operations of a warp.
//!
//! The convergent operations are LLVM intrinsics: LLVM knows that they must not be moved across
//! branches.

use core::arch::nvptx::{_block_idx_x, _syncthreads, _thread_idx_x};
use core::intrinsics::gpu::gpu_launch_sized_workgroup_mem;

use microscale_kernels_abi::launch::WARP;

const ALL: u32 = u32::MAX;

/// Two f16 in LLVM's vector type.
#[repr(simd)]
#[derive(Clone, Copy)]
struct F16x2([f16; 2]);

/// A lane's four values of a product.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sums(f32, f32, f32, f32);

#[expect(improper_ctypes, reason = "LLVM's intrinsics take its own vectors")]
unsafe extern "llvm-intrinsic" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_sync_bfly(mask: u32, value: u32, lane_mask: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.f32.f32"]
    fn mma_f16(
        a0: F16x2,
        a1: F16x2,
        a2: F16x2,
        a3: F16x2,
        b0: F16x2,
        b1: F16x2,
        c0: f32,
        c1: f32,
        c2: f32,
        c3: f32,
    ) -> Sums;
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
    fn mma_bf16(
        a0: u32,
        a1: u32,
        a2: u32,
        a3: u32,
        b0: u32,
        b1: u32,
        c0: f32,
        c1: f32,
        c2: f32,
        c3: f32,
    ) -> Sums;
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

/// The warp's number in its thread block. The shuffle tells the assembler that it is uniform, so
/// that values derived from it take uniform registers.
#[inline(always)]
pub(crate) fn number() -> u32 {
    shuffle(thread() / WARP, 0)
}

/// Pins a value in a register. The assembler recomputes other values at each use, but not the
/// result of a shuffle. LLVM does not move a shuffle either, nor anything computed from it.
#[inline(always)]
pub(crate) fn pin_in_register(value: u32) -> u32 {
    shuffle(value, lane())
}

/// The thread block's number in the grid.
#[inline(always)]
pub(crate) fn thread_block() -> u32 {
    // SAFETY: reads a special register.
    unsafe { _block_idx_x() as u32 }
}

/// The value of the lane whose number differs in the bits of `lane_mask`. All lanes of the warp
/// call it.
#[inline(always)]
pub(crate) fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { shfl_sync_bfly(ALL, value, lane_mask, WARP - 1) }
}

/// The value of a given lane. All lanes of the warp call it.
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

/// A bit per lane: whether its predicate holds. All lanes of the warp call it.
#[inline(always)]
pub(crate) fn ballot(predicate: bool) -> u32 {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { vote_ballot_sync(ALL, predicate) }
}

/// True in one lane, always the same. Unlike a comparison of the lane's number, it tells the
/// assembler that one thread issues the instructions that follow. All lanes of the warp call it.
#[cfg(microscale_tcgen05)]
#[inline(always)]
pub(crate) fn elect() -> bool {
    #[repr(C)]
    struct Elected(u32, bool);
    unsafe extern "llvm-intrinsic" {
        #[link_name = "llvm.nvvm.elect.sync"]
        fn elect_sync(mask: u32) -> Elected;
    }
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { elect_sync(ALL) }.1
}

/// The product of a 16 × 16 and a 16 × 8 matrix in f16, added to `c`. All lanes of the warp call
/// it.
///
/// Lane 4g + t has two elements per word: in `a` rows g, g + 8, g and g + 8, at K = 2t, 2t, 2t + 8
/// and 2t + 8; in `b` column g, at K = 2t and 2t + 8. In `c` it has row g, then row g + 8, of
/// columns 2t and 2t + 1.
#[inline(always)]
pub(crate) fn multiply_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the same 32 bits.
    let pair = |word: u32| unsafe { core::mem::transmute::<u32, F16x2>(word) };
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    let Sums(w, x, y, z) = unsafe {
        mma_f16(
            pair(a[0]),
            pair(a[1]),
            pair(a[2]),
            pair(a[3]),
            pair(b[0]),
            pair(b[1]),
            c[0],
            c[1],
            c[2],
            c[3],
        )
    };
    [w, x, y, z]
}

/// [`multiply_f16`] of bf16.
#[inline(always)]
pub(crate) fn multiply_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    let Sums(w, x, y, z) = unsafe { mma_bf16(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) };
    [w, x, y, z]
}

/// The product of a 16 × 64 and a 64 × 8 matrix of FP4 with block scales, added to `c`. All lanes
/// of the warp call it.
///
/// Lane 4g + t has eight codes per word: in `a` rows g, g + 8, g and g + 8, at K = 8t, 8t, 8t + 32
/// and 8t + 32; in `b` column g, at K = 8t and 8t + 32. In `c` it has row g, then row g + 8, of
/// columns 2t and 2t + 1. A word of scales has four E4M3 (NVFP4) or, in its lower half, two E8M0
/// (MXFP4). Lanes 4g + 2`A` and 4g + 2`A` + 1 have the words of rows g and g + 8, and lane 4g + `B`
/// has the word of column g.
macro_rules! multiply_fp4 {
    ($($name:ident = $intrinsic:literal;)+) => {$(
        #[doc = "The product of FP4 matrices, as `multiply_fp4` describes."]
        #[cfg(microscale_block_scale)]
        #[inline(always)]
        pub(crate) fn $name<const A: u16, const B: u16>(
            a: [u32; 4],
            b: [u32; 2],
            c: [f32; 4],
            scales: [u32; 2],
        ) -> [f32; 4] {
            unsafe extern "llvm-intrinsic" {
                #[link_name = $intrinsic]
                fn mma(
                    a0: u32,
                    a1: u32,
                    a2: u32,
                    a3: u32,
                    b0: u32,
                    b1: u32,
                    c0: f32,
                    c1: f32,
                    c2: f32,
                    c3: f32,
                    scale_a: u32,
                    byte_a: u16,
                    thread_a: u16,
                    scale_b: u32,
                    byte_b: u16,
                    thread_b: u16,
                ) -> Sums;
            }
            let ([a0, a1, a2, a3], [b0, b1], [c0, c1, c2, c3], [s, t]) = (a, b, c, scales);
            // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform
            // control flow.
            let Sums(w, x, y, z) =
                unsafe { mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, s, 0, A, t, 0, B) };
            [w, x, y, z]
        }
    )+};
}
multiply_fp4! {
    multiply_nvfp4 =
        "llvm.nvvm.mma.block.scale.m16n8k64.row.col.mxf4nvf4.scale.4x.f32.e2m1.e2m1.f32.ue4m3";
    multiply_mxfp4 = "llvm.nvvm.mma.block.scale.m16n8k64.row.col.mxf4.scale.2x.f32.e2m1.e2m1.f32.ue8m0";
}

/// The dynamic shared memory of the launch.
#[inline(always)]
pub(crate) fn shared<T>() -> *mut T {
    gpu_launch_sized_workgroup_mem::<T>()
}

/// Waits for all threads of the block. Their earlier writes are then visible to each other.
#[inline(always)]
pub(crate) fn barrier() {
    // SAFETY: convergent; every kernel calls it with all threads of the block, each warp in uniform
    // control flow.
    unsafe { _syncthreads() }
}

/// Waits for all lanes of the warp. Their earlier writes are then visible to each other.
#[inline(always)]
pub(crate) fn sync() {
    // SAFETY: convergent; every kernel calls it with all 32 lanes active, in uniform control flow.
    unsafe { bar_warp_sync(ALL) }
}
