//! Compares the scales that a full search chose with every other scale.
//!
//! The conditional errors come from Schur complements, by elimination in f64, and not from the
//! factor that the library uses.

use microscale::formats::search::Scales;
use microscale::formats::{E8m0, GlobalScale};
use microscale::{
    Format, GptqFactor, GptqOptions, GptqOrder, GptqScales, Recipe, Search, Shape, dequantize, quantize_gptq,
};

use microscale_test_support::hessians::{ALL_INPUTS, Inputs, hessian, matrix, recipes};
use microscale_test_support::inputs::Numbers;

const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The conditional Hessian of a block of columns, and how earlier errors move its optimum.
struct Conditional {
    /// The Schur complement of all later columns, `[N, N]`.
    schur: Vec<f64>,
    /// `[N, earlier columns]`: the change of the optimum for each earlier residual.
    shift: Vec<f64>,
}

/// Eliminates variable `k`, the last one, from a matrix with this number of columns.
fn eliminate(matrix: &mut [f64], columns: usize, k: usize) {
    for i in 0..k {
        let factor = matrix[i * columns + k] / matrix[k * columns + k];
        for j in 0..k {
            matrix[i * columns + j] -= factor * matrix[k * columns + j];
        }
    }
}

/// Returns the conditional Hessians of all blocks of `n` columns.
fn conditionals(entries: &[f32], columns: usize, n: usize) -> Vec<Conditional> {
    let diagonal: Vec<f64> = (0..columns).map(|i| entries[i * (columns + 1)].into()).collect();
    let active = diagonal.iter().filter(|entry| **entry > 0.0).count();
    let mean = diagonal.iter().sum::<f64>() / active as f64;
    let mut matrix: Vec<f64> = entries.iter().map(|entry| f64::from(*entry) / mean).collect();
    (0..columns).for_each(|i| matrix[i * (columns + 1)] += 0.01);
    let mut all = Vec::new();
    for start in (0..columns).step_by(n).rev() {
        let schur: Vec<f64> =
            (0..n * n).map(|at| matrix[(start + at / n) * columns + start + at % n]).collect();
        // Solves schur · shift = −coupling by Gauss.
        let mut left = schur.clone();
        let mut shift: Vec<f64> =
            (0..n * start).map(|at| -matrix[(start + at / start) * columns + at % start]).collect();
        for k in 0..n {
            let pivot = left[k * (n + 1)];
            left[k * n..][..n].iter_mut().for_each(|entry| *entry /= pivot);
            shift[k * start..][..start].iter_mut().for_each(|entry| *entry /= pivot);
            for i in (0..n).filter(|i| *i != k) {
                let factor = left[i * n + k];
                (0..n).for_each(|j| left[i * n + j] -= factor * left[k * n + j]);
                (0..start).for_each(|j| shift[i * start + j] -= factor * shift[k * start + j]);
            }
        }
        all.push(Conditional { schur, shift });
        (start..start + n).rev().for_each(|k| eliminate(&mut matrix, columns, k));
    }
    all.reverse();
    all
}

impl Conditional {
    fn error(&self, rests: &[f64]) -> f64 {
        let n = rests.len();
        (0..n * n).map(|at| rests[at / n] * self.schur[at] * rests[at % n]).sum()
    }

    /// Returns the residuals of the block under a factor, column by column with feedback.
    ///
    /// Returns `None` if a weight is so close to a tie that f32 may decide otherwise.
    fn rests(&self, optimum: &[f64], factor: f64) -> Option<Vec<f64>> {
        let n = optimum.len();
        // The coefficients of earlier residuals, by eliminating later columns.
        let mut matrix = self.schur.clone();
        let mut coefficients = vec![0.0; n * n];
        for k in (0..n).rev() {
            (0..k).for_each(|j| coefficients[k * n + j] = matrix[k * n + j] / matrix[k * (n + 1)]);
            eliminate(&mut matrix, n, k);
        }
        let mut rests: Vec<f64> = Vec::new();
        for k in 0..n {
            let feedback: f64 =
                rests.iter().enumerate().map(|(j, rest)| coefficients[k * n + j] * rest).sum();
            let from = optimum[k] - feedback;
            let scaled = from.abs() / factor;
            let distance = |value: f64| (scaled - value).abs();
            let mut nearest = VALUES;
            nearest.sort_by(|a, b| distance(*a).total_cmp(&distance(*b)));
            if distance(nearest[1]) - distance(nearest[0]) < 1e-3 {
                return None;
            }
            rests.push((nearest[0] * factor).copysign(from) - optimum[k]);
        }
        Some(rests)
    }
}

