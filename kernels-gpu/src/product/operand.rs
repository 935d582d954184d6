//! The operands of products: where rows lie, and loading chunks of them.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::weights::WeightsShape;
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use super::format::Format;
use crate::ptx;

/// A chunk's codes.
pub(crate) type Codes = [u32; 4];
/// Bytes of a chunk's codes.
pub(crate) const CHUNK_BYTES: u32 = CHUNK as u32 / 2;

/// A chunk of a row: its codes and the bytes of its scales.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    pub(crate) codes: Codes,
    pub(crate) scales: u32,
}

impl Chunk {
    pub(crate) const NONE: Self = Self { codes: [0; 4], scales: 0 };
}

/// The addresses of a row.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
}

impl Row {
    /// Loads a chunk. `ONCE` says that it is used once. `WHOLE` chunks have all their blocks. Ragged ones may
    /// have the first block only; then the second is zero.
    ///
    /// # Safety
    /// The contract of the kernels; the chunk's first block exists in a row of so many blocks.
    #[inline(always)]
    pub(crate) unsafe fn load<F: Format, const ONCE: bool, const WHOLE: bool>(
        self,
        chunk: u32,
        blocks: u32,
    ) -> Chunk {
        let first = chunk * F::BLOCKS;
        let codes = self.codes.wrapping_add((chunk * CHUNK_BYTES) as usize);
        let scales = self.scales.wrapping_add(first as usize);
        let mut loaded = Chunk::NONE;
        // SAFETY: whole chunks lie on multiples of 16 bytes, and their scales on one of their number; blocks
        // of NVFP4 lie on multiples of eight, and the second one is looked at if it exists.
        unsafe {
            if WHOLE {
                loaded.codes = if ONCE { ptx::load_16_once(codes) } else { ptx::load_16(codes) };
                loaded.scales = match F::BLOCKS {
                    1 => u32::from(*scales),
                    _ => u32::from(*scales.cast::<u16>()),
                };
                return loaded;
            }
            loaded.scales = u32::from(*scales);
            [loaded.codes[0], loaded.codes[1]] = load_8(codes);
            if first + 1 < blocks {
                loaded.scales |= u32::from(*scales.wrapping_add(1)) << 8;
                [loaded.codes[2], loaded.codes[3]] = load_8(codes.wrapping_add(F::BLOCK_BYTES as usize));
            }
        }
        loaded
    }

    /// Loads a chunk right here: the assembler does not move the load.
    ///
    /// # Safety
    /// The contract of the kernels; the chunk is in the row.
    #[inline(always)]
    pub(crate) unsafe fn load_once<F: Format>(&self, chunk: u32) -> Chunk {
        let codes = self.codes.wrapping_add((chunk * CHUNK_BYTES) as usize);
        let scales = self.scales.wrapping_add((chunk * F::BLOCKS) as usize);
        // SAFETY: the caller's promise; whole chunks lie on multiples of 16 bytes, and their scales on one of
        // their number.
        unsafe {
            Chunk {
                codes: ptx::load_16_once_here(codes),
                scales: if F::BLOCKS == 1 { ptx::load_u8_here(scales) } else { ptx::load_u16_here(scales) },
            }
        }
    }
}

/// Loads eight bytes.
///
/// # Safety
/// The bytes are readable, and `address` is a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn load_8(address: *const u8) -> [u32; 2] {
    let words = address.cast::<u32>();
    // SAFETY: the caller's promise.
    unsafe { [*words, *words.wrapping_add(1)] }
}

/// A quantized operand of a kernel.
pub(crate) struct Operand {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
    pub(crate) global: *const GlobalSlot,
    pub(crate) apply: ApplyGlobal,
}

impl Operand {
    /// The addresses of a row, if rows have so many blocks.
    #[inline(always)]
    pub(crate) fn row<F: Format>(&self, row: u64, blocks: u64) -> Row {
        let first = row * blocks;
        Row {
            codes: self.codes.wrapping_add((first * F::BLOCK_BYTES) as usize),
            scales: self.scales.wrapping_add(first as usize),
        }
    }
}

/// A product of weights and activations: its operands, its output and its shape.
pub(crate) struct Problem {
    pub(crate) weights: Operand,
    pub(crate) activations: *const u8,
    pub(crate) out: *mut u8,
    pub(crate) shape: WeightsShape,
}

impl Problem {
    /// The address of a token's activations.
    #[inline(always)]
    pub(crate) fn token(&self, token: u32) -> *const u8 {
        self.activations.wrapping_add((u64::from(token) * self.shape.cols * 2) as usize)
    }
}
