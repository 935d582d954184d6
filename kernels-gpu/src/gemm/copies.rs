//! Copying codes and scales of a work tile to a stage, and a lane's part of what is there.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::{CODES_BYTES, COLUMNS, ROW_SCALES_BYTES, ROWS, TokenTile};
use microscale_kernels_abi::weights::{QUAD, TILE_ROWS};

use super::scheduler::Share;
use crate::product::copies::pin_in_register;
use crate::product::format::Format;
use crate::product::multiply::is_usual;
use crate::product::operand::{CHUNK_BYTES, Codes, Problem};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// Words of a row's scales in a stage.
const ROW_WORDS: u32 = ROW_SCALES_BYTES / 4;
/// Bytes of codes of half a tile, in a stage.
const HALF_TILE_BYTES: u32 = TILE_ROWS / 2 * COLUMNS / 2;

/// Bytes of a stage, and of the activations in it, for `N` tokens.
pub(super) const fn stage_bytes<const N: u32>() -> [u32; 2] {
    let mut i = 0;
    while TokenTile::ALL[i].tokens() != N {
        i += 1;
    }
    [TokenTile::ALL[i].stage_bytes(), TokenTile::ALL[i].activation_bytes()]
}

/// What one of `THREADS` threads copies of a share: the same part of each k-iteration.
pub(super) struct Source<F, const THREADS: u32> {
    /// The thread's number, and the last row of the work tile that exists.
    thread: u32,
    last: u32,
    blocks: u32,
    /// The thread's first codes in the next k-iteration, and the number of their chunk.
    codes: *const u8,
    chunk: u32,
    /// The work tile's first scale, and the number in a row of the next k-iteration's first.
    scales: *const u8,
    block: u32,
    format: PhantomData<F>,
}

impl<F: Format, const THREADS: u32> Source<F, THREADS> {
    /// The source of a share, whose work tile is in this row tile.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, row_tile: u32, share: &Share, thread: u32) -> Self {
        let blocks = problem.shape.blocks as u32;
        let first_row = u64::from(row_tile) * u64::from(ROWS);
        let last = last_row(problem, row_tile);
        let chunk = share.start * QUAD + thread % QUAD;
        let row = first_row + u64::from((thread / QUAD).min(last));
        let codes = row * (u64::from(blocks) * F::BLOCK_BYTES) + u64::from(chunk) * u64::from(CHUNK_BYTES);
        Self {
            thread,
            last,
            blocks,
            codes: problem.weights.codes.wrapping_add(codes as usize),
            chunk,
            scales: problem.weights.scales.wrapping_add((first_row * u64::from(blocks)) as usize),
            block: share.start * QUAD * F::BLOCKS,
            format: PhantomData,
        }
    }

    /// Starts to copy the next k-iteration to a stage at an address. Chunks and scales that do not exist become zeros; rows past
    /// the last one repeat one that exists.
    ///
    /// # Safety
    /// The contract of the kernels; there is a next k-iteration, and nobody reads or writes the stage.
    #[inline(always)]
    pub(super) unsafe fn copy(&mut self, stage: u32) {
        let (thread, last) = (self.thread, self.last);
        // Opaque where it is used, so that the addresses of all rows are not kept in registers from one k-iteration to the next.
        let blocks = ptx::opaque_here(self.blocks);
        let row_bytes = blocks * F::BLOCK_BYTES as u32;
        let there = if self.chunk * CHUNK_BYTES < row_bytes { 16 } else { 0 };
        let rows_at_once = const { THREADS / QUAD };
        let (mut from, mut row) = (self.codes, thread / QUAD);
        for i in 0..ROWS / rows_at_once {
            // SAFETY: the chunk is in a row that exists; rows and chunks lie on multiples of 16 bytes.
            unsafe { ptx::copy_16_once(stage + (i * THREADS + thread) * CHUNK_BYTES, from, there) };
            row += rows_at_once;
            if row <= last {
                from = from.wrapping_add(u64::from(row_bytes) as usize * rows_at_once as usize);
            }
        }
        for i in 0..ROWS * ROW_WORDS / THREADS {
            let row = (i * (THREADS / ROW_WORDS) + thread / ROW_WORDS).min(last) * blocks;
            // The word in which the scales begin, and the one behind it. The work tile's first row starts on a word.
            let word = ((row + self.block) & !3) + thread % ROW_WORDS * 4;
            let there = (row + blocks).saturating_sub(word).min(4);
            // SAFETY: no more bytes are read than the row has from there on.
            unsafe {
                ptx::copy_4(
                    stage + CODES_BYTES + (i * THREADS + thread) * 4,
                    self.scales.wrapping_add(word as usize),
                    there,
                );
            }
        }
        self.chunk += QUAD;
        self.block += QUAD * F::BLOCKS;
        self.codes = self.codes.wrapping_add((QUAD * CHUNK_BYTES) as usize);
    }
}

