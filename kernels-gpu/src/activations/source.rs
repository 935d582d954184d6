//! The row operations: loading a piece of a row, and computing its values.

use core::hint::cold_path;

use microscale_formats::activations::{SUM_COLUMNS, SUM_PIECE, SUM_STEPS, SquareRoot};
use microscale_formats::gate::{gated, gelu};
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::launch::{WARP, WARP_ELEMENTS};

use super::one_by_one::{chunk_of_step, rolled, select};
use super::row::Row;
use crate::access::MOST_STEPS;
use crate::arithmetic::Ptx;
use crate::dtype::{Chunk, Dtype};
use crate::hardware::{ptx, warp};

const _: () = assert!(SUM_PIECE as u32 == WARP_ELEMENTS && SUM_STEPS == 4 && SUM_COLUMNS as u32 == 8 * WARP);

impl SquareRoot for Ptx {
    #[inline(always)]
    fn sqrt(x: f32) -> f32 {
        core::intrinsics::sqrtf32(x)
    }
}

/// The facts of an operation that the compiler knows.
pub(super) trait RowOperation {
    /// Combines two values to one.
    const GLU: bool;
    /// Normalizes the row.
    const NORM: bool;
}

/// Rows of the input.
pub(super) struct Plain;
impl RowOperation for Plain {
    const GLU: bool = false;
    const NORM: bool = false;
}

/// A gate times the other half of the row.
pub(super) struct Glu;
impl RowOperation for Glu {
    const GLU: bool = true;
    const NORM: bool = false;
}

/// RMSNorm, perhaps after adding a residual.
pub(super) struct Norm;
impl RowOperation for Norm {
    const GLU: bool = false;
    const NORM: bool = true;
}

/// The matrices that rows are computed from, or their rows.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) input: *const u8,
    /// Null for none.
    pub(super) residual: *mut u8,
    /// Null for ones.
    pub(super) weights: *const u8,
}

/// The lane's first column of a piece.
#[inline(always)]
fn first_column<D: Dtype>(piece: u32) -> u32 {
    piece * WARP_ELEMENTS + warp::lane() * D::CHUNK
}

/// Columns from one of a lane's chunks to the next.
pub(super) const fn step<D: Dtype>() -> u32 {
    WARP * D::CHUNK
}

/// The column of the lane's chunk of step `j`.
#[inline(always)]
pub(super) fn column<D: Dtype>(piece: u32, j: u32) -> u32 {
    first_column::<D>(piece) + j * step::<D>()
}

impl Source {
    /// The matrices' rows of this number.
    #[inline(always)]
    pub(super) fn at(self, params: &ActivationParams, row: &Row) -> Self {
        let bytes = |stride: u64| (u64::from(row.number) * stride * 2) as usize;
        Self {
            input: self.input.wrapping_add(bytes(params.input_stride)),
            residual: if self.residual.is_null() {
                self.residual
            } else {
                self.residual.wrapping_add(bytes(params.residual_stride))
            },
            weights: self.weights,
        }
    }

    /// Loads a piece, and computes what needs only the piece. Columns and rows that do not exist
    /// are zeros. The `first` load of a piece adds the residual, and stores the sum in its place.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`]; this is a row of theirs.
    #[inline(always)]
    pub(super) unsafe fn load<D: Dtype, O: RowOperation>(
        &self,
        params: &ActivationParams,
        row: &Row,
        piece: u32,
        first: bool,
    ) -> [Chunk; MOST_STEPS] {
        let cols = if row.exists { params.cols } else { 0 };
        let aligned = params.aligned != 0;
        let whole = aligned && (piece + 1) * WARP_ELEMENTS <= cols;
        if O::GLU {
            let pairs = params.interleaved != 0;
            // Of pairs, a lane has 16 values that follow each other.
            let (each, up, passed) = if pairs { (2, D::CHUNK, D::CHUNK) } else { (1, params.cols, 0) };
            let up = self.input.wrapping_add(2 * up as usize);
            // SAFETY: a row has twice the columns.
            let (mut chunks, others) = unsafe {
                (
                    load::<D>(self.input, piece, each, each * cols, aligned, whole),
                    load::<D>(up, piece, each, (each * cols).saturating_sub(passed), aligned, whole),
                )
            };
            for j in 0..D::STEPS as usize {
                chunks[j] = glu::<D>(params, &chunks[j], &others[j]);
            }
            return chunks;
        }
        if !O::NORM || self.residual.is_null() {
            // SAFETY: the row has `params.cols` columns.
            return unsafe { load::<D>(self.input, piece, 1, cols, aligned, whole) };
        }
        // SAFETY: as for the input; each chunk is this thread's.
        let mut sums = unsafe { load_written::<D>(self.residual, piece, cols, aligned) };
        if first {
            // SAFETY: as above.
            let chunks = unsafe { load::<D>(self.input, piece, 1, cols, aligned, whole) };
            for j in 0..D::STEPS as usize {
                sums[j] = map::<D>(|i| D::widen(&chunks[j], i) + D::widen(&sums[j], i));
            }
            // SAFETY: as above.
            unsafe { store::<D>(self.residual, piece, cols, aligned, &sums) };
        }
        sums
    }

