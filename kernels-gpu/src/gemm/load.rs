//! Copying codes and scales of a work tile to a stage, and a lane's part of what is there.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::stage::{ScalePieces, Stage, multiplied_tokens};
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};

use super::scheduler::Share;
use crate::product::copies::pin_in_register;
use crate::product::format::Format;
use crate::product::multiply::is_usual;
use crate::product::operand::{CHUNK_BYTES, Codes, Problem};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, shared, warp};

/// Rows of a work tile of `N` tokens.
pub(super) const fn rows_of<const N: u32>() -> u32 {
    if N > 64 { 128 } else { 256 }
}

/// The stage of `N` tokens and a k-iteration of so many images, but for its scales.
pub(super) const fn stage_of<const N: u32, const IMAGES: u32>() -> Stage {
    Stage { tile_m: rows_of::<N>(), tokens: N, packs: IMAGES, scales: ScalePieces::ONE }
}

/// Scales of a row in a k-iteration.
const fn scales_of<F: Format, const IMAGES: u32>() -> u32 {
    IMAGES * QUAD * F::BLOCKS
}

/// The stage for a problem, whose largest token tile has so many tokens.
#[inline(always)]
pub(super) fn stage_for<F: Format, const N: u32, const IMAGES: u32>(
    problem: &Problem,
    most_tokens: u32,
) -> Stage {
    let of_tile = const { stage_of::<N, IMAGES>() };
    let [address, blocks] = [problem.weights.scales.addr() as u64, problem.shape.blocks];
    let scales = ScalePieces::of(address, blocks as u32, const { scales_of::<F, IMAGES>() });
    Stage { tokens: multiplied_tokens(N, most_tokens), scales, ..of_tile }
}

/// The place of a chunk among those of its row in a stage. With two images, those of odd rows are exchanged, so that lanes that
/// read an image of several rows read from different banks.
#[inline(always)]
fn swizzled<const IMAGES: u32>(row: u32, chunk: u32) -> u32 {
    if IMAGES == 2 { chunk ^ (row & 1) * QUAD } else { chunk }
}

/// The part that one of `THREADS` threads copies of a share with `N` tokens: the same part of each k-iteration. Of rows past the last
/// one, it copies the last one.
pub(super) struct Source<F, const N: u32, const IMAGES: u32, const THREADS: u32> {
    thread: u32,
    /// The last row of the work tile that exists, and how many there are behind the first of which the thread copies codes.
    last: u32,
    behind: u32,
    blocks: u32,
    /// The thread's first codes in the next k-iteration, the number of their chunk, and their place in a stage.
    codes: *const u8,
    chunk: u32,
    place: u32,
    /// The piece in which the work tile's first scale lies, and, counted from there, the first scale of the next k-iteration and the
    /// one behind the work tile's last.
    scales: *const u8,
    first: u32,
    end: u32,
    /// The place of scales in a stage, and the pieces of a row's.
    scales_place: u32,
    pieces: ScalePieces,
    format: PhantomData<F>,
}

impl<F: Format, const N: u32, const IMAGES: u32, const THREADS: u32> Source<F, N, IMAGES, THREADS> {
    /// Chunks of a row in a k-iteration.
    const CHUNKS: u32 = IMAGES * QUAD;
    const ROWS: u32 = rows_of::<N>();
    const SCALES: u32 = scales_of::<F, IMAGES>();
    /// Rows of which all threads copy a chunk at once: an even number, so that all of a thread's have the same places.
    const ROWS_AT_ONCE: u32 = THREADS / Self::CHUNKS;

