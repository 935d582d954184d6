//! A product as kernels see it: operands, results, shape and routing.

use microscale_kernels_abi::experts::{ExpertTile, Plan};
use microscale_kernels_abi::gemm::WeightsShape;

use super::operand::{Operand, Row};
use super::product_format::ProductFormat;
use super::results::Results;
use super::tensor_cores::Activations;

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
    /// Token tile `number`, of at most `tile_tokens` tokens; without a plan, of `tokens` in all.
    ///
    /// # Safety
    /// The kernel's contract. The token tile exists.
    #[inline(always)]
    pub(crate) unsafe fn tile(&self, number: u32, tile_tokens: u32, tokens: u32) -> ExpertTile {
        if self.plan.is_null() {
            let first = number * tile_tokens;
            return ExpertTile { expert: 0, first, end: tokens.min(first + tile_tokens), padding: 0 };
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

impl Problem {
    /// Stores the sum of a row and a token. With a gate, `next` computes the sum of the next row.
    ///
    /// # Safety
    /// The kernel's contract. Row and token exist, and no other thread stores this result.
    #[inline(always)]
    pub(crate) unsafe fn store<D: Activations>(
        &self,
        row: u64,
        token: u32,
        sum: f64,
        next: impl FnOnce() -> f64,
    ) {
        // SAFETY: row and token exist, and no other thread stores the result.
        unsafe {
            let at = [u64::from(self.result_row(token)), row, self.shape.rows];
            let (sum, next) = (self.weights.scaled(sum), || self.weights.scaled(next()));
            self.results.store(D::OUTPUT, at, sum, next);
        }
    }
}
