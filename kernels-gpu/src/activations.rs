//! Quantizing activations, fused with the operation before it.
//!
//! Warps share a row, 1024 columns at a time: a piece. A row operation may need the sum of squares
//! of the row, and scales per token its amax. So there are up to three passes over a row: sum of
//! squares, amax, store. A warp keeps its piece in registers from pass to pass, and loads it again
//! only if it has several. Without sums and amax of rows, each warp has one piece of any row.
//!
//! The rounded results of the row operation are values of the input's dtype, which [`blocks`] and
//! [`fp8`] quantize like any other values.

mod amax;
mod blocks;
mod fp8;
mod kv;
mod one_by_one;
mod output;
#[cfg(microscale_wgmma)]
mod packed;
mod row;
mod source;

#[cfg(microscale_wgmma)]
use core::ptr::{null, null_mut};

use microscale_formats::activations::token_scale;
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::{MOST_WARPS, RowScale};
#[cfg(microscale_wgmma)]
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use self::amax::finite_amax;
use self::blocks::{MXFP4, MXFP8, Nvfp4Output};
use self::fp8::Fp8Output;
use self::output::{Memory, Output, Piece};
#[cfg(microscale_wgmma)]
use self::packed::PackedOutput;
use self::row::Row;
use self::source::{Glu, Norm, Plain, RowOperation, Source};
use crate::access::MOST_STEPS;
use crate::arithmetic::Ptx;
use crate::by_block::largest;
use crate::dtype::{Bf16, Dtype, F16};
use crate::hardware::{ptx, warp};

/// The passes over a row.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    SumOfSquares,
    Amax,
    Store,
}

/// Quantizes the rows of a thread block.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn quantize<D: Dtype, O: RowOperation, F: Output>(
    source: Source,
    output: &F,
    memory: Memory,
    offsets: [*const u32; 2],
    params: &ActivationParams,
) {
    #[cfg(microscale_sm90)]
    {
        if F::BEFORE_PRODUCTS {
            ptx::start_next_kernel();
        }
        // In a programmatic launch, the kernel before this one may still run.
        ptx::wait_for_previous_kernel();
    }
    let warp_number = warp::number();
    // If rows are spread, warps are numbered through the launch, and rows through the matrix.
    let number = warp_number + warp::thread_block() * params.spread_warps;
    let (row_in_block, first_piece) = params.warps.divide(number);
    let scale_row = warp::thread_block() * params.block_rows + row_in_block;
    // SAFETY: the same contract.
    let row = unsafe {
        if F::BY_EXPERT { Row::find(params, offsets, scale_row) } else { Row::dense(params, scale_row) }
    };
    let source = source.at(params, &row);
    let per_token = F::PER_TOKEN && params.row_scale == RowScale::PerToken as u32;
    let of_tensor = F::PER_TENSOR && params.row_scale == RowScale::AmaxOfTensor as u32;
    // A word per piece of each of the thread block's rows, and then one per warp. Launches with
    // spread rows lack these words, and do not use them.
    let words = warp::shared::<f32>();
    let sums = words.wrapping_add((row_in_block * params.pieces) as usize);
    let all_amax = words.wrapping_add((params.block_rows * params.pieces) as usize).cast::<u32>();
    let mut inverse_rms = 0.0;
    let mut amax = 0;
    let mut pass = if O::NORM {
        Pass::SumOfSquares
    } else if per_token || of_tensor {
        Pass::Amax
    } else {
        Pass::Store
    };
    let first_pass = pass;
    let mut chunks = [[0; 4]; MOST_STEPS];
    let mut held = u32::MAX;
    let mut normalized = false;
    loop {
        let mut number = first_piece;
        while number < params.pieces {
            if held != number {
                // SAFETY: the same contract.
                chunks = unsafe { source.load::<D, O>(params, &row, number, pass == first_pass) };
                held = number;
                normalized = false;
            }
            if O::NORM && pass == Pass::SumOfSquares {
                let sum = source::sum_of_squares::<D>(&chunks);
                if warp::lane() == 0 {
                    // SAFETY: each piece has a word.
                    unsafe { *sums.add(number as usize) = sum };
                }
            } else {
                if O::NORM && !normalized {
                    // SAFETY: the same contract.
                    chunks = unsafe { source.normalize::<D>(params, &row, number, &chunks, inverse_rms) };
                    normalized = true;
                }
                if pass == Pass::Store {
                    let piece = Piece { params, memory, row: &row, number, chunks };
                    let stores = number == 0 && row.exists && warp::lane() == 0;
                    // SAFETY: the same contract.
                    unsafe {
                        let scale = output.scale::<D>(params, &memory, &row, f32::from_bits(amax), stores);
                        output.store::<D>(&piece, &scale);
                    }
                } else {
                    amax = amax.max(finite_amax::<D>(&chunks));
                }
            }
            number += params.warps.divisor;
        }
        match pass {
            Pass::SumOfSquares => {
                warp::barrier();
                let mut sum = 0.0;
                let mut piece = 0;
                while piece < params.pieces {
                    // Loads that do not wait for each other. Adding 0 changes nothing.
                    let four = [0, 1, 2, 3].map(|i| {
                        let exists = piece + i < params.pieces;
                        // SAFETY: each piece's warp stored its sum before the barrier.
                        if exists { unsafe { *sums.add((piece + i) as usize) } } else { 0.0 }
                    });
                    sum = (((sum + four[0]) + four[1]) + four[2]) + four[3];
                    piece += 4;
                }
                inverse_rms = params.norm.inverse_rms::<Ptx>(sum, params.inverse_cols);
                pass = if per_token || of_tensor { Pass::Amax } else { Pass::Store };
            }
            Pass::Amax => {
                amax = largest(amax);
                if of_tensor {
                    if warp::lane() == 0 {
                        // SAFETY: `row_scales` has a scale, which this launch touches by atomic
                        // operations only.
                        unsafe { raise_scale(memory.row_scales, token_scale(f32::from_bits(amax))) };
                    }
                    break;
                }
                if warp::lane() == 0 {
                    // SAFETY: each warp has a word.
                    unsafe { *all_amax.add(warp_number as usize) = amax };
                }
                warp::barrier();
                const { assert!(MOST_WARPS <= WARP) };
                let other = row_in_block * params.warps.divisor + warp::lane();
                let exists = warp::lane() < params.warps.divisor;
                // SAFETY: each warp stored its amax before the barrier.
                amax = largest(if exists { unsafe { *all_amax.add(other as usize) } } else { 0 });
                pass = Pass::Store;
            }
            Pass::Store => break,
        }
    }
}

