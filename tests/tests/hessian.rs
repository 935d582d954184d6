//! Scales searched by the error in a layer's output, against every scale tried, one by one, without any bound.

use half::{bf16, f16};
use microscale::cpu::{Isa, quantize_hessian_with};
use microscale::formats::{GlobalScale, ScaleLayout, Search};
use microscale::{
    Convention, Error, Format, Global, HessianFault, NonFinite, Quantized, QuantizedShape, QuantizedTensor,
    Recipe, Scheme, Shape, quantize, quantize_hessian, quantize_weighted,
};
use microscale_tests::oracle::nvfp4::{self, Rule};
use microscale_tests::oracle::{self, Exact, mx};

/// Numbers that look random.
struct Numbers(fastrand::Rng);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// From a normal distribution.
    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.0.f64(), self.0.f64());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// What inputs of a layer look like.
#[derive(Clone, Copy, Debug)]
enum Inputs {
    /// So many tokens of independent columns.
    Independent(usize),
    /// A few directions that all columns share, and a mean, with little noise.
    Correlated,
    /// Columns of very different size, some never active.
    Uneven,
    /// One column at a time.
    Diagonal,
    /// The unit matrix.
    Identity,
    /// No inputs have this: errors are negative, too.
    Indefinite,
}

const ALL_INPUTS: [Inputs; 7] = [
    Inputs::Independent(200),
    // Fewer than the columns of a block: of deficient rank.
    Inputs::Independent(9),
    Inputs::Correlated,
    Inputs::Uneven,
    Inputs::Diagonal,
    Inputs::Identity,
    Inputs::Indefinite,
];

/// The diagonal blocks of XᵀX, what lies behind the last column NaN.
fn hessian(inputs: Inputs, cols: usize, block: usize, numbers: &mut Numbers) -> Vec<f32> {
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

/// Elements of several distributions; `kind` 3 has many ties between codes, 4 outliers beyond what a block can hold.
fn element(kind: usize, numbers: &mut Numbers) -> f64 {
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

fn matrix<T: Exact>(shape: Shape, kind: usize, numbers: &mut Numbers) -> Vec<T> {
    (0..shape.rows * shape.row_stride).map(|_| T::round_f64(element(kind, numbers))).collect()
}

/// The scales of a recipe under a tensor's global scale, by the oracle.
struct Scales<'a> {
    recipe: &'a Recipe,
    global: Option<GlobalScale>,
}

impl Scales<'_> {
    fn factor(&self, byte: u8) -> f64 {
        match self.recipe.format() {
            Format::Nvfp4 => nvfp4::factor(byte, self.global).into(),
            _ => mx::scale_value(byte),
        }
    }

    /// The codes of a block under a scale.
    fn codes(&self, block: &[f64], byte: u8) -> Vec<u8> {
        match self.recipe.scheme {
            Scheme::Nvfp4(arithmetic, _) => {
                let scaling = self.rule(arithmetic).scaling(byte);
                let element = mx::Element::e2m1();
                let code = |x: &f64| {
                    let quotient = f64::from(scaling.apply(*x as f32));
                    element.code(quotient, 1.0, microscale::formats::Ties::Even, arithmetic.negative_zero)
                };
                block.iter().map(code).collect()
            }
            Scheme::Mxfp4(a) => {
                let scale = mx::scale_value(byte);
                let code = |x: &f64| mx::Element::e2m1().code(*x, scale, a.ties, a.negative_zero);
                block.iter().map(code).collect()
            }
            _ => unreachable!("formats of 4 bits alone"),
        }
    }

    fn rule(&self, arithmetic: microscale::formats::nvfp4::Arithmetic) -> Rule {
        let global = self.global.map_or(1.0, GlobalScale::value);
        Rule { convention: nvfp4::convention(arithmetic), global, negative_zero: arithmetic.negative_zero }
    }

    fn larger<T: Exact>(&self, block: &[f64]) -> u8 {
        let amax = block.iter().fold(0.0, |amax: f64, x| amax.max(x.abs())) as f32 * 1.5;
        match self.recipe.scheme {
            Scheme::Nvfp4(arithmetic, _) => {
                let rule = self.rule(arithmetic);
                rule.byte(rule.wanted::<T>(amax))
            }
            Scheme::Mxfp4(a) => {
                let exponent = mx::Element::e2m1().scale_exponent(amax.into(), a.scale_rule);
                (exponent.clamp(-127, 127) + 127) as u8
            }
            _ => unreachable!("formats of 4 bits alone"),
        }
    }

    /// The bytes that a search may look at besides the plain one, in ascending order.
    fn candidates<T: Exact>(&self, block: &[f64], plain: u8) -> Vec<u8> {
        let (nvfp4, plain) = (self.recipe.format() == Format::Nvfp4, i32::from(plain));
        let (first, last) = if nvfp4 { (1, 126) } else { (0, 254) };
        let (below, above) = if nvfp4 { (2, 6) } else { (1, 1) };
        match self.recipe.search {
            Search::None => vec![],
            Search::FourSix if block.iter().all(|x| *x == 0.0) => vec![],
            Search::FourSix => vec![self.larger::<T>(block)],
            Search::Window => (first.max(plain - below)..=last.min(plain + above)).map(|b| b as u8).collect(),
            Search::Full => (first..=last).map(|b| b as u8).collect(),
        }
    }

    fn rests(&self, block: &[f64], byte: u8) -> Vec<f64> {
        let codes = self.codes(block, byte);
        block
            .iter()
            .zip(codes)
            .map(|(x, code)| x - self.factor(byte) * oracle::value(Format::Mxfp4, code, 127, None))
            .collect()
    }
}

