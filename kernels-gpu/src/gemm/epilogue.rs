//! The epilogue: scales a warp's sums, applies bias, gate and residual, rounds, and stores the
//! results.

use microscale_formats::Dtype as OutputDtype;
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::Epilogue;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::global_factor::GlobalFactor;
use super::tile::Array;
use super::tile_scheduler::WorkTile;
use super::transpose::Transpose;
use crate::arithmetic::Ptx;
use crate::hardware::{ptx, warp};
use crate::product::problem::Problem;
use crate::product::results::{Results, load};
use crate::product::tensor_cores::{Activations, WeightFormat, WithBf16, WithF16};

/// The result rows of a work tile's tokens. Each lane looks up some of them for all lanes.
pub(super) struct ResultRows([u32; Self::LOOKUPS]);

impl ResultRows {
    /// Result rows that a lane looks up, at most.
    const LOOKUPS: usize = 256 / WARP as usize;

    /// Looks up the result rows of the tokens from `first` to `end`. `A` is a lane's array of their
    /// sums.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it, and the tokens exist.
    #[inline(always)]
    pub(super) unsafe fn of<A: Array>(problem: &Problem, [first, end]: [u32; 2]) -> Self {
        let mut rows = [0; Self::LOOKUPS];
        for i in 0..(A::LEN * 2).div_ceil(WARP as usize) {
            let token = (first + i as u32 * WARP + warp::lane()).min(end - 1);
            // SAFETY: the token is at most the last one of the work tile.
            rows[i] = unsafe { problem.result_row(token) };
        }
        Self(rows)
    }

    /// The result row of token `token` of the `group`th group of [`WARP`]. All lanes call it.
    #[inline(always)]
    pub(super) fn row(&self, group: usize, token: u32) -> u32 {
        warp::shuffle(self.0[group], token)
    }
}

/// The factor of a work tile's sums, which are too small by 2^-`lowered`. If it does not fit into
/// f32, the sums are multiplied.
#[inline(always)]
pub(super) fn factor<A: Array>(
    problem: &Problem,
    work_tile: &WorkTile,
    sums: &mut A,
    lowered: i32,
) -> GlobalFactor {
    let (apply, global_scale) = (problem.weights.apply, work_tile.global_scale);
    let factor = GlobalFactor::new(apply, global_scale).raised(lowered);
    if factor.high != 0.0 {
        return factor;
    }
    let exact = apply.scaled(f64::from(power_of_two(lowered)), global_scale);
    for i in 0..A::LEN {
        let sum = sums.get_mut(i);
        *sum = (f64::from(*sum) * exact) as f32;
    }
    GlobalFactor::ONE
}

/// Stores the results of a tile of 16 rows and the tokens of a work tile. The sums are too small by
/// 2^-`lowered`.
///
/// # Safety
/// The kernel's contract. All lanes call it, and no other warp stores these rows and tokens.
#[inline(always)]
pub(super) unsafe fn store<D: Activations, A: Array>(
    problem: &Problem,
    first_row: u32,
    work_tile: &WorkTile,
    sums: &A,
    lowered: i32,
) {
    let mut sums = *sums;
    let factor = factor(problem, work_tile, &mut sums, lowered);
    let &WorkTile { first_token: first, end_token: end, .. } = work_tile;
    if problem.results.epilogue.steps != 0 {
        // SAFETY: as for this function.
        return unsafe { store_with_steps::<D, A>(problem, first_row, [first, end], sums, factor) };
    }
    let transpose = Transpose::new();
    let (rows, row) = (problem.shape.rows as u32, first_row + transpose.row);
    let count = end.saturating_sub(first);
    let of_lane = if row < rows { count } else { 0 };
    let out = problem.results.out.wrapping_add(row as usize * 2);
    let whole = (problem.results.out as u32 | rows * 2).is_multiple_of(8);
    // SAFETY: the tokens exist.
    let result_rows = unsafe { ResultRows::of::<A>(problem, [first, end]) };
    for four in 0..A::LEN / 4 {
        if four as u32 * 8 >= count {
            break;
        }
        // A word has both rows of one token.
        let words = [0, 1].map(|token| {
            let [low, high] = [0, 2].map(|row| factor.scaled(sums.get(4 * four + row + token)));
            D::rounded(high, low)
        });
        let four_rows = transpose.apply(words);
        let in_tile = four as u32 * 8 + transpose.token;
        let to = ptx::offset_by(out, result_rows.row(four / 4, in_tile % WARP), rows * 2).cast_mut();
        let exists = in_tile < of_lane;
        // SAFETY: where `exists`, the token and the first row exist, and no other lane has these
        // results. With `whole`, rows of results are a multiple of 8 bytes, so that all four rows
        // exist.
        unsafe {
            if whole {
                ptx::store_8_if(exists, to, four_rows);
            } else {
                for i in 0..4 {
                    let result = four_rows[i / 2] >> (i % 2 * 16);
                    ptx::store_2_if(exists && row + (i as u32) < rows, to.wrapping_add(2 * i), result);
                }
            }
        }
    }
}

