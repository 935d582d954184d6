//! Loading values: a lane's chunks of a warp's elements, or of one block, or one element.

use core::hint::cold_path;

use microscale_formats::layout::TILE_ROWS_APART;
use microscale_kernels_abi::BlockGrid;
use microscale_kernels_abi::launch::WARP;

use super::lane::{Lane, QUARTERS, WarpPlace};
use super::walk::{Place, Walk};
use crate::dtype::{Chunk, Dtype};
use crate::format::Blocks;
use crate::hardware::{ptx, warp};

/// Loads `count` chunks of a block from element `first` on. Elements past the row's end become
/// zeros, and all elements of a block that does not exist. With `vector`, rows start on 16 bytes.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub(crate) unsafe fn load_of_block<D: Dtype, F: Blocks>(
    values: *const u8,
    grid: &BlockGrid,
    vector: bool,
    block: u64,
    first: u32,
    count: u32,
) -> [Chunk; 4] {
    // Matrices without gaps come as one row.
    let (row, block_in_row) =
        if grid.row_blocks.divisor == grid.blocks { (0, block) } else { grid.row_blocks.divide(block) };
    let col = block_in_row * u64::from(F::BLOCK) + u64::from(first);
    let rest = if block < grid.blocks { grid.cols.saturating_sub(col) } else { 0 };
    let index = row * grid.row_stride + col;
    let whole = vector && rest >= u64::from(count * D::CHUNK);
    let chunk = |k: u32| {
        if k >= count {
            return [0; 4];
        }
        if whole {
            // SAFETY: all 16 bytes belong to the row; rows and chunks start on multiples of 16
            // bytes.
            return unsafe {
                ptx::load_16(values.add((index * u64::from(D::BYTES)) as usize).add((16 * k) as usize))
            };
        }
        cold_path();
        let before = u64::from(k * D::CHUNK);
        let place = Place {
            index: index + before,
            col: col + before,
            count: rest.saturating_sub(before).min(u64::from(D::CHUNK)) as u32,
            has_whole_after: false,
        };
        // SAFETY: the place lies in the grid's matrix, or is empty.
        unsafe { load::<D, false>(values, grid, &place) }
    };
    [chunk(0), chunk(1), chunk(2), chunk(3)]
}

/// Loads the chunk of step `j` of a warp whose blocks are contiguous.
///
/// # Safety
/// `place.contiguous`, for the grid of the matrix at `values`, which lies in global memory, starts
/// on 16 bytes as do its rows, and is not written during the kernel.
#[inline(always)]
pub(crate) unsafe fn load_contiguous<D: Dtype>(values: *const u8, place: &WarpPlace, j: u32) -> Chunk {
    let start = place.index * u64::from(D::BYTES) + u64::from(warp::lane() * 16);
    // SAFETY: the warp's 1024 elements are in the matrix, and its lanes cover 32 chunks in a step.
    unsafe { ptx::load_16(values.add(start as usize).add((j * WARP * 16) as usize)) }
}

/// The most chunks that a lane loads at a time: with f32.
pub(crate) const MOST_STEPS: usize = 8;

/// Loads a lane's chunks of a warp's 1024 elements. With `ALIGNED`, rows start on multiples of 16
/// bytes.
///
/// # Safety
/// `values` points to the grid's matrix in global memory, aligned to its dtype and with `ALIGNED`,
/// as are its rows, to 16 bytes; nothing writes there during the kernel. The lane and the place are
/// the warp's.
#[inline(always)]
pub(crate) unsafe fn load_all<D: Dtype, F: Blocks, const ALIGNED: bool>(
    values: *const u8,
    grid: &BlockGrid,
    lane: &Lane,
    place: &WarpPlace,
) -> [Chunk; MOST_STEPS] {
    let mut chunks = [[0; 4]; MOST_STEPS];
    if ALIGNED && place.contiguous {
        for j in 0..D::STEPS {
            // SAFETY: the warp's blocks are whole and consecutive in the matrix, whose rows are
            // aligned.
            chunks[j as usize] = unsafe { load_contiguous::<D>(values, place, j) };
        }
    } else {
        cold_path();
        let mut walk = Walk::new(grid, lane, place, 0);
        for j in 0..D::STEPS {
            let place = walk.place::<D, F>(j);
            // SAFETY: the place lies in the caller's matrix, or is empty.
            chunks[j as usize] = unsafe { load::<D, ALIGNED>(values, grid, &place) };
        }
    }
    chunks
}

/// Loads the chunk of step `j` of a matrix that goes by tiles.
///
/// # Safety
/// As for [`load_contiguous`].
#[inline(always)]
pub(crate) unsafe fn load_in_tile<D: Dtype>(
    values: *const u8,
    grid: &BlockGrid,
    place: &WarpPlace,
    j: u32,
) -> Chunk {
    let steps = const { D::STEPS / QUARTERS };
    let row = place.index + u64::from(j / steps) * (grid.row_stride * TILE_ROWS_APART as u64);
    let start = row * u64::from(D::BYTES) + u64::from((j % steps * WARP + warp::lane()) * 16);
    // SAFETY: each quarter of the warp's elements is in the matrix, and its lanes cover 32 chunks
    // in a step.
    unsafe { ptx::load_16(values.add(start as usize)) }
}