/// The error in the order of summation that is documented.
fn error(hessian: &[f64], rests: &[f64]) -> f64 {
    let n = rests.len();
    let mut chains = [0.0; 4];
    for i in 0..n {
        let mut y = 0.0;
        for j in 0..n {
            y += hessian[j * n + i] * rests[j];
        }
        chains[i % 4] += y * rests[i];
    }
    (chains[0] + chains[1]) + (chains[2] + chains[3])
}

/// The error in another order, and how far roundings can have brought either from the truth: there are fewer than 2^8
/// of them, each of 2^-53 of the sum of magnitudes.
fn error_otherwise(hessian: &[f64], rests: &[f64]) -> (f64, f64) {
    let n = rests.len();
    let terms = (0..n * n).rev().map(|at| hessian[at] * (rests[at / n] * rests[at % n]));
    let (sum, magnitudes) = terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()));
    // 1024 terms one after another.
    (sum, magnitudes * 1100.0 * 2f64.powi(-53))
}

/// Compares every block with all scales tried; returns how many there were, and how many scales the search tried.
fn check<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe, entries: &[f32], what: &str) -> (usize, u64) {
    let Quantized { tensor, report } = quantize_hessian(values, shape, recipe, entries).expect(what);
    for isa in Isa::available() {
        let mut other = QuantizedTensor::zeros(
            QuantizedShape::new(tensor.format(), shape.rows, shape.cols)
                .with_scale_layout(recipe.scale_layout),
        )
        .expect(what);
        let again = quantize_hessian_with(isa, values, shape, recipe, entries, &mut other).expect(what);
        assert_eq!((&other, again), (&tensor, report), "{what} by {isa:?}");
    }
    let plain = quantize(values, shape, &Recipe { search: Search::None, ..*recipe }).expect(what).tensor;
    let [tensor, plain] = [tensor, plain].map(|tensor| tensor.convert_layout(ScaleLayout::Linear));
    assert_eq!(tensor.global_scale(), plain.global_scale(), "{what}");
    let scales = Scales { recipe, global: tensor.global_scale() };
    let (n, in_row) = (recipe.format().block(), tensor.blocks_per_row());
    let codes = oracle::unpack(recipe.format(), tensor.codes());
    let mut rescaled = 0;
    for (i, (found, plain)) in tensor.scales().iter().zip(plain.scales()).enumerate() {
        let (row, first) = (i / in_row, i % in_row * n);
        let used = n.min(shape.cols - first);
        let mut block = vec![0.0; n];
        for (x, value) in block.iter_mut().zip(&values[row * shape.row_stride + first..][..used]) {
            *x = value.to_f64();
        }
        let entry = |at: usize| f64::from(entries[i % in_row * n * n + at]);
        let inside = |at: usize| at / n < used && at % n < used;
        let hessian: Vec<f64> = (0..n * n).map(|at| if inside(at) { entry(at) } else { 0.0 }).collect();
        let zeros = block.iter().all(|x| *x == 0.0);
        let mut best = (*plain, error(&hessian, &scales.rests(&block, *plain)));
        let (mut least, mut slack) = error_otherwise(&hessian, &scales.rests(&block, *plain));
        for byte in scales.candidates::<T>(&block, *plain) {
            let rests = scales.rests(&block, byte);
            let error = error(&hessian, &rests);
            // The first of equals, in ascending order; the plain one if it is among them.
            if !zeros && error < best.1 {
                best = (byte, error);
            }
            let otherwise = error_otherwise(&hessian, &rests);
            (least, slack) = (least.min(otherwise.0), slack.max(otherwise.1));
        }
        let what = format!("{what}: block {first} of row {row}, {block:?}, plain {plain}");
        assert_eq!(*found, best.0, "{what}");
        assert_eq!(codes[i * n..][..n], scales.codes(&block, *found), "{what}");
        let of_found = error_otherwise(&hessian, &scales.rests(&block, *found)).0;
        assert!(of_found <= least + 2.0 * slack, "{what}: {of_found} of {found} for {least}");
        rescaled += u64::from(found != plain);
    }
    assert_eq!(report.rescaled_blocks, rescaled, "{what}");
    assert!(report.tried_scales >= tensor.scales().len() as u64, "{what}");
    (tensor.scales().len(), report.tried_scales)
}

