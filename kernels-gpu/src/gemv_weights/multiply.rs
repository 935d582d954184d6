//! The multiplication that a kernel brings to the pipeline, and the products of chunks by tensor cores that
//! kernels share.

use microscale_formats::E8m0;
use microscale_formats::{Dtype, Format as WeightsFormat};
use microscale_kernels_abi::{GemmConfig, Mainloop};

use super::copies::LaneCopies;
use super::format::Format;
use super::operand::{Chunk, Codes};
use super::tensor_cores::{Activations, SUMS, Weights};

/// A configuration of the GEMV, of any operands.
pub(crate) const fn gemv_config(tile_m: u32, tile_n: u32) -> GemmConfig {
    let (weights, activations) = (WeightsFormat::Nvfp4, Dtype::F16);
    GemmConfig { mainloop: Mainloop::Gemv, tile_m, tile_n, cluster: 1, slices: 1, weights, activations }
}

/// The multiplication that a warp does in its k-iterations, and the sums of it.
pub(crate) trait Product<F: Format, const TILES: usize> {
    const KERNEL: GemmConfig;
    /// The offset of the activations in a stage, behind the scales.
    const ACTIVATIONS: u32 = Self::KERNEL.gemv_stage_bytes() - Self::KERNEL.gemv_activation_bytes();

    /// Starts to copy the lane's part of a k-iteration's activations to a stage. The k-iteration is `chunk`
    /// chunks behind the warp's first. Chunks that do not exist become zeros.
    ///
    /// # Safety
    /// The contract of the kernels; nobody reads or writes the stage.
    unsafe fn copy(&self, activations: *const u8, chunk: u32, stage: u32);

    /// Adds the products of a stage, whose k-iteration is `chunk` chunks behind the warp's first.
    ///
    /// # Safety
    /// All lanes' copies have arrived, and all lanes take part.
    unsafe fn add(&mut self, lane: &LaneCopies<TILES>, stage: u32, chunk: u32);

    /// Leaves the results of a work tile in the warp's shared memory, and sets the sums to zero for the next
    /// one.
    ///
    /// # Safety
    /// The memory is the warp's, all of whose lanes take part.
    unsafe fn end(&mut self, work_tile: u32);
}

/// Returns whether tensor cores may compute a chunk: its scale is usual, which leaves the dtype room, or it
/// is zeros under a number.
#[inline(always)]
pub(crate) fn is_usual<F: Weights, D: Activations>(Chunk { codes: [a, b, c, d], scales }: &Chunk) -> bool {
    let zeros = (a | b | c | d) & 0x7777_7777 == 0 && *scales != u32::from(E8m0::NAN.to_bits());
    zeros || F::distance::<D>(*scales) <= F::farthest::<D>()
}

/// Adds the products of the words `I` of two chunks, under their scales, with some eights of tokens to their sums.
#[inline(always)]
fn multiply<D: Activations, const I: usize, const EIGHTS: usize>(
    mut sums: [[f32; SUMS]; EIGHTS],
    rows: &[Chunk; 2],
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

/// The products of two chunks under their scales with some eights of tokens, given [`Activations::TABLE`].
#[inline(always)]
pub(crate) fn scaled_products<F: Weights, D: Activations, const EIGHTS: usize>(
    rows: &[Chunk; 2],
    x: &[[[u32; 4]; 4]; EIGHTS],
    table: u32,
) -> [[f32; SUMS]; EIGHTS] {
    let [low, high] = [F::factors::<D>(rows[0].scales), F::factors::<D>(rows[1].scales)];
    // Written out: the compiler keeps a loop's indices in memory.
    let sums = multiply::<D, 0, EIGHTS>([[0.0; SUMS]; EIGHTS], rows, [low[0], high[0]], x, table);
    let sums = multiply::<D, 1, EIGHTS>(sums, rows, [low[0], high[0]], x, table);
    let sums = multiply::<D, 2, EIGHTS>(sums, rows, [low[1], high[1]], x, table);
    multiply::<D, 3, EIGHTS>(sums, rows, [low[1], high[1]], x, table)
}

/// The products of the group whose codes begin at word `I`, of two rows, without their scales, given
/// [`Activations::TABLE`].
#[inline(always)]
pub(crate) fn group_products<D: Activations, const I: usize>(
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
