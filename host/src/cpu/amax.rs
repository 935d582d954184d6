//! The amax of a matrix on the CPU: its largest finite magnitude, spread over rayon's threads.

use rayon::prelude::*;

use super::isa::Isa;
use super::pieces::{Part, Pieces, TASK_BLOCKS};
use crate::amax::Amax;
use crate::element::Element;
use crate::elements::{Elements, by_dtype};
use crate::error::Result;
use crate::shape::Shape;

/// Elements that are looked at again together if there is a NaN or an infinity, and one by one if it is among
/// them.
const PART: usize = 1 << 12;

/// The largest magnitude of the matrix that `shape` describes in `values`, on the CPU: one read.
///
/// # Errors
/// [`crate::Error::Length`], [`crate::Error::RowStride`] or [`crate::Error::TooLarge`] if the shape does not
/// fit.
pub fn amax<T: Element>(values: &[T], shape: Shape) -> Result<Amax> {
    amax_with(Isa::best(), values, shape)
}

/// [`amax`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`amax`].
pub fn amax_with<T: Element>(isa: Isa, values: &[T], shape: Shape) -> Result<Amax> {
    shape.check("the input", values.len())?;
    Ok(amax_of(isa, Elements::of(values), shape))
}

/// [`amax`] of values that were found to hold their shape.
pub(super) fn amax_of(isa: Isa, values: Elements<'_>, shape: Shape) -> Amax {
    if shape.is_empty() {
        return Amax::default();
    }
    let pieces = Pieces::of(shape, 32);
    let blocks = pieces.blocks();
    let task = |first: usize| {
        let mut sum = Amax::default();
        for Part { start, len, .. } in pieces.in_blocks(first, TASK_BLOCKS.min(blocks - first)) {
            sum.add(amax_of_part(isa, values.part(start, len)));
        }
        sum
    };
    if blocks <= TASK_BLOCKS {
        return task(0);
    }
    let tasks = (0..blocks.div_ceil(TASK_BLOCKS)).into_par_iter().map(|i| task(i * TASK_BLOCKS));
    tasks.reduce(Amax::default, |mut sum, part| {
        sum.add(part);
        sum
    })
}

/// The amax of elements that follow each other.
pub(super) fn amax_of_part(isa: Isa, values: Elements<'_>) -> Amax {
    let most = f32::from_bits(isa.amax_bits(values));
    if most.is_finite() {
        return Amax { finite: most, ..Amax::default() };
    }
    let mut sum = Amax::default();
    by_dtype!(Elements, values => for part in values.chunks(PART) {
        let most = f32::from_bits(isa.amax_bits(Elements::of(part)));
        if most.is_finite() {
            sum.add(Amax { finite: most, ..Amax::default() });
        } else {
            part.iter().for_each(|value| sum.add(Amax::of_value(Element::to_f32(*value))));
        }
    });
    sum
}
