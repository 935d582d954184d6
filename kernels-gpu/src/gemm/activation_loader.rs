//! Copies activations of a work tile from global memory to stages, and packs them there as the
//! packing kernel would ([`PackParams`](microscale_kernels_abi::gemm::params::PackParams) has the
//! layout).
//!
//! Two warps copy and two others pack, each one pack of a K-iteration. Copies move a cache line of
//! four tokens at a time, each to a row of 128 bytes. Lines that are scattered over shared memory
//! become more requests to the L2 cache. Pieces are swizzled in the row, so that lanes that have
//! the same piece of eight tokens read from different banks.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::{PACK_COLUMNS, QUAD, TILE_COLUMNS};
use microscale_kernels_abi::launch::WARP;

use super::tile::Tile;
use super::tile_scheduler::WorkTile;
use crate::hardware::{ptx, shared, warp};
use crate::product::problem::Problem;
use crate::product::tensor_cores::Activations;

/// Bytes of a piece: eight activations.
const PIECE_BYTES: u32 = TILE_COLUMNS * 2;
/// Pieces of a row: a cache line of a token, or a packed piece of each token of an eight.
const ROW_PIECES: u32 = 8;
const ROW_BYTES: u32 = ROW_PIECES * PIECE_BYTES;
/// Cache lines of a token in a pack.
const LINES: u32 = PACK_COLUMNS / TILE_COLUMNS / ROW_PIECES;
/// Bytes of a line of eight tokens.
const LINE_BYTES: u32 = TILE_COLUMNS * ROW_BYTES;
/// Bytes of eight tokens in a pack.
const EIGHT_BYTES: u32 = TILE_COLUMNS * PACK_COLUMNS * 2;
/// Tokens that a warp copies at a time.
const TOKENS_AT_ONCE: u32 = WARP / ROW_PIECES;
/// Tokens of a lane, at most.
const MOST_TOKENS: usize = 6;

/// Bytes of a pack of a token tile.
const fn pack_bytes<T: Tile>() -> u32 {
    T::N / TILE_COLUMNS * EIGHT_BYTES
}

/// Copies a lane's pieces of a work tile, K-iteration by K-iteration.
pub(super) struct ActivationLoader<T> {
    /// The rows of the lane's tokens.
    rows: [u32; MOST_TOKENS],
    /// Bytes of a row.
    row_bytes: u32,
    /// The lane's first piece of the next K-iteration, in row 0.
    from: *const u8,
    /// Offset of the lane's first piece in a stage's activations.
    to: u32,
    /// Tokens from the lane's first one to the end of the work tile's.
    tokens_left: i32,
    /// Columns from the lane's first one in the next K-iteration to the end of a row.
    columns_left: i32,
    tile: PhantomData<T>,
}

impl<T: Tile> ActivationLoader<T> {
    /// Tokens of a lane.
    const TOKENS: u32 = T::N / TOKENS_AT_ONCE;
    /// Columns of a K-iteration.
    const COLUMNS: u32 = T::PACKS * PACK_COLUMNS;

    /// The loader of a work tile, for thread `thread` of two warps.
    ///
    /// # Safety
    /// The kernel's contract, of a kernel that packs activations. The work tile exists.
    #[inline(always)]
    pub(super) unsafe fn new(problem: &Problem, work_tile: &WorkTile, thread: u32) -> Self {
        const {
            let fits = T::PACKS == 2 && Self::TOKENS as usize <= MOST_TOKENS;
            assert!(!T::PACKS_ACTIVATIONS || fits && T::CONFIG.cluster == 1);
        }
        let (pack, lane) = (thread / WARP, thread % WARP);
        let (token, piece) = (lane / ROW_PIECES, lane % ROW_PIECES);
        let tokens_left = (work_tile.end_token - work_tile.first_token) as i32 - token as i32;
        let mut rows = [0; MOST_TOKENS];
        for i in 0..Self::TOKENS {
            let step = i * TOKENS_AT_ONCE;
            let of_tile = if tokens_left > step as i32 { token + step } else { 0 };
            // SAFETY: the token exists: a work tile has at least one.
            rows[i as usize] = unsafe { problem.source(work_tile.first_token + of_tile) };
        }
        let column = work_tile.k_range.start * Self::COLUMNS + pack * PACK_COLUMNS + piece * TILE_COLUMNS;
        Self {
            rows,
            row_bytes: problem.shape.cols as u32 * 2,
            from: problem.activations.wrapping_add(column as usize * 2),
            to: pack * const { pack_bytes::<T>() } + token * ROW_BYTES + (token ^ piece) * PIECE_BYTES,
            tokens_left,
            columns_left: problem.shape.cols as i32 - column as i32,
            tile: PhantomData,
        }
    }

