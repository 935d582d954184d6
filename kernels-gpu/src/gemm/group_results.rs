//! Results of warp groups: 64 rows of 32 tokens pass through shared memory at a time, so that lanes
//! store whole cache lines. One warp has 16 rows, a sector of 32 bytes per token. With experts of
//! 2048 columns and 144 tokens, sectors took a fifth of the mainloop's time to store.

use microscale_kernels_abi::gemm::TILE_ROWS;
use microscale_kernels_abi::launch::WARP;

use super::epilogue::{ResultRows, factor, store_reference, store_with_steps};
use super::params::Params;
use super::reduce::{TokenSlice, lowered, may_be_out_of_range};
use super::tile::{Array, Tile};
use super::tile_scheduler::WorkTile;
use crate::hardware::warp_group::{self, WARPS};
use crate::hardware::{ptx, shared, warp};
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, WeightFormat};

/// The fewest tokens of a tile whose results pass through shared memory. With tiles of 16 and 24
/// tokens, products took 1 to 10 % longer.
pub(super) const LEAST_TOKENS: u32 = 64;

/// Rows of a warp group.
const ROWS: u32 = WARPS * TILE_ROWS;
/// Tokens in the buffer at a time: one for each lane of a warp.
const TOKENS: u32 = WARP;
/// Bytes of a token's rows, and of a piece of them.
const TOKEN_BYTES: u32 = ROWS * 2;
const PIECE: u32 = 16;
/// Eights of tokens in the buffer.
const EIGHTS: usize = TOKENS as usize / 8;

/// A warp group's buffer for results in shared memory: its codes in a stage whose products have
/// been computed. No other warp group reads them.
#[derive(Clone, Copy)]
pub(super) struct ResultBuffer {
    address: u32,
    warp_bytes: u32,
}

impl ResultBuffer {
    /// The buffer in the stage at `stage`, which may be released only after
    /// [`Params::finish_group`] has returned.
    #[inline(always)]
    pub(super) fn new<T: Tile>(stage: u32) -> Self {
        let warp_bytes = const { T::STAGE.codes_bytes() / T::CONFIG.consumer_warps() };
        const {
            assert!(T::BLOCK_ROWS == T::CONFIG.consumer_warps() * TILE_ROWS);
            assert!(T::STAGE.codes_bytes() / T::BLOCK_ROWS * ROWS >= TOKENS * TOKEN_BYTES);
        }
        let first = warp::number() / WARPS * WARPS;
        Self { address: stage + first * warp_bytes, warp_bytes }
    }

    /// The address of a word in the codes of warp `number` of the warp group.
    #[inline(always)]
    fn flag_address(self, number: u32) -> u32 {
        self.address + number * self.warp_bytes
    }

    /// The offset of a piece of a token's rows. Pieces are swizzled, so that lanes that access a
    /// piece of eight tokens use all banks.
    #[inline(always)]
    fn offset(token: u32, piece: u32) -> u32 {
        token * TOKEN_BYTES + (piece ^ token % 8) * PIECE
    }
}

impl Params<'_> {
    /// [`finish`](Params::finish) for the warps of a warp group together: `tile` is the calling
    /// warp's.
    ///
    /// # Safety
    /// The kernel's contract. The whole warp group calls it, after its products. No other warp has
    /// these tiles, and no warp has released the buffer's stage.
    #[inline(always)]
    pub(super) unsafe fn finish_group<F: WeightFormat, D: Activations, T: Tile, A: Array>(
        &self,
        work_tile: &WorkTile,
        tile: u32,
        mut sums: A,
        mut in_range: bool,
        buffer: ResultBuffer,
    ) {
        let slice = TokenSlice::ALL;
        let mut all_in_range = true;
        let may_be_out_of_range = may_be_out_of_range::<F, T>();
        if self.is_split(&work_tile.k_range, slice) {
            let split = work_tile.k_range.tile;
            self.store_partial_sums::<T, A, 1>(split, tile, slice, &[sums]);
            let in_range_here = may_be_out_of_range.then_some(in_range);
            // SAFETY: the whole warp group is here, and this warp has stored its sums.
            match unsafe { self.arrive_group(split, tile, in_range_here, buffer) } {
                None => return,
                Some(of_all) => all_in_range = of_all,
            }
            in_range = all_in_range;
            // SAFETY: this thread block arrived last, so all have stored their sums.
            [sums] = unsafe { self.reduce_all::<T, A, 1>(split, tile, slice) };
        }
        let problem = self.problem.of_expert::<F>(work_tile.expert);
        let row = work_tile.row_tile * const { T::M } + tile * TILE_ROWS;
        let tokens = [work_tile.first_token, work_tile.end_token];
        // SAFETY: the whole warp group is here, and so are all lanes; no other warp group has these
        // rows and tokens. Other warps' stores of this warp's rows come before the barrier.
        unsafe {
            let factor = factor(&problem, work_tile, &mut sums, lowered::<F, D, T>());
            if problem.results.epilogue.steps != 0 {
                if !may_be_out_of_range || in_range {
                    return store_with_steps::<D, A>(&problem, row, tokens, sums, factor);
                }
            } else if all_in_range {
                let round = |a: f32, b: f32| D::rounded(factor.scaled(b), factor.scaled(a));
                let first_row = row - warp::number() % WARPS * TILE_ROWS;
                store_group::<A>(&problem, first_row, tokens, &sums, round, buffer);
                if may_be_out_of_range {
                    // The other warps have stored wrong results of this warp's rows.
                    warp_group::barrier();
                }
            }
            if may_be_out_of_range && !in_range {
                store_reference::<F, D>(&problem, row, TILE_ROWS, tokens);
            }
        }
    }

    /// [`Self::arrive`] once for a warp group. `in_range` is `None` if its scales always are.
    ///
    /// # Safety
    /// As for [`Self::arrive`] and [`Self::finish_group`].
    #[inline(always)]
    unsafe fn arrive_group(
        &self,
        work_tile: u32,
        tile: u32,
        in_range: Option<bool>,
        buffer: ResultBuffer,
    ) -> Option<bool> {
        let number = warp::number() % WARPS;
        warp::sync();
        // SAFETY: each warp writes to its own codes, whose products have been computed. The
        // barriers order the words' writes and reads. All four warps have stored their sums before
        // the first barrier, so the first warp may arrive for them.
        unsafe {
            if let Some(in_range) = in_range
                && warp::lane() == 0
            {
                shared::store(buffer.flag_address(number), u32::from(in_range));
            }
            warp_group::barrier();
            if number == 0 {
                let in_range = in_range.is_none_or(|own| {
                    (1..WARPS).fold(own, |all, i| all & (shared::load(buffer.flag_address(i)) != 0))
                });
                let outcome = match self.arrive(work_tile, tile, TokenSlice::ALL, in_range) {
                    None => 0,
                    Some(in_range) => 1 + u32::from(in_range),
                };
                if warp::lane() == 0 {
                    shared::store(buffer.flag_address(0), outcome);
                }
            }
            warp_group::barrier();
            let outcome = shared::load(buffer.flag_address(0));
            (outcome != 0).then_some(outcome == 2)
        }
    }
}

