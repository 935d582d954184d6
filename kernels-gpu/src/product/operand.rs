//! The operands of products: addresses of rows of a quantized matrix, and loads of their chunks.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use super::product_format::ProductFormat;
use crate::hardware::ptx;

/// A chunk's codes.
pub(crate) type Codes = [u32; 4];
/// Bytes of a chunk's codes.
pub(crate) const CHUNK_BYTES: u32 = CHUNK as u32 / 2;

/// A chunk of a row: its codes and the bytes of its scales.
#[derive(Clone, Copy)]
pub(crate) struct CodeChunk {
    pub(crate) codes: Codes,
    pub(crate) scales: u32,
}

impl CodeChunk {
    pub(crate) const NONE: Self = Self { codes: [0; 4], scales: 0 };
}

/// The addresses of a row.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
}

impl Row {
    /// Loads a chunk of a row of `blocks` blocks. With `ONCE` it bypasses the L1 cache. `WHOLE`
    /// chunks have all their blocks; others may have the first block only, and the second is then
    /// zero.
    ///
    /// # Safety
    /// The kernel's contract. The chunk's first block exists.
    #[inline(always)]
    pub(crate) unsafe fn load<F: ProductFormat, const ONCE: bool, const WHOLE: bool>(
        self,
        chunk: u32,
        blocks: u32,
    ) -> CodeChunk {
        let first = chunk * F::BLOCKS;
        let codes = self.codes.wrapping_add((chunk * CHUNK_BYTES) as usize);
        let scales = self.scales.wrapping_add(first as usize);
        let mut loaded = CodeChunk::NONE;
        // SAFETY: the first block exists, and the second is read only if it exists. Whole chunks
        // start on 16 bytes and their scales on the bytes of a chunk's scales; NVFP4 blocks start
        // on 8.
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

    /// Loads a whole chunk that is used once. LLVM does not move the load.
    ///
    /// # Safety
    /// The kernel's contract. The chunk is in the row.
    #[inline(always)]
    pub(crate) unsafe fn load_once<F: ProductFormat>(&self, chunk: u32) -> CodeChunk {
        let codes = self.codes.wrapping_add((chunk * CHUNK_BYTES) as usize);
        let scales = self.scales.wrapping_add((chunk * F::BLOCKS) as usize);
        // SAFETY: the chunk is in the row. Whole chunks start on 16 bytes, and their scales on the
        // bytes of a chunk's scales.
        unsafe {
            CodeChunk {
                codes: ptx::load_16_once_here(codes),
                scales: if F::BLOCKS == 1 { ptx::load_u8_here(scales) } else { ptx::load_u16_here(scales) },
            }
        }
    }
}

/// Loads 8 bytes.
///
/// # Safety
/// `address` points to 8 readable bytes, on 4.
#[inline(always)]
pub(crate) unsafe fn load_8(address: *const u8) -> [u32; 2] {
    let words = address.cast::<u32>();
    // SAFETY: the caller promises both words.
    unsafe { [*words, *words.wrapping_add(1)] }
}

/// A quantized matrix in global memory.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) codes: *const u8,
    pub(crate) scales: *const u8,
    pub(crate) global: *const GlobalSlot,
    pub(crate) apply: ApplyGlobal,
}

impl Operand {
    /// The addresses of row `row`, with `blocks` blocks per row.
    #[inline(always)]
    pub(crate) fn row<F: ProductFormat>(&self, row: u64, blocks: u64) -> Row {
        let first = row * blocks;
        Row {
            codes: self.codes.wrapping_add((first * F::BLOCK_BYTES) as usize),
            scales: self.scales.wrapping_add(first as usize),
        }
    }
}

impl Operand {
    /// Applies the global scale, if there is one, to a sum.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    pub(crate) unsafe fn scaled(&self, sum: f64) -> f64 {
        // SAFETY: `global` points to a slot, also without a global scale.
        self.apply.scaled(sum, unsafe { (*self.global).scale })
    }
}
