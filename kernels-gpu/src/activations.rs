//! Quantizing activations, fused with the operation before it.
//!
//! Warps share a row, 1024 columns at a time: a piece. A row operation may need the sum of squares
//! of the row, and scales per token its amax. So there are up to three passes over a row: sum of
//! squares, amax, store. A warp keeps its piece in registers from pass to pass, and loads it again
//! only if it has several.
//!
//! The rounded results of the row operation are values of the input's dtype, which [`blocks`] and
//! [`fp8`] quantize like any other values.

mod blocks;
mod fp8;
mod row;
mod source;

use core::hint::cold_path;
use core::marker::PhantomData;

use microscale_formats::nvfp4::Arithmetic;
use microscale_formats::plan::NvPlan;
use microscale_formats::{E2m1, E4m3};
use microscale_kernels_abi::activations::RowScale;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{ActivationParams, MxOptions};

use self::row::Row;
use self::source::{Glu, Norm, Plain, RowOperation, Source};
use crate::access::MOST_STEPS;
use crate::arithmetic::Ptx;
use crate::by_block::largest;
use crate::dtype::{Bf16, Chunk, Dtype, F16};
use crate::format::{EVEN, Element, Mx, Nv};
use crate::hardware::{ptx, warp};

/// The addresses that kernels take.
#[derive(Clone, Copy)]
struct Memory {
    codes: *mut u8,
    scales: *mut u8,
    row_scales: *mut f32,
}

/// A warp's piece of a row.
struct Piece<'a> {
    params: &'a ActivationParams,
    memory: Memory,
    row: &'a Row,
    /// Its number in the row.
    number: u32,
    /// Four chunks per lane: columns 256 apart.
    chunks: [Chunk; MOST_STEPS],
}

/// An output format.
trait Output {
    /// The data of a row: its scale, or its plan.
    type Scale;

    /// Whether rows may have a scale each.
    const PER_TOKEN: bool;

    /// The scale of a row, for its amax, or where that is given. Lane 0 of a row's first warp
    /// `stores` a scale from amax.
    ///
    /// # Safety
    /// The kernel's contract.
    unsafe fn scale<D: Dtype>(params: &ActivationParams, memory: &Memory, row: &Row, amax: f32, stores: bool) -> Self::Scale;

