//! A workload: an operation with its sizes worked out, its random input, and the check of its output.

use microscale::{Element, Error, Global, Recipe, Result, Shape};
use rayon::prelude::*;

use super::op::Op;

/// An operation on a matrix to measure, with its sizes worked out.
pub(super) struct Workload {
    pub(super) op: Op,
    pub(super) recipe: Recipe,
    pub(super) shape: Shape,
    pub(super) bytes: u64,
}

impl Workload {
    /// The recipe for these values: unless its computation is part of the operation, the global scale is
    /// given.
    pub(super) fn recipe<T: Element>(&self, values: &[T]) -> Result<Recipe> {
        let Some(arithmetic) = self.recipe.scheme.global_from_amax() else { return Ok(self.recipe) };
        if self.op == Op::AmaxQuantize {
            return Ok(self.recipe);
        }
        let amax = microscale::cpu::amax(values, self.shape)?;
        let given = amax.global_scale::<T>(&arithmetic, self.recipe.non_finite);
        Ok(self.recipe.with_global(Global::Given(given)))
    }
}

/// Buffers are rotated until the bytes between two uses of one exceed this: several times any cache, an
/// H200's second level (60 MB) or a server CPU's third (up to 480 MB) included.
pub(crate) const ROTATION_BYTES: u64 = 1 << 30;

/// Sets of buffers to rotate among.
pub(super) fn sets(bytes: u64) -> usize {
    ROTATION_BYTES.div_ceil(bytes).clamp(2, 256) as usize
}

/// Random values: about normal, with a block's largest magnitude spread over a few powers of two.
pub(super) fn random<T: Element>(elements: usize, seed: u64) -> Vec<T> {
    let mut values = vec![T::default(); elements];
    values.par_chunks_mut(1 << 16).enumerate().for_each(|(i, chunk)| {
        let mut rng = fastrand::Rng::with_seed(seed << 32 | i as u64);
        for value in chunk {
            let sum: f32 = (0..4).map(|_| rng.f32() - 0.5).sum();
            *value = T::from_f32(sum * 1.7);
        }
    });
    values
}

/// [`Error::Wrong`] unless the bytes are equal.
pub(super) fn require_equal<V: PartialEq>(what: &'static str, found: &[V], expected: &[V]) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Wrong(what)) }
}
