//! Copies to shared memory for a step, lane by lane, and reading them there.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{QUAD, ROW_PLACES};

use super::format::Format;
use super::operand::{CHUNK_BYTES, Codes, Job};
use crate::{ptx, warp};

/// Bytes of a chunk of activations.
pub(crate) const ACTIVATION_BYTES: u32 = CHUNK as u32 * 2;
/// Bytes of codes that the lanes of a warp copy at once.
const CODES_BYTES: u32 = WARP * CHUNK_BYTES;
/// Places of rows that half a tile has.
const HALF_PLACES: u32 = ROW_PLACES / 2;

/// Keeps a number in a register: the assembler computes again and again what it knows how to compute.
#[inline(always)]
pub(crate) fn kept(number: u32) -> u32 {
    warp::shuffle(number, warp::lane())
}

/// A number that the assembler does not know: it copies what it knows to be constant wherever it is used.
///
/// # Safety
/// There are 4 bytes of shared memory for each lane of the warp, all of which take part.
#[inline(always)]
pub(crate) unsafe fn unknown(number: u32, place: *mut u8) -> u32 {
    let of_lane = place.wrapping_add((warp::lane() * 4) as usize);
    // SAFETY: the caller's promise.
    let zero = unsafe {
        *of_lane.cast::<u32>() = 0;
        warp::sync();
        ptx::load_shared_u16(ptx::shared_address(of_lane))
    };
    number + zero
}

/// What a lane copies, and where it finds what it needs.
pub(crate) struct Lane<const TILES: usize> {
    /// Bytes from a turn's first row to the lane's codes in the warp's first step, for each tile's places `p` and
    /// `p + 8`, and how many chunks there are from theirs on.
    codes: [[u32; 2]; TILES],
    pub(crate) chunks: u32,
    /// The same, for the words of scales that the lane copies.
    scales: [u32; TILES],
    scale_chunks: u32,
    /// Where codes and scales go in the first slot, as addresses of shared memory, and where the lane's scales are.
    to: [u32; 2],
    found: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Where in a slot the scales are, behind the codes.
    const SCALES: u32 = 2 * TILES as u32 * CODES_BYTES;

    /// Of a warp with its part of the columns, in turns of so many rows, given the exponent of their segments and where
    /// the warp's shared memory is.
    #[inline(always)]
    pub(crate) fn new<F: Format>(job: &Job, rows: u32, segment_bits: u32, split: u32, address: u32) -> Self {
        let (cols, blocks) = (job.shape.cols, job.shape.blocks);
        let (place, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let chunks = (cols / CHUNK as u64) as u32;
        // The first chunk of a place.
        let first = |place: u32| ((split << segment_bits) + (place & ((1 << segment_bits) - 1))) * QUAD;
        let own = first(place) + quarter;
        // A place's scales in a step are a word of MXFP4, and two of NVFP4.
        let (words, word_chunks) = const { (F::BLOCKS, QUAD / F::BLOCKS) };
        let word_chunk = first(warp::lane() / words) + warp::lane() % words * word_chunks;
        let mut made = Self {
            codes: [[0; 2]; TILES],
            chunks: chunks.saturating_sub(own),
            scales: [0; TILES],
            scale_chunks: chunks.saturating_sub(word_chunk),
            to: [kept(address + warp::lane() * 16), kept(address + Self::SCALES + warp::lane() * 4)],
            found: kept(address + Self::SCALES + (place * QUAD + quarter) * F::BLOCKS),
        };
        // Past the last row it is taken again.
        let row = |place: u32| (place >> segment_bits).min(rows - 1);
        for (codes, i) in made.codes.as_flattened_mut().iter_mut().zip(0..) {
            let row = row(i * HALF_PLACES + place);
            *codes = kept(row * (blocks * F::BLOCK_BYTES) as u32 + own * CHUNK_BYTES);
        }
        for (scales, i) in made.scales.iter_mut().zip(0..) {
            let row = row((i * WARP + warp::lane()) / words);
            *scales = kept(row * blocks as u32 + word_chunk * F::BLOCKS);
        }
        made
    }

    /// Starts to copy the codes and scales of a step to a slot. Zeros stand for what is not there.
    ///
    /// # Safety
    /// As for the kernels; the slot is nobody's.
    #[inline(always)]
    pub(crate) unsafe fn copy<F: Format>(&self, from: Source, slot: u32) {
        let [codes, scales] = self.to.map(|to| to + slot);
        let there = if from.chunk < self.chunks { 16 } else { 0 };
        for (offset, i) in self.codes.as_flattened().iter().zip(0..) {
            // SAFETY: what is copied is in the row; chunks lie on multiples of 16 bytes.
            unsafe {
                let from = from.codes.wrapping_add(*offset as usize);
                ptx::copy_16_once(codes + i * CODES_BYTES, from, there);
            }
        }
        let there = if from.chunk < self.scale_chunks { 4 } else { 0 };
        for (offset, i) in self.scales.iter().zip(0..) {
            if i * WARP < TILES as u32 * ROW_PLACES * F::BLOCKS {
                // SAFETY: what is copied is in the row; rows are whole words of scales.
                unsafe {
                    let from = from.scales.wrapping_add(*offset as usize);
                    ptx::copy_4(scales + i * WARP * 4, from, there);
                }
            }
        }
    }

    /// A slot's codes of the lane's rows of a tile.
    ///
    /// # Safety
    /// The lane's copies are there.
    #[inline(always)]
    pub(crate) unsafe fn codes(&self, slot: u32, tile: u32) -> [Codes; 2] {
        let from = self.to[0] + slot;
        // SAFETY: the caller's promise.
        [2 * tile, 2 * tile + 1].map(|row| unsafe { ptx::load_shared_16(from + row * CODES_BYTES) })
    }

    /// The bytes of a slot's scales of the lane's rows of a tile.
    ///
    /// # Safety
    /// All lanes' copies are there.
    #[inline(always)]
    pub(crate) unsafe fn scales<F: Format>(&self, slot: u32, tile: u32) -> [u32; 2] {
        [2 * tile, 2 * tile + 1].map(|row| {
            let from = self.found + slot + row * const { HALF_PLACES * QUAD * F::BLOCKS };
            // SAFETY: the caller's promise.
            unsafe { if F::BLOCKS == 1 { ptx::load_shared_u8(from) } else { ptx::load_shared_u16(from) } }
        })
    }
}

/// What all lanes of a warp copy from, in a step.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
    pub(crate) activations: *const u8,
    /// How many chunks behind the warp's first step of the row.
    pub(crate) chunk: u32,
}
