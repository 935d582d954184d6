//! Where a lane's chunks lie, and moving them.
//!
//! A warp handles 1024 elements in blocks that follow each other, or shares them with other warps, step by step. (Where scales are
//! swizzled and the matrix is whole tiles, it takes a quarter of them from each of four rows, whose scales lie together.) In step j its
//! lanes cover 32 consecutive chunks, so that every access of a warp is contiguous. A block has as many lanes as chunks, so in so
//! many steps each of its lanes can become the owner of one block's scale: lane `part` of step j = part, then of step
//! j = part + lanes, and so on. Blocks of 32 make a lane the owner of one, blocks of 16 of two.

use core::hint::cold_path;

use microscale_formats::layout::{
    TILE_ROWS, TILE_ROWS_APART, TILE_ROWS_TOGETHER, swizzled_distance, swizzled_offset,
};
use microscale_kernels_abi::launch::{THREADS, WARP, WARP_ELEMENTS};
use microscale_kernels_abi::{BlockGrid, Divider, ScaleGrid};

use crate::dtype::{Chunk, Dtype};
use crate::format::Blocks;
use crate::{ptx, warp};

/// Lanes that share a block, a chunk each.
#[inline(always)]
pub(crate) const fn lanes<D: Dtype, F: Blocks>() -> u32 {
    F::BLOCK / D::CHUNK
}

/// Blocks whose scales a lane owns.
#[inline(always)]
pub(crate) const fn owned<F: Blocks>() -> u32 {
    WARP_ELEMENTS / WARP / F::BLOCK
}

/// The most that a lane owns.
pub(crate) const MOST_OWNED: usize = 2;

/// Blocks that a warp handles.
#[inline(always)]
pub(crate) const fn warp_blocks<F: Blocks>() -> u64 {
    (WARP_ELEMENTS / F::BLOCK) as u64
}

/// Quarters that a warp's elements come in: of four rows where they go by tiles, else behind each other.
const QUARTERS: u32 = TILE_ROWS_TOGETHER as u32;

/// A lane's share of a warp's blocks.
pub(crate) struct Lane {
    /// The warp's first block.
    pub(crate) first_block: u64,
    /// The lane's number within the lanes that share a block.
    pub(crate) part: u32,
    /// The number of its block among those of a step.
    group: u32,
    /// Blocks that the warp covers in a step.
    step: u32,
    /// Blocks from a quarter's first to the next one's, if the matrix goes by tiles.
    far: u32,
}

impl Lane {
    /// This lane's share of blocks that `split` warps share, each taking some of the steps.
    #[inline(always)]
    pub(crate) fn of<D: Dtype, F: Blocks>(split: u32) -> Self {
        let warp =
            u64::from(warp::thread_block()) * u64::from(THREADS / WARP) + u64::from(warp::thread() / WARP);
        Self::of_piece::<D, F>(warp / u64::from(split))
    }

    /// This lane's share of the matrix' piece of 1024 elements of this number.
    #[inline(always)]
    pub(crate) fn of_piece<D: Dtype, F: Blocks>(piece: u64) -> Self {
        let lanes = const { lanes::<D, F>() };
        Self {
            first_block: piece * warp_blocks::<F>(),
            part: warp::lane() % lanes,
            group: warp::lane() / lanes,
            step: WARP / lanes,
            far: 0,
        }
    }

    /// This lane's share of a matrix that goes by tiles (`ScaleGrid::by_tiles`), and where it lies.
    ///
    /// Warps go along the rows whose scales lie together, then to the next such rows of the tiles, then to the next tiles.
    #[inline(always)]
    pub(crate) fn of_tile<D: Dtype, F: Blocks>(grid: &BlockGrid, scales: &ScaleGrid) -> (Self, WarpPlace) {
        let mut lane = Self::of::<D, F>(1);
        let blocks_per_row = scales.row_blocks.divisor as u32;
        let (rows, block_in_row) = scales.row_blocks.divide_32(lane.first_block as u32 / QUARTERS);
        let apart = TILE_ROWS_APART as u32;
        let row = rows / apart * TILE_ROWS as u32 + rows % apart;
        lane.first_block = u64::from(row) * u64::from(blocks_per_row) + u64::from(block_in_row);
        lane.far = apart * blocks_per_row;
        let index = u64::from(row) * grid.row_stride + u64::from(block_in_row) * u64::from(F::BLOCK);
        let (row, block_in_row) = (u64::from(row), u64::from(block_in_row));
        (lane, WarpPlace { whole: true, contiguous: true, index, row, block_in_row })
    }

    /// The block that the lane meets in step `j` of a warp whose blocks follow each other.
    #[inline(always)]
    pub(crate) fn block(&self, j: u32) -> u64 {
        self.first_block + u64::from(j * self.step + self.group)
    }

