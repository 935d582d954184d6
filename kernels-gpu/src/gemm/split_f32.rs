//! Activations in f32: each is split into three bf16 terms of eight bits each. The GEMM multiplies
//! each term as a token of its own, and a last kernel merges the three products.
//!
//! The last kernel also multiplies sums by a factor per token, where activations in NVFP4 have a
//! global scale each.

use microscale_formats::{GlobalScale, fp4_dot};
use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::launch::THREADS;
use microscale_kernels_abi::{Epilogue, GlobalSlot};

use crate::hardware::{ptx, warp};
use crate::product::problem::Routed;
use crate::product::results::Results;

/// The first eight bits of a number as a bf16, and the remainder, which is 0 for NaN and
/// infinities.
#[inline(always)]
fn first_bits(x: f32) -> (u16, f32) {
    let bits = x.to_bits();
    let first = f32::from_bits(bits & 0xFFFF_0000);
    if !x.is_finite() {
        // The bits that make a NaN may be among the last ones.
        let quiet = if x.is_nan() { 0x0040 } else { 0 };
        return ((bits >> 16) as u16 | quiet, 0.0);
    }
    ((bits >> 16) as u16, x - first)
}

/// The terms of a number, the largest first.
#[inline(always)]
fn terms(x: f32) -> [u16; PARTS as usize] {
    let (first, rest) = first_bits(x);
    let (second, rest) = first_bits(rest);
    // The remainder has at most eight bits above the smallest bf16.
    [first, second, (rest.to_bits() >> 16) as u16]
}

/// The number of the thread in the launch.
#[inline(always)]
fn thread() -> u64 {
    u64::from(warp::thread_block()) * u64::from(THREADS) + u64::from(warp::thread())
}

/// Returns whether a row of activations exists. Sorted rows exist if an expert has them.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn exists(routed: &Routed, row: u64, parts: u32) -> bool {
    // SAFETY: the plan is not null when it is read, and is the one of the launch.
    routed.plan.is_null() || row * u64::from(parts) < u64::from(unsafe { routed.sorted_rows() })
}

/// Splits four activations. The terms of a row are consecutive rows. Sorted rows stay sorted.
///
/// # Safety
/// The contract of `split_f32`.
#[inline(always)]
pub(super) unsafe fn split(activations: *const f32, out: *mut u16, routed: Routed, grid: &SplitGrid) {
    let number = thread();
    if number >= grid.count {
        return;
    }
    let (row, four) = grid.fours.divide(number);
    // SAFETY: the kernel's contract.
    if !unsafe { exists(&routed, row, PARTS) } {
        return;
    }
    // SAFETY: the row exists, and `from` lists it.
    let token = u64::from(unsafe { Routed::listed(routed.from, row as u32) });
    let from = activations.wrapping_add((token * grid.cols + 4 * four) as usize);
    let to = out.wrapping_add((row * u64::from(PARTS) * grid.cols + 4 * four) as usize);
    // SAFETY: the row has activations from `4 * four` on, and `out` has room for the terms of each.
    // With `aligned`, there are four, on 16 bytes.
    unsafe {
        if grid.aligned != 0 {
            let [a, b, c, d] = ptx::load_16(from.cast()).map(|bits| terms(f32::from_bits(bits)));
            for i in 0..PARTS as usize {
                let words =
                    [[a[i], b[i]], [c[i], d[i]]].map(|[low, high]| u32::from(low) | u32::from(high) << 16);
                let to = to.wrapping_add(i * grid.cols as usize).cast::<u64>();
                *to = u64::from(words[0]) | u64::from(words[1]) << 32;
            }
        } else {
            let mut i = 0;
            while i < 4 && 4 * four + i < grid.cols {
                let terms = terms(*from.wrapping_add(i as usize));
                for j in 0..PARTS as usize {
                    *to.wrapping_add(j * grid.cols as usize + i as usize) = terms[j];
                }
                i += 1;
            }
        }
    }
}

/// The global scales of activations by token, if they have such, and of each matrix of weights:
/// addresses in global memory.
#[derive(Clone, Copy)]
pub(super) struct TokenGlobals {
    pub(super) token_scales: *const f32,
    pub(super) weight_globals: *const GlobalSlot,
}

impl TokenGlobals {
    /// The factor of the sums of a sorted row, by the weights of an expert; 1 without global scales
    /// by token.
    ///
    /// # Safety
    /// The contract of `merge_f32`. Row and expert exist.
    #[inline(always)]
    unsafe fn factor(&self, routed: &Routed, row: u64, expert: u64, grid: &MergeGrid) -> f64 {
        if self.token_scales.is_null() {
            return 1.0;
        }
        // SAFETY: `from` lists the row, `token_scales` has a scale per row of activations, and
        // `weight_globals` a slot per expert.
        let [token, weights] = unsafe {
            let from = Routed::listed(routed.from, row as u32);
            let token = *self.token_scales.wrapping_add(from as usize);
            [token, (*self.weight_globals.wrapping_add(expert as usize)).scale]
        };
        let globals = [Some(GlobalScale::Multiplier(token)), grid.weights.global_scale(weights)];
        f64::from(fp4_dot::factor(grid.alpha, globals))
    }
}

/// Adds up the products of a result's terms, and stores the result.
///
/// # Safety
/// The contract of `merge_f32`.
#[inline(always)]
pub(super) unsafe fn merge(
    sums: *const f32,
    globals: TokenGlobals,
    results: Results,
    routed: Routed,
    grid: &MergeGrid,
) {
    let number = thread();
    if number >= grid.count {
        return;
    }
    let (token, result) = grid.results.divide(number);
    // SAFETY: the kernel's contract.
    if !unsafe { exists(&routed, token, grid.parts) } {
        return;
    }
    // SAFETY: the row exists, and `to` lists it.
    let result_row = u64::from(unsafe { Routed::listed(routed.to, token as u32) });
    let expert = if results.epilogue.has(Epilogue::BIAS) || !globals.token_scales.is_null() {
        // SAFETY: the sorted rows of its terms exist.
        u64::from(unsafe { routed.expert_of(token as u32 * grid.parts) })
    } else {
        0
    };
    // SAFETY: the row and its expert exist.
    let factor = unsafe { globals.factor(&routed, token, expert, grid) };
    let multiplied = grid.multiplied();
    let bias_bytes = results.epilogue.bias_dtype(multiplied).bytes() as u64;
    let bias = results.bias.wrapping_add((expert * grid.rows * bias_bytes) as usize);
    let results = Results { bias, ..results };
    let gated = grid.results.divisor != grid.rows;
    let row = if gated { 2 * result } else { result };
    let sum_of = |row: u64| {
        let mut sum = 0.0;
        for i in 0..u64::from(grid.parts) {
            let from = (token * u64::from(grid.parts) + i) * grid.rows + row;
            // SAFETY: `sums` has a row for each term of each token.
            sum += f64::from(unsafe { *sums.wrapping_add(from as usize) });
        }
        sum * factor
    };
    // SAFETY: the result exists, and no other thread stores it.
    unsafe { results.store(multiplied, [result_row, row, grid.rows], sum_of(row), || sum_of(row + 1)) }
}
