//! Copies to a stage in shared memory, lane by lane, and loads from it.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::format::Format;
use super::operand::{CHUNK_BYTES, Codes, Problem};
use crate::{shared, warp};

/// Bytes of a chunk of activations.
pub(crate) const ACTIVATION_BYTES: u32 = CHUNK as u32 * 2;
/// Bytes of codes that the lanes of a warp copy at once.
const CODES_BYTES: u32 = WARP * CHUNK_BYTES;
/// Rows of half a tile.
const HALF_TILE_ROWS: u32 = TILE_ROWS / 2;

/// Pins a number in a register. The assembler computes again and again what it knows how to compute, but not
/// what a shuffle gives.
#[inline(always)]
pub(crate) fn pin_in_register(number: u32) -> u32 {
    warp::shuffle(number, warp::lane())
}

/// Makes a constant that the assembler does not know. It would copy a known one to a register wherever it is
/// used.
///
/// # Safety
/// `scratch` points to 4 bytes of shared memory for each lane of the warp. All its lanes take part.
#[inline(always)]
pub(crate) unsafe fn opaque_constant(number: u32, scratch: *mut u8) -> u32 {
    let of_lane = scratch.wrapping_add((warp::lane() * 4) as usize);
    // SAFETY: the caller's promise.
    let zero = unsafe {
        *of_lane.cast::<u32>() = 0;
        warp::sync();
        shared::load_u16(shared::address(of_lane))
    };
    // Now all lanes have loaded theirs, and the memory is free for others' copies.
    warp::sync();
    number + zero
}

/// The copies of a lane, and where it finds what it multiplies.
pub(crate) struct LaneCopies<const TILES: usize> {
    /// Bytes from a work tile's first row to the lane's codes in the warp's first k-iteration, for the tile
    /// rows `p` and `p + 8` of each tile; and how many chunks there are from the lane's on.
    codes: [[u32; 2]; TILES],
    pub(crate) chunks: u32,
    /// The same for the words of scales that the lane copies, with the scales that there are from each on.
    scales: [u32; TILES],
    scales_left: [u32; TILES],
    /// Words of a tile row that are copied, and tile rows from that of the lane's first word on.
    words: u32,
    tile_rows: u32,
    /// Addresses of shared memory: where codes and scales go in the first stage, and where the lane's scales
    /// are.
    to: [u32; 2],
    found: u32,
}

impl<const TILES: usize> LaneCopies<TILES> {
    /// The offset of the scales in a stage, behind the codes.
    const SCALES: u32 = 2 * TILES as u32 * CODES_BYTES;
    /// Words of a tile row's scales in a stage: there are two of NVFP4 in a k-iteration. There is one of MXFP4, but they may lie in two.
    const ROW_WORDS: u32 = 2;

