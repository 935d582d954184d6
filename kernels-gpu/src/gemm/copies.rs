//! Copying codes and scales of a work tile to a stage, and a lane's part of what is there.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::{Stage, TokenTile};
use microscale_kernels_abi::weights::{QUAD, TILE_ROWS};

use super::scheduler::Share;
use crate::product::copies::pin_in_register;
use crate::product::format::Format;
use crate::product::multiply::is_usual;
use crate::product::operand::{CHUNK_BYTES, Codes, Problem};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// The token tile of `N` tokens.
const fn tile_of<const N: u32>() -> TokenTile {
    let mut i = 0;
    while TokenTile::ALL[i].tokens() != N {
        i += 1;
    }
    TokenTile::ALL[i]
}

/// The stage of `N` tokens and a k-iteration of so many images.
pub(super) const fn stage_of<const N: u32, const IMAGES: u32>() -> Stage {
    Stage { tile: tile_of::<N>(), tokens: N, images: IMAGES }
}

/// The place of a chunk among those of its row in a stage. With two images, those of odd rows are exchanged, so that lanes that
/// read an image of several rows read from different banks.
#[inline(always)]
fn swizzled<const IMAGES: u32>(row: u32, chunk: u32) -> u32 {
    if IMAGES == 2 { chunk ^ (row & 1) * QUAD } else { chunk }
}

/// The part that one of `THREADS` threads copies of a share with `N` tokens: the same part of each k-iteration.
pub(super) struct Source<F, const N: u32, const IMAGES: u32, const THREADS: u32> {
    /// The thread's number, and the last row of the work tile that exists.
    thread: u32,
    last: u32,
    blocks: u32,
    /// The thread's first codes in the next k-iteration, the number of their chunk, and their place in a stage.
    codes: *const u8,
    chunk: u32,
    place: u32,
    /// The work tile's first scale, and the number in a row of the next k-iteration's first.
    scales: *const u8,
    block: u32,
    format: PhantomData<F>,
}

impl<F: Format, const N: u32, const IMAGES: u32, const THREADS: u32> Source<F, N, IMAGES, THREADS> {
    /// Chunks of a row in a k-iteration.
    const CHUNKS: u32 = IMAGES * QUAD;
    /// Words of a row's scales in a stage.
    const ROW_WORDS: u32 = stage_of::<N, IMAGES>().row_scales_bytes() / 4;

    /// The source of a share, whose work tile is in this row tile.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, row_tile: u32, share: &Share, thread: u32) -> Self {
        let blocks = problem.shape.blocks as u32;
        let first_row = u64::from(row_tile) * u64::from(const { tile_of::<N>().rows() });
        let last = last_row::<N>(problem, row_tile);
        let (row, of_row) = (thread / Self::CHUNKS, thread % Self::CHUNKS);
        let chunk = share.start * Self::CHUNKS + of_row;
        let codes = (first_row + u64::from(row.min(last))) * (u64::from(blocks) * F::BLOCK_BYTES)
            + u64::from(chunk) * u64::from(CHUNK_BYTES);
        Self {
            thread,
            last,
            blocks,
            codes: problem.weights.codes.wrapping_add(codes as usize),
            chunk,
            place: (row * Self::CHUNKS + swizzled::<IMAGES>(row, of_row)) * CHUNK_BYTES,
            scales: problem.weights.scales.wrapping_add((first_row * u64::from(blocks)) as usize),
            block: share.start * Self::CHUNKS * F::BLOCKS,
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
        // An even number of rows, so that all of a thread's have the same places.
        let rows_at_once = const { THREADS / Self::CHUNKS };
        let rows = const { tile_of::<N>().rows() };
        let (mut from, mut row) = (self.codes, thread / Self::CHUNKS);
        for i in 0..rows / rows_at_once {
            // SAFETY: the chunk is in a row that exists; rows and chunks lie on multiples of 16 bytes.
            unsafe { ptx::copy_16_once(stage + i * THREADS * CHUNK_BYTES + self.place, from, there) };
            row += rows_at_once;
            if row <= last {
                from = from.wrapping_add(u64::from(row_bytes) as usize * rows_at_once as usize);
            }
        }
        for i in 0..rows * Self::ROW_WORDS / THREADS {
            let row = (i * (THREADS / Self::ROW_WORDS) + thread / Self::ROW_WORDS).min(last) * blocks;
            // The word in which the scales begin, and those behind it. The work tile's first row starts on a word.
            let word = ((row + self.block) & !3) + thread % Self::ROW_WORDS * 4;
            let there = (row + blocks).saturating_sub(word).min(4);
            // SAFETY: no more bytes are read than the row has from there on.
            unsafe {
                ptx::copy_4(
                    stage + const { stage_of::<N, IMAGES>().codes_bytes() } + (i * THREADS + thread) * 4,
                    self.scales.wrapping_add(word as usize),
                    there,
                );
            }
        }
        self.chunk += Self::CHUNKS;
        self.block += Self::CHUNKS * F::BLOCKS;
        self.codes = self.codes.wrapping_add((Self::CHUNKS * CHUNK_BYTES) as usize);
    }
}

