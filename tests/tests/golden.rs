//! The bytes that other libraries made, reproduced on every instruction set.

use std::collections::BTreeMap;

use half::{bf16, f16};
use microscale::cpu::{Isa, dequantize_with};
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Convention, Error, Format, NonFinite, Position, QuantizedTensor, Recipe, Shape};
use microscale_tests::cases::{assert_as_expected, every_recipe, quantize, spread};
use microscale_tests::golden::{Block, Golden, Input, folder};
use microscale_tests::oracle::{self, BLOCK, Exact, unpack};

/// Every file, and in how many blocks of which groups the library departs from its own convention.
const FILES: [(&str, &[(&str, usize)]); 15] = [
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
];

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

fn files() -> impl Iterator<Item = Golden> {
    FILES.iter().map(|(name, _)| Golden::read(name))
}

#[test]
fn no_file_is_left_out() {
    let mut known: Vec<String> = FILES.iter().map(|(name, _)| format!("{name}.safetensors")).collect();
    known.push("ml_dtypes-0.6.0-tables.safetensors".to_owned());
    known.sort();
    let entries =
        std::fs::read_dir(folder()).expect("the golden files").map(|entry| entry.expect("an entry"));
    let mut found: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    found.sort();
    assert_eq!(found, known);
}

#[test]
fn names_say_what_the_files_hold() {
    for golden in files() {
        let input = match &golden.input {
            Input::F32(rows) => ("f32", rows.len()),
            Input::F16(rows) => ("f16", rows.len()),
            Input::Bf16(rows) => ("bf16", rows.len()),
        };
        let rule = match golden.arithmetic.scale_rule {
            ScaleRule::Floor => "floor",
            ScaleRule::Ceil => "ceil",
            ScaleRule::Even => "even",
            ScaleRule::Rceil => "rceil",
        };
        assert!(golden.name.ends_with(&format!("-{rule}-{}", input.0)), "{}", golden.name);
        assert_eq!(golden.cols, 2 * BLOCK);
        assert_eq!(input.1, golden.rows * golden.cols);
        assert_eq!((golden.codes.len(), golden.scales.len()), (golden.rows * 32, golden.rows * 2));
    }
}

#[test]
fn conventions_are_what_the_libraries_do() {
    let mut seen = Vec::new();
    for golden in files() {
        if let Some(convention) = golden.convention() {
            assert_eq!(convention.mxfp4(), golden.arithmetic, "{}", golden.name);
            assert_eq!(Recipe::of(convention).arithmetic, golden.arithmetic, "{}", golden.name);
            seen.push(convention);
        } else {
            let rest = (golden.arithmetic.ties, golden.arithmetic.negative_zero);
            assert_eq!(rest, (Ties::Even, NegativeZero::Keep), "{}", golden.name);
        }
    }
    for convention in [Convention::Ocp, Convention::CompressedTensors, Convention::Modelopt, Convention::Ggml]
    {
        assert!(seen.contains(&convention), "no file shows {convention:?}");
    }
    assert_eq!(
        Recipe::default(),
        Recipe::of(Convention::Ocp),
        "the default is OCP's, refusing non-finite input"
    );
    assert_eq!(Recipe::default().non_finite, NonFinite::Error);
}

#[test]
fn slips_are_as_many_as_known() {
    for (name, groups) in FILES {
        let golden = Golden::read(name);
        let mut found = BTreeMap::<&str, usize>::new();
        for (row, _) in &golden.slips {
            *found.entry(golden.group(*row)).or_default() += 1;
        }
        let found: Vec<_> = found.into_iter().collect();
        assert_eq!(found, groups, "{name}");
        assert!(golden.slips.is_disjoint(&golden.non_finite), "{name}");
    }
}

#[test]
fn every_block_is_the_librarys() {
    for golden in files() {
        with_input!(golden, assert_blocks);
    }
}

fn assert_blocks<T: Exact>(golden: &Golden, rows: &[T]) {
    let recipe =
        Recipe { format: Format::Mxfp4, arithmetic: golden.arithmetic, non_finite: NonFinite::Propagate };
    for isa in Isa::available() {
        for row_stride in [64, 65, 72, 101, 128] {
            let what = format!("{}, {isa:?}, row stride {row_stride}", golden.name);
            let (values, shape) = spread(rows, Shape::new(golden.rows, golden.cols), row_stride);
            let (tensor, _) = quantize(isa, &values, shape, &recipe).expect(&what);
            assert_eq!(tensor.codes().len(), golden.codes.len(), "{what}");
            for block in golden.blocks() {
                let index = block.0 * golden.cols / BLOCK + block.1;
                let ours = (tensor.scales()[index], &tensor.codes()[index * BLOCK / 2..][..BLOCK / 2]);
                let what = || format!("{what}, {block:?}, {}", golden.group(block.0));
                if golden.non_finite.contains(&block) {
                    assert_eq!(ours, (255, [0; BLOCK / 2].as_slice()), "{}", what());
                } else if golden.slips.contains(&block) {
                    assert_ne!(ours, golden.block(block), "no slip: {}", what());
                } else {
                    assert_eq!(ours, golden.block(block), "{}", what());
                }
            }
        }
    }
}

/// The golden inputs are the hardest that there are, so they serve for every other recipe too.
#[test]
fn every_input_is_as_expected_for_every_recipe() {
    for name in ["torchao-0.18.0-floor-f32", "torchao-0.18.0-floor-bf16", "modelopt-0.47.0-rceil-f16"] {
        let golden = Golden::read(name);
        with_input!(golden, assert_oracle);
    }
}

