//! Matrix–vector products: rows over rayon's threads, and the definition.

use microscale_formats::dot::{self, CHUNK, Sums};
use microscale_formats::{E4m3, E8m0, mx, nvfp4};
use rayon::prelude::*;

use super::isa::Isa;
use crate::element::{Dtype, Element};
use crate::error::Result;
use crate::gemv::Batch;
use crate::recipe::Format;
use crate::tensor::QuantizedTensor;

/// Codes that a task goes through, at least.
const TASK_BYTES: usize = 64 << 10;

/// See [`crate::gemv`].
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
    let row_codes = matrix.shape().blocks_per_row() * matrix.format().block_bytes();
    let rows_a_task = (TASK_BYTES / row_codes.max(1)).clamp(1, rows);
    for (l, out) in out[..batch.count * rows].chunks_mut(rows).enumerate() {
        let vector = Vector::of(vectors, l * batch.vector_stride);
        let tasks = out.par_chunks_mut(rows_a_task).enumerate();
        tasks.for_each(|(task, out)| {
            let first = l * rows + task * rows_a_task;
            for (i, out) in out.iter_mut().enumerate() {
                let sum = reference(matrix.format(), Vector::of(matrix, first + i), vector);
                *out = finished(sum, matrix, vectors);
            }
        });
    }
    let _ = isa;
    Ok(())
}

/// A row of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Vector<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl<'a> Vector<'a> {
    fn of(tensor: &'a QuantizedTensor, row: usize) -> Self {
        let blocks = tensor.shape().blocks_per_row();
        let bytes = blocks * tensor.format().block_bytes();
        Self {
            codes: &tensor.codes()[row * bytes..][..bytes],
            scales: &tensor.scales()[row * blocks..][..blocks],
        }
    }
}

/// The definition.
fn reference(format: Format, a: Vector<'_>, b: Vector<'_>) -> f64 {
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

/// A sum under the global scales, rounded.
fn finished<T: Element>(sum: f64, matrix: &QuantizedTensor, vectors: &QuantizedTensor) -> T {
    let sum = dot::scaled(dot::scaled(sum, matrix.global_scale()), vectors.global_scale());
    T::from_f32(match T::DTYPE {
        _ if sum.is_nan() => f32::NAN,
        Dtype::F32 => sum as f32,
        Dtype::F16 | Dtype::Bf16 => dot::rounded_to_odd(sum),
    })
}

const _: () = assert!(mx::BLOCK == CHUNK && 2 * nvfp4::BLOCK == CHUNK);
