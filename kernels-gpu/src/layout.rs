//! Scales from one layout to the other: a thread moves the four bytes of a row in a tile.

use microscale_formats::layout::{TILE_COLS, TILE_ROWS};
use microscale_kernels_abi::launch::THREADS;
use microscale_kernels_abi::{Divider, ScaleGrid};

use crate::hardware::warp;

/// The place of a thread's four scales: the row, the first one's block, and their offset in the
/// swizzled layout.
#[inline(always)]
fn place(grid: &ScaleGrid, tiles_per_row: &Divider) -> (u64, u64, u64) {
    let thread = u64::from(warp::thread_block()) * u64::from(THREADS) + u64::from(warp::thread());
    let (tile, row) = (thread / TILE_ROWS as u64, thread % TILE_ROWS as u64);
    let (tile_row, tile_col) = tiles_per_row.divide(tile);
    let (row, block) = (tile_row * TILE_ROWS as u64 + row, tile_col * TILE_COLS as u64);
    (row, block, grid.swizzled_offset(row, block))
}

/// Puts linear scales into the swizzled layout, padding with zeros.
///
/// # Safety
/// `linear` has `rows` times `grid.row_blocks.divisor` bytes that nothing writes during the kernel.
/// `swizzled`, on 4 bytes, has room for the tiles of `rows` rows in `grid`, a swizzled one with
/// `tiles_per_row`. Both are global memory and do not overlap. The launch has at least one thread
/// per four bytes of `swizzled`.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn scales_to_swizzled(
    linear: *const u8,
    swizzled: *mut u8,
    rows: u64,
    grid: ScaleGrid,
    tiles_per_row: Divider,
) {
    let (row, block, offset) = place(&grid, &tiles_per_row);
    if row >= rows.next_multiple_of(TILE_ROWS as u64) {
        return;
    }
    let blocks = grid.row_blocks.divisor;
    let mut word = 0;
    for i in 0..TILE_COLS as u64 {
        if row < rows && block + i < blocks {
            // SAFETY: the scale exists.
            word |= u32::from(unsafe { *linear.add((row * blocks + block + i) as usize) }) << (8 * i);
        }
    }
    // SAFETY: the thread's own four bytes of a tile.
    unsafe { *swizzled.add(offset as usize).cast::<u32>() = word };
}

/// Takes swizzled scales into the linear layout, without padding.
///
/// # Safety
/// As for [`scales_to_swizzled`], with the sides exchanged.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn scales_to_linear(
    swizzled: *const u8,
    linear: *mut u8,
    rows: u64,
    grid: ScaleGrid,
    tiles_per_row: Divider,
) {
    let (row, block, offset) = place(&grid, &tiles_per_row);
    if row >= rows {
        return;
    }
    let blocks = grid.row_blocks.divisor;
    // SAFETY: the thread's own four bytes of a tile.
    let word = unsafe { *swizzled.add(offset as usize).cast::<u32>() };
    for i in 0..TILE_COLS as u64 {
        if block + i < blocks {
            // SAFETY: the scale exists, and has one thread.
            unsafe { *linear.add((row * blocks + block + i) as usize) = (word >> (8 * i)) as u8 };
        }
    }
}