/// MXFP4 and NVFP4 by several conventions.
fn recipes() -> Vec<Recipe> {
    let of = |format, convention| Recipe::of(format, convention).expect("there is one");
    let nvfp4 = of(Format::Nvfp4, Convention::Modelopt);
    vec![
        of(Format::Mxfp4, Convention::Ocp),
        of(Format::Mxfp4, Convention::Modelopt),
        of(Format::Mxfp4, Convention::Ggml),
        nvfp4.with_global(Global::Absent),
        nvfp4,
        of(Format::Nvfp4, Convention::CompressedTensors),
        of(Format::Nvfp4, Convention::TransformerEngine),
        of(Format::Nvfp4, Convention::Torchao),
    ]
}

fn every_scale<T: Exact>(seed: u64) {
    let mut numbers = Numbers::new(seed);
    let (mut blocks, mut tried) = ([0; 7], [0; 7]);
    for (index, recipe) in recipes().into_iter().enumerate() {
        for (which, inputs) in ALL_INPUTS.into_iter().enumerate() {
            for kind in 0..5 {
                let shape = Shape::new(5, 32 * 4 + 13).with_row_stride(150);
                let values: Vec<T> = matrix(shape, kind, &mut numbers);
                let entries = hessian(inputs, shape.cols, recipe.format().block(), &mut numbers);
                let searches = [Search::Full, Search::Window, Search::FourSix];
                for search in &searches[..if index % 3 == 0 { 3 } else { 1 }] {
                    let scale_layout =
                        if kind % 2 == 0 { ScaleLayout::Linear } else { ScaleLayout::Swizzled };
                    let recipe = Recipe { search: *search, scale_layout, ..recipe };
                    let what = format!("{recipe:?}, {inputs:?}, kind {kind}");
                    let checked = check(&values, shape, &recipe, &entries, &what);
                    if *search == Search::Full && recipe.format() == Format::Nvfp4 {
                        (blocks[which], tried[which]) = (blocks[which] + checked.0, tried[which] + checked.1);
                    }
                }
            }
        }
    }
    for (which, inputs) in ALL_INPUTS.iter().enumerate() {
        let each = tried[which] as f64 / blocks[which] as f64;
        eprintln!("{inputs:?}: {each:.1} of 126 scales tried");
        assert!(matches!(inputs, Inputs::Indefinite) || each < 45.0, "{inputs:?}");
    }
}

#[test]
fn no_scale_is_better_f32() {
    every_scale::<f32>(1);
}

#[test]
fn no_scale_is_better_f16() {
    every_scale::<f16>(2);
}

#[test]
fn no_scale_is_better_bf16() {
    every_scale::<bf16>(3);
}

/// A matrix of 64 rows and 1040 columns.
fn gaussian(seed: u64) -> (Vec<f32>, Shape) {
    let shape = Shape::new(64, 1040);
    (matrix(shape, 0, &mut Numbers::new(seed)), shape)
}

