//! Matrices, Hessians of layers' inputs, and recipes.

use crate::inputs::Numbers;
use microscale::{Element, Format, Global, Numerics, Recipe, Search};

/// The distribution of a layer's inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Inputs {
    /// Independent columns.
    Independent,
    /// Each column follows the one before, with sizes that differ.
    Following,
    /// A few directions that all columns share, and columns that are never active.
    Shared,
    /// Columns in identical pairs, and fewer tokens than columns.
    Identical,
}

/// All distributions.
pub const ALL_INPUTS: [Inputs; 4] =
    [Inputs::Independent, Inputs::Following, Inputs::Shared, Inputs::Identical];

/// Returns whether a column of [`Inputs::Shared`] is never active.
fn is_dead(column: usize) -> bool {
    column % 7 == 3
}

/// Returns XᵀX.
pub fn hessian(inputs: Inputs, columns: usize, numbers: &mut Numbers) -> Vec<f32> {
    let tokens = if inputs == Inputs::Identical { columns / 2 } else { 2 * columns };
    let sizes: Vec<f64> = (0..columns).map(|_| (0.8 * numbers.normal()).exp()).collect();
    let shared: Vec<f64> = (0..3 * columns).map(|_| numbers.normal()).collect();
    let mut sums = vec![0.0; columns * columns];
    for _ in 0..tokens {
        let common = [(); 3].map(|()| numbers.normal());
        let mut x = vec![0.0; columns];
        for col in 0..columns {
            let own = numbers.normal();
            x[col] = match inputs {
                Inputs::Independent => own,
                Inputs::Following if col > 0 => 0.95 * x[col - 1] + 0.3 * own,
                Inputs::Following => own,
                Inputs::Shared if is_dead(col) => 0.0,
                Inputs::Shared => (0..3).map(|i| common[i] * shared[3 * col + i]).sum::<f64>() + 0.2 * own,
                Inputs::Identical if col % 2 == 1 => x[col - 1],
                Inputs::Identical => own,
            };
        }
        if inputs == Inputs::Following || inputs == Inputs::Shared {
            x.iter_mut().zip(&sizes).for_each(|(x, size)| *x *= size);
        }
        for (i, sums) in sums.chunks_mut(columns).enumerate() {
            sums.iter_mut().zip(&x).for_each(|(sum, other)| *sum += x[i] * other);
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// Returns a matrix of several distributions. `kind` 1 has heavy tails, 2 and 3 are far from 1.
pub fn matrix<T: Element>(count: usize, kind: usize, numbers: &mut Numbers) -> Vec<T> {
    let element = |normal: f64| match kind {
        0 => 0.02 * normal,
        1 => normal * normal * normal,
        2 => 1e-30 * normal,
        3 => 1e37 * normal,
        _ => (4.0 * normal).round() / 4.0,
    };
    (0..count).map(|_| T::from_f32(element(numbers.normal()) as f32)).collect()
}

/// Returns recipes of MXFP4 and NVFP4 with all their rules.
pub fn recipes(search: Search) -> Vec<Recipe> {
    let of = |format, numerics| {
        let recipe = Recipe::of(format, numerics).expect("the library has the format");
        Recipe { search, ..recipe }
    };
    vec![
        of(Format::Mxfp4, Numerics::Ocp),
        of(Format::Mxfp4, Numerics::CompressedTensors),
        of(Format::Mxfp4, Numerics::Modelopt),
        of(Format::Mxfp4, Numerics::Ggml),
        of(Format::Nvfp4, Numerics::CompressedTensors),
        of(Format::Nvfp4, Numerics::Modelopt),
        of(Format::Nvfp4, Numerics::Torchao),
        of(Format::Nvfp4, Numerics::TransformerEngine),
        of(Format::Nvfp4, Numerics::Modelopt).with_global(Global::Absent),
    ]
}