    /// Multiplies a piece by 1 / RMS and the weights. Columns that do not exist stay zeros.
    ///
    /// # Safety
    /// As for [`Self::load`].
    #[inline(always)]
    pub(super) unsafe fn normalize<D: Dtype>(
        &self,
        params: &ActivationParams,
        row: &Row,
        piece: u32,
        chunks: &[Chunk; MOST_STEPS],
        inverse_rms: f32,
    ) -> [Chunk; MOST_STEPS] {
        let cols = if row.exists { params.cols } else { 0 };
        let (aligned, weighs) = (params.aligned != 0, !self.weights.is_null());
        let whole = aligned && (piece + 1) * WARP_ELEMENTS <= cols;
        let mut weights = [[0; 4]; MOST_STEPS];
        if weighs {
            // SAFETY: there is a weight per column.
            weights = unsafe { load::<D>(self.weights, piece, 1, cols, aligned, whole) };
        }
        let mut normalized = [[0; 4]; MOST_STEPS];
        for j in 0..D::STEPS {
            let (chunk, weights) = (&chunks[j as usize], &weights[j as usize]);
            normalized[j as usize] = map::<D>(|i| {
                let weight = weighs.then(|| D::widen(weights, i));
                params.norm.of(D::widen(chunk, i), inverse_rms, weight, D::round)
            });
        }
        if !whole {
            cold_path();
            for j in 0..D::STEPS {
                let chunk = &mut normalized[j as usize];
                *chunk = first(chunk, column::<D>(piece, j), cols);
            }
        }
        normalized
    }
}

/// The gated values of a chunk: `a` has gates and `b` the other half, or both have pairs.
#[inline(always)]
fn glu<D: Dtype>(params: &ActivationParams, a: &Chunk, b: &Chunk) -> Chunk {
    let (gates, ups) = if params.interleaved != 0 {
        let low = |chunk: &Chunk, i: usize| ptx::permute(chunk[i], chunk[i + 1], 0x5410);
        let high = |chunk: &Chunk, i: usize| ptx::permute(chunk[i], chunk[i + 1], 0x7632);
        ([low(a, 0), low(a, 2), low(b, 0), low(b, 2)], [high(a, 0), high(a, 2), high(b, 0), high(b, 2)])
    } else {
        (*a, *b)
    };
    if params.gelu == 0 && params.gate.is_plain() {
        // `gated` has steps that change nothing here.
        return map::<D>(|i| {
            let x = D::widen(&gates, i);
            params.gate.weighed::<Ptx>(x, D::widen(&ups, i), x)
        });
    }
    if params.gelu == ActivationParams::GELU {
        return map::<D>(|i| gelu::<Ptx>(D::widen(&gates, i), D::widen(&ups, i)));
    }
    map::<D>(|i| gated::<Ptx>(&params.gate, params.gelu != 0, D::widen(&gates, i), D::widen(&ups, i)))
}

/// A chunk of results, rounded to the dtype.
#[inline(always)]
fn map<D: Dtype>(f: impl Fn(u32) -> f32) -> Chunk {
    // Not by `map` of an array: LLVM would call it as a function.
    let mut values = [0.0; 8];
    for i in 0..D::CHUNK {
        values[i as usize] = f(i);
    }
    D::narrow(&values)
}

/// A chunk with zeros from column `cols` on.
#[inline(always)]
fn first(chunk: &Chunk, column: u32, cols: u32) -> Chunk {
    [0, 1, 2, 3].map(|word| {
        let column = column + 2 * word;
        let kept = if column + 1 < cols {
            u32::MAX
        } else if column < cols {
            0xFFFF
        } else {
            0
        };
        chunk[word as usize] & kept
    })
}

