//! Tests the MXFP4 and MXFP8 files: every block must match the library's, except the listed ones.

use std::collections::BTreeMap;

use half::{bf16, f16};
use microscale::cpu::{Isa, dequantize_with};
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{
    Error, Format, NonFinite, Numerics, Position, QuantizedShape, QuantizedTensor, Recipe, Scheme, Shape,
    Words,
};
use microscale_test_support::cases::{
    assert_as_expected, every_mxfp4_recipe, every_mxfp8_recipe, quantize, spread,
};
use microscale_test_support::golden::{Block, Golden, Input, files};
use microscale_test_support::oracle::mx::BLOCK;
use microscale_test_support::oracle::{self, Exact, unpack};

/// A file, and the number of blocks per group where the library deviates from its own rule.
type File = (&'static str, &'static [(&'static str, usize)]);

/// Every MXFP4 file.
const MXFP4: [File; 18] = [
    ("torchao-0.18.0-floor-f32", &[("smallest-scale", 18), ("subnormal", 3), ("ties-smallest-scale", 4)]),
    ("torchao-0.18.0-floor-bf16", &[("smallest-scale", 18), ("subnormal", 4), ("ties-smallest-scale", 4)]),
    ("torchao-0.18.0-even-f32", &[("smallest-scale", 16), ("subnormal", 3), ("ties-smallest-scale", 4)]),
    ("torchao-0.18.0-even-bf16", &[("smallest-scale", 15), ("subnormal", 4), ("ties-smallest-scale", 4)]),
    ("torchao-0.18.0-ceil-f32", &[("smallest-scale", 10), ("subnormal", 3), ("ties-smallest-scale", 2)]),
    ("torchao-0.18.0-ceil-bf16", &[("smallest-scale", 10), ("subnormal", 4), ("ties-smallest-scale", 2)]),
    (
        "torchao-0.18.0-rceil-f32",
        &[
            ("near-boundary", 7),
            ("six-times-power-of-two", 12),
            ("smallest-scale", 16),
            ("subnormal", 3),
            ("ties-smallest-scale", 4),
        ],
    ),
    ("torchao-0.18.0-rceil-bf16", &[("smallest-scale", 13), ("subnormal", 4), ("ties-smallest-scale", 4)]),
    (
        "compressed-tensors-0.20.0-even-f32",
        &[("largest-finite", 4), ("seven-times-power-of-two", 2), ("tiny-among-large", 3)],
    ),
    (
        "compressed-tensors-0.20.0-even-bf16",
        &[("largest-finite", 4), ("seven-times-power-of-two", 2), ("tiny-among-large", 3)],
    ),
    (
        "compressed-tensors-0.20.0-even-f16",
        &[
            ("largest-finite", 4),
            ("mixed-zero", 2),
            ("negative-zero", 2),
            ("normal-by-exponent", 62),
            ("seven-times-power-of-two", 2),
            ("subnormal", 11),
            ("ties", 8),
            ("tiny-among-large", 3),
            ("zero", 2),
        ],
    ),
    (
        "modelopt-0.47.0-rceil-f32",
        &[
            ("largest-finite", 1),
            ("near-boundary", 7),
            ("six-times-power-of-two", 12),
            ("smallest-scale", 1),
            ("tiny-among-large", 3),
        ],
    ),
    ("modelopt-0.47.0-rceil-bf16", &[("largest-finite", 1), ("tiny-among-large", 2)]),
    ("modelopt-0.47.0-rceil-f16", &[]),
    (
        "gguf-0.19.0-floor-f32",
        &[
            ("largest-finite", 4),
            ("near-boundary", 6),
            ("power-of-two", 14),
            ("smallest-scale", 9),
            ("subnormal", 25),
        ],
    ),
    (
        "microxcaling-7bc4195-floor-f32",
        &[
            ("largest-finite", 4),
            ("near-boundary", 6),
            ("power-of-two", 14),
            ("ties", 24),
            ("tiny-among-large", 3),
        ],
    ),
    (
        "qwantize-0.1.1-floor-f32",
        &[
            ("largest-finite", 4),
            ("mixed-zero", 2),
            ("near-boundary", 21),
            ("negative-zero", 2),
            ("normal-by-exponent", 24),
            ("power-of-two", 20),
            ("seven-times-power-of-two", 3),
            ("six-times-power-of-two", 3),
            ("smallest-scale", 18),
            ("subnormal", 25),
            ("ties", 8),
            ("ties-smallest-scale", 4),
            ("tiny-among-large", 1),
            ("zero", 2),
        ],
    ),
    (
        "qwantize-0.1.1-floor-bf16",
        &[
            ("mixed-zero", 2),
            ("near-boundary", 12),
            ("negative-zero", 2),
            ("normal-by-exponent", 24),
            ("power-of-two", 4),
            ("seven-times-power-of-two", 3),
            ("six-times-power-of-two", 3),
            ("smallest-scale", 18),
            ("subnormal", 9),
            ("ties", 8),
            ("ties-smallest-scale", 4),
            ("tiny-among-large", 1),
            ("zero", 2),
        ],
    ),
];

/// Every MXFP8 file.
const MXFP8: [File; 8] = [
    (
        "torchao-0.18.0-e4m3-floor-f32",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 6),
            ("power-of-two", 3),
            ("smallest-scale", 24),
            ("subnormal", 11),
        ],
    ),
    (
        "torchao-0.18.0-e4m3-floor-bf16",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 6),
            ("power-of-two", 3),
            ("smallest-scale", 24),
            ("subnormal", 9),
        ],
    ),
    (
        "torchao-0.18.0-e4m3-rceil-f32",
        &[
            ("largest-times-power-of-two", 35),
            ("normal-by-exponent", 6),
            ("power-of-two", 3),
            ("smallest-scale", 24),
            ("subnormal", 11),
        ],
    ),
    (
        "torchao-0.18.0-e4m3-rceil-bf16",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 6),
            ("power-of-two", 3),
            ("smallest-scale", 23),
            ("subnormal", 9),
        ],
    ),
    (
        "torchao-0.18.0-e5m2-floor-f32",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 13),
            ("power-of-two", 3),
            ("smallest-scale", 31),
            ("subnormal", 19),
        ],
    ),
    (
        "torchao-0.18.0-e5m2-floor-bf16",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 13),
            ("power-of-two", 3),
            ("smallest-scale", 31),
            ("subnormal", 9),
        ],
    ),
    (
        "torchao-0.18.0-e5m2-rceil-f32",
        &[
            ("largest-times-power-of-two", 37),
            ("normal-by-exponent", 13),
            ("power-of-two", 3),
            ("smallest-scale", 30),
            ("subnormal", 19),
        ],
    ),
    (
        "torchao-0.18.0-e5m2-rceil-bf16",
        &[
            ("largest-times-power-of-two", 5),
            ("normal-by-exponent", 13),
            ("power-of-two", 3),
            ("smallest-scale", 31),
            ("subnormal", 9),
        ],
    ),
];