/// The number in its work tile of the last row that exists.
#[inline(always)]
fn last_row(problem: &Problem, row_tile: u32) -> u32 {
    (problem.shape.rows - 1 - u64::from(row_tile) * u64::from(ROWS)).min(u64::from(ROWS - 1)) as u32
}

/// A lane's part of a tile of 16 rows: a chunk of two rows in each k-iteration.
pub(super) struct LaneRows<F> {
    /// The offsets of the codes and of the scales of the first row in a stage.
    codes: u32,
    scales: u32,
    /// Chunks of a row from the lane's in the next k-iteration on; not positive if there are none.
    left: i32,
    format: PhantomData<F>,
}

/// A lane's codes in a k-iteration, the factors of both halves of each chunk, and the larger
/// [distance](Weights::distance) of the scales.
pub(super) struct Loaded {
    pub(super) rows: [Codes; 2],
    pub(super) factors: [[u32; 2]; 2],
    pub(super) distance: u32,
}

impl<F: Weights> LaneRows<F> {
    /// The rows of a tile with this number in a work tile, from a k-iteration on.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, tile: u32, start: u32) -> Self {
        let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let blocks = problem.shape.blocks as u32;
        let row = tile * TILE_ROWS + of_eight;
        // Bytes from the first word to the row's scales. They are as many for the row eight behind, and in each k-iteration. Past
        // the last row they do not matter.
        let lead = row * blocks & 3;
        Self {
            codes: pin_in_register(tile * 2 * HALF_TILE_BYTES + warp::lane() * CHUNK_BYTES),
            scales: pin_in_register(CODES_BYTES + row * ROW_SCALES_BYTES + lead + quarter * F::BLOCKS),
            left: (blocks * F::BLOCK_BYTES as u32 / CHUNK_BYTES) as i32 - (start * QUAD + quarter) as i32,
            format: PhantomData,
        }
    }

    /// Loads the lane's part of the next k-iteration from a stage at an address.
    ///
    /// # Safety
    /// The k-iteration is in the stage.
    #[inline(always)]
    pub(super) unsafe fn load<D: Activations>(&mut self, stage: u32) -> Loaded {
        let exists = self.left > 0;
        self.left -= QUAD as i32;
        // SAFETY: the caller's promise.
        let (rows, scales) = unsafe {
            let rows = [0, HALF_TILE_BYTES].map(|half| ptx::load_shared_16(stage + self.codes + half));
            let scales = [0, const { TILE_ROWS / 2 * ROW_SCALES_BYTES }].map(|half| match F::BLOCKS {
                1 => ptx::load_shared_u8(stage + self.scales + half),
                _ => ptx::load_shared_u16(stage + self.scales + half),
            });
            (rows, scales)
        };
        // Bytes behind a row's last scale are others'. Over zeros, the first usual scale is as good as any.
        let scales = scales.map(|scales| if exists { scales } else { F::first_usual::<D>() });
        let distance = F::distance::<D>(scales[0]).max(F::distance::<D>(scales[1]));
        Loaded { rows, factors: scales.map(F::factors::<D>), distance }
    }
}

/// Decodes the words `I` of two rows, and brings them under their scales: the first operands of two multiplications, as a lane
/// has them.
#[inline(always)]
pub(super) fn decode<D: Activations, const I: usize>(loaded: &Loaded, table: u32) -> [[u32; 4]; 2] {
    let weights = |row: usize| {
        D::weights(loaded.rows[row][I], table).map(|pair| D::scaled(pair, loaded.factors[row][I / 2]))
    };
    let ([a, b, c, d], [e, f, g, h]) = (weights(0), weights(1));
    [[a, e, b, f], [c, g, d, h]]
}

/// Returns whether all of the lane's chunks of a share that have unusual scales are zeros under a number.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
pub(super) unsafe fn usual_but_zeros<F: Weights, D: Activations>(
    problem: &Problem,
    row_tile: u32,
    tile: u32,
    share: &Share,
) -> bool {
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let blocks = problem.shape.blocks;
    let end = (share.end * QUAD).min((blocks * F::BLOCK_BYTES / u64::from(CHUNK_BYTES)) as u32);
    let mut usual = true;
    let mut half = 0;
    while half < 2 {
        let in_tile = (tile * TILE_ROWS + half * (TILE_ROWS / 2) + of_eight).min(last_row(problem, row_tile));
        let row = problem.weights.row::<F>(u64::from(row_tile * ROWS + in_tile), blocks);
        let mut chunk = share.start * QUAD + quarter;
        while chunk < end {
            // SAFETY: the chunk is in a row that exists.
            usual &= unsafe { is_usual::<F, D>(&row.load_once::<F>(chunk)) };
            chunk += QUAD;
        }
        half += 1;
    }
    usual
}
