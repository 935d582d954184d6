//! Products of quantized matrices and quantized vectors: rows over rayon's threads, the definition, and how vectors do a row.

use microscale_formats::dot::{self, CHUNK, STREAMS, Sums};
use microscale_formats::{E4m3, E8m0, GlobalScale};
use rayon::prelude::*;

use super::isa::Isa;
use super::products::{Products, STEP, Twice};
use super::vector::{LANES, Lanes, Vector};
use crate::element::{Dtype, Element};
use crate::error::Result;
use crate::gemv::Batch;
use crate::recipe::Format;
use crate::tensor::QuantizedTensor;

/// Codes that a task goes through, at least: as much as the input of one that quantizes is.
pub(super) const TASK_BYTES: usize = 64 << 10;

/// Multiplies matrices with vectors, both in NVFP4 or both in MXFP4, on the CPU: `out[l, m] = Σₖ matrix[l, m, k] · vector[l, k]`, with
/// block and global scales. See [`Batch`] for the shapes.
///
/// The sum is that of [`microscale_formats::dot`]: exact in all but extreme cases, in a given order in any case, and rounded once to `T`. A
/// GPU gives the same bits. NaN scales and infinite sums come out as canonical NaN and infinities.
///
/// # Errors
/// [`crate::Error::Operands`] if they do not fit each other, and [`crate::Error::Length`] if `out` has fewer elements than `[L, M]`.
pub fn gemv<T: Element>(
    matrix: &QuantizedTensor,
    vectors: &QuantizedTensor,
    batch: Batch,
    out: &mut [T],
) -> Result<()> {
    gemv_with(Isa::best(), matrix, vectors, batch, out)
}

/// [`gemv`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`gemv`].
pub fn gemv_with<T: Element>(
    isa: Isa,
    matrix: &QuantizedTensor,
    vectors: &QuantizedTensor,
    batch: Batch,
    out: &mut [T],
) -> Result<()> {
    let rows = batch.check(matrix.shape(), vectors.shape(), out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let prepared = (0..batch.count).into_par_iter().with_min_len(16);
    let prepared = prepared.map(|l| Prepared::of(matrix.format(), Row::of(vectors, l * batch.vector_stride)));
    let prepared: Vec<_> = prepared.collect();
    let globals = [matrix.global_scale(), vectors.global_scale()];
    let out = &mut out[..batch.count * rows];
    each_rows(matrix, out, 1, 1, |row, out| {
        let l = row / rows;
        let row = Row::of(matrix, row);
        let sum = match isa {
            Isa::Reference => reference(matrix.format(), row, Row::of(vectors, l * batch.vector_stride)),
            _ if prepared[l].nan || matrix.format().is_nan_scale(row.most()) => f64::NAN,
            _ => isa.dot(row, &prepared[l]),
        };
        out[0] = finished(sum, &globals);
    });
    Ok(())
}

/// Does something with each few rows of a matrix, given the first, and their part of an output, which are so many elements a row: on this
/// thread if there is little to do.
pub(super) fn each_rows<T: Send>(
    matrix: &QuantizedTensor,
    out: &mut [T],
    rows: usize,
    outputs: usize,
    few: impl Fn(usize, &mut [T]) + Sync,
) {
    let row_codes = matrix.blocks_per_row() * matrix.format().block_bytes();
    let rows_a_task = (TASK_BYTES / row_codes.max(1)).max(1).next_multiple_of(rows);
    let task = |(task, out): (usize, &mut [T])| {
        for (i, out) in out.chunks_mut(rows * outputs).enumerate() {
            few(task * rows_a_task + i * rows, out);
        }
    };
    if out.len() <= rows_a_task * outputs {
        return task((0, out));
    }
    out.par_chunks_mut(rows_a_task * outputs).enumerate().for_each(task);
}

/// A row of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl<'a> Row<'a> {
    pub(super) fn of(tensor: &'a QuantizedTensor, row: usize) -> Self {
        let blocks = tensor.shape().blocks_per_row();
        let bytes = blocks * tensor.format().block_bytes();
        Self {
            codes: &tensor.codes()[row * bytes..][..bytes],
            scales: &tensor.scales()[row * blocks..][..blocks],
        }
    }

    /// The largest scale byte: in both formats NaN is above all numbers.
    pub(super) fn most(self) -> u8 {
        self.scales.iter().fold(0, |most, scale| most.max(*scale))
    }
}

