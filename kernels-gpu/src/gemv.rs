//! Matrix–vector products of quantized operands. The arithmetic and the order of its sums are
//! [`microscale_formats::dot`]'s.
//!
//! A warp takes one row, or a few rows side by side that share what is decoded of the vector. Each lane has a stream:
//! the chunks of 32 elements whose numbers leave its own when divided by 32, so that a warp reads 512 bytes of each
//! row at once, and no lane waits for another before the end.

mod products;
mod weights;

use microscale_formats::dot::{self, CHUNK, STREAMS};
use microscale_kernels_abi::gemv::GemvGrid;
use microscale_kernels_abi::launch::{THREADS, WARP};
use microscale_kernels_abi::{ApplyGlobal, Dtype as OutputDtype, GlobalSlot};

use self::products::{Format, Machine, Mxfp4, Nvfp4, Products};
use crate::dtype::{Bf16, Dtype, F16};
use crate::{ptx, warp};

/// The codes of a chunk.
type Codes = [u32; 4];
/// Their bytes.
const CHUNK_BYTES: u32 = CHUNK as u32 / 2;

/// A chunk of a row: its codes and the bytes of its scales.
#[derive(Clone, Copy)]
struct Chunk {
    codes: Codes,
    scales: u32,
}

impl Chunk {
    const NONE: Self = Self { codes: [0; 4], scales: 0 };
}

/// Where a row lies.
#[derive(Clone, Copy)]
struct Row {
    codes: *const u8,
    scales: *const u8,
}

impl Row {
    /// Loads a chunk. `ONCE` says that it is used once. `WHOLE` chunks have all their blocks, others may have the
    /// first one only: then the other is zero.
    ///
    /// # Safety
    /// As for the kernels; the chunk's first block exists in a row of so many.
    #[inline(always)]
    unsafe fn load<F: Format, const ONCE: bool, const WHOLE: bool>(self, chunk: u32, blocks: u32) -> Chunk {
        let first = chunk * F::BLOCKS;
        let codes = self.codes.wrapping_add((chunk * CHUNK_BYTES) as usize);
        let scales = self.scales.wrapping_add(first as usize);
        let mut loaded = Chunk::NONE;
        // SAFETY: whole chunks lie on multiples of 16 bytes, and their scales on one of their number; blocks of NVFP4
        // lie on multiples of eight, and the second one is looked at if it exists.
        unsafe {
            if WHOLE {
                loaded.codes = if ONCE { ptx::load_16_once(codes) } else { ptx::load_16(codes) };
                loaded.scales = match F::BLOCKS {
                    1 => u32::from(*scales),
                    _ => u32::from(*scales.cast::<u16>()),
                };
                return loaded;
            }
            loaded.scales = u32::from(*scales);
            [loaded.codes[0], loaded.codes[1]] = load_8(codes);
            if first + 1 < blocks {
                loaded.scales |= u32::from(*scales.wrapping_add(1)) << 8;
                [loaded.codes[2], loaded.codes[3]] = load_8(codes.wrapping_add(F::BLOCK_BYTES as usize));
            }
        }
        loaded
    }
}

/// Eight bytes.
///
/// # Safety
/// They are readable, and `address` is a multiple of 4.
#[inline(always)]
unsafe fn load_8(address: *const u8) -> [u32; 2] {
    let words = address.cast::<u32>();
    // SAFETY: the caller's promise.
    unsafe { [*words, *words.wrapping_add(1)] }
}

/// One of two operands of the kernels.
struct Operand {
    codes: *const u8,
    scales: *const u8,
    global: *const GlobalSlot,
    apply: ApplyGlobal,
}

impl Operand {
    /// A row of so many blocks.
    #[inline(always)]
    fn row<F: Format>(&self, row: u64, blocks: u64) -> Row {
        let first = row * blocks;
        Row {
            codes: self.codes.wrapping_add((first * F::BLOCK_BYTES) as usize),
            scales: self.scales.wrapping_add(first as usize),
        }
    }

    /// A sum under its global scale, if it has one.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn scaled(&self, sum: f64) -> f64 {
        // SAFETY: the caller's promise; an operand without a global scale has a slot too.
        let global = f64::from(unsafe { (*self.global).scale });
        match self.apply {
            ApplyGlobal::Absent => sum,
            ApplyGlobal::Divisor => sum / global,
            ApplyGlobal::Multiplier => sum * global,
        }
    }
}

/// What a warp loads for a step.
#[derive(Clone, Copy)]
struct Step<const ROWS: usize> {
    vector: Chunk,
    rows: [Chunk; ROWS],
}

/// The rows of a warp, and their vector.
struct Group<const ROWS: usize> {
    vector: Row,
    rows: [Row; ROWS],
    /// Blocks of each.
    blocks: u32,
}

impl<const ROWS: usize> Group<ROWS> {
    /// Loads a chunk of each row and of the vector; zeros if there is none.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn load<F: Format, const WHOLE: bool>(&self, chunk: u32) -> Step<ROWS> {
        let mut step = Step { vector: Chunk::NONE, rows: [Chunk::NONE; ROWS] };
        if chunk * F::BLOCKS < self.blocks {
            // SAFETY: the chunk's first block exists.
            unsafe {
                for i in 0..ROWS {
                    step.rows[i] = self.rows[i].load::<F, true, WHOLE>(chunk, self.blocks);
                }
                step.vector = self.vector.load::<F, false, WHOLE>(chunk, self.blocks);
            }
        }
        step
    }
}

