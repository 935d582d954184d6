//! Activations in f32: each becomes three in bf16, of eight bits each, which tensor cores multiply as they do others; and the sums of
//! the three are added up.

use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::launch::THREADS;
use microscale_formats::Dtype;
use microscale_kernels_abi::Epilogue;

use crate::product::operand::Routed;
use crate::product::results::Results;
use crate::warp;

/// The first eight bits of a number, as a bf16, and what they leave of it: nothing of a number that is not finite. NaN stays NaN.
#[inline(always)]
fn first_bits(x: f32) -> (u16, f32) {
    let bits = x.to_bits();
    let first = f32::from_bits(bits & 0xFFFF_0000);
    if !x.is_finite() {
        // The bits that say NaN may be the last ones.
        let quiet = if x.is_nan() { 0x0040 } else { 0 };
        return ((bits >> 16) as u16 | quiet, 0.0);
    }
    ((bits >> 16) as u16, x - first)
}

/// The parts of a number, the largest first.
#[inline(always)]
fn parts(x: f32) -> [u16; PARTS as usize] {
    let (first, rest) = first_bits(x);
    let (second, rest) = first_bits(rest);
    // What is left has eight bits or fewer, but for those below bf16's last one.
    [first, second, (rest.to_bits() >> 16) as u16]
}

/// The number of a thread among all of the launch.
#[inline(always)]
fn thread() -> u64 {
    u64::from(warp::thread_block()) * u64::from(THREADS) + u64::from(warp::thread())
}

/// Returns whether a row whose parts are rows of a product is there: of sorted ones, whether it is some expert's.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
unsafe fn is_there(routed: &Routed, row: u64) -> bool {
    // SAFETY: the caller's promise.
    routed.plan.is_null() || row * u64::from(PARTS) < u64::from(unsafe { routed.sorted_rows() })
}

/// Makes the parts of four activations: a row's parts are rows one after the other. Sorted rows become sorted ones.
///
/// # Safety
/// The contract of the kernel.
#[inline(always)]
pub(super) unsafe fn split(activations: *const f32, out: *mut u16, routed: Routed, grid: &SplitGrid) {
    let number = thread();
    if number >= grid.count {
        return;
    }
    let (row, four) = grid.fours.divide(number);
    // SAFETY: the caller's contract.
    if !unsafe { is_there(&routed, row) } {
        return;
    }
    // SAFETY: as above; the row exists.
    let token = u64::from(unsafe { Routed::listed(routed.from, row as u32) });
    let from = activations.wrapping_add((token * grid.cols + 4 * four) as usize);
    let to = out.wrapping_add((row * u64::from(PARTS) * grid.cols + 4 * four) as usize);
    // SAFETY: the activations exist, and there is room for each part of each.
    unsafe {
        if grid.aligned != 0 {
            let [a, b, c, d] = crate::ptx::load_16(from.cast()).map(|bits| parts(f32::from_bits(bits)));
            for i in 0..PARTS as usize {
                let words =
                    [[a[i], b[i]], [c[i], d[i]]].map(|[low, high]| u32::from(low) | u32::from(high) << 16);
                let to = to.wrapping_add(i * grid.cols as usize).cast::<u64>();
                *to = u64::from(words[0]) | u64::from(words[1]) << 32;
            }
        } else {
            let mut i = 0;
            while i < 4 && 4 * four + i < grid.cols {
                let parts = parts(*from.wrapping_add(i as usize));
                for j in 0..PARTS as usize {
                    *to.wrapping_add(j * grid.cols as usize + i as usize) = parts[j];
                }
                i += 1;
            }
        }
    }
}

/// Adds up the sums of a result's parts, and stores it.
///
/// # Safety
/// The contract of the kernel.
#[inline(always)]
pub(super) unsafe fn merge(sums: *const f32, results: Results, routed: Routed, grid: &MergeGrid) {
    let number = thread();
    if number >= grid.count {
        return;
    }
    let (token, result) = grid.results.divide(number);
    // SAFETY: the caller's contract.
    if !unsafe { is_there(&routed, token) } {
        return;
    }
    // SAFETY: as above; the row exists.
    let place = u64::from(unsafe { Routed::listed(routed.to, token as u32) });
    let expert = if results.epilogue.has(Epilogue::BIAS) {
        // SAFETY: as above, and so do its parts.
        u64::from(unsafe { routed.expert_of(token as u32 * PARTS) })
    } else {
        0
    };
    let bias = results.bias.wrapping_add((expert * grid.rows * size_of::<f32>() as u64) as usize);
    let results = Results { bias, ..results };
    let gated = grid.results.divisor != grid.rows;
    let row = if gated { 2 * result } else { result };
    let sum_of = |row: u64| {
        let mut sum = 0.0;
        for i in 0..u64::from(PARTS) {
            let from = (token * u64::from(PARTS) + i) * grid.rows + row;
            // SAFETY: there is a sum for each part.
            sum += f64::from(unsafe { *sums.wrapping_add(from as usize) });
        }
        sum
    };
    // SAFETY: the result exists, and is this thread's.
    unsafe { results.store(Dtype::F32, [place, row, grid.rows], sum_of(row), || sum_of(row + 1)) }
}