fn factor_of(format: Format, byte: u8, global: Option<GlobalScale>) -> f64 {
    match format {
        Format::Nvfp4 => global.factor(byte).into(),
        _ => E8m0::from_bits(byte).to_f32().into(),
    }
}

/// Returns the blocks, and how many were compared with all scales that can be stored.
fn check(inputs: Inputs, kind: usize, recipe: &Recipe, numbers: &mut Numbers) -> (usize, usize) {
    let shape = Shape::new(4, 96);
    let entries = hessian(inputs, shape.cols, numbers);
    let values: Vec<f32> = matrix(shape.elements(), kind, numbers);
    let options = GptqOptions::new().order(GptqOrder::Natural);
    let factor = GptqFactor::new(&entries, shape.cols, recipe.format(), options).expect("a factor");
    let tensor = quantize_gptq(&values, shape, recipe, &factor, GptqScales::InLoop).expect("it").tensor;
    let dequantized: Vec<f32> = dequantize(&tensor);
    let n = recipe.format().block();
    let bytes = if recipe.format() == Format::Nvfp4 { 1..=126 } else { 0..=254 };
    let (mut blocks, mut compared) = (0, 0);
    for (block, conditional) in conditionals(&entries, shape.cols, n).iter().enumerate() {
        let start = block * n;
        for row in 0..shape.rows {
            let row_values = &values[row * shape.cols..][..shape.cols];
            let row_quantized = &dequantized[row * shape.cols..][..shape.cols];
            let rest = |i: usize| f64::from(row_quantized[i]) - f64::from(row_values[i]);
            let optimum: Vec<f64> = (0..n)
                .map(|k| {
                    let shift = |j: usize| conditional.shift[k * start + j] * rest(j);
                    f64::from(row_values[start + k]) + (0..start).map(shift).sum::<f64>()
                })
                .collect();
            let rests: Vec<f64> = (0..n).map(|k| f64::from(row_quantized[start + k]) - optimum[k]).collect();
            let (found, size) = (conditional.error(&rests), conditional.error(&optimum));
            let byte = tensor.scales()[row * tensor.blocks_per_row() + block];
            blocks += 1;
            for other in bytes.clone() {
                let factor = factor_of(recipe.format(), other, tensor.global_scale());
                let Some(rests) = conditional.rests(&optimum, factor) else { continue };
                let error = conditional.error(&rests);
                compared += 1;
                let what = format!("{recipe:?}, {inputs:?}, kind {kind}, block {start} of row {row}");
                assert!(
                    found <= error * (1.0 + 1e-3) + size * 1e-6,
                    "{what}: {byte:#x} errs by {found:e}, {other:#x} by {error:e}"
                );
            }
        }
    }
    (blocks, compared)
}

#[test]
fn no_scale_that_can_be_stored_has_a_smaller_conditional_error() {
    let mut numbers = Numbers::new(1);
    let (mut blocks, mut compared) = (0, 0);
    for recipe in recipes(Search::Full) {
        for inputs in ALL_INPUTS {
            for kind in [0, 1, 2] {
                let counts = check(inputs, kind, &recipe, &mut numbers);
                (blocks, compared) = (blocks + counts.0, compared + counts.1);
            }
        }
    }
    assert!(compared > blocks * 100, "{compared} errors of {blocks} blocks");
}
