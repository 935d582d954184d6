//! Warp groups, of compute capability 9.0: four warps multiply 64 rows of weights by many tokens
//! (`wgmma`).
//!
//! These instructions are convergent assembly: see [`crate::hardware`]. Kernels call them in
//! control flow that is uniform for the warp group, where LLVM has no branch to move them into.

use core::arch::asm;

use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::launch::WARP;

use crate::hardware::warp;

/// Warps of a warp group, and tiles of 16 rows of a multiplication.
pub(crate) const WARPS: u32 = 4;

/// Releases registers of each thread but `COUNT`, a multiple of 8. All threads of the warp group
/// call it.
#[inline(always)]
pub(crate) fn release_registers<const COUNT: u32>() {
    // SAFETY: convergent; kernels call it in uniform control flow. The assembler limits the code
    // after it to the number.
    unsafe {
        asm!("setmaxnreg.dec.sync.aligned.u32 {count};", count = const COUNT,
            options(nostack, preserves_flags));
    }
}

/// Waits until each thread can have `COUNT` registers, a multiple of 8, which other warp groups
/// release. All threads of the warp group call it.
#[inline(always)]
pub(crate) fn acquire_registers<const COUNT: u32>() {
    // SAFETY: as for `release_registers`.
    unsafe {
        asm!("setmaxnreg.inc.sync.aligned.u32 {count};", count = const COUNT,
            options(nostack, preserves_flags));
    }
}

/// Waits for `threads` threads, whole warps, at the thread block's barrier `NUMBER`. Their earlier
/// writes are then visible to each other. [`warp::barrier`](crate::hardware::warp::barrier) has
/// number 0.
///
/// # Safety
/// All lanes of the warp call it, and exactly `threads` threads.
#[inline(always)]
pub(crate) unsafe fn barrier_of<const NUMBER: u32>(threads: u32) {
    // SAFETY: convergent; all lanes of the warp are here.
    unsafe {
        asm!("barrier.sync.aligned {number}, {threads};", number = const NUMBER, threads = in(reg32) threads,
            options(nostack, preserves_flags));
    }
}

/// Waits for the other warps of the warp group. Their earlier writes are then visible to each
/// other. Takes a barrier of the thread block per warp group, from number 1 on.
///
/// # Safety
/// All lanes of the warp group's four warps call it. [`barrier_of`] is not used with its number.
#[inline(always)]
pub(crate) unsafe fn barrier() {
    let number = 1 + warp::number() / WARPS;
    // SAFETY: convergent; all lanes of the warp are here.
    unsafe {
        asm!("barrier.sync.aligned {number}, {threads};", number = in(reg32) number,
            threads = const WARPS * WARP, options(nostack, preserves_flags));
    }
}

/// The stride of eight tokens of 16-bit activations in a pack, in the descriptors' unit of 16
/// bytes.
const NEXT_EIGHT: u32 = PACK_COLUMNS;
/// The same for decoded FP8 weights.
const NEXT_EIGHT_FP8: u32 = PACK_COLUMNS / 2;
/// The upper half of the descriptor of [`swizzled`] tokens: the same stride, and rows of 128 bytes.
const SWIZZLED_EIGHT: u32 = PACK_COLUMNS / 2 | 1 << 30;

/// The low half of the descriptor of a pack in shared memory, for [`MultiplyTokens`] and
/// [`MultiplyPack`].
///
/// A core matrix has eight tokens and 16 bytes of activations per token. It is followed by the core
/// matrix of the next 16 bytes. The core matrices of the next eight tokens come after all of these.
/// A multiplication takes 32 bytes per token, so the next one's descriptor is 16 larger.
#[inline(always)]
pub(crate) fn core_matrices(address: u32) -> u32 {
    // The upper bits of the address select a thread block of the cluster.
    (address & 0x3_FFFF) >> 4 | 8 << 16
}

/// The low half of the descriptor of a pack of FP8 activations in shared memory, for
/// [`MultiplyTokens`] and [`MultiplyPack`], on 1024 bytes.
///
/// A token has 128 bytes, whose pieces of 16 are swizzled. A multiplication takes 32 bytes per
/// token, so the next one's descriptor is 2 larger.
#[inline(always)]
pub(crate) fn swizzled(address: u32) -> u32 {
    // The upper bits of the address select a thread block of the cluster.
    (address & 0x3_FFFF) >> 4 | 1 << 16
}

