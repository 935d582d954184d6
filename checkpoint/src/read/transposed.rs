//! Matrices in a tensor's last two dimensions, transposed.

use microscale::Element;
use rayon::prelude::*;

use crate::read::values::Values;

impl Values<'_> {
    /// The matrices in the last two dimensions, transposed.
    pub(crate) fn transposed(&self, shape: &[usize]) -> Self {
        match self {
            Self::F32(values) => Self::F32(transposed(values, shape).into()),
            Self::F16(values) => Self::F16(transposed(values, shape).into()),
            Self::Bf16(values) => Self::Bf16(transposed(values, shape).into()),
        }
    }
}

/// A tensor's matrices in its last two dimensions, transposed.
pub(crate) fn transposed<T: Element>(values: &[T], shape: &[usize]) -> Vec<T> {
    /// Sides of what is moved at a time: its rows and columns lie in the first-level cache.
    const TILE: usize = 64;
    let [.., rows, cols] = *shape else { return values.to_vec() };
    let mut transposed = vec![T::default(); values.len()];
    let matrix = rows.saturating_mul(cols).max(1);
    let bands = transposed.par_chunks_mut(matrix).zip(values.par_chunks(matrix)).flat_map(|(to, from)| {
        to.par_chunks_mut(rows.saturating_mul(TILE).max(1))
            .enumerate()
            .map(move |(band, to)| (band * TILE, to, from))
    });
    bands.for_each(|(first, to, from)| {
        for row in (0..rows).step_by(TILE) {
            for (col, to) in (first..).zip(to.chunks_exact_mut(rows)) {
                let to = &mut to[row..rows.min(row + TILE)];
                for (to, row) in to.iter_mut().zip(row..) {
                    *to = from[row * cols + col];
                }
            }
        }
    });
    transposed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_matrix_is_transposed() {
        let shape = [3, 70, 131];
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32).collect();
        let transposed = transposed(&values, &shape);
        for (i, value) in transposed.iter().enumerate() {
            let (matrix, col, row) = (i / (70 * 131), i / 70 % 131, i % 70);
            assert_eq!(*value, (matrix * 70 * 131 + row * 131 + col) as f32);
        }
        assert!(super::transposed::<f32>(&[], &[0, 5, 7]).is_empty());
        assert!(super::transposed::<f32>(&[], &[5, 0, 7]).is_empty());
    }
}