/// Every file with its folder.
const FOLDERS: [(&str, &[File]); 2] = [("mxfp4", &MXFP4), ("mxfp8", &MXFP8)];

/// Calls a generic function with the input rows of a file, whatever their type.
macro_rules! with_input {
    ($golden:expr, $function:ident) => {
        match &$golden.input {
            Input::F32(rows) => $function(&$golden, rows),
            Input::F16(rows) => $function(&$golden, rows),
            Input::Bf16(rows) => $function(&$golden, rows),
        }
    };
}

/// Reads every file.
pub(super) fn every_file() -> impl Iterator<Item = Golden> {
    FOLDERS
        .into_iter()
        .flat_map(|(folder, files)| files.iter().map(move |(name, _)| Golden::read(folder, name)))
}

#[test]
fn no_file_is_left_out() {
    for (folder, known) in FOLDERS {
        let mut known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        known.extend((folder == "mxfp4").then_some("ml_dtypes-0.6.0-tables"));
        known.sort_unstable();
        assert_eq!(files(folder), known, "{folder}");
    }
}

#[test]
fn file_names_match_their_contents() {
    for golden in every_file() {
        let (dtype, len) = golden.input.what();
        let rule = golden.scale_rule().word();
        let element = match golden.format() {
            Format::Mxfp8E4m3 => "-e4m3",
            Format::Mxfp8E5m2 => "-e5m2",
            _ => "",
        };
        assert!(golden.name.ends_with(&format!("{element}-{rule}-{dtype}")), "{}", golden.name);
        assert_eq!(golden.cols, 2 * BLOCK);
        assert_eq!(len, golden.rows * golden.cols);
        let bytes = (golden.codes.len(), golden.scales.len());
        assert_eq!(
            bytes,
            (golden.rows * golden.format().block_bytes() * 2, golden.rows * 2),
            "{}",
            golden.name
        );
    }
}

