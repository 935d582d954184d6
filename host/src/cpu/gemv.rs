//! Products of quantized matrices and quantized vectors.

use rayon::prelude::*;

use super::isa::Isa;
use crate::cpu::products::dot::{PackedVector, reference};
use crate::cpu::products::rows::{Row, for_each_rows, scale_and_round};
use crate::element::Element;
use crate::elements::{ElementsMut, by_dtype};
use crate::error::Result;
use crate::gemv::Batch;
use crate::view::QuantizedView;

/// Multiplies matrices by vectors, both in NVFP4 or both in MXFP4, on the CPU.
///
/// Computes `out[l, m] = Σₖ matrix[l, m, k] · vector[l, k]`, with block and global scales. See
/// [`Batch`] for the shapes.
///
/// [`microscale_formats::dot`] defines the sum: exact in all but extreme cases, always in the same
/// order, and rounded once to `T`. A GPU gives the same bits. NaN scales give canonical NaN, and
/// infinite sums give infinities.
///
/// ```
/// use microscale::{Batch, Recipe, Shape, gemv, quantize};
///
/// let recipe = Recipe::default(); // MXFP4
/// let matrix = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &recipe)?.tensor;
/// let vector = quantize(&[3f32; 32], Shape::new(1, 32), &recipe)?.tensor;
/// let mut out = [0f32; 2];
/// gemv(&matrix, &vector, Batch::default(), &mut out)?;
/// assert_eq!(out, [48.0, 48.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// [`crate::Error::Operands`] if the operands do not match, and [`crate::Error::Length`] if `out`
/// has fewer elements than `[L, M]`.
pub fn gemv<'a, 'b, T: Element>(
    matrix: impl Into<QuantizedView<'a>>,
    vectors: impl Into<QuantizedView<'b>>,
    batch: Batch,
    out: &mut [T],
) -> Result<()> {
    gemv_with(Isa::best(), matrix, vectors, batch, out)
}

/// [`gemv`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemv`].
pub fn gemv_with<'a, 'b, T: Element>(
    isa: Isa,
    matrix: impl Into<QuantizedView<'a>>,
    vectors: impl Into<QuantizedView<'b>>,
    batch: Batch,
    out: &mut [T],
) -> Result<()> {
    let (matrix, vectors) = (matrix.into(), vectors.into());
    let rows = batch.check(matrix.shape(), vectors.shape(), out.len())?;
    if rows > 0 {
        let out = ElementsMut::of(&mut out[..batch.count * rows]);
        multiply(isa, matrix, vectors, batch, out);
    }
    Ok(())
}

/// Multiplies checked operands.
fn multiply(
    isa: Isa,
    matrix: QuantizedView<'_>,
    vectors: QuantizedView<'_>,
    batch: Batch,
    out: ElementsMut<'_>,
) {
    let (format, rows) = (matrix.format(), matrix.rows() / batch.count);
    let vector = |l: usize| Row::of(vectors, l * batch.vector_stride);
    let prepared = (0..batch.count).into_par_iter().with_min_len(16);
    let prepared: Vec<_> = prepared.map(|l| PackedVector::of(format, vector(l))).collect();
    let globals = [matrix.global_scale(), vectors.global_scale()];
    let product = |row: usize| {
        let l = row / rows;
        let row = Row::of(matrix, row);
        match isa {
            Isa::Reference => reference(format, row, vector(l)),
            _ if prepared[l].nan || format.is_nan_scale(row.max_scale()) => f64::NAN,
            _ => isa.dot(row, &prepared[l]),
        }
    };
    by_dtype!(ElementsMut, out => for_each_rows(matrix, out, 1, 1, |row, out| {
        out[0] = scale_and_round(product(row), &globals);
    }));
}