/// The definition.
fn reference(format: Format, a: Row<'_>, b: Row<'_>) -> f64 {
    let block = format.block();
    let mut sums = Sums::default();
    let codes = a.codes.chunks(block / 2).zip(b.codes.chunks(block / 2));
    for (i, ((x, y), (s, t))) in codes.zip(a.scales.iter().zip(b.scales)).enumerate() {
        let quarters = dot::quarters(x, y);
        let term = match format {
            Format::Nvfp4 => dot::nvfp4_term(quarters, E4m3::from_bits(*s), E4m3::from_bits(*t)),
            _ => dot::mxfp4_term(quarters, E8m0::from_bits(*s), E8m0::from_bits(*t)),
        };
        sums.add(i * block / CHUNK, term);
    }
    sums.total()
}

/// A sum under global scales, one after the other, rounded.
pub(super) fn finished<T: Element>(sum: f64, globals: &[Option<GlobalScale>]) -> T {
    let sum = globals.iter().fold(sum, |sum, global| dot::scaled(sum, *global));
    T::from_f32(match T::DTYPE {
        _ if sum.is_nan() => f32::NAN,
        Dtype::F32 => sum as f32,
        Dtype::F16 | Dtype::Bf16 => dot::rounded_to_odd(sum),
    })
}

/// A vector, ready to be multiplied with many rows.
pub(super) struct Prepared {
    steps: Steps,
    /// Whether a scale is NaN, and so all products.
    nan: bool,
}

/// [`STEP`] bytes of codes each, the last one filled up with zeros: they add nothing.
enum Steps {
    Nvfp4(Vec<Step<Nvfp4>>),
    Mxfp4(Vec<Step<Mxfp4>>),
}

struct Step<S> {
    codes: Twice,
    scales: S,
}

/// The scales of sixteen blocks, as [`Products::quarters`] has them: 64 times as large, for they are multiplied with quarters and with
/// 256ths of scales.
struct Nvfp4(Lanes<f32>);

/// A quarter of the scales of eight blocks.
struct Mxfp4([f64; 8]);

/// What the formats do differently.
trait Scales {
    /// Scales of a step.
    const COUNT: usize;

    /// From that many bytes.
    fn of(bytes: &[u8]) -> Self;

    /// Adds the terms of a step, given the matrix' scales.
    fn add<V: Products>(&self, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums;
}

/// The scales of blocks with an even index, then those of the others.
const EVEN_THEN_ODD: [u8; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];

impl Scales for Nvfp4 {
    const COUNT: usize = 16;

    fn of(bytes: &[u8]) -> Self {
        Self(EVEN_THEN_ODD.map(|i| 64.0 * E4m3::from_bits(bytes[usize::from(i)]).to_f32()))
    }

    #[inline(always)]
    fn add<V: Products>(&self, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums {
        let Some(bytes) = bytes.first_chunk() else { return sums };
        let scales = e4m3_over_256::<V>(V::bytes(bytes, &EVEN_THEN_ODD));
        let scales = V::mul(scales, V::load(&self.0));
        V::add_halves(sums, V::mul(V::numbers(quarters), scales))
    }
}

impl Scales for Mxfp4 {
    const COUNT: usize = 8;

    fn of(bytes: &[u8]) -> Self {
        // A quarter of 1 is the scale of the other side.
        Self(std::array::from_fn(|i| dot::mxfp4_scale(E8m0::from_bits(bytes[i]), E8m0::from_bits(127))))
    }