fn assert_oracle<T: Exact>(golden: &Golden, rows: &[T]) {
    for recipe in every_recipe() {
        assert_as_expected(rows, Shape::new(golden.rows, golden.cols), &recipe);
    }
}

#[test]
fn non_finite_blocks_are_those_listed_and_refused() {
    for golden in files() {
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

    let recipe = Recipe { arithmetic: golden.arithmetic, ..Recipe::default() };
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
    for golden in files() {
        assert_dequantized::<f32>(&golden);
        assert_dequantized::<f16>(&golden);
        assert_dequantized::<bf16>(&golden);
    }
}

fn assert_dequantized<T: Exact>(golden: &Golden) {
    let (rows, cols) = (golden.rows, golden.cols);
    let parts = (golden.codes.clone(), golden.scales.clone());
    let tensor =
        QuantizedTensor::from_parts(Format::Mxfp4, rows, cols, parts.0, parts.1).expect("whole blocks");
    let codes = unpack(&golden.codes);
    for isa in Isa::available() {
        let mut values = vec![T::of_bits(0xA5A5); rows * cols];
        dequantize_with(isa, &tensor, &mut values, cols).expect("room for all");
        for (index, found) in values.iter().enumerate() {
            let exact = oracle::value(codes[index], golden.scales[index / BLOCK]);
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

/// What a block of a group is for, in the terms of its elements' exact values; one block of the group must be so.
fn shows<T: Exact>(group: &str, block: &[T]) -> bool {
    let values: Vec<f64> = block.iter().map(|v| v.to_f64()).collect();
    let all = |is: fn(&f64) -> bool| values.iter().all(is);
    let any = |is: fn(&f64) -> bool| values.iter().any(is);
    let amax = values.iter().fold(0.0, |amax: f64, v| amax.max(v.abs()));
    let mantissa = amax / 2f64.powf(amax.log2().floor());
    let zero = |sign: bool| move |v: &f64| *v == 0.0 && v.is_sign_negative() == sign;
    let mut specials = values.iter().filter(|v| !v.is_finite());
    match group {
        "zero" => values.iter().all(zero(false)),
        "negative-zero" => values.iter().all(zero(true)),
        "mixed-zero" => all(|v| *v == 0.0) && values.iter().any(zero(false)) && values.iter().any(zero(true)),
        "zeros-among-normals" => {
            any(|v| *v != 0.0) && values.iter().any(zero(false)) && values.iter().any(zero(true))
        }
        "power-of-two" => mantissa == 1.0,
        "six-times-power-of-two" => mantissa == 1.5,
        "seven-times-power-of-two" => mantissa == 1.75,
        "ties" | "ties-smallest-scale" => {
            let scale = if group == "ties" { 1.0 } else { oracle::power_of_two(-127) };
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].iter().all(|tie| values.contains(&(tie * scale)))
        }
        "smallest-scale" => (oracle::power_of_two(-126)..oracle::power_of_two(-124)).contains(&amax),
        "subnormal" => {
            let smallest_normal = if T::SMALLEST_EXPONENT == -24 { -14 } else { -126 };
            amax > 0.0 && amax < oracle::power_of_two(smallest_normal)
        }
        "largest-finite" => amax == T::LARGEST,
        "nan" => any(|v| v.is_nan() && v.is_sign_positive()),
        "negative-nan" => any(|v| v.is_nan() && v.is_sign_negative()),
        "positive-infinity" => specials.all(|v| *v == f64::INFINITY) && any(|v| v.is_infinite()),
        "negative-infinity" => specials.all(|v| *v == f64::NEG_INFINITY) && any(|v| v.is_infinite()),
        "both-infinities" => values.contains(&f64::INFINITY) && values.contains(&f64::NEG_INFINITY),
        "nan-and-infinity" => any(|v| v.is_nan()) && any(|v| v.is_infinite()),
        _ => amax > 0.0,
    }
}

const GROUPS: [&str; 22] = [
    "normal-by-exponent",
    "heavy-tailed",
    "zero",
    "negative-zero",
    "mixed-zero",
    "zeros-among-normals",
    "tiny-among-large",
    "power-of-two",
    "six-times-power-of-two",
    "seven-times-power-of-two",
    "near-boundary",
    "ties",
    "ties-smallest-scale",
    "smallest-scale",
    "subnormal",
    "largest-finite",
    "nan",
    "negative-nan",
    "positive-infinity",
    "negative-infinity",
    "both-infinities",
    "nan-and-infinity",
];

#[test]
fn every_group_is_there_and_shows_its_case() {
    for golden in files() {
        with_input!(golden, assert_groups);
    }
}

fn assert_groups<T: Exact>(golden: &Golden, rows: &[T]) {
    // The smallest scale is far below what f16 can hold.
    let out_of_reach = |name: &str| name.ends_with("smallest-scale") && T::SMALLEST_EXPONENT == -24;
    for name in GROUPS.into_iter().filter(|name| !out_of_reach(name)) {
        let group = golden.groups.iter().find(|group| group.name == name);
        let group = group.unwrap_or_else(|| panic!("{} has no group {name}", golden.name));
        let elements = &rows[group.first * golden.cols..(group.last + 1) * golden.cols];
        assert!(elements.chunks(BLOCK).any(|block| shows(name, block)), "{}: {name}", golden.name);
    }
    let grouped: usize = golden.groups.iter().map(|group| group.last + 1 - group.first).sum();
    assert_eq!(grouped, golden.rows, "{}", golden.name);
}
