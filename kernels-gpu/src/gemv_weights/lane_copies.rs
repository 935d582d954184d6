//! A lane's copies of codes and scales to a stage, and its loads from there.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::hardware::warp::pin_in_register;
use crate::hardware::{shared, warp};
use crate::product::operand::{CHUNK_BYTES, Codes};
use crate::product::problem::Problem;
use crate::product::product_format::ProductFormat;

/// Bytes of a chunk of activations.
pub(super) const ACTIVATION_BYTES: u32 = CHUNK as u32 * 2;
/// Bytes of codes that a warp copies per instruction.
const CODES_BYTES: u32 = WARP * CHUNK_BYTES;
/// Rows of half a tile.
const HALF_TILE_ROWS: u32 = TILE_ROWS / 2;

/// Returns `number` as a value that the assembler does not know. It would copy a known constant to
/// a register at each use.
///
/// # Safety
/// `scratch` points to 128 bytes of shared memory that only this warp uses. All lanes call it.
#[inline(always)]
pub(super) unsafe fn opaque_constant(number: u32, scratch: *mut u8) -> u32 {
    let of_lane = scratch.wrapping_add((warp::lane() * 4) as usize);
    // SAFETY: each lane has its own 4 bytes of `scratch`.
    let zero = unsafe {
        *of_lane.cast::<u32>() = 0;
        warp::sync();
        shared::load_u16(shared::address(of_lane))
    };
    // Now all lanes have loaded, and the memory is free for copies of other lanes.
    warp::sync();
    number + zero
}

/// A lane's copies of each K-iteration, and the addresses of its operands in a stage.
pub(super) struct LaneCopies<const TILES: usize> {
    /// Offsets of the lane's codes from the work tile's first row, in the warp's first K-iteration:
    /// for tile rows `p` and `p + 8` of each tile.
    global_codes: [[u32; 2]; TILES],
    /// Chunks of a row from the lane's first one to the end.
    pub(super) chunks: u32,
    /// Offsets of the words of scales that the lane copies, as `global_codes`.
    global_scales: [u32; TILES],
    /// Scales of a row from each of these words to the end.
    scales_left: [u32; TILES],
    /// Words of scales per tile row.
    words: u32,
    /// Tile rows from the one of the lane's first word to the end.
    tile_rows: u32,
    /// Shared addresses, in the first stage, of the lane's copies of codes and scales.
    shared_to: [u32; 2],
    /// Shared address, in the first stage, of the lane's own scales.
    shared_scales: u32,
}

impl<const TILES: usize> LaneCopies<TILES> {
    /// Offset of the scales in a stage. They follow the codes.
    const SCALES: u32 = 2 * TILES as u32 * CODES_BYTES;
    /// Words of a tile row's scales in a stage. A K-iteration of NVFP4 has two. One of MXFP4 has
    /// four scales, which may span two words.
    const ROW_WORDS: u32 = 2;

    /// The copies of the lane in a warp that has slice `slice` of K, for work tiles of `rows` rows
    /// in 2^`segment_bits` segments. `address` is the shared address of the warp's ring.
    /// `whole_words` says that each row of scales is whole words. Otherwise the format is MXFP4 and
    /// four rows together are whole words.
    #[inline(always)]
    pub(super) fn new<F: ProductFormat>(
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
        // Bytes from the start of a row's first word to its first scale. K-iterations are whole
        // words.
        let lead = |row: u32| if whole_words { 0 } else { row * blocks as u32 % 4 };
        // Rows past the last one repeat it.
        let row = |tile_row: u32| (tile_row >> segment_bits).min(rows - 1);
        let to_scales = (word_row * Self::ROW_WORDS + word) * 4;
        let own_scales = tile_row * (Self::ROW_WORDS * 4) + lead(row(tile_row)) + quarter * F::BLOCKS;
        let mut made = Self {
            global_codes: [[0; 2]; TILES],
            chunks: chunks.saturating_sub(own),
            global_scales: [0; TILES],
            scales_left: [0; TILES],
            words,
            tile_rows: (TILES as u32 * TILE_ROWS).saturating_sub(word_row),
            shared_to: [
                pin_in_register(address + warp::lane() * 16),
                pin_in_register(address + Self::SCALES + to_scales),
            ],
            shared_scales: pin_in_register(address + Self::SCALES + own_scales),
        };
        for (codes, i) in made.global_codes.as_flattened_mut().iter_mut().zip(0..) {
            let row = row(i * HALF_TILE_ROWS + tile_row);
            *codes = pin_in_register(row * (blocks * F::BLOCK_BYTES) as u32 + own * CHUNK_BYTES);
        }
        for i in 0..TILES {
            let row = row(i as u32 * (WARP / words) + word_row);
            made.global_scales[i] = pin_in_register(row * blocks as u32 - lead(row) + word_scale);
            made.scales_left[i] = (blocks as u32 + lead(row)).saturating_sub(word_scale);
        }
        made
    }

