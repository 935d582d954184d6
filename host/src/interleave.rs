//! Interleaves the rows of two matrices for products with a gate.

use rayon::prelude::*;

use crate::error::{Error, OperandFault, Result};
use crate::shape::QuantizedShape;
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;
use microscale_formats::ScaleLayout;

/// Interleaves the rows of `gate` and `up`, so that a product's epilogue finds both results
/// together.
///
/// Nothing is quantized again, and [`deinterleave_rows`] returns both matrices. Scales become
/// linear.
///
/// # Errors
/// [`OperandFault::Interleaved`] if shapes, formats or global scales differ. Layers that are
/// multiplied together must share a global scale, as in checkpoints for vLLM.
///
/// # Examples
/// ```
/// use microscale::{Numerics, Format, Recipe, Shape};
/// use microscale::{deinterleave_rows, interleave_rows, quantize};
///
/// let recipe = Recipe::of(Format::Mxfp4, Numerics::Ocp)?;
/// let gate = quantize(&[1.0f32; 64], Shape::new(2, 32), &recipe)?.tensor;
/// let up = quantize(&[3.0f32; 64], Shape::new(2, 32), &recipe)?.tensor;
/// let both = interleave_rows(&gate, &up)?;
/// assert_eq!((both.rows(), both.cols()), (4, 32));
/// assert_eq!(deinterleave_rows(&both)?, [gate, up]);
/// # Ok::<(), microscale::Error>(())
/// ```
pub fn interleave_rows<'a>(
    gate: impl Into<QuantizedView<'a>>,
    up: impl Into<QuantizedView<'a>>,
) -> Result<QuantizedTensor> {
    let (gate, up) = (gate.into(), up.into());
    let linear =
        |view: QuantizedView<'_>| QuantizedShape { scale_layout: ScaleLayout::Linear, ..view.shape() };
    if linear(gate) != linear(up) || gate.global_scale() != up.global_scale() {
        return Err(Error::Operands(OperandFault::Interleaved));
    }
    let one = linear(gate);
    let shape = QuantizedShape { rows: 2 * one.rows, ..one };
    let (codes, scales) = shape.bytes()?;
    let in_turn = |parts: [&[u8]; 2], bytes: usize| {
        let mut both = vec![0; bytes];
        let row = (bytes / shape.rows.max(1)).max(1);
        both.par_chunks_mut(row).enumerate().with_min_len(64).for_each(|(i, to)| {
            to.copy_from_slice(&parts[i % 2][i / 2 * row..][..row]);
        });
        both
    };
    let codes = in_turn([gate.codes(), up.codes()], codes);
    let scales = in_turn([&gate.linear_scales(), &up.linear_scales()], scales);
    with_scale_of(gate, QuantizedTensor::from_parts(shape, codes, scales)?)
}

/// Splits a matrix made by [`interleave_rows`] into its two matrices.
///
/// # Errors
/// [`OperandFault::Gate`] for an odd number of rows.
pub fn deinterleave_rows<'a>(both: impl Into<QuantizedView<'a>>) -> Result<[QuantizedTensor; 2]> {
    let both = both.into();
    let of_both = both.shape();
    if !of_both.rows.is_multiple_of(2) {
        return Err(Error::Operands(OperandFault::Gate { rows: of_both.rows }));
    }
    let shape = QuantizedShape { rows: of_both.rows / 2, scale_layout: ScaleLayout::Linear, ..of_both };
    let (codes, scales) = shape.bytes()?;
    let every_other = |from: &[u8], bytes: usize, first: usize| {
        let mut part = vec![0; bytes];
        let row = (bytes / shape.rows.max(1)).max(1);
        part.par_chunks_mut(row).enumerate().with_min_len(64).for_each(|(i, to)| {
            to.copy_from_slice(&from[(2 * i + first) * row..][..row]);
        });
        part
    };
    let part = |first: usize| {
        let codes = every_other(both.codes(), codes, first);
        let scales = every_other(&both.linear_scales(), scales, first);
        with_scale_of(both, QuantizedTensor::from_parts(shape, codes, scales)?)
    };
    Ok([part(0)?, part(1)?])
}

/// Applies the global scale of another tensor, if that has one.
fn with_scale_of(other: QuantizedView<'_>, tensor: QuantizedTensor) -> Result<QuantizedTensor> {
    match other.global_scale() {
        Some(scale) => tensor.with_global_scale(scale),
        None => Ok(tensor),
    }
}
