//! The searches for block scales against brute force in f64, which knows nothing of their bounds and shares no code
//! with them; and against all scales by the search's own arithmetic, which what it skips must not win.
//!
//! With `--nocapture` the tables of `docs/search.md` are printed. `MICROSCALE_WEIGHTS=FILE` takes the weights of
//! another safetensors file than the sample's, up to [`BLOCKS`] blocks.

use std::fmt::{self, Write as _};
use std::path::PathBuf;

use half::{bf16, f16};
use microscale::cpu::{Isa, quantize_weighted_with};
use microscale::formats::search::{Block, Fused, Measure, PowersOfTwo, Scales};
use microscale::formats::{ScaleRule, mx, nvfp4};
use microscale::{
    Convention, Element, Error, Format, GlobalScale, Quantized, QuantizedShape, QuantizedTensor, Recipe,
    Scheme, Search, Shape, Words, check_search,
};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};

/// Blocks of each distribution.
const BLOCKS: usize = 100_000;
/// Blocks of each distribution where errors are weighted, or many recipes are tried.
const FEWER_BLOCKS: usize = 10_000;
/// Columns of the matrices.
const COLS: usize = 1600;

const FORMATS: [Format; 2] = [Format::Nvfp4, Format::Mxfp4];
const SEARCHES: [Search; 4] = [Search::None, Search::FourSix, Search::Window, Search::Full];
/// E2M1's magnitudes, by code.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

// Data.

/// Numbers of one distribution.
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