    /// Starts to copy the codes and scales of a K-iteration to a stage. Chunks that do not exist
    /// become zeros.
    ///
    /// # Safety
    /// The kernel's contract. No lane reads or writes the stage.
    #[inline(always)]
    pub(super) unsafe fn copy<F: ProductFormat>(&self, from: CopySource, stage: u32) {
        let [codes, scales] = self.shared_to.map(|to| to + stage);
        let bytes = if from.chunk < self.chunks { 16 } else { 0 };
        for (offset, i) in self.global_codes.as_flattened().iter().zip(0..) {
            // SAFETY: `bytes` is 0 past the row's last chunk. Chunks start on 16 bytes.
            unsafe {
                let from = from.codes.wrapping_add(*offset as usize);
                shared::copy_16_once(codes + i * CODES_BYTES, from, bytes);
            }
        }
        for i in 0..TILES {
            let rows = i as u32 * (WARP / self.words);
            if rows < self.tile_rows {
                let bytes = self.scales_left[i].saturating_sub(from.chunk * F::BLOCKS).min(4);
                // SAFETY: the word starts in the row, or less than a word before it, where the
                // previous row is. `bytes` ends with the row. The word starts on 4 bytes, as the
                // work tile's first row does.
                unsafe {
                    let from = from.scales.wrapping_add(self.global_scales[i] as usize);
                    shared::copy_4(scales + rows * (Self::ROW_WORDS * 4), from, bytes);
                }
            }
        }
    }

    /// Loads the codes of the lane's two rows of a tile from a stage.
    ///
    /// # Safety
    /// The lane's copies to the stage have completed.
    #[inline(always)]
    pub(super) unsafe fn codes(&self, stage: u32, tile: u32) -> [Codes; 2] {
        let from = self.shared_to[0] + stage;
        // SAFETY: the stage has 16 bytes per lane and row, which the lane has copied.
        [2 * tile, 2 * tile + 1].map(|row| unsafe { shared::load_16(from + row * CODES_BYTES) })
    }

    /// Loads the bytes of the scales of the lane's two rows of a tile from a stage.
    ///
    /// # Safety
    /// All lanes' copies to the stage have completed.
    #[inline(always)]
    pub(super) unsafe fn scales<F: ProductFormat>(&self, stage: u32, tile: u32) -> [u32; 2] {
        [2 * tile, 2 * tile + 1].map(|row| {
            let from = self.shared_scales + stage + row * (HALF_TILE_ROWS * Self::ROW_WORDS * 4);
            // SAFETY: the stage has the scales of each row, which other lanes have copied.
            unsafe { if F::BLOCKS == 1 { shared::load_u8(from) } else { shared::load_u16(from) } }
        })
    }
}

/// A warp's source of a K-iteration, in global memory.
#[derive(Clone, Copy)]
pub(super) struct CopySource {
    pub(super) codes: *const u8,
    pub(super) scales: *const u8,
    pub(super) activations: *const u8,
    /// Chunks of the row before the K-iteration, from the warp's first one on.
    pub(super) chunk: u32,
}