#[test]
fn numerics_match_their_libraries() {
    let mut seen = Vec::new();
    for golden in every_file() {
        if let Some(numerics) = golden.numerics() {
            let recipe = Recipe::of(golden.format(), numerics).expect("numerics of the format");
            assert_eq!(recipe.scheme, golden.scheme, "{}", golden.name);
            seen.push((golden.format(), numerics));
        } else if let (Scheme::Mxfp4(arithmetic), "torchao") = (golden.scheme, golden.library.as_str()) {
            let rest = (arithmetic.ties, arithmetic.negative_zero);
            assert_eq!(rest, (Ties::Even, NegativeZero::Keep), "{}", golden.name);
        }
    }
    for shown in [
        (Format::Mxfp4, Numerics::Ocp),
        (Format::Mxfp4, Numerics::CompressedTensors),
        (Format::Mxfp4, Numerics::Modelopt),
        (Format::Mxfp4, Numerics::Ggml),
        (Format::Mxfp8E4m3, Numerics::Ocp),
        (Format::Mxfp8E5m2, Numerics::Ocp),
    ] {
        assert!(seen.contains(&shown), "no file shows {shown:?}");
    }
    let ocp = Recipe::of(Format::Mxfp4, Numerics::Ocp).expect("OCP's MXFP4");
    assert_eq!(Recipe::default(), ocp, "the default is OCP's, refusing non-finite input");
    assert_eq!(Recipe::default().non_finite, NonFinite::Error);
    // Some library must cover each rule for ties and each scale rule.
    let schemes: Vec<Scheme> = every_file().map(|golden| golden.scheme).collect();
    let arithmetics = || {
        schemes.iter().filter_map(|scheme| match scheme {
            Scheme::Mxfp4(arithmetic) => Some(*arithmetic),
            _ => None,
        })
    };
    for &(word, ties) in Ties::WORDS {
        assert!(arithmetics().any(|arithmetic| arithmetic.ties == ties), "ties {word}");
    }
    for &(word, rule) in ScaleRule::WORDS {
        assert!(arithmetics().any(|arithmetic| arithmetic.scale_rule == rule), "rule {word}");
    }
}

#[test]
fn libraries_deviate_in_exactly_the_known_blocks() {
    for (folder, files) in FOLDERS {
        for (name, groups) in files {
            let golden = Golden::read(folder, name);
            let mut found = BTreeMap::<&str, usize>::new();
            for (row, _) in &golden.slips {
                *found.entry(golden.group(*row)).or_default() += 1;
            }
            let found: Vec<_> = found.into_iter().collect();
            assert_eq!(found, *groups, "{name}");
            assert!(golden.slips.is_disjoint(&golden.non_finite), "{name}");
        }
    }
}

#[test]
fn every_block_matches_the_library() {
    for golden in every_file() {
        with_input!(golden, assert_blocks);
    }
}

fn assert_blocks<T: Exact>(golden: &Golden, rows: &[T]) {
    let recipe = Recipe { scheme: golden.scheme, non_finite: NonFinite::Propagate, ..Recipe::default() };
    let block_bytes = golden.format().block_bytes();
    for isa in Isa::available() {
        for row_stride in [64, 65, 72, 101, 128] {
            let what = format!("{}, {isa:?}, row stride {row_stride}", golden.name);
            let (values, shape) = spread(rows, Shape::new(golden.rows, golden.cols), row_stride);
            let (tensor, _) = quantize(isa, &values, shape, &recipe).expect(&what);
            assert_eq!(tensor.codes().len(), golden.codes.len(), "{what}");
            for block in golden.blocks() {
                let index = block.0 * golden.cols / BLOCK + block.1;
                let ours = (tensor.scales()[index], &tensor.codes()[index * block_bytes..][..block_bytes]);
                let what = || format!("{what}, {block:?}, {}", golden.group(block.0));
                if golden.non_finite.contains(&block) {
                    assert_eq!(ours, (255, vec![0; block_bytes].as_slice()), "{}", what());
                } else if golden.slips.contains(&block) {
                    assert_ne!(ours, golden.block(block), "no slip: {}", what());
                } else {
                    assert_eq!(ours, golden.block(block), "{}", what());
                }
            }
        }
    }
}

