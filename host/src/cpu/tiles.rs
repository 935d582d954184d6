//! Products of quantized weights and activations of many tokens by matrix tiles, which multiply bf16: a tile has sixteen
//! tokens, or the pairs of sixteen rows of weights as [`super::panels`] decodes them.

mod activations;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod emulated;

use microscale_formats::Format;
use microscale_formats::dot::CHUNK;

pub(super) use activations::{TOKENS, Tile, TiledActivations, arrange};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) use amx::Amx;
pub(super) use emulated::Emulated;

use super::arranged::{Aligned, Word};
use super::panels::{self, PANELS, Pairs, PanelRows, Scratch, TokenSums};
use super::products::Products;
use super::vector::LANES;
use super::weigh::{Mxfp4, Nvfp4, Scales};

/// The groups of rows of a task: one after the other meets the activations of a segment, which a core's second-level cache
/// keeps that long. Fewer, if some threads would have nothing to do.
pub(super) fn groups(of_all_rows: usize) -> usize {
    (of_all_rows / (4 * rayon::current_num_threads())).clamp(1, 4)
}

/// Pairs of a chunk: the words of each row of weights that meet a tile.
const PAIRS: usize = CHUNK / Word::Pair.elements();

/// Instructions that multiply tiles, or their emulation.
pub(super) trait TileProducts {
    /// Sets the sums of a tile's tokens to those of its products with panels.
    ///
    /// There are `parts` tiles for each [`PAIRS`] words of weights. The order is that of
    /// [`microscale_formats::weights`]: tile after tile from zero.
    fn multiply(
        &self,
        x: &[Tile],
        parts: usize,
        weights: &[[Aligned; PANELS]],
        sums: &mut [TokenSums; TOKENS],
    );
}

/// Groups of rows, and the activations that they meet from a tile of tokens on.
pub(super) struct TileOperands<'a> {
    pub(super) format: Format,
    pub(super) groups: &'a [PanelRows<'a>],
    pub(super) x: &'a TiledActivations,
    pub(super) first_tile: usize,
}

/// Adds to the sums of some tiles' tokens, by group of rows and token.
#[inline(always)]
pub(super) fn multiply<V: Products, T: TileProducts>(
    tiles: &T,
    operands: &TileOperands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    match operands.format {
        Format::Nvfp4 => of_format::<V, T, Nvfp4>(tiles, operands, sums, scratch),
        _ => of_format::<V, T, Mxfp4>(tiles, operands, sums, scratch),
    }
}

#[inline(always)]
fn of_format<V: Products, T: TileProducts, S: Scales>(
    tiles: &T,
    operands: &TileOperands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    let TileOperands { groups, x, first_tile, .. } = *operands;
    let tokens = sums.len() / groups.len();
    let mut of_segment = [[Aligned([0.0; LANES]); PANELS]; TOKENS];
    for (segment, elements) in x.segments().enumerate() {
        let decoded = &mut scratch.decoded[..elements / Word::Pair.elements()];
        let all = groups.iter().zip(sums.chunks_mut(tokens)).zip(&mut scratch.stretches);
        for ((rows, sums), stretch) in all {
            panels::decode_segment::<V, Pairs, S>(rows, segment, stretch, decoded);
            for (tile, sums) in sums.chunks_mut(TOKENS).enumerate() {
                tiles.multiply(x.part(first_tile + tile, segment), x.parts(), decoded, &mut of_segment);
                for (sums, of_segment) in sums.iter_mut().zip(&of_segment) {
                    for panel in 0..PANELS {
                        let sum = V::add(V::load(&sums[panel].0), V::load(&of_segment[panel].0));
                        sums[panel] = Aligned(V::store(sum));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