/// Products of 64 rows of weights in registers and tokens' activations in shared memory. `A` is a
/// thread's array of accumulators: of two rows, eight apart, and of two tokens in each eight.
pub(crate) trait MultiplyTokens<A> {
    /// Starts to add two products of 16 columns each to the accumulators, 32 of E4M3, and waits for
    /// all earlier products. Weights are distributed as in [`crate::hardware::warp::multiply_f16`],
    /// with two columns of E4M3 in place of one of 16 bits;
    /// `activations` is the low half of a descriptor from [`core_matrices`], of E4M3 from
    /// [`swizzled`].
    ///
    /// # Safety
    /// All threads of the warp group call it. The activations stay in shared memory until the
    /// products have been waited for. Nothing else uses the accumulators until then.
    unsafe fn multiply_tokens(sums: &mut A, weights: [[u32; 4]; 2], activations: u32);

    /// Waits for all products.
    ///
    /// # Safety
    /// All threads of the warp group call it.
    unsafe fn wait(sums: &mut A);
}

/// Products of 64 rows of E4M3 weights in registers and tokens' E4M3 activations in shared memory.
/// `Self` is a thread's array of accumulators, as in [`MultiplyTokens`].
pub(crate) trait MultiplyPack {
    /// Starts to compute the sums of the 128 products of a pack. Weights are distributed as in
    /// [`crate::hardware::warp::multiply_f16`], with two columns in place of one of 16 bits, for
    /// each of four multiplications. `activations` is the low half of a descriptor from
    /// [`swizzled`].
    ///
    /// # Safety
    /// All threads of the warp group call it. The activations stay in shared memory until the
    /// products have been waited for. Nothing else uses the accumulators until then.
    unsafe fn multiply_pack(&mut self, weights: [[u32; 4]; 4], activations: u32);

    /// [`Self::multiply_pack`] with weights in shared memory, as core matrices of eight rows.
    /// `weights` is the low half of their descriptor, from [`core_matrices`]. Waits for the
    /// first half of the products: long layers take up to 7 % less time with it.
    ///
    /// # Safety
    /// As for [`Self::multiply_pack`]. The weights stay in shared memory, too, and their writers
    /// have called [`fence_writes`](crate::hardware::shared::fence_writes).
    unsafe fn multiply_shared(&mut self, weights: u32, activations: u32);

    /// Waits for all products.
    ///
    /// # Safety
    /// All threads of the warp group call it.
    unsafe fn wait(&mut self);
}

/// Products of a pack as in [`MultiplyPack`], where each of the four multiplications has its own
/// sums.
pub(crate) trait MultiplyBlocks {
    /// A thread's sums of all four, one after the other.
    type Blocks;

    /// Starts to compute the sums. Operands are as for [`MultiplyPack::multiply_pack`].
    ///
    /// # Safety
    /// As for [`MultiplyPack::multiply_pack`].
    unsafe fn multiply_blocks(products: &mut Self::Blocks, weights: [[u32; 4]; 4], activations: u32);

    /// Waits for all products.
    ///
    /// # Safety
    /// All threads of the warp group call it.
    unsafe fn wait_for_blocks(products: &mut Self::Blocks);
}

/// The instructions for f16.
pub(crate) struct WgmmaF16;

/// The instructions for bf16.
pub(crate) struct WgmmaBf16;

/// The instructions for E4M3.
pub(crate) struct WgmmaE4m3;

/// Implements [`MultiplyTokens`] for a dtype and a number of tokens, with the indices of the
/// accumulators written out.
macro_rules! multiply_tokens {
    ($dtype:ident $shape:literal $last:literal $eight:ident $next:literal $tokens:literal $sums:literal
        [$first:literal $($i:literal)*]) => {
        impl MultiplyTokens<[f32; $sums]> for $dtype {
            #[inline(always)]
            unsafe fn multiply_tokens(sums: &mut [f32; $sums], [a, b]: [[u32; 4]; 2], activations: u32) {
                // SAFETY: the instructions need exactly the caller's promise. The upper half of a
                // descriptor has the stride of eight tokens.
                unsafe {
                    asm!(
                        "{{ .reg .pred add; .reg .b64 first, second; setp.eq.u32 add, 0, 0;",
                        "mov.b64 first, {{{first}, {eight}}}; mov.b64 second, {{{second}, {eight}}};",
                        "wgmma.fence.sync.aligned;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, $shape,
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{a0}, {a1}, {a2}, {a3}}}, first, add", $last),
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, $shape,
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{b0}, {b1}, {b2}, {b3}}}, second, add", $last),
                        "wgmma.commit_group.sync.aligned;",
                        "wgmma.wait_group.sync.aligned 1; }}",
                        inout(reg32) sums[$first], $(inout(reg32) sums[$i],)*
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b0 = in(reg32) b[0], b1 = in(reg32) b[1], b2 = in(reg32) b[2], b3 = in(reg32) b[3],
                        first = in(reg32) activations, second = in(reg32) activations + $next,
                        eight = const $eight,
                        options(nostack, preserves_flags)
                    );
                }
            }

            #[inline(always)]
            unsafe fn wait(sums: &mut [f32; $sums]) {
                // SAFETY: the instruction needs exactly the caller's promise. The accumulators are
                // operands, so that LLVM does not read them earlier.
                unsafe {
                    asm!(
                        "wgmma.wait_group.sync.aligned 0;",
                        concat!("// {", $first, "}", $(" {", $i, "}",)*),
                        inout(reg32) sums[$first], $(inout(reg32) sums[$i],)*
                        options(nostack, preserves_flags)
                    );
                }
            }
        }
    };
}

