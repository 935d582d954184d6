//! What warp groups do together, on targets of compute capability 9.0: four warps multiply 64 rows with many tokens.
//!
//! These instructions are convergent, and LLVM does not know it, as there are no intrinsics for them all. Kernels use them in
//! control flow that is the same for all threads of a warp group, where LLVM has no branch to move them into.

use core::arch::asm;

use microscale_kernels_abi::gemm::PACK_COLUMNS as COLUMNS;

use crate::product::tensor_cores::{WithBf16, WithF16};

/// Registers of a thread, of which there are as many in a thread block as it started with.
pub(crate) enum Registers {
    /// For each of two warp groups that multiply: 232.
    Many,
    /// For the one that copies: 32.
    Few,
}

/// Gives registers back, or waits until others have given back what is asked for. All threads of the warp group take part.
#[inline(always)]
pub(crate) fn set_registers(registers: Registers) {
    // SAFETY: convergent; the kernels call it in uniform control flow. The assembler keeps to the number.
    unsafe {
        match registers {
            Registers::Many => {
                asm!("setmaxnreg.inc.sync.aligned.u32 232;", options(nostack, preserves_flags))
            }
            Registers::Few => asm!("setmaxnreg.dec.sync.aligned.u32 32;", options(nostack, preserves_flags)),
        }
    }
}

/// Waits for so many threads of the block, whole warps, at its barrier of this number, and makes what they wrote visible to each other.
/// [`warp::barrier`](crate::warp::barrier) has number 0.
///
/// # Safety
/// All lanes of the warp take part, and as many threads as wait call it.
#[inline(always)]
pub(crate) unsafe fn barrier_of<const NUMBER: u32>(threads: u32) {
    // SAFETY: convergent; the caller's promise.
    unsafe {
        asm!("barrier.sync.aligned {number}, {threads};", number = const NUMBER, threads = in(reg32) threads,
            options(nostack, preserves_flags));
    }
}

/// The offset of eight tokens' activations behind those of the eight before, in descriptors' units of 16 bytes: an image's.
const NEXT_EIGHT: u32 = COLUMNS;

/// Describes tokens' activations in shared memory at an address, for [`MultiplyTokens`]: the low half of a descriptor.
///
/// A core matrix is eight tokens times eight activations, a token in 16 bytes after the other. That of the next eight activations lies
/// behind it, and the next eight tokens' behind all of these. A multiplication takes 16 activations, so that the next one's are 16
/// behind.
#[inline(always)]
pub(crate) fn core_matrices(address: u32) -> u32 {
    // The bits above say which thread block of a cluster it is.
    (address & 0x3_FFFF) >> 4 | 8 << 16
}

/// Products of 64 rows of weights in registers with tokens' activations in shared memory, in a dtype. A thread has `SUMS` of
/// them: of two rows, eight apart, and of two tokens in each eight.
pub(crate) trait MultiplyTokens<const SUMS: usize> {
    /// Starts to add two products to sums: each of 16 columns, whose weights the thread has as in [`crate::warp::multiply_f16`], with
    /// activations that [`core_matrices`] describes. Waits for the products that were started before these.
    ///
    /// # Safety
    /// All threads of the warp group take part. The activations are in shared memory, and stay there until the products have been
    /// waited for; the sums are used for nothing else until then.
    unsafe fn multiply_tokens(sums: &mut [f32; SUMS], weights: [[u32; 4]; 2], activations: u32);

    /// Waits for all products.
    ///
    /// # Safety
    /// All threads of the warp group take part.
    unsafe fn wait(sums: &mut [f32; SUMS]);
}

/// Products of as many tokens as may be multiplied of a token tile that is not full
/// ([`TokenTile::multiplied`](microscale_kernels_abi::gemm::TokenTile::multiplied)).
pub(crate) trait MultiplyFewer:
    MultiplyTokens<48> + MultiplyTokens<64> + MultiplyTokens<80> + MultiplyTokens<96>
{
}

impl MultiplyFewer for WithF16 {}
impl MultiplyFewer for WithBf16 {}

/// Implements [`MultiplyTokens`] for a dtype and a number of tokens, with the numbers of the sums written out.
macro_rules! multiply_tokens {
    ($dtype:ident $word:literal $tokens:literal $sums:literal [$first:literal $($i:literal)*]) => {
        impl MultiplyTokens<$sums> for $dtype {
            #[inline(always)]
            unsafe fn multiply_tokens(sums: &mut [f32; $sums], [a, b]: [[u32; 4]; 2], activations: u32) {
                // SAFETY: the caller's promise is what the instructions need. The upper half of a descriptor says where the next eight
                // tokens are.
                unsafe {
                    asm!(
                        "{{ .reg .pred add; .reg .b64 first, second; setp.eq.u32 add, 0, 0;",
                        "mov.b64 first, {{{first}, {eight}}}; mov.b64 second, {{{second}, {eight}}};",
                        "wgmma.fence.sync.aligned;",
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k16.f32.", $word, ".", $word,
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{a0}, {a1}, {a2}, {a3}}}, first, add, 1, 1, 0;"),
                        concat!("wgmma.mma_async.sync.aligned.m64n", $tokens, "k16.f32.", $word, ".", $word,
                            " {{{", $first, "}", $(", {", $i, "}",)* "}}, {{{b0}, {b1}, {b2}, {b3}}}, second, add, 1, 1, 0;"),
                        "wgmma.commit_group.sync.aligned;",
                        "wgmma.wait_group.sync.aligned 1; }}",
                        inout(reg32) sums[$first], $(inout(reg32) sums[$i],)*
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b0 = in(reg32) b[0], b1 = in(reg32) b[1], b2 = in(reg32) b[2], b3 = in(reg32) b[3],
                        first = in(reg32) activations, second = in(reg32) activations + 16,
                        eight = const NEXT_EIGHT,
                        options(nostack, preserves_flags)
                    );
                }
            }

            #[inline(always)]
            unsafe fn wait(sums: &mut [f32; $sums]) {
                // SAFETY: the caller's promise is what the instruction needs. The sums are operands so that nobody reads them before.
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

/// Implements [`MultiplyTokens`] for both dtypes.
macro_rules! both_dtypes {
    ($tokens:literal $sums:literal $i:tt) => {
        multiply_tokens!(WithF16 "f16" $tokens $sums $i);
        multiply_tokens!(WithBf16 "bf16" $tokens $sums $i);
    };
}

both_dtypes!(16 8 [0 1 2 3 4 5 6 7]);
both_dtypes!(32 16 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]);
both_dtypes!(64 32 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]);
both_dtypes!(96 48 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35
    36 37 38 39 40 41 42 43 44 45 46 47
]);
both_dtypes!(128 64 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
    37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
]);
both_dtypes!(160 80 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35
    36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67
    68 69 70 71 72 73 74 75 76 77 78 79
]);
both_dtypes!(192 96 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35
    36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67
    68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
]);
both_dtypes!(256 128 [
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
    37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67
    68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98
    99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127
]);