    /// Quantizes and stores a piece.
    ///
    /// # Safety
    /// The kernel's contract.
    unsafe fn store<D: Dtype>(piece: &Piece<'_>, scale: &Self::Scale);
}

/// MXFP8 or MXFP4.
struct MxOutput<E>(PhantomData<E>);

impl<E: Element> Output for MxOutput<E> {
    type Scale = Mx<E, EVEN>;
    const PER_TOKEN: bool = false;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(params: &ActivationParams, _: &Memory, _: &Row, _: f32, _: bool) -> Self::Scale {
        let ActivationParams { mantissa_addend, .. } = *params;
        Mx::new(MxOptions { mantissa_addend, negative_zero: 0, saturate_non_finite: 0, ties: 0 })
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(piece: &Piece<'_>, format: &Self::Scale) {
        // SAFETY: the same contract.
        unsafe { blocks::store::<D, _>(piece, format) }
    }
}

/// NVFP4 with Transformer Engine's numerics.
struct Nvfp4Output;

impl Output for Nvfp4Output {
    type Scale = Nv;
    const PER_TOKEN: bool = true;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(
        params: &ActivationParams,
        memory: &Memory,
        row: &Row,
        amax: f32,
        stores: bool,
    ) -> Nv {
        const NUMERICS: Arithmetic = Arithmetic::TRANSFORMER_ENGINE;
        let divisor = if params.row_scale == RowScale::PerToken as u32 {
            let divisor = NUMERICS.global_scale(amax, |x| x).value();
            if stores {
                // SAFETY: there is a scale for each row that exists.
                unsafe { *memory.row_scales.add(row.number as usize) = 1.0 / divisor };
            }
            divisor
        } else {
            // SAFETY: the same contract.
            let given = unsafe { row.given(params, memory.row_scales) };
            if params.multiplies != 0 { 1.0 / given } else { given }
        };
        Nv::new(NvPlan::new(NUMERICS, divisor), 0)
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(piece: &Piece<'_>, format: &Nv) {
        // SAFETY: the same contract.
        unsafe { blocks::store::<D, _>(piece, format) }
    }
}

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
    memory: Memory,
    offsets: [*const u32; 2],
    params: &ActivationParams,
) {
    let warp_number = warp::number();
    let (row_in_block, first_piece) = params.warps.divide(warp_number);
    let scale_row = warp::thread_block() * params.block_rows + row_in_block;
    // SAFETY: the same contract.
    let row = unsafe { Row::find(params, offsets, scale_row) };
    let source = source.at(params, &row);
    let per_token = F::PER_TOKEN && params.row_scale == RowScale::PerToken as u32;
    let sums = warp::shared::<f32>();
    // SAFETY: the launch has a word per piece of each row, and then one per warp.
    let (sums, all_amax) = unsafe {
        (sums.add((row_in_block * params.pieces) as usize), sums.add((params.block_rows * params.pieces) as usize).cast::<u32>())
    };
    let mut inverse_rms = 0.0;
    let mut amax = 0;
    let mut pass = if O::NORM {
        Pass::SumOfSquares
    } else if per_token {
        Pass::Amax
    } else {
        Pass::Store
    };
    let first_pass = pass;
    let mut chunks = [[0; 4]; MOST_STEPS];
    let mut held = u32::MAX;
    let mut normalized = false;
    loop {
        // SAFETY: the same contract.
        let scale = unsafe {
            let stores = pass == Pass::Store && first_piece == 0 && row.exists && warp::lane() == 0;
            F::scale::<D>(params, &memory, &row, f32::from_bits(amax), stores)
        };
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
                    // SAFETY: the same contract.
                    unsafe { F::store::<D>(&piece, &scale) };
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
                for piece in 0..params.pieces {
                    // SAFETY: each piece's warp stored its sum before the barrier.
                    sum += unsafe { *sums.add(piece as usize) };
                }
                inverse_rms = params.norm.inverse_rms::<Ptx>(sum, params.inverse_cols);
                pass = if per_token { Pass::Amax } else { Pass::Store };
            }
            Pass::Amax => {
                amax = largest(amax);
                if warp::lane() == 0 {
                    // SAFETY: each warp has a word.
                    unsafe { *all_amax.add(warp_number as usize) = amax };
                }
                warp::barrier();
                for other in 0..params.warps.divisor {
                    let other = row_in_block * params.warps.divisor + other;
                    // SAFETY: each warp stored its amax before the barrier.
                    amax = amax.max(unsafe { *all_amax.add(other as usize) });
                }
                pass = Pass::Store;
            }
            Pass::Store => break,
        }
    }
}

/// The bits, as f32, of the largest finite magnitude of a lane's chunks.
#[inline(always)]
fn finite_amax<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> u32 {
    let mut most = 0;
    for j in 0..D::STEPS as usize {
        let [a, b, c, d] = chunks[j];
        most = D::max_magnitudes(most, D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)));
    }
    let most = D::largest(most);
    if most < D::INFINITY {
        return D::magnitude_to_f32_bits(most);
    }
    cold_path();
    let mut finite = 0;
    for_each::<D>(chunks, |value| {
        if value.is_finite() {
            finite = finite.max(value.to_bits() & 0x7FFF_FFFF);
        }
    });
    finite
}

/// Calls `each` with a lane's elements, for rare cases.
#[inline(always)]
fn for_each<D: Dtype>(chunks: &[Chunk; MOST_STEPS], mut each: impl FnMut(f32)) {
    rolled(D::STEPS, |j| {
        let chunk = chunk_of_step(chunks, j);
        rolled(D::CHUNK, |i| each(element::<D>(&chunk, i)));
    });
}

/// Calls `each` with numbers below `count`, in a loop that is not unrolled, for rare cases.
#[inline(always)]
fn rolled(count: u32, mut each: impl FnMut(u32)) {
    let mut i = 0;
    while i < count {
        each(i);
        // Opaque, so that the compiler cannot count the iterations.
        i = ptx::opaque(i + 1);
    }
}

/// Value `i` of a chunk of 16-bit values, without indexing memory.
#[inline(always)]
fn element<D: Dtype>(chunk: &Chunk, i: u32) -> f32 {
    let word = select(chunk, i / 2);
    D::widen(&[if i % 2 == 0 { word & 0xFFFF } else { word >> 16 }, 0, 0, 0], 0)
}