/// Matrices of [`COLS`] columns and up to so many blocks: every distribution, and real weights.
fn matrices(block: usize, blocks: usize) -> Vec<(&'static str, Vec<f32>)> {
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

/// The matrices of a checkpoint end to end, cut into rows of [`COLS`], of which evenly many are taken from everywhere.
fn weights(most: usize) -> Vec<f32> {
    let files = match std::env::var_os("MICROSCALE_WEIGHTS") {
        Some(file) => vec![PathBuf::from(file)],
        None => {
            let shard =
                |shard| microscale_tests::sample().join(format!("model-0000{shard}-of-00002.safetensors"));
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

/// Weights by column over six orders of magnitude, some 0.
fn importance() -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(6);
    (0..COLS).map(|_| if rng.f32() < 0.05 { 0.0 } else { 10f32.powf(rng.f32() * 6.0 - 3.0) }).collect()
}

// The slow way.

/// What a scale byte multiplies codes with, as real numbers go.
fn factor(tensor: &QuantizedTensor, byte: u8) -> f64 {
    if tensor.format() == Format::Mxfp4 {
        return 2f64.powi(i32::from(byte) - 127);
    }
    let (exponent, mantissa) = (i32::from(byte >> 3), f64::from(byte & 7));
    let scale = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    match tensor.global_scale() {
        None => scale,
        Some(GlobalScale::Divisor(divisor)) => scale / f64::from(divisor),
        Some(GlobalScale::Multiplier(multiplier)) => scale * f64::from(multiplier),
    }
}

/// Every byte that a scale can have, but for NaN, and for NVFP4's 0: that makes zeros, and no scale errs more.
fn scale_bytes(format: Format) -> std::ops::RangeInclusive<u8> {
    if format == Format::Mxfp4 { 0..=254 } else { 1..=126 }
}

/// The weighted squared error of a block if every element takes the magnitude that is nearest; or, once the sum is
/// `enough`, what it has come to.
fn nearest_error(block: &[f64], weights: &[f64], factor: f64, enough: f64) -> f64 {
    let magnitudes = MAGNITUDES.map(|magnitude| factor * magnitude);
    let mut error = 0.0;
    for (a, weight) in block.iter().zip(weights) {
        let distance = magnitudes.iter().fold(f64::INFINITY, |least, value| {
            let distance = (a - value).abs();
            if distance < least { distance } else { least }
        });
        error += weight * distance * distance;
        if error >= enough {
            break;
        }
    }
    error
}

/// A block of a matrix, and what quantizing made of it.
struct BlockErrors {
    /// Of the bytes that were written.
    written: f64,
    /// Of the best scale.
    least: f64,
    /// Σ w·x².
    energy: f64,
}

impl BlockErrors {
    /// By how much more than the least the written error may be, as norms, in units of the block's.
    ///
    /// Let u be 2⁻²⁴, x the block, r what a scale leaves of it, all weighted. A search sees the factor f with an error
    /// of u, and its reciprocal with another, which may take the farther of two magnitudes where that is farther by no
    /// more than 2u·a. What an element leaves is rounded once. That is u·f·q + 2u·a + u·|r| an element, and f·q is at
    /// most a + |r|: 3u·‖x‖ + 2u·‖r‖. The sum rounds a term at most eight times (weight, four of a chain, three sums),
    /// which makes 4u·‖r‖ of the norm. So a norm is off by less than 6u·(‖x‖ + ‖r‖), once for the scale that is taken
    /// and once for the best. Where the largest element is within u of 7 scales, skipping the double of a scale may
    /// cost 2u·‖x‖. Codes are written by the convention's quotient, which up to four roundings lie in: 8u·‖x‖. In all
    /// 22u·(‖x‖ + ‖r‖) at most.
    fn excess(&self) -> f64 {
        (self.written.sqrt() - self.least.sqrt())
            / (self.energy.sqrt() + self.least.sqrt()).max(f64::MIN_POSITIVE)
    }
}

/// [`BlockErrors::excess`] must not be more.
const TOLERANCE: f64 = 24.0 / (1 << 24) as f64;

/// The error of what was written, of the best scale if `brute` (else 0), and the energy, block by block.
fn errors(
    values: &[f32],
    importance: Option<&[f32]>,
    tensor: &QuantizedTensor,
    brute: bool,
) -> Vec<BlockErrors> {
    let size = tensor.format().block();
    let factors: Vec<f64> = scale_bytes(tensor.format()).map(|byte| factor(tensor, byte)).collect();
    let one = |(i, values): (usize, &[f32])| {
        let block: Vec<f64> = values.iter().map(|value| f64::from(value.abs())).collect();
        let weight = |k| importance.map_or(1.0, |weights| f64::from(weights[(i * size + k) % COLS]));
        let weights: Vec<f64> = (0..size).map(weight).collect();
        let scale = factor(tensor, tensor.scales()[i]);
        let mut written = 0.0;
        for (k, value) in values.iter().enumerate() {
            let code = tensor.codes()[(i * size + k) / 2] >> (4 * (k % 2)) & 15;
            let sign = if code < 8 { 1.0 } else { -1.0 };
            let rest = f64::from(*value) - sign * MAGNITUDES[usize::from(code % 8)] * scale;
            written += weights[k] * rest * rest;
        }
        let least = || {
            // Begun with a good one, so that most others are soon enough.
            let begin = nearest_error(&block, &weights, scale, f64::INFINITY);
            factors
                .iter()
                .fold(begin, |least, factor| least.min(nearest_error(&block, &weights, *factor, least)))
        };
        let energy = block.iter().zip(&weights).map(|(a, weight)| weight * a * a).sum();
        BlockErrors { written, least: if brute { least() } else { 0.0 }, energy }
    };
    values.par_chunks(size).enumerate().map(one).collect()
}

// What is tested.

fn recipe(format: Format, convention: Convention, search: Search) -> Recipe {
    Recipe { search, ..Recipe::of(format, convention).expect("a recipe") }
}

fn quantize<T: Element>(isa: Isa, values: &[T], recipe: &Recipe, importance: Option<&[f32]>) -> Quantized {
    let shape = Shape::new(values.len() / COLS, COLS);
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::new(recipe.format(), shape.rows, shape.cols))
        .expect("a tensor");
    let report =
        quantize_weighted_with(isa, values, shape, recipe, importance, &mut tensor).expect("finite values");
    Quantized { tensor, report }
}

/// Checks that no block's error is more than the least there is, and returns the largest excess in units of
/// [`TOLERANCE`].
fn check_optimal(what: &str, errors: &[BlockErrors]) -> f64 {
    let mut most = 0.0f64;
    for (i, block) in errors.iter().enumerate() {
        let excess = block.excess();
        assert!(
            excess <= TOLERANCE,
            "{what}, block {i}: the error is {:e}, the least is {:e}, {excess:e} of the norm",
            block.written,
            block.least,
        );
        most = most.max(excess);
    }
    most / TOLERANCE
}

/// What a search loses against the full one.
struct Loss {
    /// Of the total squared error, relative to that of full.
    total: f64,
    /// Blocks in which it errs more by more than rounding.
    blocks: usize,
    /// Of all blocks.
    of: usize,
    /// The largest loss in a block, relative to the error of full there.
    most: f64,
}

impl Loss {
    fn of(errors: &[BlockErrors], full: &[BlockErrors]) -> Self {
        let total = |errors: &[BlockErrors]| errors.iter().map(|block| block.written).sum::<f64>();
        let losses = errors.iter().zip(full).filter_map(|(block, full)| {
            let (norm, least) = (block.written.sqrt(), full.written.sqrt());
            (norm - least > TOLERANCE * (full.energy.sqrt() + least))
                .then(|| block.written / full.written - 1.0)
        });
        let losses: Vec<f64> = losses.collect();
        Self {
            total: total(errors) / total(full) - 1.0,
            blocks: losses.len(),
            of: full.len(),
            most: losses.into_iter().fold(0.0, f64::max),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.blocks == 0 {
            return f.write_str("nothing");
        }
        let blocks = self.blocks as f64 / self.of as f64 * 100.0;
        write!(f, "{:.4} %, in {blocks:.3} % of blocks", self.total * 100.0)?;
        // Where full errs by almost nothing a ratio says nothing.
        if self.most < 10.0 { write!(f, ", at most {:.0} %", self.most * 100.0) } else { Ok(()) }
    }
}

/// One format's table, and the checks of every row.
fn table(format: Format) {
    let mut table = String::from(
        "| data | blocks | plain | four-six | window | full | full changes | scales tried | four-six loses | window loses |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut closest = 0.0f64;
    for (name, values) in matrices(format.block(), BLOCKS) {
        let blocks = values.len() / format.block();
        let quantized = SEARCHES.map(|search| {
            let recipe = recipe(format, Convention::default_for(format), search);
            quantize(Isa::best(), &values, &recipe, None)
        });
        let errors: [_; 4] =
            std::array::from_fn(|i| errors(&values, None, &quantized[i].tensor, SEARCHES[i] == Search::Full));
        closest = closest.max(check_optimal(&format!("{format}, {name}"), &errors[3]));
        let energy: f64 = errors[0].iter().map(|block| block.energy).sum();
        let [plain, four_six, window, full] =
            errors.each_ref().map(|errors| errors.iter().map(|block| block.written).sum::<f64>() / energy);
        // Totals of what is no worse in any block but for rounding.
        for (better, worse) in [(full, window), (window, plain), (full, four_six), (four_six, plain)] {
            assert!(better <= worse * (1.0 + 1e-6), "{format}, {name}: {better} is more than {worse}");
        }
        let [lost_by_four_six, lost_by_window] = [1, 2].map(|i| Loss::of(&errors[i], &errors[3]));
        // MXFP4's window holds whatever can win; NVFP4's does not, which shows that brute force finds what a search
        // misses.
        assert!(
            (lost_by_window.blocks == 0) == (format == Format::Mxfp4),
            "{format}, {name}: {lost_by_window}"
        );
        writeln!(
            table,
            "| {name} | {blocks} | {plain:.5} | {four_six:.5} | {window:.5} | {full:.5} | {:.1} % | {:.2} | {lost_by_four_six} \
             | {lost_by_window} |",
            quantized[3].report.rescaled_blocks as f64 / blocks as f64 * 100.0,
            quantized[3].report.tried_scales as f64 / blocks as f64,
        )
        .expect("a string");
    }
    println!(
        "\n{format}: relative squared errors. The largest excess of full is {closest:.1e} of the tolerance.\n\n{table}"
    );
}

#[test]
fn nvfp4_full_is_the_least_error() {
    table(Format::Nvfp4);
}

#[test]
fn mxfp4_full_is_the_least_error() {
    table(Format::Mxfp4);
}

#[test]
fn full_is_the_least_weighted_error() {
    let weights = importance();
    for format in FORMATS {
        let recipe = recipe(format, Convention::default_for(format), Search::Full);
        for (name, values) in matrices(format.block(), FEWER_BLOCKS) {
            let tensor = quantize(Isa::best(), &values, &recipe, Some(&weights)).tensor;
            let closest = check_optimal(
                &format!("{format}, {name}, weighted"),
                &errors(&values, Some(&weights), &tensor, true),
            );
            println!("{format}, {name}, weighted: the largest excess is {closest:.1e} of the tolerance");
        }
    }
}

#[test]
fn full_is_the_least_error_in_every_convention() {
    for format in FORMATS {
        for (_, convention) in
            Convention::WORDS.iter().filter(|(_, convention)| convention.scheme(format).is_some())
        {
            let recipe = recipe(format, *convention, Search::Full);
            for (name, values) in matrices(format.block(), FEWER_BLOCKS / 2) {
                let tensor = quantize(Isa::best(), &values, &recipe, None).tensor;
                let what = format!("{format}, {}, {name}", convention.word());
                check_optimal(&what, &errors(&values, None, &tensor, true));
                if format == Format::Mxfp4 {
                    let window = Recipe { search: Search::Window, ..recipe };
                    assert!(quantize(Isa::best(), &values, &window, None).tensor == tensor, "{what}: window");
                }
            }
        }
    }
}

/// The arithmetic that the search is defined in.
struct Hosts;

impl Fused for Hosts {
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Asserts that the full search took the scale that its definition names, and that no scale it skipped errs less, by
/// the search's own arithmetic. `plain` and `full` are the bytes of the block without a search and with it.
fn check_skipped<const N: usize, S: Scales>(what: &str, block: &Block<N>, scales: &S, plain: u8, full: u8) {
    let error = |byte| block.error::<Hosts>(scales.factor(byte));
    let plain_error = error(plain);
    let (first, last) = block.bounds::<Hosts, S>(scales, plain_error, plain);
    let mut best = (plain, plain_error);
    for byte in first..=last {
        let error = error(byte);
        if error < best.1 {
            best = (byte, error);
        }
    }
    assert_eq!(full, best.0, "{what}: among {first:#x} to {last:#x} the best is {best:?}");
    // What is skipped below loses in rounded numbers too.
    for byte in S::FIRST..first {
        assert!(error(byte) >= best.1, "{what}: {byte:#x} errs less than {best:?}");
    }
    // What is skipped above may win by a rounding. Under the largest factor there is, all become zeros, and the error
    // is Σ w·a².
    let least = f64::from(best.1).sqrt();
    let rounding = TOLERANCE * (f64::from(block.error::<Hosts>(f32::MAX)).sqrt() + least);
    for byte in last + 1..=S::LAST {
        assert!(
            f64::from(error(byte)).sqrt() >= least - rounding,
            "{what}: {byte:#x} errs less than {best:?}"
        );
    }
}

/// [`check_skipped`] for the blocks of matrices, with weights and without.
fn check_skipped_everywhere<const N: usize, S: Scales + Sync>(
    format: Format,
    scales: impl Fn(&QuantizedTensor) -> S,
) {
    let importance = importance();
    for (name, values) in matrices(N, FEWER_BLOCKS / 4) {
        let convention = Convention::default_for(format);
        let plain = quantize(Isa::best(), &values, &recipe(format, convention, Search::None), None).tensor;
        for weights in [None, Some(&importance[..])] {
            let recipe = recipe(format, convention, Search::Full);
            let full = quantize(Isa::best(), &values, &recipe, weights).tensor;
            let scales = scales(&full);
            values.as_chunks::<N>().0.par_iter().enumerate().for_each(|(i, values)| {
                let weights = weights.map(|weights| std::array::from_fn(|k| weights[(i * N + k) % COLS]));
                let what = format!("{format}, {name}, block {i}, weights: {}", weights.is_some());
                let block = Block::new(values, weights);
                check_skipped(&what, &block, &scales, plain.scales()[i], full.scales()[i]);
            });
        }
    }
}

#[test]
fn what_full_skips_cannot_win() {
    check_skipped_everywhere::<{ nvfp4::BLOCK }, _>(Format::Nvfp4, QuantizedTensor::global_scale);
    check_skipped_everywhere::<{ mx::BLOCK }, _>(Format::Mxfp4, |_| PowersOfTwo);
}

#[test]
fn checking_a_search_passes_the_best_and_finds_any_other() {
    let weights = importance();
    for format in FORMATS {
        let recipe = recipe(format, Convention::default_for(format), Search::Full);
        for (name, values) in matrices(format.block(), FEWER_BLOCKS / 4) {
            let shape = Shape::new(values.len() / COLS, COLS);
            let blocks = (values.len() / format.block()) as u64;
            for importance in [None, Some(&weights[..])] {
                let tensor = quantize(Isa::best(), &values, &recipe, importance).tensor;
                let check =
                    |tensor: &QuantizedTensor| check_search(&values, shape, &recipe, importance, tensor);
                assert_eq!(check(&tensor).expect("the best scales"), blocks, "{format}, {name}");
                // A scale a third or a quarter as large is far from the best: it clips.
                let mut scales = tensor.scales().to_vec();
                let (row, block) = (shape.rows / 2, 7);
                let changed = &mut scales[row * COLS / format.block() + block];
                let chosen = *changed - if format == Format::Nvfp4 { 12 } else { 2 };
                *changed = chosen;
                let quantized = QuantizedShape::new(format, shape.rows, shape.cols);
                let mut worse = QuantizedTensor::from_parts(quantized, tensor.codes().to_vec(), scales)
                    .expect("a tensor");
                if let Some(scale) = tensor.global_scale() {
                    worse = worse.with_global_scale(scale).expect("a global scale");
                }
                let found = check(&worse);
                let here = matches!(found, Err(Error::SkippedScale { row: r, block: b, chosen: c, .. })
                    if (r, b, c) == (row, block, chosen));
                assert!(here, "{format}, {name}: {found:?}");
            }
        }
    }
}

#[test]
fn instruction_sets_agree_on_bytes_and_reports() {
    let weights = importance();
    for format in FORMATS {
        for (name, values) in matrices(format.block(), FEWER_BLOCKS / 4) {
            let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            for search in SEARCHES {
                let recipe = recipe(format, Convention::default_for(format), search);
                for importance in [None, Some(&weights[..])] {
                    let what =
                        format!("{format}, {name}, {}, weights: {}", search.word(), importance.is_some());
                    let expected = quantize(Isa::Reference, &values, &recipe, importance);
                    let expected_narrow = quantize(Isa::Reference, &narrow, &recipe, importance);
                    for isa in Isa::available() {
                        assert!(quantize(isa, &values, &recipe, importance) == expected, "{what}, {isa:?}");
                        assert!(
                            quantize(isa, &narrow, &recipe, importance) == expected_narrow,
                            "{what}, {isa:?}, bf16"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_example_whose_best_scale_is_smaller() {
    let mut values = vec![0.25f32; COLS];
    values.iter_mut().step_by(mx::BLOCK).for_each(|value| *value = 4.0);
    for (search, byte, error) in [(Search::None, 127, 1.9375), (Search::Full, 126, 1.0)] {
        for isa in Isa::available() {
            let tensor = quantize(isa, &values, &recipe(Format::Mxfp4, Convention::Ocp, search), None).tensor;
            assert!(tensor.scales().iter().all(|scale| *scale == byte), "{isa:?}, {}", search.word());
            assert!(
                errors(&values, None, &tensor, true)
                    .iter()
                    .all(|block| block.written == error && block.least == 1.0)
            );
        }
    }
}

#[test]
fn mxfp4_window_misses_a_quarter_of_what_ceil_gives() {
    // Ceil alone gives an amax of 2.1 the scale 1. The 0.125's are lost under 1 and ½, and kept under ¼, which clips
    // 2.1 by 0.6.
    let mut values = vec![0.125f32; COLS];
    values.iter_mut().step_by(mx::BLOCK).for_each(|value| *value = 2.1);
    let ceil = mx::Arithmetic { scale_rule: ScaleRule::Ceil, ..Default::default() };
    for (search, byte) in [(Search::None, 127), (Search::Window, 127), (Search::Full, 125)] {
        let recipe = Recipe { scheme: Scheme::Mxfp4(ceil), search, ..Recipe::default() };
        let tensor = quantize(Isa::best(), &values, &recipe, None).tensor;
        assert!(
            tensor.scales().iter().all(|scale| *scale == byte),
            "{}: {:?}",
            search.word(),
            tensor.scales()
        );
    }
}