    /// The same, of a matrix that goes by tiles.
    #[inline(always)]
    pub(crate) fn block_in_tile<D: Dtype>(&self, j: u32) -> u64 {
        let (quarter, block) = self.quarter::<D>(j, self.group);
        self.first_block + u64::from(quarter) * u64::from(self.far) + u64::from(block)
    }

    /// The warp's block of this number.
    #[inline(always)]
    pub(crate) fn warp_block<D: Dtype>(&self, number: u32, by_tiles: bool) -> u64 {
        if !by_tiles {
            return self.first_block + u64::from(number);
        }
        let (quarter, block) = self.quarter::<D>(number / self.step, number % self.step);
        self.first_block + u64::from(quarter) * u64::from(self.far) + u64::from(block)
    }

    /// The quarter that a group's block of step `j` lies in, and its number there.
    #[inline(always)]
    fn quarter<D: Dtype>(&self, j: u32, group: u32) -> (u32, u32) {
        let steps = const { D::STEPS / QUARTERS };
        (j / steps, j % steps * self.step + group)
    }

    /// Where the scale byte of the block lies that the lane owns as its k-th, if the matrix goes by tiles.
    #[inline(always)]
    pub(crate) fn scale_in_tile<D: Dtype, F: Blocks>(
        &self,
        place: &WarpPlace,
        scales: &ScaleGrid,
        k: u32,
    ) -> usize {
        let (quarter, block) = self.quarter::<D>(k * lanes::<D, F>() + self.part, self.group);
        let tiles_per_row = u64::from(scales.tiles_per_row as u32);
        let first = swizzled_offset(place.row, place.block_in_row, tiles_per_row) as usize;
        first + swizzled_distance(quarter, block) as usize
    }

    /// Where the warp's blocks lie. The same for all its lanes.
    #[inline(always)]
    pub(crate) fn place<F: Blocks>(&self, grid: &BlockGrid) -> WarpPlace {
        let last = self.first_block + warp_blocks::<F>();
        let whole = last <= grid.blocks;
        let block = u64::from(F::BLOCK);
        // Matrices without gaps come as one row, and all but their last blocks are whole.
        if grid.row_blocks.divisor == grid.blocks {
            return WarpPlace {
                whole,
                contiguous: whole && last * block <= grid.aligned_cols,
                index: self.first_block * block,
                row: 0,
                block_in_row: self.first_block,
            };
        }
        let (row, block_in_row) = grid.row_blocks.divide(self.first_block);
        let last_col = (block_in_row + warp_blocks::<F>()) * block;
        WarpPlace {
            whole,
            contiguous: whole && last_col <= grid.aligned_cols,
            index: row * grid.row_stride + block_in_row * block,
            row,
            block_in_row,
        }
    }

    /// The block whose scale the lane owns as its k-th.
    #[inline(always)]
    pub(crate) fn own_block<D: Dtype, F: Blocks>(&self, k: u32) -> u64 {
        self.block(k * lanes::<D, F>() + self.part)
    }

    /// The lane that owns the scale of the block that this lane meets in step `j`, as its `j / lanes`-th.
    #[inline(always)]
    pub(crate) fn owner<D: Dtype, F: Blocks>(&self, j: u32) -> u32 {
        self.group * lanes::<D, F>() + j % lanes::<D, F>()
    }
}

/// Where the scale bytes of a warp's blocks lie.
pub(crate) struct Scales {
    grid: ScaleGrid,
    first_block: u64,
    row: u64,
    block_in_row: u64,
}

impl Scales {
    /// From the warp's first block on.
    #[inline(always)]
    pub(crate) fn new(grid: ScaleGrid, first_block: u64) -> Self {
        let swizzled = grid.tiles_per_row != 0;
        let (row, block_in_row) = if swizzled { grid.row_blocks.divide(first_block) } else { (0, 0) };
        Self { grid, first_block, row, block_in_row }
    }

    /// The offset of a block's scale byte.
    #[inline(always)]
    pub(crate) fn offset(&self, block: u64) -> usize {
        if self.grid.tiles_per_row == 0 {
            return block as usize;
        }
        let Divider { divisor, .. } = self.grid.row_blocks;
        let (mut row, mut block_in_row) = (self.row, self.block_in_row + (block - self.first_block));
        if block_in_row >= divisor {
            (row, block_in_row) = self.grid.row_blocks.divide(block);
        }
        self.grid.swizzled_offset(row, block_in_row) as usize
    }
}

/// Where a warp's blocks lie in the unquantized matrix.
pub(crate) struct WarpPlace {
    /// All blocks exist.
    pub(crate) whole: bool,
    /// They are also whole and in one row, so that their elements lie behind each other, and every row starts on 16 bytes; or the
    /// matrix goes by tiles.
    pub(crate) contiguous: bool,
    /// The first one's first element's index from the matrix' start.
    index: u64,
    row: u64,
    block_in_row: u64,
}