/// Starts the four multiplications of a pack, given the indices of all sums, and of the sums of
/// each multiplication. `add` adds to them, `none` does not.
macro_rules! start_pack {
    ($tokens:literal $sums:ident $weights:ident $activations:ident [$($all:literal)*]
        $([$first:literal $($i:literal)*] $weight:literal $descriptor:literal $adds:literal)*) => {{
        let [a, b, c, d] = $weights;
        asm!(
            "{{ .reg .pred add, none; .reg .b64 first, second, third, fourth;",
            "setp.eq.u32 add, 0, 0; setp.ne.u32 none, 0, 0;",
            "mov.b64 first, {{{first}, {eight}}}; mov.b64 second, {{{second}, {eight}}};",
            "mov.b64 third, {{{third}, {eight}}}; mov.b64 fourth, {{{fourth}, {eight}}};",
            "wgmma.fence.sync.aligned;",
            $(concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k32.f32.e4m3.e4m3",
                " {{{", $first, "}", $(", {", $i, "}",)* "}}, ", $weight, ", ", $descriptor, ", ", $adds, ", 1, 1;"),)*
            "wgmma.commit_group.sync.aligned; }}",
            $(inout(reg32) $sums[$all],)*
            a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
            b0 = in(reg32) b[0], b1 = in(reg32) b[1], b2 = in(reg32) b[2], b3 = in(reg32) b[3],
            c0 = in(reg32) c[0], c1 = in(reg32) c[1], c2 = in(reg32) c[2], c3 = in(reg32) c[3],
            d0 = in(reg32) d[0], d1 = in(reg32) d[1], d2 = in(reg32) d[2], d3 = in(reg32) d[3],
            first = in(reg32) $activations, second = in(reg32) $activations + 2,
            third = in(reg32) $activations + 4, fourth = in(reg32) $activations + 6,
            eight = const SWIZZLED_EIGHT,
            options(nostack, preserves_flags)
        );
    }};
}

/// Implements [`MultiplyPack`] for a number of tokens, with the indices of the accumulators written
/// out.
macro_rules! multiply_pack {
    ($tokens:literal $sums:literal [$first:literal $($i:literal)*]) => {
        impl MultiplyPack for [f32; $sums] {
            #[inline(always)]
            unsafe fn multiply_pack(&mut self, weights: [[u32; 4]; 4], activations: u32) {
                // SAFETY: the instructions need exactly the caller's promise. The upper half of a
                // descriptor has the stride of eight tokens.
                unsafe {
                    start_pack!($tokens self weights activations [$first $($i)*]
                        [$first $($i)*] "{{{a0}, {a1}, {a2}, {a3}}}" "first" "none"
                        [$first $($i)*] "{{{b0}, {b1}, {b2}, {b3}}}" "second" "add"
                        [$first $($i)*] "{{{c0}, {c1}, {c2}, {c3}}}" "third" "add"
                        [$first $($i)*] "{{{d0}, {d1}, {d2}, {d3}}}" "fourth" "add");
                }
            }

            #[inline(always)]
            unsafe fn multiply_shared(&mut self, weights: u32, activations: u32) {
                // SAFETY: the instructions need exactly the caller's promise. The upper half of a
                // descriptor has the stride of eight rows or tokens.
                unsafe {
                    asm!(
                        "{{ .reg .pred add, none; .reg .b64 a, b, first, second;",
                        "setp.eq.u32 add, 0, 0; setp.ne.u32 none, 0, 0;",
                        "mov.b64 a, {{{weights}, {eight}}}; mov.b64 b, {{{activations}, {swizzled}}};",
                        "wgmma.fence.sync.aligned;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k32.f32.e4m3.e4m3",
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, a, b, none, 1, 1;"),
                        "add.s64 first, a, 16; add.s64 second, b, 2;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k32.f32.e4m3.e4m3",
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, first, second, add, 1, 1;"),
                        "wgmma.commit_group.sync.aligned;",
                        "add.s64 first, a, 32; add.s64 second, b, 4;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k32.f32.e4m3.e4m3",
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, first, second, add, 1, 1;"),
                        "add.s64 first, a, 48; add.s64 second, b, 6;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k32.f32.e4m3.e4m3",
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, first, second, add, 1, 1;"),
                        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }}",
                        inout(reg32) self[$first], $(inout(reg32) self[$i],)*
                        weights = in(reg32) weights, activations = in(reg32) activations,
                        eight = const NEXT_EIGHT_FP8, swizzled = const SWIZZLED_EIGHT,
                        options(nostack, preserves_flags)
                    );
                }
            }

            #[inline(always)]
            unsafe fn wait(&mut self) {
                // SAFETY: as for the caller. Every implementation of `wait` for this array is the
                // same.
                unsafe { <WgmmaBf16 as MultiplyTokens<[f32; $sums]>>::wait(self) };
            }
        }
    };
}

