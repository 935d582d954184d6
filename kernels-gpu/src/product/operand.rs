//! The operands of products: where rows lie, and loading chunks of them.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::experts::{ExpertTile, Plan};
use microscale_kernels_abi::gemm::WeightsShape;
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use super::format::Format;
use super::results::Results;
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
#[derive(Clone, Copy)]
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

/// How rows of activations and of results go to experts: with a null plan, there is one matrix for all. Otherwise there are sorted
/// rows, an expert's one after the other, and of each two numbers: of the row of activations, and of the row of results. Where one of the
/// lists is null, sorted rows are in their places.
#[derive(Clone, Copy)]
pub(crate) struct Routed {
    pub(crate) plan: *const Plan,
    pub(crate) from: *const u32,
    pub(crate) to: *const u32,
}

impl Routed {
    /// A token tile of 2^`bits` tokens, of so many in all.
    ///
    /// # Safety
    /// The contract of the kernels; there is such a tile.
    #[inline(always)]
    pub(crate) unsafe fn tile(&self, number: u32, bits: u32, tokens: u32) -> ExpertTile {
        if self.plan.is_null() {
            let first = number << bits;
            return ExpertTile { expert: 0, first, end: tokens.min(first + (1 << bits)), padding: 0 };
        }
        // SAFETY: the caller's promise.
        unsafe { *self.plan.wrapping_add(1).cast::<ExpertTile>().wrapping_add(number as usize) }
    }

    /// The number of sorted rows, if there is a plan.
    ///
    /// # Safety
    /// The contract of the kernels; the plan is not null.
    #[inline(always)]
    pub(crate) unsafe fn sorted_rows(&self) -> u32 {
        // SAFETY: the caller's promise; the last tile that has rows has the last ones.
        unsafe {
            let tiles = (*self.plan).tiles;
            if tiles == 0 { 0 } else { self.tile(tiles - 1, 0, 0).end }
        }
    }

    /// The expert of a sorted row: 0, if there is one matrix for all.
    ///
    /// # Safety
    /// The contract of the kernels; there is such a row.
    #[inline(always)]
    pub(crate) unsafe fn expert_of(&self, row: u32) -> u32 {
        if self.plan.is_null() {
            return 0;
        }
        // SAFETY: the caller's promise; a tile that has rows is there.
        unsafe {
            let (mut found, mut behind) = (0, (*self.plan).tiles);
            while behind - found > 1 {
                let middle = found.midpoint(behind);
                if self.tile(middle, 0, 0).first <= row {
                    found = middle;
                } else {
                    behind = middle;
                }
            }
            self.tile(found, 0, 0).expert
        }
    }

    /// The number of a sorted row in one of the lists.
    ///
    /// # Safety
    /// The contract of the kernels; there is such a row.
    #[inline(always)]
    pub(crate) unsafe fn listed(list: *const u32, row: u32) -> u32 {
        // SAFETY: the caller's promise.
        if list.is_null() { row } else { unsafe { *list.wrapping_add(row as usize) } }
    }
}

/// A product of weights and activations: its operands, its results, its shape, and whose weights are for which rows.
#[derive(Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) weights: Operand,
    pub(crate) activations: *const u8,
    pub(crate) results: Results,
    pub(crate) shape: WeightsShape,
    pub(crate) routed: Routed,
}

impl Problem {
    /// The product with the weights of an expert: 0, if there is one matrix for all.
    #[inline(always)]
    pub(crate) fn of_expert<F: Format>(&self, expert: u32) -> Self {
        let WeightsShape { rows, blocks, .. } = self.shape;
        let Row { codes, scales } = self.weights.row::<F>(u64::from(expert) * rows, blocks);
        let global = self.weights.global.wrapping_add(expert as usize);
        // Of the activations' dtype, which has two bytes.
        let bias = self.results.bias.wrapping_add((u64::from(expert) * rows * 2) as usize);
        Self {
            weights: Operand { codes, scales, global, ..self.weights },
            results: Results { bias, ..self.results },
            ..*self
        }
    }

    /// The number of the row of activations of a token.
    ///
    /// # Safety
    /// The contract of the kernels; the token exists.
    #[inline(always)]
    pub(crate) unsafe fn source(&self, token: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { Routed::listed(self.routed.from, token) }
    }

    /// The address of a token's activations.
    ///
    /// # Safety
    /// The contract of the kernels; the token exists.
    #[inline(always)]
    pub(crate) unsafe fn token(&self, token: u32) -> *const u8 {
        // SAFETY: the caller's promise.
        let row = unsafe { self.source(token) };
        self.activations.wrapping_add((u64::from(row) * self.shape.cols * 2) as usize)
    }

    /// The activations of a token tile that begins with a token, for [`Self::rows_behind`]: its first row, or, where rows are listed,
    /// the first of all.
    #[inline(always)]
    pub(crate) fn activations_of_tile(&self, first: u32) -> *const u8 {
        let row = if self.routed.from.is_null() { first } else { 0 };
        self.activations.wrapping_add((u64::from(row) * self.shape.cols * 2) as usize)
    }

    /// Rows from [`Self::activations_of_tile`] to a token's.
    ///
    /// # Safety
    /// The contract of the kernels; the token exists, and is not before the tile's first.
    #[inline(always)]
    pub(crate) unsafe fn rows_behind(&self, first: u32, token: u32) -> u32 {
        // SAFETY: the caller's promise.
        if self.routed.from.is_null() { token - first } else { unsafe { self.source(token) } }
    }

    /// The number of the row of results of a token.
    ///
    /// # Safety
    /// The contract of the kernels; the token exists.
    #[inline(always)]
    pub(crate) unsafe fn place(&self, token: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { Routed::listed(self.routed.to, token) }
    }
}
