//! Matrices, distributions of layers' inputs, and recipes.

use microscale::{Format, Global, Numerics, Recipe, Shape};
use microscale_test_support::inputs::Numbers;
use microscale_test_support::oracle::Exact;

/// The distribution of a layer's inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Inputs {
    /// This number of tokens with independent columns.
    Independent(usize),
    /// A few directions that all columns share, and a mean, with little noise.
    Correlated,
    /// Columns of very different sizes, some never active.
    Uneven,
    /// One column at a time.
    Diagonal,
    /// The identity matrix.
    Identity,
    /// Not a Hessian of any inputs. Errors may be negative.
    Indefinite,
}

pub(crate) const ALL_INPUTS: [Inputs; 7] = [
    Inputs::Independent(200),
    // Fewer tokens than the columns of a block, so the rank is deficient.
    Inputs::Independent(9),
    Inputs::Correlated,
    Inputs::Uneven,
    Inputs::Diagonal,
    Inputs::Identity,
    Inputs::Indefinite,
];

/// Returns the diagonal blocks of XᵀX, with NaN after the last column.
pub(crate) fn hessian(inputs: Inputs, cols: usize, block: usize, numbers: &mut Numbers) -> Vec<f32> {
    let tokens = if let Inputs::Independent(tokens) = inputs { tokens } else { 100 };
    let shared: Vec<[f64; 3]> = (0..cols).map(|_| [(); 3].map(|()| numbers.normal())).collect();
    let sizes: Vec<f64> = (0..cols)
        .map(|_| match inputs {
            Inputs::Uneven if numbers.0.u8(..) < 40 => 0.0,
            Inputs::Uneven | Inputs::Diagonal => (3.0 * numbers.normal()).exp(),
            _ => 1.0,
        })
        .collect();
    let mut all = vec![f32::NAN; cols.div_ceil(block) * block * block];
    let x: Vec<Vec<f64>> = (0..tokens)
        .map(|_| {
            let common = [(); 3].map(|()| numbers.normal());
            let column = |col: usize, own: f64| match inputs {
                Inputs::Correlated => {
                    let together: f64 = common.iter().zip(shared[col]).map(|(a, b)| a * b).sum();
                    together + 2.0 + 0.05 * own
                }
                _ => own * sizes[col],
            };
            (0..cols).map(|col| column(col, numbers.normal())).collect()
        })
        .collect();
    for (i, entries) in all.chunks_mut(block * block).enumerate() {
        let used = block.min(cols - i * block);
        for (row, col) in (0..used).flat_map(|row| (0..used).map(move |col| (row, col))) {
            let (a, b) = (i * block + row, i * block + col);
            let sum: f64 = match inputs {
                Inputs::Identity => f64::from(u8::from(a == b)),
                Inputs::Indefinite if a == b => 0.3,
                Inputs::Indefinite => (1.0 + (a * b) as f64).sin(),
                Inputs::Diagonal => {
                    if a == b {
                        sizes[a]
                    } else {
                        0.0
                    }
                }
                _ => x.iter().map(|x| x[a] * x[b]).sum(),
            };
            entries[row * block + col] = sum as f32;
        }
    }
    all
}

/// Returns an element of several distributions.
///
/// `kind` 3 has many ties between codes, and 4 has outliers beyond a block's range.
pub(crate) fn element(kind: usize, numbers: &mut Numbers) -> f64 {
    let normal = numbers.normal();
    match kind {
        0 => normal,
        1 => normal * normal * normal,
        2 => 1e-30 * normal,
        3 => (normal * 4.0).round() / 4.0,
        4 if numbers.0.u8(..) < 12 => normal * 3000.0,
        _ => 0.02 * normal,
    }
}

pub(crate) fn matrix<T: Exact>(shape: Shape, kind: usize, numbers: &mut Numbers) -> Vec<T> {
    (0..shape.rows * shape.row_stride).map(|_| T::round_f64(element(kind, numbers))).collect()
}

/// Returns recipes of MXFP4 and NVFP4 with several numerics.
pub(crate) fn recipes() -> Vec<Recipe> {
    let of = |format, numerics| Recipe::of(format, numerics).expect("there is one");
    let nvfp4 = of(Format::Nvfp4, Numerics::Modelopt);
    vec![
        of(Format::Mxfp4, Numerics::Ocp),
        of(Format::Mxfp4, Numerics::Modelopt),
        of(Format::Mxfp4, Numerics::Ggml),
        nvfp4.with_global(Global::Absent),
        nvfp4,
        of(Format::Nvfp4, Numerics::CompressedTensors),
        of(Format::Nvfp4, Numerics::TransformerEngine),
        of(Format::Nvfp4, Numerics::Torchao),
    ]
}
