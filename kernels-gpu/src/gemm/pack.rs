//! The kernel in front of the GEMM: activations as tensor cores read them.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::PACK_COLUMNS as COLUMNS;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::gemm::stage::multiplied_tokens as multiplied;
use microscale_kernels_abi::launch::WARP;

use crate::product::operand::Routed;
use crate::product::scheduler::parts;
use crate::product::tensor_cores::Activations;
use crate::{ptx, warp};

/// Tokens of a core matrix, which is eight activations wide.
const EIGHT: u32 = 8;
/// Words of eight activations in a chunk.
const WORDS: u32 = CHUNK as u32 / EIGHT;

/// Arranges activations. Warps take turns at eight tokens of an image, of which a lane has the words of one number in a token's four chunks.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
pub(super) unsafe fn arrange<D: Activations>(
    activations: *const u8,
    out: *mut u8,
    routed: Routed,
    grid: PackParams,
) {
    // The kernel in front may have written weights, which the one behind reads before it waits.
    #[cfg(microscale_wgmma)]
    ptx::wait_for_kernel_in_front();
    #[cfg(microscale_wgmma)]
    ptx::start_kernel_behind();
    const WARPS: u32 = PACK_THREADS / WARP;
    let mut number = warp::thread_block() * WARPS + warp::thread() / WARP;
    while number < grid.eights {
        // SAFETY: the caller's contract.
        unsafe { arrange_eight::<D>(activations, out, &routed, &grid, number) };
        number += grid.thread_blocks * WARPS;
    }
}

/// Arranges eight tokens of an image, given their number.
///
/// # Safety
/// The contract of the kernels.
#[inline(always)]
unsafe fn arrange_eight<D: Activations>(
    activations: *const u8,
    out: *mut u8,
    routed: &Routed,
    grid: &PackParams,
    number: u32,
) {
    let (token_of_eight, word) = (warp::lane() % EIGHT, warp::lane() / EIGHT);
    let tile_tokens = 1 << grid.tile_bits;
    let (image, eight) = parts(number, grid.tile_bits - const { EIGHT.ilog2() });
    let (tile, of_tile) = grid.packs.divide_32(image);
    let in_tile = eight * EIGHT + token_of_eight;
    // SAFETY: the caller's contract.
    let tokens = unsafe { routed.tile(tile, grid.tile_bits, grid.tokens) };
    let count = tokens.end - tokens.first;
    if count == 0 || eight * EIGHT >= multiplied(tile_tokens, count) {
        // Nobody reads them.
        return;
    }
    // SAFETY: as above; the token exists.
    let token =
        if in_tile < count { unsafe { Routed::listed(routed.from, tokens.first + in_tile) } } else { 0 };
    let cols = grid.cols as u32;
    // Activations of one of the lane's words, which is in the chunk that one lane of a quad multiplies, and the first one's column.
    let of_word = |chunk: u32| {
        let column = of_tile * COLUMNS + chunk * CHUNK as u32 + word * EIGHT;
        (if in_tile < count { cols.saturating_sub(column).min(EIGHT) } else { 0 }, column)
    };
    let row = activations.wrapping_add((u64::from(token) * grid.cols * 2) as usize);
    let at = |column: u32| row.wrapping_add(column as usize * 2);
    let image = out.wrapping_add((u64::from(image) * u64::from(tile_tokens * COLUMNS * 2)) as usize);
    let store = |number: u32, piece: [u32; 4]| {
        // SAFETY: the piece is in the image, of which there is one, and is this lane's.
        unsafe { ptx::store_16(image.wrapping_add((number * 16) as usize), piece) }
    };
    // The numbers of the pieces: of warps, a word's pairs; of warp groups, a pair of each word.
    let of_pairs = |chunk: u32| (word * tile_tokens + in_tile) * WORDS + chunk;
    let of_pair = |pair: u32| (eight * const { COLUMNS / EIGHT } + word * 4 + pair) * EIGHT + token_of_eight;
    let whole = grid.aligned != 0 && of_word(3).0 > 0;
    let load = |chunk: usize| {
        // SAFETY: the activations exist, as eights are whole where tokens start on 16 bytes.
        D::pairs(unsafe { ptx::load_16_here(at(of_word(0).1).wrapping_add(chunk * CHUNK * 2)) })
    };
    // Loads written out for either order: together with it, both would keep more in registers than there are.
    if whole && grid.core_matrices != 0 {
        let words = [0, 1, 2, 3].map(load);
        for i in 0..4 {
            // Of a word the first two pairs go to one multiplication, the others to the next.
            store(of_pair(i as u32), [words[0][i], words[1][i], words[2][i], words[3][i]]);
        }
        return;
    }
    if whole {
        let words = [0, 1, 2, 3].map(load);
        for i in 0..4 {
            store(of_pairs(i as u32), words[i]);
        }
        return;
    }
    // The others a word at a time, which takes fewer registers.
    let mut chunk = 0;
    while chunk < ptx::opaque(4) {
        let (count, column) = of_word(chunk);
        // SAFETY: the activations exist.
        let pairs = D::pairs(unsafe { load_any(at(column), count) });
        if grid.core_matrices != 0 {
            for pair in 0..4 {
                let place = of_pair(pair) * 4 + chunk;
                // SAFETY: as in `store`.
                unsafe { *image.cast::<u32>().wrapping_add(place as usize) = pairs[pair as usize] };
            }
        } else {
            store(of_pairs(chunk), pairs);
        }
        chunk += 1;
    }
}

/// Loads up to eight activations from anywhere. Those behind the last one are zeros.
///
/// # Safety
/// `from` points to so many.
#[inline(always)]
unsafe fn load_any(from: *const u8, count: u32) -> [u32; 4] {
    [0, 2, 4, 6].map(|i| {
        let half = |i: u32| {
            // SAFETY: the activation exists.
            if i < count { unsafe { u32::from(*from.cast::<u16>().wrapping_add(i as usize)) } } else { 0 }
        };
        half(i) | half(i + 1) << 16
    })
}
