//! Storing chunks of values.

use microscale_kernels_abi::launch::WARP;

use super::lane::WarpPlace;
use super::load::cut;
use super::walk::Place;
use crate::dtype::{Chunk, Dtype};
use crate::hardware::{ptx, warp};

/// Stores the chunk of step `j` of a warp whose blocks are contiguous.
///
/// # Safety
/// As for [`load_contiguous`], for writing; each chunk is written by one lane.
#[inline(always)]
pub(crate) unsafe fn store_contiguous<D: Dtype>(values: *mut u8, place: &WarpPlace, j: u32, chunk: &Chunk) {
    let start = place.index * u64::from(D::BYTES) + u64::from(warp::lane() * 16);
    // SAFETY: the warp's 1024 elements are in the matrix, and its lanes cover 32 chunks in a step.
    unsafe { ptx::store_16_streaming(values.add(start as usize).add((j * WARP * 16) as usize), *chunk) }
}

/// Stores the elements of a chunk that the row has. Rows start on 16 bytes.
///
/// # Safety
/// As for [`load`] with `ALIGNED`, for writing; each element is written by one thread.
#[inline(always)]
pub(crate) unsafe fn store<D: Dtype>(values: *mut u8, place: &Place, chunk: &Chunk) {
    // SAFETY: the place lies in the matrix, or nothing is written.
    let start = unsafe { values.add((place.index * u64::from(D::BYTES)) as usize) };
    if place.count == D::CHUNK {
        // SAFETY: all 16 bytes belong to the row; rows and chunks start on multiples of 16 bytes.
        unsafe { ptx::store_16_streaming(start, *chunk) };
    } else {
        // SAFETY: elements below count belong to the row.
        unsafe { store_elements::<D>(start, chunk, 0, place.count) };
    }
}

/// Stores the elements of step `j`'s chunks that the row has, for any start of rows. The whole warp
/// calls it.
///
/// Consecutive chunks are in consecutive lanes; the first lane of the next step follows the last
/// lane. Each lane gets the previous chunk from its neighbour and writes the aligned 16 bytes where
/// its own chunk begins: the end of the previous chunk and the start of its own. The remaining
/// elements, at the ends of a row and of the warp's blocks, are written one by one.
///
/// # Safety
/// `values` points to the matrix that the place was made for, in global memory, aligned to the
/// dtype; each element is written by one thread. `last` is the chunk of step `j − 1`.
#[inline(always)]
pub(crate) unsafe fn store_shifted<D: Dtype>(
    values: *mut u8,
    place: &Place,
    j: u32,
    last: &Chunk,
    chunk: &Chunk,
) {
    let lane = warp::lane();
    let before = [0, 1, 2, 3].map(|word| {
        let given = if lane == WARP - 1 { last[word] } else { chunk[word] };
        warp::shuffle(given, (lane + WARP - 1) % WARP)
    });
    // SAFETY: the place lies in the matrix, or nothing is written.
    let start = unsafe { values.add((place.index * u64::from(D::BYTES)) as usize) };
    let past = (start.addr() % 16) as u32;
    let whole = place.count == D::CHUNK;
    let has_before = place.col > 0 && (lane > 0 || j > 0);
    let has_after = whole && place.has_whole_after && (lane < WARP - 1 || j < D::STEPS - 1);
    let shifted = whole && (past == 0 || has_before);
    if shifted {
        let words = if past == 0 { [*chunk, *chunk] } else { [before, *chunk] };
        // SAFETY: the 16 bytes are aligned; the first `past` are the end of the chunk before, which
        // is whole and in the same row, and whose lane leaves them to this one; the others are this
        // chunk's.
        unsafe { ptx::store_16_streaming(start.sub(past as usize), cut(words, (16 - past) % 16)) };
    }
    let covered = D::CHUNK - past / D::BYTES;
    let from = if shifted { covered } else { 0 };
    let to = if has_after { covered } else { place.count };
    if from < to {
        // SAFETY: elements below count belong to the row, and no other lane writes these.
        unsafe { store_elements::<D>(start, chunk, from, to) };
    }
}

/// Stores elements `from .. to` of a chunk.
///
/// # Safety
/// They are writable at `start`, which is aligned to the dtype.
#[inline(always)]
unsafe fn store_elements<D: Dtype>(start: *mut u8, chunk: &Chunk, from: u32, to: u32) {
    for i in 0..D::CHUNK {
        if i >= from && i < to {
            let bits = D::bits(chunk, i);
            // SAFETY: the element exists and is the thread's, by the caller's promise.
            unsafe {
                if D::BYTES == 4 {
                    *start.cast::<u32>().add(i as usize) = bits;
                } else {
                    *start.cast::<u16>().add(i as usize) = bits as u16;
                }
            }
        }
    }
}
