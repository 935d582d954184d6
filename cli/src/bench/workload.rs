//! An operation on a matrix: its sizes, random input, and the check of its output.

use microscale::{Element, Error, Global, Recipe, Result, Shape};
use rayon::prelude::*;

use super::op::Op;

/// An operation on a matrix, with its sizes.
pub(super) struct Workload {
    pub(super) op: Op,
    pub(super) recipe: Recipe,
    pub(super) shape: Shape,
    pub(super) bytes: u64,
}

impl Workload {
    /// The recipe, with the global scale unless the operation computes it.
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

/// Minimum bytes between two uses of a buffer: more than any cache, including an H200's L2 (60 MB)
/// and a server CPU's L3 (up to 480 MB).
pub(crate) const ROTATION_BYTES: u64 = 1 << 30;

/// Returns the number of buffer sets in rotation.
pub(super) fn sets(bytes: u64) -> usize {
    ROTATION_BYTES.div_ceil(bytes).clamp(2, 256) as usize
}

/// Returns roughly normal random values. Maxima of blocks vary over a few powers of two.
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

/// Returns [`Error::Wrong`] unless the bytes are equal.
pub(super) fn require_equal<V: PartialEq>(what: &'static str, found: &[V], expected: &[V]) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Wrong(what)) }
}