    /// The source of a share, whose work tile is in this row tile, for a ring of such stages.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, stage: &Stage, row_tile: u32, share: &Share, thread: u32) -> Self {
        const { assert!(Self::ROWS_AT_ONCE % 2 == 0 && Self::ROWS % THREADS == 0) };
        let blocks = problem.shape.blocks as u32;
        let last = last_row::<N>(problem, row_tile);
        let first_row = u64::from(row_tile) * u64::from(Self::ROWS);
        let of_tile = problem.weights.row::<F>(first_row, u64::from(blocks));
        let lead = of_tile.scales.addr() as u32 % stage.scales.bytes;
        let (row, of_row) = (thread / Self::CHUNKS, thread % Self::CHUNKS);
        let chunk = share.start * Self::CHUNKS + of_row;
        let row_bytes = u64::from(blocks) * F::BLOCK_BYTES;
        let codes = u64::from(row.min(last)) * row_bytes + u64::from(chunk) * u64::from(CHUNK_BYTES);
        Self {
            thread,
            last,
            behind: last.saturating_sub(row),
            blocks,
            codes: of_tile.codes.wrapping_add(codes as usize),
            chunk,
            place: (row * Self::CHUNKS + swizzled::<IMAGES>(row, of_row)) * CHUNK_BYTES,
            scales: of_tile.scales.wrapping_sub(lead as usize),
            first: lead + share.start * Self::SCALES,
            end: lead + (last + 1) * blocks,
            scales_place: stage.scales_offset(),
            pieces: stage.scales,
            format: PhantomData,
        }
    }

    /// Starts to copy the next k-iteration to a stage at an address. Chunks that do not exist become zeros, and scales of them are others'.
    ///
    /// # Safety
    /// The contract of the kernels; there is a next k-iteration, and nobody reads or writes the stage.
    #[inline(always)]
    pub(super) unsafe fn copy(&mut self, stage: u32) {
        let row_bytes = self.blocks * F::BLOCK_BYTES as u32;
        let there = if self.chunk * CHUNK_BYTES < row_bytes { CHUNK_BYTES } else { 0 };
        for i in 0..const { Self::ROWS / Self::ROWS_AT_ONCE } {
            let from = ptx::behind(self.codes, (i * Self::ROWS_AT_ONCE).min(self.behind), row_bytes);
            // SAFETY: the chunk is in a row that exists; rows and chunks lie on multiples of 16 bytes.
            unsafe { shared::copy_16_once(stage + i * THREADS * CHUNK_BYTES + self.place, from, there) };
        }
        let ScalePieces { bytes, count } = self.pieces;
        for i in 0..const { Self::ROWS / THREADS } {
            let row = i * THREADS + self.thread;
            let first = row.min(self.last) * self.blocks + self.first;
            let piece = first & !(bytes - 1);
            let (from, left) = (self.scales.wrapping_add(piece as usize), self.end - piece);
            let to = stage + self.scales_place + row * self.pieces.all();
            // SAFETY: pieces lie on multiples of their bytes, and no more is read of them than the work tile's rows have, or, in front of
            // their first scale, those of the row before, or of the expert before: the first one's scales begin with a piece.
            unsafe {
                if bytes == 16 {
                    shared::copy_16_once(to, from, left.min(16));
                    if Self::SCALES == 16 && count == 2 {
                        shared::copy_16_once(to + 16, from.wrapping_add(16), left.saturating_sub(16).min(16));
                    }
                } else {
                    shared::copy_8(to, from, left.min(8));
                    shared::copy_8(to + 8, from.wrapping_add(8), left.saturating_sub(8).min(8));
                }
            }
        }
        self.chunk += Self::CHUNKS;
        self.first += Self::SCALES;
        self.codes = self.codes.wrapping_add((Self::CHUNKS * CHUNK_BYTES) as usize);
    }
}

/// The number in its work tile of the last row that exists.
#[inline(always)]
fn last_row<const N: u32>(problem: &Problem, row_tile: u32) -> u32 {
    let rows = u64::from(const { rows_of::<N>() });
    (problem.shape.rows - 1 - u64::from(row_tile) * rows).min(rows - 1) as u32
}

/// A lane's part of tiles of 16 rows: a chunk of two rows of each in each image.
pub(super) struct LaneRows<F, const N: u32, const IMAGES: u32> {
    /// The offset of the codes of the first row in a stage.
    codes: u32,
    /// The offset of the piece in which the first row's scales begin, with that of the lane's among them, and the bytes of half a tile.
    scales: u32,
    half_tile: u32,
    /// The scales in front of them in their piece, in the next k-iteration, the mask of what a piece has, and bits that differ in rows
    /// that are eight apart.
    lead: u32,
    in_piece: u32,
    differ: u32,
    /// Chunks of a row from the lane's in the next image on; not positive if there are none.
    left: i32,
    format: PhantomData<F>,
}

/// A lane's codes and scales of two rows in an image.
#[derive(Clone, Copy, Default)]
pub(super) struct Loaded {
    rows: [Codes; 2],
    scales: [u32; 2],
}

impl Loaded {
    /// The factors of both halves of each chunk.
    #[inline(always)]
    pub(super) fn factors<F: Weights, D: Activations>(&self) -> [[u32; 2]; 2] {
        self.scales.map(F::factors::<D>)
    }

    /// The larger [distance](Weights::distance) of the scales.
    #[inline(always)]
    pub(super) fn distance<F: Weights, D: Activations>(&self) -> u32 {
        F::distance::<D>(self.scales[0]).max(F::distance::<D>(self.scales[1]))
    }
}

impl<F: Weights, const N: u32, const IMAGES: u32> LaneRows<F, N, IMAGES> {
    /// Bytes of codes of half a tile in a stage.
    const HALF_TILE: u32 = TILE_ROWS / 2 * IMAGES * QUAD * CHUNK_BYTES;
    /// True if a row's scales of a k-iteration are as many as a piece has, and rows eight apart begin alike.
    const WHOLE_PIECES: bool = F::BLOCKS > 1 && scales_of::<F, IMAGES>() == 16;