/// The number in its work tile of the last row that exists.
#[inline(always)]
fn last_row<const N: u32>(problem: &Problem, row_tile: u32) -> u32 {
    let rows = u64::from(const { tile_of::<N>().rows() });
    (problem.shape.rows - 1 - u64::from(row_tile) * rows).min(rows - 1) as u32
}

/// A lane's part of tiles of 16 rows: a chunk of two rows of each in each image.
pub(super) struct LaneRows<F, const N: u32, const IMAGES: u32> {
    /// The offsets of the codes and of the scales of the first row in a stage.
    codes: u32,
    scales: u32,
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
    /// Bytes of codes, and of scales, of half a tile in a stage.
    const HALF_TILE_BYTES: [u32; 2] = [
        TILE_ROWS / 2 * IMAGES * QUAD * CHUNK_BYTES,
        TILE_ROWS / 2 * stage_of::<N, IMAGES>().row_scales_bytes(),
    ];

    /// The rows of a tile with this number in a work tile, and of those behind it, from a k-iteration on.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, tile: u32, start: u32) -> Self {
        let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let blocks = problem.shape.blocks as u32;
        let row = tile * TILE_ROWS + of_eight;
        // Bytes from the first word to the row's scales. They are as many for the rows eight behind, and in each k-iteration. Past
        // the last row they do not matter.
        let lead = row * blocks & 3;
        let codes = (row * (IMAGES * QUAD) + swizzled::<IMAGES>(row, quarter)) * CHUNK_BYTES;
        let scales = row * const { stage_of::<N, IMAGES>().row_scales_bytes() } + lead + quarter * F::BLOCKS;
        let chunks = (blocks * F::BLOCK_BYTES as u32 / CHUNK_BYTES) as i32;
        Self {
            codes: pin_in_register(codes),
            scales: pin_in_register(const { stage_of::<N, IMAGES>().codes_bytes() } + scales),
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
        let mut loaded = [Loaded::default(); TILES];
        for i in 0..TILES {
            for half in 0..2 {
                let half_tile = (2 * i + half) as u32;
                // SAFETY: the caller's promise.
                let scales = unsafe {
                    loaded[i].rows[half] = ptx::load_shared_16(codes + half_tile * Self::HALF_TILE_BYTES[0]);
                    let scales = scales + half_tile * Self::HALF_TILE_BYTES[1];
                    match F::BLOCKS {
                        1 => ptx::load_shared_u8(scales),
                        _ => ptx::load_shared_u16(scales),
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
            problem.weights.row::<F>(u64::from(row_tile * const { tile_of::<N>().rows() } + in_tile), blocks);
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