/// The chunk of step `j`, without indexing memory.
#[inline(always)]
fn chunk_of_step(chunks: &[Chunk; MOST_STEPS], j: u32) -> Chunk {
    let [a, b, c, d, ..] = *chunks;
    let word = |word: usize| select(&[a[word], b[word], c[word], d[word]], j);
    [word(0), word(1), word(2), word(3)]
}

/// A word of four, without indexing memory.
#[inline(always)]
fn select([a, b, c, d]: &[u32; 4], i: u32) -> u32 {
    // Opaque, lest the compiler index an array in memory instead.
    let [a, b, c, d] = [ptx::opaque(*a), ptx::opaque(*b), ptx::opaque(*c), ptx::opaque(*d)];
    let (low, high) = if i & 1 == 0 { (a, c) } else { (b, d) };
    if i & 2 == 0 { low } else { high }
}

/// The entry points: `name<dtype, operation, output>`.
macro_rules! entries {
    ($($name:ident<$dtype:ty, $operation:ty, $output:ty>)+) => {$(
        /// Computes, rounds and quantizes rows.
        ///
        /// # Safety
        /// `params` describes the matrices at `input`, `residual` (null for none; only for
        /// operations with a norm) and `weights` (null for ones), each aligned to its dtype and as
        /// `aligned` says, at `codes`, and at `scales`. `row_scales` has a scale per row or expert,
        /// as `row_scale` says, and `offsets` and `scale_offsets` an entry per expert, and one more
        /// for rows that are sorted. Sorted offsets are not decreasing. All in global memory. Only
        /// this kernel writes during the kernel, and outputs overlap nothing, but the residual is
        /// both. The launch has the shape that the parameters give.
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
                quantize::<$dtype, $operation, $output>(source, memory, [offsets, scale_offsets], &params);
            }
        }
    )+};
}

entries! {
    activations_plain_fp8_f16<F16, Plain, fp8::Fp8Output>
    activations_plain_fp8_bf16<Bf16, Plain, fp8::Fp8Output>
    activations_plain_mxfp8_f16<F16, Plain, MxOutput<E4m3>>
    activations_plain_mxfp8_bf16<Bf16, Plain, MxOutput<E4m3>>
    activations_plain_mxfp4_f16<F16, Plain, MxOutput<E2m1>>
    activations_plain_mxfp4_bf16<Bf16, Plain, MxOutput<E2m1>>
    activations_plain_nvfp4_f16<F16, Plain, Nvfp4Output>
    activations_plain_nvfp4_bf16<Bf16, Plain, Nvfp4Output>
    activations_glu_fp8_f16<F16, Glu, fp8::Fp8Output>
    activations_glu_fp8_bf16<Bf16, Glu, fp8::Fp8Output>
    activations_glu_mxfp8_f16<F16, Glu, MxOutput<E4m3>>
    activations_glu_mxfp8_bf16<Bf16, Glu, MxOutput<E4m3>>
    activations_glu_mxfp4_f16<F16, Glu, MxOutput<E2m1>>
    activations_glu_mxfp4_bf16<Bf16, Glu, MxOutput<E2m1>>
    activations_glu_nvfp4_f16<F16, Glu, Nvfp4Output>
    activations_glu_nvfp4_bf16<Bf16, Glu, Nvfp4Output>
    activations_norm_fp8_f16<F16, Norm, fp8::Fp8Output>
    activations_norm_fp8_bf16<Bf16, Norm, fp8::Fp8Output>
    activations_norm_mxfp8_f16<F16, Norm, MxOutput<E4m3>>
    activations_norm_mxfp8_bf16<Bf16, Norm, MxOutput<E4m3>>
    activations_norm_mxfp4_f16<F16, Norm, MxOutput<E2m1>>
    activations_norm_mxfp4_bf16<Bf16, Norm, MxOutput<E2m1>>
    activations_norm_nvfp4_f16<F16, Norm, Nvfp4Output>
    activations_norm_nvfp4_bf16<Bf16, Norm, Nvfp4Output>
}

const _: () = assert!(MOST_STEPS >= 4 && WARP == 32);
