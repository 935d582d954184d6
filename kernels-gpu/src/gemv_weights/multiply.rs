//! The multiplication in a warp's pipeline, and products of chunks by tensor cores.

use microscale_formats::{Dtype, Format as WeightsFormat};
use microscale_kernels_abi::{GemmConfig, Mainloop};

use super::lane_copies::LaneCopies;
use crate::product::operand::{CodeChunk, Codes};
use crate::product::product_format::ProductFormat;
use crate::product::tensor_cores::{Activations, SUMS, WeightFormat};

/// A configuration of the GEMV. Tiles are the same for all operands.
pub(super) const fn gemv_config(tile_m: u32, tile_n: u32) -> GemmConfig {
    let (weights, activations) = (WeightsFormat::Nvfp4, Dtype::F16);
    GemmConfig { mainloop: Mainloop::Gemv, tile_m, tile_n, cluster: 1, slices: 1, weights, activations }
}

/// The products of a warp in its K-iterations, and its accumulators.
pub(super) trait Product<F: ProductFormat, const TILES: usize> {
    /// The configuration.
    const CONFIG: GemmConfig;
    /// Offset of the activations in a stage. They follow the scales.
    const ACTIVATIONS: u32 = Self::CONFIG.gemv_stage_bytes() - Self::CONFIG.gemv_activation_bytes();

    /// Starts to copy the lane's activations of a K-iteration to a stage. The K-iteration is
    /// `chunk` chunks after the warp's first. Chunks that do not exist become zeros.
    ///
    /// # Safety
    /// The kernel's contract. No lane reads or writes the stage.
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32);

    /// Adds the products of a stage. Its K-iteration is `chunk` chunks after the warp's first.
    ///
    /// # Safety
    /// All lanes' copies to the stage have completed. All lanes call it.
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, chunk: u32);

    /// Stores the accumulators of a work tile in the warp's shared memory and clears them.
    ///
    /// # Safety
    /// Only this warp uses its shared memory. All lanes call it.
    unsafe fn end(&mut self, work_tile: u32);
}

/// Adds the products of word `I` of two scaled chunks and `EIGHTS` times eight tokens to `sums`.
#[inline(always)]
fn multiply<D: Activations, const I: usize, const EIGHTS: usize>(
    mut sums: [[f32; SUMS]; EIGHTS],
    rows: &[CodeChunk; 2],
    factors: [u32; 2],
    activations: &[[[u32; 4]; 4]; EIGHTS],
    table: u32,
) -> [[f32; SUMS]; EIGHTS] {
    let weights = |i: usize| D::weights(rows[i].codes[I], table).map(|pair| D::scaled(pair, factors[i]));
    let ([a, b, c, d], [e, f, g, h]) = (weights(0), weights(1));
    for (sums, x) in sums.iter_mut().zip(activations) {
        *sums = D::multiply([a, e, b, f], [x[I][0], x[I][1]], *sums);
        *sums = D::multiply([c, g, d, h], [x[I][2], x[I][3]], *sums);
    }
    sums
}

/// The products of two scaled chunks and `EIGHTS` times eight tokens. `table` is
/// [`Activations::TABLE`].
#[inline(always)]
pub(super) fn scaled_products<F: WeightFormat, D: Activations, const EIGHTS: usize>(
    rows: &[CodeChunk; 2],
    x: &[[[u32; 4]; 4]; EIGHTS],
    table: u32,
) -> [[f32; SUMS]; EIGHTS] {
    let [low, high] = [F::factors::<D>(rows[0].scales), F::factors::<D>(rows[1].scales)];
    // Written out: in a loop, LLVM would keep the arrays in local memory.
    let sums = multiply::<D, 0, EIGHTS>([[0.0; SUMS]; EIGHTS], rows, [low[0], high[0]], x, table);
    let sums = multiply::<D, 1, EIGHTS>(sums, rows, [low[0], high[0]], x, table);
    let sums = multiply::<D, 2, EIGHTS>(sums, rows, [low[1], high[1]], x, table);
    multiply::<D, 3, EIGHTS>(sums, rows, [low[1], high[1]], x, table)
}

/// The unscaled products of two rows' groups whose codes start at word `I`. `table` is
/// [`Activations::TABLE`].
#[inline(always)]
pub(super) fn group_products<D: Activations, const I: usize>(
    rows: &[Codes; 2],
    x: &[[u32; 4]; 4],
    table: u32,
) -> [f32; SUMS] {
    let weights = |row: usize, i: usize| D::weights(rows[row][i], table);
    let ([a, b, c, d], [e, f, g, h]) = (weights(0, I), weights(1, I));
    let sums = D::multiply([a, e, b, f], [x[I][0], x[I][1]], [0.0; SUMS]);
    let sums = D::multiply([c, g, d, h], [x[I][2], x[I][3]], sums);
    let ([a, b, c, d], [e, f, g, h]) = (weights(0, I + 1), weights(1, I + 1));
    let sums = D::multiply([a, e, b, f], [x[I + 1][0], x[I + 1][1]], sums);
    D::multiply([c, g, d, h], [x[I + 1][2], x[I + 1][3]], sums)
}