/// Walks the steps of a lane through the unquantized matrix.
pub(crate) struct Walk<'a> {
    grid: &'a BlockGrid,
    lane: &'a Lane,
    first: u32,
    row: u64,
    block_in_row: u64,
}

/// Where a lane's chunk lies in the unquantized matrix.
pub(crate) struct Place {
    /// The first element's index from the matrix' start.
    index: u64,
    /// Its column.
    col: u64,
    /// How many of the chunk's elements the row has; none for a block past the end.
    count: u32,
    /// The row has the whole next chunk too.
    has_whole_after: bool,
}

impl<'a> Walk<'a> {
    /// Before step `first`.
    #[inline(always)]
    pub(crate) fn new(grid: &'a BlockGrid, lane: &'a Lane, place: &WarpPlace, first: u32) -> Self {
        // Possibly past the row's end: `place` puts it right.
        let block_in_row = place.block_in_row + u64::from(lane.group + first * lane.step);
        Self { grid, lane, first, row: place.row, block_in_row }
    }

    /// The chunk of step `j`; to be called for each step in turn. Divides again only where a row ends.
    #[inline(always)]
    pub(crate) fn place<D: Dtype, F: Blocks>(&mut self, j: u32) -> Place {
        if j > self.first {
            self.block_in_row += u64::from(self.lane.step);
        }
        if self.block_in_row >= self.grid.row_blocks.divisor {
            (self.row, self.block_in_row) = self.grid.row_blocks.divide(self.lane.block(j));
        }
        let col = self.block_in_row * u64::from(F::BLOCK) + u64::from(self.lane.part * D::CHUNK);
        let rest = if self.lane.block(j) < self.grid.blocks { self.grid.cols.saturating_sub(col) } else { 0 };
        Place {
            index: self.row * self.grid.row_stride + col,
            col,
            count: rest.min(u64::from(D::CHUNK)) as u32,
            has_whole_after: rest >= u64::from(2 * D::CHUNK),
        }
    }
}

/// Loads `count` chunks of a block from element `first` on, zeros for what the row does not have; all zeros if the block does not exist.
/// With `vector`, rows start on multiples of 16 bytes.
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
            // SAFETY: all 16 bytes belong to the row; rows and chunks start on multiples of 16 bytes.
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
/// `place.contiguous`, for the grid of the matrix at `values`, which lies in global memory, starts on 16 bytes as do its
/// rows, and is not written during the kernel.
#[inline(always)]
pub(crate) unsafe fn load_contiguous<D: Dtype>(values: *const u8, place: &WarpPlace, j: u32) -> Chunk {
    let start = place.index * u64::from(D::BYTES) + u64::from(warp::lane() * 16);
    // SAFETY: the warp's 1024 elements are in the matrix, and its lanes cover 32 chunks in a step.
    unsafe { ptx::load_16(values.add(start as usize).add((j * WARP * 16) as usize)) }
}

/// The most chunks that a lane loads at once, those of f32.
pub(crate) const MOST_STEPS: usize = 8;

/// Loads a lane's chunks of a warp's 1024 elements, wherever rows start.
///
/// # Safety
/// `values` points to the grid's matrix in global memory, aligned to its dtype; nothing writes there during the kernel. The lane and
/// the place are the warp's.
#[inline(always)]
pub(crate) unsafe fn load_all<D: Dtype, F: Blocks>(
    values: *const u8,
    grid: &BlockGrid,
    lane: &Lane,
    place: &WarpPlace,
) -> [Chunk; MOST_STEPS] {
    if place.contiguous {
        let mut chunks = [[0; 4]; MOST_STEPS];
        for j in 0..D::STEPS {
            // SAFETY: the warp's blocks are whole and lie behind each other in the caller's matrix, whose rows are aligned.
            chunks[j as usize] = unsafe { load_contiguous::<D>(values, place, j) };
        }
        return chunks;
    }
    cold_path();
    // SAFETY: the caller's matrix is the grid's, and its rows are aligned or not.
    unsafe {
        if grid.rows_are_aligned() {
            load_walking::<D, F, true>(values, grid, lane, place)
        } else {
            load_walking::<D, F, false>(values, grid, lane, place)
        }
    }
}