    #[inline(always)]
    fn add<V: Products>(&self, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums {
        let Some(bytes) = bytes.first_chunk() else { return sums };
        V::add_scaled(sums, quarters, bytes, &self.0)
    }
}

/// E4M3 of no sign that are numbers: f16 has a bit more of exponent, whose bias is larger by 8.
#[inline(always)]
pub(super) fn e4m3_over_256<V: Vector>(bytes: V::Bits) -> V::Number {
    V::widened_f16(V::shift_left(bytes, 7))
}

impl Prepared {
    fn of(format: Format, vector: Row<'_>) -> Self {
        let steps = match format {
            Format::Nvfp4 => Steps::Nvfp4(steps(vector)),
            _ => Steps::Mxfp4(steps(vector)),
        };
        Self { steps, nan: format.is_nan_scale(vector.most()) }
    }
}

fn steps<S: Scales>(vector: Row<'_>) -> Vec<Step<S>> {
    let one = |(codes, scales): (&[u8], &[u8])| {
        let (mut filled, mut filled_scales) = ([0; STEP], [0; 16]);
        filled[..codes.len()].copy_from_slice(codes);
        filled_scales[..scales.len()].copy_from_slice(scales);
        Step { codes: Twice::of(&filled), scales: S::of(&filled_scales[..S::COUNT]) }
    };
    vector.codes.chunks(STEP).zip(vector.scales.chunks(S::COUNT)).map(one).collect()
}

/// The sum of a row's products with a vector, none of whose scales is NaN.
#[inline(always)]
pub(super) fn dot<V: Products>(row: Row<'_>, vector: &Prepared) -> f64 {
    match &vector.steps {
        Steps::Nvfp4(steps) => sum::<V, _>(row, steps),
        Steps::Mxfp4(steps) => sum::<V, _>(row, steps),
    }
}

/// Four steps have a chunk for each stream.
#[inline(always)]
fn sum<V: Products, S: Scales>(row: Row<'_>, steps: &[Step<S>]) -> f64 {
    let mut sums = [V::no_sums(); 4];
    let (codes, last_codes) = row.codes.as_chunks::<{ 4 * STEP }>();
    let whole = codes.len();
    let (scales, last_scales) = row.scales.split_at(whole * 4 * S::COUNT);
    let (fours, last_steps) = steps.split_at(4 * whole);
    for ((codes, scales), steps) in
        codes.iter().zip(scales.chunks_exact(4 * S::COUNT)).zip(fours.as_chunks::<4>().0)
    {
        for i in 0..4 {
            sums[i] = step::<V, S>(sums[i], &codes.as_chunks().0[i], &scales[i * S::COUNT..], &steps[i]);
        }
    }
    if !last_steps.is_empty() {
        let (mut codes, mut scales) = ([0; 4 * STEP], [0; 64]);
        codes[..last_codes.len()].copy_from_slice(last_codes);
        scales[..last_scales.len()].copy_from_slice(last_scales);
        for i in 0..4 {
            // Not a loop over steps: the sums would no longer be in registers.
            if let Some(step_of) = last_steps.get(i) {
                sums[i] = step::<V, S>(sums[i], &codes.as_chunks().0[i], &scales[i * S::COUNT..], step_of);
            }
        }
    }
    let mut streams = [0.0; STREAMS];
    for (streams, sums) in streams.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
        *streams = V::store_sums(sums);
    }
    Sums::of(streams).total()
}

#[inline(always)]
fn step<V: Products, S: Scales>(sums: V::Sums, codes: &[u8; STEP], scales: &[u8], by: &Step<S>) -> V::Sums {
    by.scales.add::<V>(sums, V::quarters(codes, &by.codes), scales)
}

const _: () = assert!(STREAMS * CHUNK == 4 * 2 * STEP && LANES == 16);