/// The sums over all streams, in pairs: those 16 apart, then 8, and so on. As long as a lane has sums of several
/// rows, it gives half of them away; at the end lane `l` has that of row `l / (32 / ROWS)`.
#[inline(always)]
fn total<const ROWS: usize>(mut sums: [f64; ROWS]) -> f64 {
    let (mut left, mut apart) = (ROWS, STREAMS as u32 / 2);
    while apart > 0 {
        if left > 1 {
            left /= 2;
            let upper = warp::lane() & apart != 0;
            for i in 0..left {
                let (low, high) = (sums[i], sums[i + left]);
                let (keeps, gives) = if upper { (high, low) } else { (low, high) };
                sums[i] = keeps + warp::shuffle_xor_f64(gives, apart);
            }
        } else {
            sums[0] += warp::shuffle_xor_f64(sums[0], apart);
        }
        apart /= 2;
    }
    sums[0]
}

/// Stores a result, rounded.
///
/// # Safety
/// `out` points to more than `index` elements of the dtype in global memory, and no other thread writes this one.
#[inline(always)]
unsafe fn store(out: *mut u8, index: u64, sum: f64, dtype: OutputDtype) {
    let index = index as usize;
    let odd = dot::rounded_to_odd(sum);
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            OutputDtype::F32 => {
                *out.cast::<u32>().add(index) =
                    if sum.is_nan() { 0x7FC0_0000 } else { (sum as f32).to_bits() };
            }
            OutputDtype::F16 => *out.cast::<u16>().add(index) = narrowed::<F16>(odd),
            OutputDtype::Bf16 => *out.cast::<u16>().add(index) = narrowed::<Bf16>(odd),
        }
    }
}

#[inline(always)]
fn narrowed<D: Dtype>(value: f32) -> u16 {
    if value.is_nan() { D::NAN_WORD as u16 } else { D::narrow(&[value; 8])[0] as u16 }
}

/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn gemv<F: Format, const ROWS: usize, const WHOLE: bool>(
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
        return; // The whole warp: what follows shuffles.
    }
    let before = u64::from(in_batch) * ROWS as u64;
    // Past the last row it is taken again.
    let last = grid.rows - 1 - before;
    let first = batch * grid.rows + before;
    let vector_row = vector.row::<F>(batch * grid.vector_stride, grid.blocks);
    let mut group = Group { vector: vector_row, rows: [vector_row; ROWS], blocks: grid.blocks as u32 };
    for (row, i) in group.rows.iter_mut().zip(0..) {
        *row = matrix.row::<F>(first + if i < last { i } else { last }, grid.blocks);
    }

    let products = Machine::new(warp::ballot(grid.rows > 0));
    let steps = group.blocks.div_ceil(F::BLOCKS * STREAMS as u32);
    let mut sums = [0.0; ROWS];
    let mut add = |loaded: &Step<ROWS>| {
        let decoded = products.vector(loaded.vector.codes);
        let scales = F::scales(loaded.vector.scales);
        for (sum, row) in sums.iter_mut().zip(&loaded.rows) {
            F::add(sum, products.quarters(row.codes, &decoded), row.scales, scales);
        }
    };
    let (mut chunk, mut step) = (warp::lane(), 0);
    // Two steps are on their way while a third one is computed. They take turns in three places, so that nothing is
    // moved and waiting for one is not waiting for the next.
    const NEXT: u32 = STREAMS as u32;
    // SAFETY, of these and those below: the rows are the operands', by the caller's contract.
    let (mut a, mut b) = unsafe { (group.load::<F, WHOLE>(chunk), group.load::<F, WHOLE>(chunk + NEXT)) };
    while step < steps {
        // SAFETY: as above.
        let c = unsafe { group.load::<F, WHOLE>(chunk + 2 * NEXT) };
        add(&a);
        if step + 1 >= steps {
            break;
        }
        // SAFETY: as above.
        a = unsafe { group.load::<F, WHOLE>(chunk + 3 * NEXT) };
        add(&b);
        if step + 2 >= steps {
            break;
        }
        // SAFETY: as above.
        b = unsafe { group.load::<F, WHOLE>(chunk + 4 * NEXT) };
        add(&c);
        chunk += 3 * NEXT;
        step += 3;
    }

    let lanes = const { (STREAMS / ROWS) as u32 };
    let sum = total(sums);
    let row = u64::from(warp::lane() / lanes);
    if warp::lane() % lanes == 0 && row <= last {
        // SAFETY: each result is stored by one lane.
        unsafe { store(out, first + row, vector.scaled(matrix.scaled(sum)), dtype) };
    }
}

/// The entry points: `name = gemv::<format, rows a warp, whole chunks>`.
macro_rules! entries {
    ($($name:ident = $body:expr,)+) => {$(
        /// Multiplies matrices with vectors.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrices, those of `vector_codes` and `vector_scales` those
        /// of its vectors, linear, on multiples of 8 bytes and of 1; with whole chunks rows are a multiple of 16
        /// bytes and start on one, and scales on one of their number in a chunk. `out` has room for a result a row,
        /// aligned to its dtype. The globals are slots. All in global memory; `out` overlaps nothing, and nothing
        /// writes the others meanwhile. The launch shape is the one that `microscale_kernels_abi` gives.
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
    nvfp4_gemv_cut = gemv::<Nvfp4, 1, false>,
    mxfp4_gemv_rows1 = gemv::<Mxfp4, 1, true>,
    mxfp4_gemv_rows2 = gemv::<Mxfp4, 2, true>,
    mxfp4_gemv_rows4 = gemv::<Mxfp4, 4, true>,
}

const _: () = assert!(STREAMS == WARP as usize);