fn squared_error(values: &[f32], tensor: &QuantizedTensor, weights: impl Fn(usize) -> f64) -> f64 {
    let errors = values.iter().zip(oracle::dequantize(tensor)).enumerate();
    errors.map(|(i, (x, y))| weights(i % tensor.cols()) * (f64::from(*x) - y).powi(2)).sum()
}

#[test]
fn the_unit_matrix_gives_the_unweighted_search() {
    let (values, shape) = gaussian(4);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe };
        let entries = hessian(Inputs::Identity, shape.cols, recipe.format().block(), &mut Numbers::new(0));
        let with = quantize_hessian(&values, shape, &recipe, &entries).unwrap().tensor;
        let without = quantize(&values, shape, &recipe).unwrap().tensor;
        let [with, without] = [with, without].map(|tensor| squared_error(&values, &tensor, |_| 1.0));
        // The unweighted search compares errors in f32, and takes either code where two are equally near.
        assert!((with / without - 1.0).abs() < 1e-6, "{recipe:?}: {with} and {without}");
        assert!(with <= without * (1.0 + 1e-12), "{recipe:?}: {with} and {without}");
    }
}

#[test]
fn a_diagonal_gives_the_weighted_search() {
    let (values, shape) = gaussian(5);
    let mut numbers = Numbers::new(6);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe };
        let n = recipe.format().block();
        let entries = hessian(Inputs::Diagonal, shape.cols, n, &mut numbers);
        let weights: Vec<f32> =
            (0..shape.cols).map(|col| entries[col / n * n * n + col % n * (n + 1)]).collect();
        let with = quantize_hessian(&values, shape, &recipe, &entries).unwrap().tensor;
        let weighted = quantize_weighted(&values, shape, &recipe, &weights).unwrap().tensor;
        let error = |tensor| squared_error(&values, &tensor, |col| weights[col].into());
        let [with, weighted] = [error(with), error(weighted)];
        assert!((with / weighted - 1.0).abs() < 1e-6, "{recipe:?}: {with} and {weighted}");
        assert!(with <= weighted * (1.0 + 1e-12), "{recipe:?}: {with} and {weighted}");
    }
}

#[test]
fn what_weighs_nothing_may_be_clipped_however_large_it_is() {
    // The first element is 2^40 times the others and its column is never active.
    let mut values = [0.375f32; 32];
    values[0] = 0.375 * 2f32.powi(40);
    let mut weights = [1.0; 32];
    weights[0] = 0.0;
    let mut entries = [0.0; 32 * 32];
    (0..32).for_each(|i| entries[i * 33] = weights[i]);
    let (recipe, shape) = (Recipe { search: Search::Full, ..Recipe::default() }, Shape::new(1, 32));
    for tensor in [
        quantize_hessian(&values, shape, &recipe, &entries).unwrap().tensor,
        quantize_weighted(&values, shape, &recipe, &weights).unwrap().tensor,
    ] {
        assert_eq!(tensor.scales(), [127 - 4]);
        assert_eq!(tensor.codes(), [0x77; 16]);
    }
}