/// Stores the results of a warp group's rows, from `first_row` on. `round` makes a word of two
/// sums.
///
/// # Safety
/// As for [`Params::finish_group`].
#[inline(always)]
unsafe fn store_group<A: Array>(
    problem: &Problem,
    first_row: u32,
    [first, end]: [u32; 2],
    sums: &A,
    round: impl Fn(f32, f32) -> u32,
    buffer: ResultBuffer,
) {
    // Otherwise LLVM computes addresses before the mainloop and keeps them in registers.
    let lane = warp::pin_in_register(warp::lane());
    let number = warp::number() % WARPS;
    // A store of matrices has two eights of tokens, and both eights of the warp's rows.
    let (matrix, column) = (lane / 8, lane % 8);
    let to = buffer.address + ResultBuffer::offset(matrix / 2 * 8 + column, number * 2 + matrix % 2);
    // A load has four tokens of a warp.
    let (token, piece) = (number * 4 + lane / 8, lane % 8);
    let from = buffer.address + ResultBuffer::offset(token, piece);
    let (rows, row) = (problem.shape.rows as u32, first_row + piece * 8);
    let count = end - first;
    let of_lane = if row < rows { count } else { 0 };
    let out = problem.results.out.wrapping_add(row as usize * 2);
    let whole = (problem.results.out as u32 | rows * 2).is_multiple_of(PIECE);
    // SAFETY: the tokens exist.
    let result_rows = unsafe { ResultRows::of::<A>(problem, [first, end]) };
    for group in 0..(A::LEN / 4).div_ceil(EIGHTS) {
        if group as u32 * TOKENS >= count {
            break;
        }
        let eights = EIGHTS.min(A::LEN / 4 - group * EIGHTS);
        // A word has two tokens of a row.
        let word = |eight: usize, half: usize| {
            let at = 4 * (group * EIGHTS + eight) + 2 * half;
            if eight < eights { round(sums.get(at), sums.get(at + 1)) } else { 0 }
        };
        // SAFETY: the whole warp group is here. Its warps have read their codes and words, or the
        // previous results, before they write to the buffer, and have written before they read.
        // Where it `exists`, the token and the first row exist, and no other lane has these
        // results. If `whole`, rows of results are a multiple of 16 bytes, so all eight rows exist.
        unsafe {
            warp_group::barrier();
            for pair in 0..eights.div_ceil(2) {
                let words =
                    [word(2 * pair, 0), word(2 * pair, 1), word(2 * pair + 1, 0), word(2 * pair + 1, 1)];
                shared::store_transposed(to + pair as u32 * 16 * TOKEN_BYTES, words);
            }
            warp_group::barrier();
            for half in 0..eights.div_ceil(2) as u32 {
                let token = half * 16 + token;
                let results = shared::load_16(from + half * 16 * TOKEN_BYTES);
                let exists = group as u32 * TOKENS + token < of_lane;
                let to = ptx::offset_by(out, result_rows.row(group, token), rows * 2).cast_mut();
                if whole {
                    ptx::store_16_if(exists, to, results);
                } else {
                    for i in 0..8 {
                        let result = results[i / 2] >> (i % 2 * 16);
                        ptx::store_2_if(exists && row + (i as u32) < rows, to.wrapping_add(2 * i), result);
                    }
                }
            }
        }
    }
}