    /// Makes the copies of a warp with its slice of K, for work tiles of so many rows. Given are the exponent
    /// of the segments, the address of the warp's shared memory, and whether all rows of scales are whole
    /// words. If not, they are those of MXFP4, and half a tile has at least four rows, which together are.
    #[inline(always)]
    pub(crate) fn new<F: Format>(
        problem: &Problem,
        rows: u32,
        segment_bits: u32,
        slice: u32,
        address: u32,
        whole_words: bool,
    ) -> Self {
        let (cols, blocks) = (problem.shape.cols, problem.shape.blocks);
        let (tile_row, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let chunks = (cols / CHUNK as u64) as u32;
        // The first chunk of a tile row.
        let first = |tile_row: u32| ((slice << segment_bits) + (tile_row & ((1 << segment_bits) - 1))) * QUAD;
        let own = first(tile_row) + quarter;
        let words = if F::BLOCKS == 1 && whole_words { 1 } else { Self::ROW_WORDS };
        let (word_row, word) = (warp::lane() / words, warp::lane() % words);
        let word_scale = first(word_row) * F::BLOCKS + word * 4;
        // Bytes from the word in which a row's scales begin to them. K-iterations are whole words.
        let lead = |row: u32| if whole_words { 0 } else { row * blocks as u32 % 4 };
        // Rows past the last one repeat it.
        let row = |tile_row: u32| (tile_row >> segment_bits).min(rows - 1);
        let place = (word_row * Self::ROW_WORDS + word) * 4;
        let found = tile_row * (Self::ROW_WORDS * 4) + lead(row(tile_row)) + quarter * F::BLOCKS;
        let mut made = Self {
            codes: [[0; 2]; TILES],
            chunks: chunks.saturating_sub(own),
            scales: [0; TILES],
            scales_left: [0; TILES],
            words,
            tile_rows: (TILES as u32 * TILE_ROWS).saturating_sub(word_row),
            to: [
                pin_in_register(address + warp::lane() * 16),
                pin_in_register(address + Self::SCALES + place),
            ],
            found: pin_in_register(address + Self::SCALES + found),
        };
        for (codes, i) in made.codes.as_flattened_mut().iter_mut().zip(0..) {
            let row = row(i * HALF_TILE_ROWS + tile_row);
            *codes = pin_in_register(row * (blocks * F::BLOCK_BYTES) as u32 + own * CHUNK_BYTES);
        }
        for i in 0..TILES {
            let row = row(i as u32 * (WARP / words) + word_row);
            made.scales[i] = pin_in_register(row * blocks as u32 - lead(row) + word_scale);
            made.scales_left[i] = (blocks as u32 + lead(row)).saturating_sub(word_scale);
        }
        made
    }

    /// Starts to copy the codes and scales of a k-iteration to a stage. Chunks that do not exist become
    /// zeros.
    ///
    /// # Safety
    /// The contract of the kernels; nobody reads or writes the stage.
    #[inline(always)]
    pub(crate) unsafe fn copy<F: Format>(&self, from: Source, stage: u32) {
        let [codes, scales] = self.to.map(|to| to + stage);
        let there = if from.chunk < self.chunks { 16 } else { 0 };
        for (offset, i) in self.codes.as_flattened().iter().zip(0..) {
            // SAFETY: the chunk is in the row; chunks lie on multiples of 16 bytes.
            unsafe {
                let from = from.codes.wrapping_add(*offset as usize);
                shared::copy_16_once(codes + i * CODES_BYTES, from, there);
            }
        }
        for i in 0..TILES {
            let rows = i as u32 * (WARP / self.words);
            if rows < self.tile_rows {
                let there = self.scales_left[i].saturating_sub(from.chunk * F::BLOCKS).min(4);
                // SAFETY: the word begins in the row or, by less than a word, before it, and no more of it is read than the row has. It
                // lies on a multiple of 4, as the work tile's first row does.
                unsafe {
                    let from = from.scales.wrapping_add(self.scales[i] as usize);
                    shared::copy_4(scales + rows * (Self::ROW_WORDS * 4), from, there);
                }
            }
        }
    }

    /// Loads the codes of the lane's two rows of a tile from a stage.
    ///
    /// # Safety
    /// The lane's copies have arrived.
    #[inline(always)]
    pub(crate) unsafe fn codes(&self, stage: u32, tile: u32) -> [Codes; 2] {
        let from = self.to[0] + stage;
        // SAFETY: the caller's promise.
        [2 * tile, 2 * tile + 1].map(|row| unsafe { shared::load_16(from + row * CODES_BYTES) })
    }

    /// Loads the bytes of the scales of the lane's two rows of a tile from a stage.
    ///
    /// # Safety
    /// All lanes' copies have arrived.
    #[inline(always)]
    pub(crate) unsafe fn scales<F: Format>(&self, stage: u32, tile: u32) -> [u32; 2] {
        [2 * tile, 2 * tile + 1].map(|row| {
            let from = self.found + stage + row * (HALF_TILE_ROWS * Self::ROW_WORDS * 4);
            // SAFETY: the caller's promise.
            unsafe { if F::BLOCKS == 1 { shared::load_u8(from) } else { shared::load_u16(from) } }
        })
    }
}

/// The sources that all lanes of a warp copy from in a k-iteration.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
    pub(crate) activations: *const u8,
    /// Chunks from the warp's first k-iteration of the row to this one.
    pub(crate) chunk: u32,
}