/// Implements [`MultiplyBlocks`] for a number of tokens, with the indices of the sums of each
/// multiplication written out.
macro_rules! multiply_blocks {
    ($tokens:literal $sums:literal $all:literal
        [$($a:literal)*] [$($b:literal)*] [$($c:literal)*] [$($d:literal)*]) => {
        impl MultiplyBlocks for [f32; $sums] {
            type Blocks = [f32; $all];

            #[inline(always)]
            unsafe fn multiply_blocks(
                products: &mut Self::Blocks,
                weights: [[u32; 4]; 4],
                activations: u32,
            ) {
                // SAFETY: the instructions need exactly the caller's promise. The upper half of a
                // descriptor has the stride of eight tokens.
                unsafe {
                    start_pack!($tokens products weights activations [$($a)* $($b)* $($c)* $($d)*]
                        [$($a)*] "{{{a0}, {a1}, {a2}, {a3}}}" "first" "none"
                        [$($b)*] "{{{b0}, {b1}, {b2}, {b3}}}" "second" "none"
                        [$($c)*] "{{{c0}, {c1}, {c2}, {c3}}}" "third" "none"
                        [$($d)*] "{{{d0}, {d1}, {d2}, {d3}}}" "fourth" "none");
                }
            }

            #[inline(always)]
            unsafe fn wait_for_blocks(products: &mut Self::Blocks) {
                // SAFETY: as for the caller. Every implementation of `wait` for this array is the
                // same.
                unsafe { <WgmmaBf16 as MultiplyTokens<[f32; $all]>>::wait(products) };
            }
        }
    };
}

multiply_blocks!(16 8 32 [0 1 2 3 4 5 6 7] [8 9 10 11 12 13 14 15] [16 17 18 19 20 21 22 23]
    [24 25 26 27 28 29 30 31]);

/// Implements [`MultiplyTokens`] for every dtype.
macro_rules! every_dtype {
    ($tokens:literal $sums:literal $i:tt) => {
        multiply_tokens!(WgmmaF16 "k16.f32.f16.f16" ", 1, 1, 0;" NEXT_EIGHT 16 $tokens $sums $i);
        multiply_tokens!(WgmmaBf16 "k16.f32.bf16.bf16" ", 1, 1, 0;" NEXT_EIGHT 16 $tokens $sums $i);
        multiply_tokens!(WgmmaE4m3 "k32.f32.e4m3.e4m3" ", 1, 1;" SWIZZLED_EIGHT 2 $tokens $sums $i);
    };
}

/// Implements [`MultiplyTokens`] for every dtype, and [`MultiplyPack`].
macro_rules! every_dtype_and_pack {
    ($tokens:literal $sums:literal $i:tt) => {
        every_dtype!($tokens $sums $i);
        multiply_pack!($tokens $sums $i);
    };
}

every_dtype!(8 4 [0 1 2 3]);
every_dtype_and_pack!(16 8 [0 1 2 3 4 5 6 7]);
every_dtype!(24 12 [0 1 2 3 4 5 6 7 8 9 10 11]);
every_dtype_and_pack!(32 16 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]);
every_dtype!(48 24 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23]);
every_dtype_and_pack!(64 32 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
]);
every_dtype!(96 48 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47
]);
every_dtype!(104 52 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51
]);
every_dtype_and_pack!(128 64 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
]);
every_dtype!(144 72 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66
    67 68 69 70 71
]);
every_dtype!(192 96 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66
    67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
]);
every_dtype!(224 112 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66
    67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98
    99 100 101 102 103 104 105 106 107 108 109 110 111
]);
every_dtype!(256 128 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34
    35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66
    67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98
    99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122
    123 124 125 126 127
]);