/// Quantizes a thread block's rows to FP8, into packs.
///
/// # Safety
/// `params` and `pack` are of a
/// [`Quantizing`](microscale_kernels_abi::gemm::quantizing::Quantizing), and describe the rows at
/// `values`, in global memory, which nothing writes during the kernel. `out` has room for all
/// packs, and only this kernel uses it.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn quantize_packed<D: Dtype>(
    values: *const u8,
    out: *mut u8,
    pack: &PackParams,
    params: &ActivationParams,
) {
    let source = Source { input: values, residual: null_mut(), weights: null() };
    let memory = Memory { codes: out, scales: null_mut(), row_scales: null_mut() };
    // SAFETY: the same contract. Rows are dense, and have scales of their own.
    unsafe { quantize::<D, Plain, _>(source, &PackedOutput::new(pack), memory, [null(); 2], params) }
}

/// Raises a positive scale in memory. Numbers order as their bits do.
///
/// # Safety
/// `scale` is a number in global memory that is not negative, and that only atomic operations use
/// during the kernel.
#[inline(always)]
unsafe fn raise_scale(scale: *mut f32, least: f32) {
    // SAFETY: the same contract.
    unsafe {
        // After the first rows, hardly any raises it.
        if least.to_bits() > ptx::read_counter(scale.cast()) {
            ptx::raise_counter_32(scale.cast(), least.to_bits());
        }
    }
}

/// The entry points: `name<dtype, operation> = output`.
macro_rules! entries {
    ($($name:ident<$dtype:ty, $operation:ty> = $output:expr;)+) => {$(
        /// Computes, rounds and quantizes rows.
        ///
        /// # Safety
        /// `params` describes the matrices at `input`, `residual` (null for none; only for
        /// operations with a norm) and `weights` (null for ones), each aligned to its dtype and as
        /// `aligned` says, at `codes`, and at `scales`. `row_scales` has one scale, or one per row
        /// or expert, as `row_scale` says, and `offsets` and `scale_offsets` an entry per expert,
        /// and one more for rows that are sorted. Sorted offsets are not decreasing. All in global
        /// memory. Only this kernel writes during the kernel, and outputs overlap nothing, but the
        /// residual is both. The launch has the shape that the parameters give.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            input: *const u8,
            residual: *mut u8,
            weights: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            row_scales: *mut f32,
            offsets: *const u32,
            scale_offsets: *const u32,
            params: ActivationParams,
        ) {
            let source = Source { input, residual, weights };
            let memory = Memory { codes, scales, row_scales };
            // SAFETY: the same contract.
            unsafe {
                let offsets = [offsets, scale_offsets];
                quantize::<$dtype, $operation, _>(source, &$output, memory, offsets, &params);
            }
        }
    )+};
}

entries! {
    activations_plain_fp8_f16<F16, Plain> = Fp8Output;
    activations_plain_fp8_bf16<Bf16, Plain> = Fp8Output;
    activations_plain_mxfp8_f16<F16, Plain> = MXFP8;
    activations_plain_mxfp8_bf16<Bf16, Plain> = MXFP8;
    activations_plain_mxfp4_f16<F16, Plain> = MXFP4;
    activations_plain_mxfp4_bf16<Bf16, Plain> = MXFP4;
    activations_plain_nvfp4_f16<F16, Plain> = Nvfp4Output;
    activations_plain_nvfp4_bf16<Bf16, Plain> = Nvfp4Output;
    activations_glu_fp8_f16<F16, Glu> = Fp8Output;
    activations_glu_fp8_bf16<Bf16, Glu> = Fp8Output;
    activations_glu_mxfp8_f16<F16, Glu> = MXFP8;
    activations_glu_mxfp8_bf16<Bf16, Glu> = MXFP8;
    activations_glu_mxfp4_f16<F16, Glu> = MXFP4;
    activations_glu_mxfp4_bf16<Bf16, Glu> = MXFP4;
    activations_glu_nvfp4_f16<F16, Glu> = Nvfp4Output;
    activations_glu_nvfp4_bf16<Bf16, Glu> = Nvfp4Output;
    activations_norm_fp8_f16<F16, Norm> = Fp8Output;
    activations_norm_fp8_bf16<Bf16, Norm> = Fp8Output;
    activations_norm_mxfp8_f16<F16, Norm> = MXFP8;
    activations_norm_mxfp8_bf16<Bf16, Norm> = MXFP8;
    activations_norm_mxfp4_f16<F16, Norm> = MXFP4;
    activations_norm_mxfp4_bf16<Bf16, Norm> = MXFP4;
    activations_norm_nvfp4_f16<F16, Norm> = Nvfp4Output;
    activations_norm_nvfp4_bf16<Bf16, Norm> = Nvfp4Output;
}