/// [`store`] with bias, gate or residual. Lanes store their own results. A gate's two rows are in
/// two lanes. Each of these lanes stores one of two tokens.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub(super) unsafe fn store_with_steps<D: Activations, A: Array>(
    problem: &Problem,
    first_row: u32,
    [mut first, end]: [u32; 2],
    mut sums: A,
    factor: GlobalFactor,
) {
    let results = &problem.results;
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let rows = problem.shape.rows as u32;
    let own = [first_row + of_eight, first_row + TILE_ROWS / 2 + of_eight];
    let bias_dtype = results.epilogue.bias_dtype(D::OUTPUT);
    let bias = own.map(|row| {
        let exists = results.epilogue.has(Epilogue::BIAS) && row < rows;
        // SAFETY: `bias` has a value of the dtype for each row.
        if exists { unsafe { load(results.bias, u64::from(row), bias_dtype) } } else { 0.0 }
    });
    // A loop over 32 tokens at a time: unrolled for all tokens, the kernel's text would be very
    // long.
    let fours = const { if A::LEN > 16 { 4 } else { A::LEN / 4 } };
    while first < end {
        // SAFETY: the token is at most the last one of the work tile.
        let result_row = unsafe { problem.result_row((first + warp::lane()).min(end - 1)) };
        for four in 0..fours {
            let in_tile = four as u32 * 8 + quarter * 2;
            let result_rows = [0, 1].map(|i| warp::shuffle(result_row, (in_tile + i) % WARP));
            for half in 0..2 {
                let values = [0, 1].map(|i| factor.scaled(sums.get(4 * four + 2 * half + i)) + bias[half]);
                let exist = [0, 1].map(|i| own[half] < rows && first + in_tile + i < end);
                // SAFETY: where `exist`, row and token exist, and no other lane has these results.
                unsafe { store_two_tokens::<D>(problem, own[half], values, result_rows, exist) };
            }
        }
        // The sums rotate, so that indices are constants: otherwise LLVM would unroll the loop.
        let before = sums;
        for i in 0..A::LEN {
            *sums.get_mut(i) = before.get((i + 4 * fours) % A::LEN);
        }
        first += fours as u32 * 8;
    }
}

/// Stores the results of a row and two tokens in two rows of results, where they `exist`.
///
/// # Safety
/// The kernel's contract. All lanes call it. Lanes [`QUAD`] apart have an even row and the next
/// one.
#[inline(always)]
unsafe fn store_two_tokens<D: Activations>(
    problem: &Problem,
    row: u32,
    values: [f32; 2],
    result_rows: [u32; 2],
    mut exist: [bool; 2],
) {
    let Results { out, residual, epilogue, .. } = problem.results;
    let (mut values, mut at) = (values, row);
    if epilogue.has(Epilogue::GATED) {
        // Even rows are gates. Two lanes exchange values, so that each has gate and up of one
        // token.
        let odd = row % 2 == 1;
        let [given, kept] = if odd { values } else { [values[1], values[0]] };
        let got = f32::from_bits(warp::shuffle_xor(given.to_bits(), QUAD));
        let (gate, up) = if odd { (got, kept) } else { (kept, got) };
        values = [epilogue.gate.of::<Ptx>(gate, up); 2];
        exist = [exist[0] && !odd, exist[1] && odd];
        at = row / 2;
    }
    let dtype = epilogue.result_dtype(D::OUTPUT);
    for i in 0..2 {
        if exist[i] {
            let index = u64::from(result_rows[i]) * epilogue.results(problem.shape.rows) + u64::from(at);
            let mut value = values[i];
            // SAFETY: the result exists and is the lane's; `residual` has a value for each result.
            unsafe {
                if epilogue.has(Epilogue::RESIDUAL) {
                    value += load(residual, index, dtype);
                }
                let half = match dtype {
                    OutputDtype::F32 => {
                        let canonical = if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() };
                        *out.cast::<u32>().wrapping_add(index as usize) = canonical;
                        continue;
                    }
                    OutputDtype::F16 => WithF16::rounded(value, value),
                    OutputDtype::Bf16 => WithBf16::rounded(value, value),
                };
                *out.cast::<u16>().wrapping_add(index as usize) = half as u16;
            }
        }
    }
}

/// Computes and stores the results of `count` rows and the tokens of a work tile by the reference
/// (the slow path).
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub(super) unsafe fn store_reference<F: WeightFormat, D: Activations>(
    problem: &Problem,
    first_row: u32,
    count: u32,
    tokens: [u32; 2],
) {
    let end = (problem.shape.rows as u32).min(first_row + count);
    let mut row = first_row;
    while row < end {
        // SAFETY: the row exists; all lanes are here, and no other warp stores these results.
        unsafe { problem.store_reference::<F, D>(u64::from(row), tokens) };
        row += 1;
    }
}
