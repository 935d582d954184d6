//! Dispatch of GPTQ's loops.

use super::*;
use crate::cpu::gptq::{Blocks, GptqFactor, LoopParams, TaskRows};
use crate::cpu::simd::Lanes;

impl Isa {
    /// Subtracts the products of finished rows from a panel's rows of one tile of a factorization.
    pub(in crate::cpu) fn subtract_panel(
        self,
        panel: &[&[[f64; 8]]],
        done: &[[f64; 8]],
        open: &mut [[f64; 8]],
    ) {
        by_instance!(self, subtract_panel(panel, done, open));
    }

    /// Finishes a panel's rows of one tile of a factorization.
    pub(in crate::cpu) fn solve_panel(self, start: usize, panel: &[Vec<[f64; 8]>], tile: &mut [[f64; 8]]) {
        by_instance!(self, solve_panel(start, panel, tile));
    }

    /// Finishes the last rows of a panel's tiles of a factorization.
    ///
    /// # Errors
    /// The first column whose pivot is not positive.
    pub(in crate::cpu) fn factor_panel(
        self,
        first: usize,
        panel: &mut [Vec<[f64; 8]>],
    ) -> std::result::Result<(), usize> {
        by_instance!(self, factor_panel(first, panel))
    }

    /// Quantizes the rows of a task by GPTQ.
    pub(in crate::cpu) fn quantize_gptq(
        self,
        params: &LoopParams<'_>,
        blocks: &Blocks,
        task: &mut TaskRows<'_>,
    ) -> Tally {
        by_instance!(self, quantize_gptq(params, blocks, task))
    }

    /// Adds the squared norm of each row times a factor.
    pub(in crate::cpu) fn add_gptq_norms(self, factor: &GptqFactor, rows: &[Lanes<f32>], norms: &mut [f64]) {
        by_instance!(self, add_gptq_norms(factor, rows, norms));
    }
}