/// [`load_all`], chunk by chunk.
///
/// # Safety
/// As for [`load_all`]; with `ALIGNED`, rows start on 16 bytes.
#[inline(always)]
unsafe fn load_walking<D: Dtype, F: Blocks, const ALIGNED: bool>(
    values: *const u8,
    grid: &BlockGrid,
    lane: &Lane,
    place: &WarpPlace,
) -> [Chunk; MOST_STEPS] {
    let mut chunks = [[0; 4]; MOST_STEPS];
    let mut walk = Walk::new(grid, lane, place, 0);
    for j in 0..D::STEPS {
        let place = walk.place::<D, F>(j);
        // SAFETY: the caller's promise.
        chunks[j as usize] = unsafe { load::<D, ALIGNED>(values, grid, &place) };
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
    // SAFETY: each quarter of the warp's elements is in the matrix, and its lanes cover 32 chunks in a step.
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
        // SAFETY: the caller's promise.
        chunks[j as usize] = unsafe { load_in_tile::<D>(values, grid, place, j) };
    }
    chunks
}

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

/// Loads a chunk, zeros for what the row does not have. With `ALIGNED`, rows start on multiples of 16 bytes; without, a whole
/// chunk is cut out of the two aligned 16 bytes that it lies in.
///
/// # Safety
/// `values` points to the matrix that the place was made for, in global memory, aligned to the dtype and with `ALIGNED` to
/// 16 bytes; nothing writes there during the kernel.
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

/// The 16 bytes that start `skipped` bytes into 32: a shift by 8, 4 and 2 bytes, each if its bit is set.
#[inline(always)]
fn cut([[a, b, c, d], [e, f, g, h]]: [Chunk; 2], skipped: u32) -> Chunk {
    let by_8 = if skipped & 8 != 0 { [c, d, e, f, g, h] } else { [a, b, c, d, e, f] };
    let [a, b, c, d, e, f] = by_8;
    let [a, b, c, d, e] = if skipped & 4 != 0 { [b, c, d, e, f] } else { [a, b, c, d, e] };
    let bits = (skipped & 2) * 8;
    let pair = |low: u32, high: u32| ((u64::from(high) << 32 | u64::from(low)) >> bits) as u32;
    [pair(a, b), pair(b, c), pair(c, d), pair(d, e)]
}

/// Stores what the row has of a chunk, for rows that start on multiples of 16 bytes.
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

/// Stores what the row has of step `j`'s chunks, wherever rows start. Entered by the whole warp.
///
/// Chunks that follow each other in memory are held by lanes that follow each other, the last lane's by the first in the
/// next step. So each lane gets the chunk before its own from there, and writes the aligned 16 bytes in which its own begins:
/// the end of the other and the start of its own. What no lane covers that way, at the ends of a row and of the warp's share,
/// is written element by element.
///
/// # Safety
/// `values` points to the matrix that the place was made for, in global memory, aligned to the dtype; each element is
/// written by one thread. `last` is the chunk of step `j − 1`.
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
        // SAFETY: the 16 bytes are aligned; the first `past` are the end of the chunk before, which is whole and in the same
        // row, and whose lane leaves them to this one; the others are this chunk's.
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
            // SAFETY: the caller's promise.
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

/// Loads the codes of a lane's chunk, the first in the lowest bits.
///
/// # Safety
/// `codes` points to the packed codes of more than `block` blocks in global memory, aligned to 8 bytes.
#[inline(always)]
pub(crate) unsafe fn load_codes<D: Dtype, F: Blocks>(codes: *const u8, block: u64, part: u32) -> u64 {
    let bytes = const { D::CHUNK * F::BITS / 8 };
    // SAFETY: F::BYTES a block; the part's codes are `bytes` of them, at a multiple of that.
    unsafe {
        let start = codes.add((block * u64::from(F::BYTES) + u64::from(part * bytes)) as usize);
        match bytes {
            8 => *start.cast::<u64>(),
            4 => u64::from(*start.cast::<u32>()),
            _ => u64::from(*start.cast::<u16>()),
        }
    }
}

/// Stores the codes of a lane's chunk.
///
/// # Safety
/// As for [`load_codes`], for writing; each byte is written by one thread.
#[inline(always)]
pub(crate) unsafe fn store_codes<D: Dtype, F: Blocks>(codes: *mut u8, block: u64, part: u32, packed: u64) {
    let bytes = const { D::CHUNK * F::BITS / 8 };
    // SAFETY: F::BYTES a block; the part's codes are `bytes` of them, at a multiple of that.
    unsafe {
        let start = codes.add((block * u64::from(F::BYTES) + u64::from(part * bytes)) as usize);
        match bytes {
            8 => *start.cast::<u64>() = packed,
            4 => *start.cast::<u32>() = packed as u32,
            _ => *start.cast::<u16>() = packed as u16,
        }
    }
}

/// Element `i` of a block, widened, as bits; 0 past the row's end.
///
/// # Safety
/// `values` points to the grid's matrix in global memory, aligned to the dtype; nothing writes there during the kernel; the
/// block exists.
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
