//! The amax of a matrix on the CPU: the largest finite magnitude, in tasks for rayon's threads.

use rayon::prelude::*;

use super::isa::Isa;
use crate::amax::Amax;
use crate::cpu::blocks::partition::{Partition, Run, TASK_BLOCKS};
use crate::element::Element;
use crate::elements::{Elements, by_dtype};
use crate::error::Result;
use crate::shape::{MatrixShape, Shape, Strided};

/// Elements per part. Only parts with NaN or infinities are read again, element by element.
const PART: usize = 1 << 12;

/// The largest magnitude of the matrix that `shape` describes in `values`, on the CPU.
///
/// # Errors
///
/// If the slice does not hold the shape, the errors of [`quantize`](super::quantize()).
pub fn amax<T: Element>(values: &[T], shape: impl Into<MatrixShape>) -> Result<Amax> {
    amax_with(Isa::best(), values, shape)
}

/// [`amax`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`amax`].
pub fn amax_with<T: Element>(isa: Isa, values: &[T], shape: impl Into<MatrixShape>) -> Result<Amax> {
    let shape = shape.into();
    shape.check(values.len())?;
    Ok(amax_of_matrix(isa, Elements::of(values), &shape.simplified()))
}

/// [`amax`] of values that are checked to hold their simplified shape.
pub(super) fn amax_of_matrix(isa: Isa, values: Elements<'_>, shape: &MatrixShape) -> Amax {
    match shape {
        MatrixShape::Rows(shape) => amax_of(isa, values, *shape),
        MatrixShape::Strided(strided) => by_dtype!(Elements, values => amax_of_strided(isa, values, strided)),
    }
}

/// The amax of contiguous rows.
fn amax_of(isa: Isa, values: Elements<'_>, shape: Shape) -> Amax {
    if shape.is_empty() {
        return Amax::default();
    }
    let partition = Partition::of(shape, 32);
    let blocks = partition.blocks();
    let task = |first: usize| {
        let mut sum = Amax::default();
        for Run { start, len, .. } in partition.runs(first, TASK_BLOCKS.min(blocks - first)) {
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

/// The amax of a strided matrix, read in the order of memory.
fn amax_of_strided<T: Element>(isa: Isa, values: &[T], strided: &Strided) -> Amax {
    const PIECE: usize = 1 << 16;
    if strided.is_empty() {
        return Amax::default();
    }
    let [(n, outer), (middle, stride), (inner, step)] = strided.in_memory_order();
    let partition = inner.div_ceil(PIECE);
    let one = |index: usize| {
        let (at, line) = (index % partition * PIECE, index / partition);
        let far = |count: usize, index: usize, stride: usize| if count > 1 { index * stride } else { 0 };
        let step = if inner > 1 { step } else { 1 };
        let start = far(n, line / middle, outer) + far(middle, line % middle, stride) + at * step;
        let len = PIECE.min(inner - at);
        let mut sum = Amax::default();
        if step == 1 {
            values[start..][..len]
                .chunks(PART)
                .for_each(|part| sum.add(amax_of_part(isa, Elements::of(part))));
        } else {
            let values = values[start..].iter().step_by(step).take(len);
            values.for_each(|value| sum.add(Amax::of_value(value.to_f32())));
        }
        sum
    };
    let plus = |mut sum: Amax, part| {
        sum.add(part);
        sum
    };
    (0..n * middle * partition).into_par_iter().map(one).reduce(Amax::default, plus)
}

/// The amax of contiguous elements.
fn amax_of_part(isa: Isa, values: Elements<'_>) -> Amax {
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
