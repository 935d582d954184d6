//! Matrix–vector products of quantized operands. The arithmetic and the order of its sums are
//! [`microscale_formats::dot`]'s.
//!
//! A warp has one row, or a few adjacent rows that share the decoded vector. Lane `l` has a stream:
//! chunks `l`, `l + 32`, `l + 64`, … of 32 elements. So a warp reads 512 adjacent bytes of each
//! row, and no lane waits for another before the end.

mod chunk_products;

use microscale_formats::Dtype as OutputDtype;
use microscale_formats::dot::STREAMS;
use microscale_kernels_abi::gemv::GemvGrid;
use microscale_kernels_abi::launch::{THREADS, WARP};
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use self::chunk_products::{Machine, Products};
use crate::hardware::warp;
use crate::product::lane_sums::total;
use crate::product::operand::{CodeChunk, Operand, Row};
use crate::product::product_format::{Mxfp4, Nvfp4, ProductFormat};
use crate::product::results::store;

/// The chunks that a lane loads per K-iteration.
#[derive(Clone, Copy)]
struct LoadedChunks<const ROWS: usize> {
    vector: CodeChunk,
    rows: [CodeChunk; ROWS],
}

/// The rows of a warp, and the vector.
struct Group<const ROWS: usize> {
    vector: Row,
    rows: [Row; ROWS],
    /// Blocks of each row.
    blocks: u32,
}

impl<const ROWS: usize> Group<ROWS> {
    /// Loads a chunk of each row and of the vector. Chunks past the last one are zeros.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn load<F: ProductFormat, const WHOLE: bool>(&self, chunk: u32) -> LoadedChunks<ROWS> {
        let mut k_iteration = LoadedChunks { vector: CodeChunk::NONE, rows: [CodeChunk::NONE; ROWS] };
        if chunk * F::BLOCKS < self.blocks {
            // SAFETY: the chunk's first block exists.
            unsafe {
                for i in 0..ROWS {
                    k_iteration.rows[i] = self.rows[i].load::<F, true, WHOLE>(chunk, self.blocks);
                }
                k_iteration.vector = self.vector.load::<F, false, WHOLE>(chunk, self.blocks);
            }
        }
        k_iteration
    }
}

/// Multiplies `ROWS` rows per warp by a vector.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn gemv<F: ProductFormat, const ROWS: usize, const WHOLE: bool>(
    matrix: Operand,
    vector: Operand,
    out: *mut u8,
    grid: GemvGrid,
    dtype: OutputDtype,
) {
    let number = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    let (batch, in_batch) = grid.groups.divide_32(number);
    let batch = u64::from(batch);
    if batch >= grid.batches {
        return; // The whole warp returns, as it shuffles below.
    }
    let before = u64::from(in_batch) * ROWS as u64;
    // Rows past the last one repeat it.
    let last = grid.rows - 1 - before;
    let first = batch * grid.rows + before;
    let vector_row = vector.row::<F>(batch * grid.vector_stride, grid.blocks);
    let mut group = Group { vector: vector_row, rows: [vector_row; ROWS], blocks: grid.blocks as u32 };
    for (row, i) in group.rows.iter_mut().zip(0..) {
        *row = matrix.row::<F>(first + if i < last { i } else { last }, grid.blocks);
    }

    let products = Machine::new(warp::ballot(grid.rows > 0));
    let k_iterations = group.blocks.div_ceil(F::BLOCKS * STREAMS as u32);
    let mut sums = [0.0; ROWS];
    let mut add = |loaded: &LoadedChunks<ROWS>| {
        let decoded = products.vector(loaded.vector.codes);
        let scales = F::scales(loaded.vector.scales);
        for (sum, row) in sums.iter_mut().zip(&loaded.rows) {
            F::add(sum, products.quarters(row.codes, &decoded), row.scales, scales);
        }
    };
    let (mut chunk, mut k_iteration) = (warp::lane(), 0);
    // Two K-iterations are loaded while a third one is multiplied. They take turns at three sets of
    // registers, so that nothing is moved, and waiting for one does not wait for the next.
    const NEXT: u32 = STREAMS as u32;
    // SAFETY: the rows exist, by the kernel's contract.
    let (mut a, mut b) = unsafe { (group.load::<F, WHOLE>(chunk), group.load::<F, WHOLE>(chunk + NEXT)) };
    while k_iteration < k_iterations {
        // SAFETY: the rows exist, by the kernel's contract.
        let c = unsafe { group.load::<F, WHOLE>(chunk + 2 * NEXT) };
        add(&a);
        if k_iteration + 1 >= k_iterations {
            break;
        }
        // SAFETY: the rows exist, by the kernel's contract.
        a = unsafe { group.load::<F, WHOLE>(chunk + 3 * NEXT) };
        add(&b);
        if k_iteration + 2 >= k_iterations {
            break;
        }
        // SAFETY: the rows exist, by the kernel's contract.
        b = unsafe { group.load::<F, WHOLE>(chunk + 4 * NEXT) };
        add(&c);
        chunk += 3 * NEXT;
        k_iteration += 3;
    }

    let lanes = const { (STREAMS / ROWS) as u32 };
    let sum = total(sums);
    let row = u64::from(warp::lane() / lanes);
    if warp::lane() % lanes == 0 && row <= last {
        // SAFETY: each result is stored by one lane.
        unsafe { store(out, first + row, vector.scaled(matrix.scaled(sum)), dtype) };
    }
}

/// Declares the entry points: `name = gemv::<format, rows a warp, whole chunks>`.
macro_rules! entries {
    ($($name:ident = $body:expr,)+) => {$(
        /// Multiplies matrices by vectors.
        ///
        /// # Safety
        /// All pointers are to global memory. For the whole launch:
        /// - `codes` and `scales` have the rows of `grid`'s matrices, and `vector_codes` and
        ///   `vector_scales` its vectors, linear, on 8 bytes and on 1. With whole chunks, rows
        ///   start on 16 bytes, and rows of scales on the bytes of a chunk's scales. Both globals
        ///   point to slots. Read-only.
        /// - `out` has room for a result per row, aligned to its dtype, overlaps nothing, and only
        ///   this kernel uses it.
        ///
        /// The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            vector_codes: *const u8,
            vector_scales: *const u8,
            vector_global: *const GlobalSlot,
            out: *mut u8,
            grid: GemvGrid,
            apply: ApplyGlobal,
            vector_apply: ApplyGlobal,
            dtype: OutputDtype,
        ) {
            let matrix = Operand { codes, scales, global, apply };
            let vector =
                Operand { codes: vector_codes, scales: vector_scales, global: vector_global, apply: vector_apply };
            // SAFETY: the same contract.
            unsafe { $body(matrix, vector, out, grid, dtype) }
        }
    )+};
}

entries! {
    nvfp4_gemv_rows1 = gemv::<Nvfp4, 1, true>,
    nvfp4_gemv_rows2 = gemv::<Nvfp4, 2, true>,
    nvfp4_gemv_rows4 = gemv::<Nvfp4, 4, true>,
    nvfp4_gemv_ragged = gemv::<Nvfp4, 1, false>,
    mxfp4_gemv_rows1 = gemv::<Mxfp4, 1, true>,
    mxfp4_gemv_rows2 = gemv::<Mxfp4, 2, true>,
    mxfp4_gemv_rows4 = gemv::<Mxfp4, 4, true>,
}

const _: () = assert!(STREAMS == WARP as usize);
