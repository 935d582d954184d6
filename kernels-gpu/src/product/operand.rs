//! The operands of products: addresses of rows, tokens and experts, and loads of chunks of rows.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::experts::{ExpertTile, Plan};
use microscale_kernels_abi::gemm::WeightsShape;
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use super::product_format::ProductFormat;
use super::results::Results;
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

/// The routing of tokens to experts. Without a plan (null) there is one matrix for all tokens. With
/// one, rows are sorted by expert: `from` lists the row of activations of each sorted row, and `to`
/// its row of results. Where a list is null, sorted row `i` is row `i`.
#[derive(Clone, Copy)]
pub(crate) struct Routed {
    pub(crate) plan: *const Plan,
    pub(crate) from: *const u32,
    pub(crate) to: *const u32,
}

impl Routed {
    /// Token tile `number`, of 2^`bits` tokens; without a plan, of `tokens` in all.
    ///
    /// # Safety
    /// The kernel's contract. The token tile exists.
    #[inline(always)]
    pub(crate) unsafe fn tile(&self, number: u32, bits: u32, tokens: u32) -> ExpertTile {
        if self.plan.is_null() {
            let first = number << bits;
            return ExpertTile { expert: 0, first, end: tokens.min(first + (1 << bits)), padding: 0 };
        }
        // SAFETY: the tiles follow the plan's head, and this one exists.
        unsafe { *self.plan.wrapping_add(1).cast::<ExpertTile>().wrapping_add(number as usize) }
    }

    /// The number of sorted rows.
    ///
    /// # Safety
    /// The kernel's contract. The plan is not null.
    #[inline(always)]
    pub(crate) unsafe fn sorted_rows(&self) -> u32 {
        // SAFETY: the plan's first `tiles` tiles exist. The last of them ends with the last row.
        unsafe {
            let tiles = (*self.plan).tiles;
            if tiles == 0 { 0 } else { self.tile(tiles - 1, 0, 0).end }
        }
    }

    /// The expert of a sorted row; 0 without a plan.
    ///
    /// # Safety
    /// The kernel's contract. The row exists.
    #[inline(always)]
    pub(crate) unsafe fn expert_of(&self, row: u32) -> u32 {
        if self.plan.is_null() {
            return 0;
        }
        // SAFETY: the plan's first `tiles` tiles exist, and one of them has the row.
        unsafe {
            let (mut found, mut end) = (0, (*self.plan).tiles);
            while end - found > 1 {
                let middle = found.midpoint(end);
                if self.tile(middle, 0, 0).first <= row {
                    found = middle;
                } else {
                    end = middle;
                }
            }
            self.tile(found, 0, 0).expert
        }
    }

    /// The entry of a sorted row in `from` or `to`.
    ///
    /// # Safety
    /// The kernel's contract. The row exists.
    #[inline(always)]
    pub(crate) unsafe fn listed(list: *const u32, row: u32) -> u32 {
        // SAFETY: the list has an entry per sorted row.
        if list.is_null() { row } else { unsafe { *list.wrapping_add(row as usize) } }
    }
}

/// A product of weights and activations: operands, results, shape and routing.
#[derive(Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) weights: Operand,
    pub(crate) activations: *const u8,
    pub(crate) results: Results,
    pub(crate) shape: WeightsShape,
    pub(crate) routed: Routed,
}

impl Problem {
    /// The product with the weights of an expert; 0 without a plan.
    #[inline(always)]
    pub(crate) fn of_expert<F: ProductFormat>(&self, expert: u32) -> Self {
        let WeightsShape { rows, blocks, .. } = self.shape;
        let Row { codes, scales } = self.weights.row::<F>(u64::from(expert) * rows, blocks);
        let global = self.weights.global.wrapping_add(expert as usize);
        // Biases have the activations' dtype, of two bytes.
        let bias = self.results.bias.wrapping_add((u64::from(expert) * rows * 2) as usize);
        Self {
            weights: Operand { codes, scales, global, ..self.weights },
            results: Results { bias, ..self.results },
            ..*self
        }
    }

    /// The row of activations of a token.
    ///
    /// # Safety
    /// The kernel's contract. The token exists.
    #[inline(always)]
    pub(crate) unsafe fn source(&self, token: u32) -> u32 {
        // SAFETY: the token exists.
        unsafe { Routed::listed(self.routed.from, token) }
    }

    /// The address of a token's activations.
    ///
    /// # Safety
    /// The kernel's contract. The token exists.
    #[inline(always)]
    pub(crate) unsafe fn token(&self, token: u32) -> *const u8 {
        // SAFETY: the token exists.
        let row = unsafe { self.source(token) };
        self.activations.wrapping_add((u64::from(row) * self.shape.cols * 2) as usize)
    }

    /// The origin of [`Self::rows_from_origin`] for a token tile: the row of its first token, or
    /// row 0 if rows are listed.
    #[inline(always)]
    pub(crate) fn origin_of_tile(&self, first: u32) -> *const u8 {
        let row = if self.routed.from.is_null() { first } else { 0 };
        self.activations.wrapping_add((u64::from(row) * self.shape.cols * 2) as usize)
    }

    /// Rows from [`Self::origin_of_tile`] to a token's row.
    ///
    /// # Safety
    /// The kernel's contract. The token exists, and is not before `first`.
    #[inline(always)]
    pub(crate) unsafe fn rows_from_origin(&self, first: u32, token: u32) -> u32 {
        // SAFETY: the token exists.
        if self.routed.from.is_null() { token - first } else { unsafe { self.source(token) } }
    }

    /// The row of results of a token.
    ///
    /// # Safety
    /// The kernel's contract. The token exists.
    #[inline(always)]
    pub(crate) unsafe fn result_row(&self, token: u32) -> u32 {
        // SAFETY: the token exists.
        unsafe { Routed::listed(self.routed.to, token) }
    }
}