    /// Starts to copy the next K-iteration to the stage's activations at `activations`. Tokens and
    /// columns that do not exist become zeros.
    ///
    /// # Safety
    /// The kernel's contract. There is a next K-iteration, and no thread reads or writes the stage.
    #[inline(always)]
    pub(super) unsafe fn copy(&mut self, activations: u32) {
        for i in 0..Self::TOKENS {
            let token = ptx::offset_by(self.from, self.rows[i as usize], self.row_bytes);
            let (eight, half) = (i / 2, i % 2);
            let swizzled = self.to ^ half * (ROW_BYTES / 2);
            let to = activations + eight * EIGHT_BYTES + half * (TOKENS_AT_ONCE * ROW_BYTES) + swizzled;
            for line in 0..LINES {
                let column = line * ROW_PIECES * TILE_COLUMNS;
                let exists =
                    self.tokens_left > (i * TOKENS_AT_ONCE) as i32 && self.columns_left > column as i32;
                let from = token.wrapping_add(column as usize * 2);
                let to = to + line * LINE_BYTES;
                // SAFETY: rows of activations start on 16 bytes and are whole pieces, so an
                // existing piece has 16 bytes on 16. No other lane writes these 16 bytes.
                unsafe { shared::copy_16_once(to, from, if exists { PIECE_BYTES } else { 0 }) };
            }
        }
        self.from = self.from.wrapping_add(const { Self::COLUMNS as usize * 2 });
        self.columns_left -= Self::COLUMNS as i32;
    }
}

/// Packs a warp's pack of the copied activations at `activations`. Thread `thread` of two warps
/// calls it.
///
/// # Safety
/// The stage is full. All lanes of both warps call it, and no other thread reads or writes the
/// activations.
#[inline(always)]
pub(super) unsafe fn pack_copied<D: Activations, T: Tile>(activations: u32, thread: u32) {
    let (pack, lane) = (thread / WARP, thread % WARP);
    let (token, word) = (lane % TILE_COLUMNS, lane / TILE_COLUMNS);
    let of_warp = activations + pack * const { pack_bytes::<T>() };
    let copied = token * ROW_BYTES + (token ^ word) * PIECE_BYTES;
    let packed = word * (QUAD * ROW_BYTES) + token * PIECE_BYTES;
    for eight in 0..T::N / TILE_COLUMNS {
        let of_eight = of_warp + eight * EIGHT_BYTES;
        // A line has two chunks.
        let words = [0, 1, 2, 3].map(|chunk| {
            let at = of_eight + chunk / 2 * LINE_BYTES + (copied ^ chunk % 2 * (ROW_BYTES / 2));
            // SAFETY: the piece is in the stage, on 16 bytes.
            D::pairs(unsafe { shared::load_16(at) })
        });
        // The packed pieces take the places that other lanes have read.
        warp::sync();
        for pair in 0..4 {
            let to = of_eight + pair * ROW_BYTES + packed;
            // SAFETY: the piece is in the stage, on 16 bytes, and no other lane writes it.
            unsafe { shared::store_16(to, words.map(|word| word[pair as usize])) };
        }
    }
}