#[test]
fn what_is_not_finite_goes_by_the_policy() {
    let shape = Shape::new(3, 40).with_row_stride(41);
    let mut values: Vec<f16> = matrix(shape, 0, &mut Numbers::new(7));
    let clean = {
        let mut clean = values.clone();
        (clean[41 + 33], clean[5]) = (f16::MIN, f16::ZERO);
        clean
    };
    (values[41 + 33], values[5]) = (f16::NEG_INFINITY, f16::NAN);
    for recipe in recipes() {
        let recipe = Recipe { search: Search::Full, ..recipe.with_global(Global::Absent) };
        let n = recipe.format().block();
        let entries = hessian(Inputs::Correlated, 40, n, &mut Numbers::new(8));
        let with = |non_finite| quantize_hessian(&values, shape, &Recipe { non_finite, ..recipe }, &entries);
        let Err(Error::NonFinite { first, report }) = with(NonFinite::Error) else { panic!("accepted") };
        assert_eq!((first.row, first.col, report.nan, report.infinite), (0, 5, 1, 1));
        let right = quantize_hessian(&clean, shape, &recipe, &entries).unwrap().tensor;
        assert_eq!(with(NonFinite::Saturate).unwrap().tensor, right);
        let spoilt = with(NonFinite::Propagate).unwrap().tensor;
        let blocks = [0, right.blocks_per_row() + 33 / n];
        for (i, (scale, right)) in spoilt.scales().iter().zip(right.scales()).enumerate() {
            let expected = if blocks.contains(&i) { oracle::nan_scale(recipe.format()) } else { *right };
            assert_eq!(*scale, expected, "block {i}");
        }
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let (values, shape) = (vec![1.0f32; 3 * 40], Shape::new(3, 40));
    let recipe = Recipe { search: Search::Full, ..Recipe::default() };
    let right = hessian(Inputs::Independent(100), 40, 32, &mut Numbers::new(9));
    let with = |recipe: &Recipe, entries: &[f32]| quantize_hessian(&values, shape, recipe, entries);
    assert!(with(&recipe, &right).is_ok(), "what lies behind the last column is ignored");

    let found = with(&Recipe::default(), &right);
    assert!(matches!(found, Err(Error::HessianWithoutSearch)), "{found:?}");
    let mxfp8 = Recipe::of(Format::Mxfp8E4m3, Convention::Ocp).unwrap();
    let found = with(&mxfp8, &right);
    assert!(matches!(found, Err(Error::NoSearch { format: Format::Mxfp8E4m3 })), "{found:?}");
    let found = with(&recipe, &right[1..]).unwrap_err();
    assert!(
        matches!(found, Error::HessianLength { columns: 40, expected: 2048, found: 2047, .. }),
        "{found:?}"
    );
    assert!(found.to_string().contains("need 2 × 32 × 32 = 2048"), "{found}");

    // Row 3 and column 5 of the second block.
    let at = 32 * 32 + 3 * 32 + 5;
    for (index, value, fault, (row, col)) in [
        (at, f32::NAN, HessianFault::NotFinite, (3, 5)),
        (at, f32::NEG_INFINITY, HessianFault::NotFinite, (3, 5)),
        (at, right[at] + 3.0, HessianFault::NotSymmetric, (3, 5)),
        (32 * 32 + 2 * 33, -1.0, HessianFault::NegativeDiagonal, (2, 2)),
    ] {
        let mut entries = right.clone();
        entries[index] = value;
        let found = with(&recipe, &entries).unwrap_err();
        let Error::HessianEntry { block: 1, row: r, col: c, fault: f, .. } = found else {
            panic!("{found:?}")
        };
        assert_eq!((r, c, f), (row, col, fault), "{found}");
        assert!(found.to_string().contains("of block 1 of columns"), "{found}");
    }
    // As much as sums of 16-bit products differ.
    let mut entries = right;
    entries[at] += 0.1;
    assert!(with(&recipe, &entries).is_ok());
}

#[test]
fn empty_matrices_need_a_hessian_of_their_columns() {
    let recipe = Recipe { search: Search::Full, ..Recipe::default() };
    let entries = hessian(Inputs::Identity, 40, 32, &mut Numbers::new(0));
    assert!(quantize_hessian(&[0.0f32; 0], Shape::new(0, 40), &recipe, &entries).is_ok());
    assert!(quantize_hessian(&[0.0f32; 0], Shape::new(0, 40), &recipe, &[]).is_err());
    assert!(quantize_hessian(&[0.0f32; 0], Shape::new(4, 0), &recipe, &[]).is_ok());
}

/// It costs the outputs less than a search that knows nothing of them.
#[test]
fn outputs_lose_less() {
    let (values, shape) = gaussian(10);
    let recipe = Recipe { search: Search::Full, ..recipes()[3] };
    let entries = hessian(Inputs::Correlated, shape.cols, 16, &mut Numbers::new(11));
    let with = quantize_hessian(&values, shape, &recipe, &entries).unwrap().tensor;
    let without = quantize(&values, shape, &recipe).unwrap().tensor;
    let loss = |tensor: &QuantizedTensor| -> f64 {
        let left: Vec<f64> =
            values.iter().zip(oracle::dequantize(tensor)).map(|(x, y)| f64::from(*x) - y).collect();
        let blocks = left.as_chunks::<16>().0.iter().enumerate();
        blocks
            .map(|(i, rests)| {
                let entries = &entries[i % 65 * 256..][..256];
                error_otherwise(&entries.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), rests).0
            })
            .sum()
    };
    assert!(loss(&with) < 0.8 * loss(&without), "{} and {}", loss(&with), loss(&without));
}