    /// The rows of a tile with this number in a work tile, and of those behind it, from a k-iteration on, in a ring of such stages.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, stage: &Stage, tile: u32, start: u32) -> Self {
        // Computed here, for a shuffle is not moved: in front of a loop over tasks, what follows would take registers.
        let lane = pin_in_register(warp::lane());
        let (of_eight, quarter) = (lane / QUAD, lane % QUAD);
        let blocks = problem.shape.blocks as u32;
        let row = tile * TILE_ROWS + of_eight;
        let codes = (row * (IMAGES * QUAD) + swizzled::<IMAGES>(row, quarter)) * CHUNK_BYTES;
        let scales = row * stage.scales.all() + quarter * F::BLOCKS;
        // Row tiles begin where the first one does in its piece. Past the last row it does not matter.
        let first =
            problem.weights.scales.addr() as u32 + row * blocks + start * const { scales_of::<F, IMAGES>() };
        let lead = first % stage.scales.bytes;
        // With whole pieces, the lead stays.
        let (scales, lead) = if Self::WHOLE_PIECES { (scales + lead, 0) } else { (scales, lead) };
        let chunks = (blocks * F::BLOCK_BYTES as u32 / CHUNK_BYTES) as i32;
        Self {
            codes: pin_in_register(codes),
            scales: pin_in_register(stage.scales_offset() + scales),
            half_tile: TILE_ROWS / 2 * stage.scales.all(),
            lead,
            in_piece: stage.scales.bytes - 1,
            differ: if F::BLOCKS == 1 { TILE_ROWS / 2 * blocks % stage.scales.bytes } else { 0 },
            left: chunks - (start * IMAGES * QUAD + quarter) as i32,
            format: PhantomData,
        }
    }

    /// Loads the lane's part of the next image, which has this number in its k-iteration, from a stage at an address: of the first
    /// tile, and of those behind it.
    ///
    /// # Safety
    /// The k-iteration is in the stage.
    #[inline(always)]
    pub(super) unsafe fn load<D: Activations, const TILES: usize>(
        &mut self,
        stage: u32,
        image: u32,
    ) -> [Loaded; TILES] {
        let exists = self.left > 0;
        self.left -= QUAD as i32;
        let codes = stage + (self.codes ^ image * (QUAD * CHUNK_BYTES));
        let scales = stage + self.scales + image * QUAD * F::BLOCKS;
        let leads = [self.lead, self.lead ^ self.differ];
        if !Self::WHOLE_PIECES && image + 1 == IMAGES {
            self.lead = (self.lead + const { scales_of::<F, IMAGES>() }) & self.in_piece;
        }
        let mut loaded = [Loaded::default(); TILES];
        for i in 0..TILES {
            for half in 0..2 {
                let half_tile = (2 * i + half) as u32;
                // SAFETY: the caller's promise.
                let scales = unsafe {
                    loaded[i].rows[half] = shared::load_16(codes + half_tile * Self::HALF_TILE);
                    let scales = scales + half_tile * self.half_tile + leads[half];
                    match F::BLOCKS {
                        1 => shared::load_u8(scales),
                        _ => shared::load_u16(scales),
                    }
                };
                // Bytes behind a row's last scale are others'. Over zeros, the first usual scale is as good as any.
                loaded[i].scales[half] = if exists { scales } else { F::first_usual::<D>() };
            }
        }
        loaded
    }
}

/// Decodes the words `I` of two rows, and brings them under their scales: the first operands of two multiplications, as a lane
/// has them.
#[inline(always)]
pub(super) fn decode<D: Activations, const I: usize>(
    loaded: &Loaded,
    factors: &[[u32; 2]; 2],
    table: u32,
) -> [[u32; 4]; 2] {
    let weights =
        |row: usize| D::weights(loaded.rows[row][I], table).map(|pair| D::scaled(pair, factors[row][I / 2]));
    let ([a, b, c, d], [e, f, g, h]) = (weights(0), weights(1));
    [[a, e, b, f], [c, g, d, h]]
}

/// Returns whether all of the lane's chunks of a share that have unusual scales are zeros under a number.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
pub(super) unsafe fn usual_but_zeros<F: Weights, D: Activations, const N: u32, const IMAGES: u32>(
    problem: &Problem,
    row_tile: u32,
    tile: u32,
    share: &Share,
) -> bool {
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let blocks = problem.shape.blocks;
    let end = (share.end * IMAGES * QUAD).min((blocks * F::BLOCK_BYTES / u64::from(CHUNK_BYTES)) as u32);
    let mut usual = true;
    let mut half = 0;
    while half < 2 {
        let in_tile =
            (tile * TILE_ROWS + half * (TILE_ROWS / 2) + of_eight).min(last_row::<N>(problem, row_tile));
        let row =
            problem.weights.row::<F>(u64::from(row_tile * const { rows_of::<N>() } + in_tile), blocks);
        let mut chunk = share.start * IMAGES * QUAD + quarter;
        while chunk < end {
            // SAFETY: the chunk is in a row that exists.
            usual &= unsafe { is_usual::<F, D>(&row.load_once::<F>(chunk)) };
            chunk += QUAD;
        }
        half += 1;
    }
    usual
}
