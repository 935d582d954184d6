//! Matrices, importance by column, and recipes.

use std::path::PathBuf;

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::{
    Element, Format, Numerics, Quantized, QuantizedShape, QuantizedTensor, Recipe, Search, Shape,
    quantize_into,
};
pub(crate) use microscale_test_support::cases::SEARCHES;
use microscale_test_support::cases::options;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};

/// Blocks of each distribution.
pub(crate) const BLOCKS: usize = 100_000;
/// Blocks of each distribution for weighted errors, or for many recipes.
pub(crate) const FEWER_BLOCKS: usize = 10_000;
/// Columns of the matrices.
pub(crate) const COLS: usize = 1600;

pub(crate) const FORMATS: [Format; 2] = Format::MULTIPLIED;

/// Draws a number from a distribution.
type Sampler = fn(&mut fastrand::Rng) -> f64;

const DISTRIBUTIONS: [(&str, Sampler); 5] = [
    ("Gaussian", gaussian),
    ("Laplace", |rng| (1.0 - rng.f64()).ln() * f64::from(rng.i8(0..2) * 2 - 1)),
    ("Student-t, 3 degrees", |rng| {
        let chi_squared: f64 = (0..3).map(|_| gaussian(rng).powi(2)).sum();
        gaussian(rng) / (chi_squared / 3.0).sqrt()
    }),
    ("uniform", |rng| rng.f64() * 2.0 - 1.0),
    ("Gaussian, 1 % × 30", |rng| gaussian(rng) * if rng.f64() < 0.01 { 30.0 } else { 1.0 }),
];

fn gaussian(rng: &mut fastrand::Rng) -> f64 {
    // Box and Muller.
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.f64()).cos()
}

/// Returns matrices of [`COLS`] columns and up to `blocks` blocks.
///
/// They have every distribution, and real weights.
pub(crate) fn matrices(block: usize, blocks: usize) -> Vec<(&'static str, Vec<f32>)> {
    let count = blocks * block;
    assert_eq!(count % COLS, 0);
    let sample = |(name, sampler): &(&'static str, Sampler)| {
        let mut rng = fastrand::Rng::with_seed(5);
        (*name, (0..count).map(|_| sampler(&mut rng) as f32).collect())
    };
    let mut matrices: Vec<_> = DISTRIBUTIONS.par_iter().map(sample).collect();
    matrices.push(("weights", weights(count)));
    matrices
}

/// Returns a checkpoint's matrices end to end, cut into rows of [`COLS`] and sampled evenly.
fn weights(most: usize) -> Vec<f32> {
    let files = match std::env::var_os("MICROSCALE_WEIGHTS") {
        Some(file) => vec![PathBuf::from(file)],
        None => {
            let shard = |shard| {
                microscale_test_support::sample().join(format!("model-0000{shard}-of-00002.safetensors"))
            };
            vec![shard(1), shard(2)]
        }
    };
    let mut weights = Vec::new();
    for file in files {
        let bytes = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let mut tensors = SafeTensors::deserialize(&bytes).expect("safetensors").tensors();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (_, tensor) in tensors {
            let halves = || tensor.data().chunks_exact(2).map(|bytes| [bytes[0], bytes[1]]);
            match tensor.dtype() {
                _ if tensor.shape().len() != 2 => {}
                Dtype::BF16 => weights.extend(halves().map(|bytes| bf16::from_le_bytes(bytes).to_f32())),
                Dtype::F16 => weights.extend(halves().map(|bytes| f16::from_le_bytes(bytes).to_f32())),
                Dtype::F32 => weights.extend(
                    tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                ),
                _ => {}
            }
        }
    }
    let (rows, taken) = (weights.len() / COLS, (weights.len().min(most)) / COLS);
    let row = |i| &weights[i * rows / taken * COLS..][..COLS];
    (0..taken).flat_map(row).copied().collect()
}

/// Returns weights by column over six orders of magnitude, some of them 0.
pub(crate) fn importance() -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(6);
    (0..COLS).map(|_| if rng.f32() < 0.05 { 0.0 } else { 10f32.powf(rng.f32() * 6.0 - 3.0) }).collect()
}

pub(crate) fn recipe(format: Format, numerics: Numerics, search: Search) -> Recipe {
    Recipe { search, ..Recipe::of(format, numerics).expect("a recipe") }
}

pub(crate) fn quantize<T: Element>(
    isa: Isa,
    values: &[T],
    recipe: &Recipe,
    importance: Option<&[f32]>,
) -> Quantized {
    let shape = Shape::new(values.len() / COLS, COLS);
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::new(recipe.format(), shape.rows, shape.cols))
        .expect("a tensor");
    let report =
        quantize_into(values, shape, recipe, options(isa, importance), &mut tensor).expect("finite values");
    Quantized { tensor, report }
}