/// The golden inputs are the hardest ones, so they are used for every other recipe too.
#[test]
fn every_input_is_as_expected_for_every_recipe() {
    for (folder, name) in [
        ("mxfp4", "torchao-0.18.0-floor-f32"),
        ("mxfp4", "torchao-0.18.0-floor-bf16"),
        ("mxfp4", "modelopt-0.47.0-rceil-f16"),
        ("mxfp8", "torchao-0.18.0-e4m3-rceil-f32"),
        ("mxfp8", "torchao-0.18.0-e5m2-rceil-bf16"),
    ] {
        let golden = Golden::read(folder, name);
        with_input!(golden, assert_oracle);
    }
}

fn assert_oracle<T: Exact>(golden: &Golden, rows: &[T]) {
    let recipes = if golden.format() == Format::Mxfp4 { every_mxfp4_recipe() } else { every_mxfp8_recipe() };
    for recipe in recipes {
        assert_as_expected(rows, Shape::new(golden.rows, golden.cols), &recipe);
    }
}

#[test]
fn non_finite_blocks_are_listed_and_refused() {
    for golden in every_file() {
        with_input!(golden, assert_non_finite);
    }
}

fn assert_non_finite<T: Exact>(golden: &Golden, rows: &[T]) {
    let found: Vec<Block> = golden
        .blocks()
        .filter(|(row, block)| {
            rows[row * golden.cols + block * BLOCK..][..BLOCK].iter().any(|v| !v.to_f64().is_finite())
        })
        .collect();
    assert!(found.iter().eq(&golden.non_finite), "{}", golden.name);

    let recipe = Recipe { scheme: golden.scheme, ..Recipe::default() };
    let index = rows.iter().position(|v| !v.to_f64().is_finite()).expect("non-finite rows");
    let position = Position { row: index / golden.cols, col: index % golden.cols };
    for isa in Isa::available() {
        let why = quantize(isa, rows, Shape::new(golden.rows, golden.cols), &recipe).map(|_| ());
        let Err(Error::NonFinite { first, report }) = why else { panic!("{}: {why:?}", golden.name) };
        assert_eq!(first, position);
        assert_eq!(report.nan, rows.iter().filter(|v| v.to_f64().is_nan()).count() as u64);
        assert_eq!(report.infinite, rows.iter().filter(|v| v.to_f64().is_infinite()).count() as u64);
    }
}

#[test]
fn dequantized_blocks_are_exact() {
    for golden in every_file() {
        assert_dequantized::<f32>(&golden);
        assert_dequantized::<f16>(&golden);
        assert_dequantized::<bf16>(&golden);
    }
}

fn assert_dequantized<T: Exact>(golden: &Golden) {
    let (rows, cols) = (golden.rows, golden.cols);
    let shape = QuantizedShape::new(golden.format(), rows, cols);
    let tensor = QuantizedTensor::from_parts(shape, golden.codes.clone(), golden.scales.clone())
        .expect("whole blocks");
    let codes = unpack(golden.format(), &golden.codes);
    for isa in Isa::available() {
        let mut values = vec![T::of_bits(0xA5A5); rows * cols];
        dequantize_with(isa, &tensor, &mut values, cols).expect("room for all");
        for (index, found) in values.iter().enumerate() {
            let exact = oracle::value(golden.format(), codes[index], golden.scales[index / BLOCK], None);
            let right = T::round_f64(exact);
            let (row, col) = (index / cols, index % cols);
            assert_eq!(
                found.bits(),
                right.bits(),
                "{}, {isa:?}, row {row}, column {col}: {exact:e}",
                golden.name
            );
        }
    }
}
