//! The kernel in front of the GEMM: activations as tensor cores read them.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::{ArrangeGrid, COLUMNS, multiplied};
use microscale_kernels_abi::launch::{THREADS, WARP};

use crate::product::operand::Routed;
use crate::product::scheduler::parts;
use crate::product::tensor_cores::Activations;
use crate::{ptx, warp};

/// Tokens of a core matrix, which is eight activations wide.
const EIGHT: u32 = 8;
/// Words of eight activations in a chunk.
const WORDS: u32 = CHUNK as u32 / EIGHT;

/// Arranges activations. A warp has eight tokens of an image, and a lane the words of one number in a token's four
/// chunks.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
pub(super) unsafe fn arrange<D: Activations>(
    activations: *const u8,
    out: *mut u8,
    routed: Routed,
    grid: ArrangeGrid,
) {
    #[cfg(microscale_wgmma)]
    ptx::start_kernel_behind();
    let number = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    if number >= grid.eights {
        return;
    }
    let (token_of_eight, word) = (warp::lane() % EIGHT, warp::lane() / EIGHT);
    let tile_tokens = 1 << grid.tile_bits;
    let (image, eight) = parts(number, grid.tile_bits - const { EIGHT.ilog2() });
    let (tile, of_tile) = grid.images.divide_32(image);
    let in_tile = eight * EIGHT + token_of_eight;
    // SAFETY: the caller's contract.
    let tokens = unsafe { routed.tile(tile, grid.tile_bits, grid.tokens) };
    let count = tokens.end - tokens.first;
    if count == 0 || eight * EIGHT >= multiplied(tile_tokens, count) {
        // Nobody reads them.
        return;
    }
    let there = in_tile < count;
    // SAFETY: as above; the token exists.
    let token = if there { unsafe { Routed::listed(routed.from, tokens.first + in_tile) } } else { 0 };
    let row = activations.wrapping_add((u64::from(token) * grid.cols * 2) as usize);
    // The words of the chunks that lanes of a quad multiply at once, in the order of pairs in which weights are decoded.
    let words = [0, 1, 2, 3].map(|quarter| {
        let first =
            u64::from(of_tile) * u64::from(COLUMNS) + u64::from(quarter * CHUNK as u32 + word * EIGHT);
        if !there {
            return [0; 4];
        }
        // SAFETY: the token exists.
        D::pairs(unsafe { load(row, first, grid.cols, grid.aligned != 0) })
    });
    let image = u64::from(image) * u64::from(tile_tokens * COLUMNS * 2);
    let to = out.wrapping_add(image as usize);
    for i in 0..4 {
        let (piece, at) = if grid.core_matrices != 0 {
            // Of a word the first two pairs go to one multiplication, the others to the next.
            let piece = [words[0][i], words[1][i], words[2][i], words[3][i]];
            (piece, (eight * const { COLUMNS / EIGHT } + word * 4 + i as u32) * EIGHT + token_of_eight)
        } else {
            (words[i], (word * tile_tokens + in_tile) * WORDS + i as u32)
        };
        // SAFETY: the piece is in the image, of which there is one, and is this lane's.
        unsafe { ptx::store_16(to.wrapping_add((at * 16) as usize), piece) };
    }
}

/// Loads eight activations of a token. Those behind the last column are zeros.
///
/// # Safety
/// `row` points to as many activations as there are columns, on 16 bytes if they are `aligned`.
#[inline(always)]
unsafe fn load(row: *const u8, first: u64, cols: u64, aligned: bool) -> [u32; 4] {
    let from = row.wrapping_add((first * 2) as usize);
    if aligned && first + 8 <= cols {
        // SAFETY: the caller's promise.
        return unsafe { ptx::load_16(from) };
    }
    [0, 2, 4, 6].map(|i| {
        let half = |i: u64| {
            // SAFETY: the activation exists.
            if first + i < cols {
                unsafe { u32::from(*from.cast::<u16>().wrapping_add(i as usize)) }
            } else {
                0
            }
        };
        half(i) | half(i + 1) << 16
    })
}
