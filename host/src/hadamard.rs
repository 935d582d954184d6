//! Block Hadamard transforms of matrices and of Hessians, on CPUs.

use microscale_formats::HadamardWidth;
use microscale_formats::activations::hadamard_factor;
use rayon::prelude::*;

/// Elements that a thread transforms at a time, a multiple of all widths.
const CHUNK: usize = 1 << 14;

/// Transforms the blocks of rows without gaps, whose length is a multiple of the width: W becomes
/// W·H.
///
/// H is its own inverse, so a second call gives the rows back, within the rounding of f32. NaN and
/// infinities spread over their block. [`formats::hadamard`](crate::formats::hadamard) defines the
/// arithmetic.
pub fn hadamard_rows(values: &mut [f32], width: HadamardWidth) {
    values.par_chunks_mut(CHUNK).for_each(|values| width.transform(values));
}

/// Transforms a Hessian XᵀX `[columns, columns]` to the one of transformed inputs, H·XᵀX·H.
///
/// `columns` is a multiple of the width. Rows are transformed first, then columns, in f32.
pub fn hadamard_hessian(hessian: &mut [f32], columns: usize, width: HadamardWidth) {
    let size = width.columns();
    let factor = hadamard_factor(size);
    hessian.par_chunks_mut((size * columns).max(1)).for_each(|rows| {
        width.transform(rows);
        if rows.len() < size * columns {
            return;
        }
        let mut distance = 1;
        while distance < size {
            for pair in rows.chunks_exact_mut(2 * distance * columns) {
                let (first, second) = pair.split_at_mut(distance * columns);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        rows.iter_mut().for_each(|value| *value *= factor);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::Words;

    /// Returns numbers from -1 to 1 without a pattern.
    fn noise(count: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// XᵀX in f64.
    fn gram(inputs: &[f32], columns: usize) -> Vec<f64> {
        let mut sums = vec![0.0; columns * columns];
        for row in inputs.chunks_exact(columns) {
            for (i, a) in row.iter().enumerate() {
                for (j, b) in row.iter().enumerate() {
                    sums[i * columns + j] += f64::from(*a) * f64::from(*b);
                }
            }
        }
        sums
    }

    #[test]
    fn products_of_transformed_rows_and_inputs_are_equal() {
        let columns = 256;
        let (weights, inputs) = (noise(3 * columns), noise(8 * columns).split_off(5 * columns));
        let product = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        for width in HadamardWidth::values() {
            let (mut w, mut x) = (weights.clone(), inputs.clone());
            hadamard_rows(&mut w, width);
            hadamard_rows(&mut x, width);
            assert_ne!(w, weights);
            for (rows, before) in w.chunks(columns).zip(weights.chunks(columns)) {
                for (inputs, inputs_before) in x.chunks(columns).zip(inputs.chunks(columns)) {
                    let (found, right) = (product(rows, inputs), product(before, inputs_before));
                    assert!((found - right).abs() < 1e-5, "{width}: {found} {right}");
                }
            }
            hadamard_rows(&mut w, width);
            assert!(w.iter().zip(&weights).all(|(a, b)| (a - b).abs() < 1e-6), "{width}");
        }
    }

    #[test]
    fn a_transformed_hessian_is_of_the_transformed_inputs() {
        let columns = 256;
        let inputs = noise(64 * columns);
        for width in HadamardWidth::values() {
            let mut transformed = inputs.clone();
            hadamard_rows(&mut transformed, width);
            let right = gram(&transformed, columns);
            let mut found: Vec<f32> = gram(&inputs, columns).iter().map(|sum| *sum as f32).collect();
            hadamard_hessian(&mut found, columns, width);
            for (found, right) in found.iter().zip(&right) {
                assert!((f64::from(*found) - right).abs() < 1e-4, "{width}: {found} {right}");
            }
        }
    }
}