/// Loads a lane's chunks of a warp's 1024 elements, if the matrix goes by tiles.
///
/// # Safety
/// As for [`load_contiguous`].
#[inline(always)]
pub(crate) unsafe fn load_all_in_tile<D: Dtype>(
    values: *const u8,
    grid: &BlockGrid,
    place: &WarpPlace,
) -> [Chunk; MOST_STEPS] {
    let mut chunks = [[0; 4]; MOST_STEPS];
    for j in 0..D::STEPS {
        // SAFETY: the element exists, by the caller's promise.
        chunks[j as usize] = unsafe { load_in_tile::<D>(values, grid, place, j) };
    }
    chunks
}

/// Loads a chunk. Elements past the row's end become zeros. With `ALIGNED`, rows start on 16 bytes.
/// Without, a whole chunk is cut out of the two aligned 16 bytes that contain it.
///
/// # Safety
/// `values` points to the matrix that the place was made for, in global memory, aligned to the
/// dtype and with `ALIGNED` to 16 bytes; nothing writes there during the kernel.
#[inline(always)]
pub(crate) unsafe fn load<D: Dtype, const ALIGNED: bool>(
    values: *const u8,
    grid: &BlockGrid,
    place: &Place,
) -> Chunk {
    // SAFETY: the place lies in the matrix, or nothing is read.
    let start = unsafe { values.add((place.index * u64::from(D::BYTES)) as usize) };
    if ALIGNED && place.count == D::CHUNK {
        // SAFETY: all 16 bytes belong to the row; rows and chunks start on multiples of 16 bytes.
        return unsafe { ptx::load_16(start) };
    }
    let (first, last) = (values.addr(), values.addr() + (grid.span * u64::from(D::BYTES)) as usize);
    let skipped = start.addr() % 16;
    let aligned = start.addr() - skipped;
    if !ALIGNED && place.count == D::CHUNK && aligned >= first && aligned + 32 <= last {
        let aligned = start.with_addr(aligned);
        // SAFETY: both 16 bytes are aligned and within the matrix' span.
        let words = unsafe { [ptx::load_16(aligned), ptx::load_16(aligned.add(16))] };
        return cut(words, skipped as u32);
    }
    let mut chunk = [0; 4];
    for i in 0..D::CHUNK {
        if i < place.count {
            // SAFETY: element i < count belongs to the row.
            let bits = unsafe {
                if D::BYTES == 4 {
                    *start.cast::<u32>().add(i as usize)
                } else {
                    u32::from(*start.cast::<u16>().add(i as usize))
                }
            };
            D::insert(&mut chunk, i, bits);
        }
    }
    chunk
}

/// The 16 bytes that start `skipped` bytes into 32: a shift by 8, 4 and 2 bytes, each if its bit is
/// set.
#[inline(always)]
pub(super) fn cut([[a, b, c, d], [e, f, g, h]]: [Chunk; 2], skipped: u32) -> Chunk {
    let by_8 = if skipped & 8 != 0 { [c, d, e, f, g, h] } else { [a, b, c, d, e, f] };
    let [a, b, c, d, e, f] = by_8;
    let [a, b, c, d, e] = if skipped & 4 != 0 { [b, c, d, e, f] } else { [a, b, c, d, e] };
    let bits = (skipped & 2) * 8;
    let pair = |low: u32, high: u32| ((u64::from(high) << 32 | u64::from(low)) >> bits) as u32;
    [pair(a, b), pair(b, c), pair(c, d), pair(d, e)]
}

/// Element `i` of a block, widened, as bits; 0 past the row's end.
///
/// # Safety
/// `values` points to the grid's matrix in global memory, aligned to the dtype; nothing writes
/// there during the kernel; the block exists.
#[inline(always)]
pub(crate) unsafe fn element<D: Dtype, F: Blocks>(
    values: *const u8,
    grid: &BlockGrid,
    block: u64,
    i: u32,
) -> u32 {
    let (row, block_in_row) = grid.row_blocks.divide(block);
    let col = block_in_row * u64::from(F::BLOCK) + u64::from(i);
    if col >= grid.cols {
        return 0;
    }
    let index = (row * grid.row_stride + col) as usize;
    // SAFETY: the element is in its row.
    let bits = unsafe {
        if D::BYTES == 4 {
            *values.cast::<u32>().add(index)
        } else {
            u32::from(*values.cast::<u16>().add(index))
        }
    };
    D::widen(&[bits, 0, 0, 0], 0).to_bits()
}