/// Loads a piece of a row, `each` columns for one of the piece. Columns from `cols` on are zeros.
///
/// # Safety
/// The row has `cols` columns in global memory that nothing writes during the kernel. If it is
/// `aligned`, it starts on 16 bytes and `cols` is a multiple of 8. If `whole`, it is aligned and
/// has the whole piece.
#[inline(always)]
pub(super) unsafe fn load<D: Dtype>(
    row: *const u8,
    piece: u32,
    each: u32,
    cols: u32,
    aligned: bool,
    whole: bool,
) -> [Chunk; MOST_STEPS] {
    let mut chunks = [[0; 4]; MOST_STEPS];
    let start = |j: u32| row.wrapping_add(2 * (each * column::<D>(piece, j)) as usize);
    if whole {
        for j in 0..D::STEPS {
            // SAFETY: the chunk is in the row, and on 16 bytes.
            chunks[j as usize] = unsafe { ptx::load_16(start(j)) };
        }
    } else if aligned {
        for j in 0..D::STEPS {
            if each * column::<D>(piece, j) < cols {
                // SAFETY: the chunk is in the row, and on 16 bytes.
                chunks[j as usize] = unsafe { ptx::load_16(start(j)) };
            }
        }
    } else {
        cold_path();
        // SAFETY: the same contract.
        chunks = unsafe { load_elements::<D>(row, piece, each, cols) };
    }
    chunks
}

/// [`load`] of memory that this thread may have written.
///
/// # Safety
/// As for [`load`], but this thread may write.
#[inline(always)]
unsafe fn load_written<D: Dtype>(
    row: *const u8,
    piece: u32,
    cols: u32,
    aligned: bool,
) -> [Chunk; MOST_STEPS] {
    if !aligned {
        cold_path();
        // SAFETY: the same contract.
        return unsafe { load_elements::<D>(row, piece, 1, cols) };
    }
    let mut chunks = [[0; 4]; MOST_STEPS];
    for j in 0..D::STEPS {
        let column = column::<D>(piece, j);
        if column < cols {
            // SAFETY: the chunk is in the row, and on 16 bytes.
            chunks[j as usize] = unsafe { ptx::load_16_written(row.wrapping_add(2 * column as usize)) };
        }
    }
    chunks
}

/// [`load`] element by element.
///
/// # Safety
/// As for [`load`], without alignment.
#[inline(always)]
unsafe fn load_elements<D: Dtype>(row: *const u8, piece: u32, each: u32, cols: u32) -> [Chunk; MOST_STEPS] {
    let mut chunks = [[0; 4]; MOST_STEPS];
    rolled!(j below D::STEPS => {
        let column = each * column::<D>(piece, j);
        let (mut low, mut high) = (0, 0);
        rolled!(i below D::CHUNK => {
            if column + i < cols {
                // SAFETY: the element exists.
                let element = unsafe { *row.cast::<u16>().add((column + i) as usize) };
                let shifted = u64::from(element) << (16 * (i % 4));
                if i < 4 {
                    low |= shifted;
                } else {
                    high |= shifted;
                }
            }
        });
        let loaded = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
        // By masks: the compiler would index an array in memory.
        for k in 0..D::STEPS {
            let mask = 0_u32.wrapping_sub(u32::from(k == j));
            for word in 0..4 {
                chunks[k as usize][word] |= loaded[word] & mask;
            }
        }
    });
    chunks
}

/// Stores a piece of a row.
///
/// # Safety
/// As for [`load`], for writing; no other thread uses the lane's chunks.
#[inline(always)]
unsafe fn store<D: Dtype>(row: *mut u8, piece: u32, cols: u32, aligned: bool, chunks: &[Chunk; MOST_STEPS]) {
    if aligned {
        for j in 0..D::STEPS {
            let column = column::<D>(piece, j);
            if column < cols {
                // SAFETY: the chunk is in the row, and on 16 bytes.
                unsafe { ptx::store_16(row.wrapping_add(2 * column as usize), chunks[j as usize]) };
            }
        }
        return;
    }
    cold_path();
    rolled!(j below D::STEPS => {
        let (column, chunk) = (column::<D>(piece, j), chunk_of_step(chunks, j));
        rolled!(i below D::CHUNK => {
            if column + i < cols {
                let element = (select(&chunk, i / 2) >> (16 * (i % 2))) as u16;
                // SAFETY: the element exists.
                unsafe { *row.cast::<u16>().add((column + i) as usize) = element };
            }
        });
    });
}

/// The sum of squares of a piece, in the order of
/// [`sum_of_squares`](microscale_formats::activations::sum_of_squares). All lanes get it.
#[inline(always)]
pub(super) fn sum_of_squares<D: Dtype>(chunks: &[Chunk; MOST_STEPS]) -> f32 {
    let mut sums = [0.0; 8];
    for j in 0..D::STEPS as usize {
        for i in 0..D::CHUNK {
            let x = D::widen(&chunks[j], i);
            sums[i as usize] = ptx::fma_f32(x, x, sums[i as usize]);
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    let mut sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
    let mut distance = 1;
    while distance < WARP {
        sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), distance));
        distance *= 2;
    }
    sum
}
