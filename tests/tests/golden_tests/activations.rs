//! Compares quantized activations with libraries: codes and scales in bytes, row operations within
//! derived bounds.

use half::{bf16, f16};
use microscale::formats::activations::{GROUP, LEAST_GROUP_AMAX, LEAST_TOKEN_SCALE, RmsNorm};
use microscale::formats::nvfp4::Direction;
use microscale::formats::{NegativeZero, Ties};
use microscale::{
    ActivationFormat, ActivationLayout, ActivationRecipe, ActivationScale, Fp8Scale, Gate, Glu, GluOrder,
    QuantizedActivations, RowOperation, Scheme, Shape,
};
use microscale_test_support::activations::{
    PER_GROUP, Parts, Within, assert_within, fp8, gate_error, gelu_error, norm_error, quantized,
    sum_roundings,
};
use microscale_test_support::golden::{Golden, Input, Nvfp4, Tensors, files};
use microscale_test_support::oracle::{Exact, power_of_two};

const FOLDER: &str = "activations";
const TORCHAO: &str = "torchao-0.18.0";
const TRANSFORMERS: &str = "transformers-5.23.0";
const TORCH: &str = "torch-2.11.0";

/// ε of the files.
const EPSILON: f32 = 1.0 / (1 << 20) as f32;

/// Quantizes rows without gaps.
fn of_rows<T: Exact>(
    values: &[T],
    columns: usize,
    recipe: &ActivationRecipe,
    parts: &Parts<'_, T>,
) -> (QuantizedActivations, Option<Vec<T>>) {
    let shape = Shape::new(values.len() / columns, columns);
    quantized(values, shape, recipe, parts).expect("the CPU quantizes")
}

/// Quantizes rows without an operation.
fn of_input(
    input: &Input,
    columns: usize,
    recipe: &ActivationRecipe,
    scales: &[f32],
) -> QuantizedActivations {
    match input {
        Input::F32(values) => of_rows(values, columns, recipe, &Parts { scales, ..Parts::default() }).0,
        Input::F16(values) => of_rows(values, columns, recipe, &Parts { scales, ..Parts::default() }).0,
        Input::Bf16(values) => of_rows(values, columns, recipe, &Parts { scales, ..Parts::default() }).0,
    }
}

fn bits(scales: &[f32]) -> Vec<u32> {
    scales.iter().map(|scale| scale.to_bits()).collect()
}

fn columns_of(file: &Tensors, tensor: &str) -> usize {
    let &[_, columns] = file.shape(tensor) else { panic!("{tensor} is no matrix") };
    columns
}

#[test]
fn each_file_is_compared() {
    let mut names: Vec<String> = ["fp8-f32", "fp8-bf16", "fp8-f16", "nvfp4-f32", "nvfp4-bf16", "mx-bf16"]
        .map(|end| format!("{TORCHAO}-{end}"))
        .into();
    names.push("compressed-tensors-0.20.0-fp8-f32".to_owned());
    names.extend(
        ["fp8-f32", "fp8-bf16", "gates-f32", "norms-f32", "norms-bf16", "norms-f16"]
            .map(|end| format!("{TRANSFORMERS}-{end}")),
    );
    names.extend(["gates-f32", "norms-f32"].map(|end| format!("{TORCH}-{end}")));
    names.sort();
    assert_eq!(files(FOLDER), names);
}

#[test]
fn fp8_equals_torchao() {
    for dtype in ["f32", "bf16", "f16"] {
        let file = Tensors::read(FOLDER, &format!("{TORCHAO}-fp8-{dtype}"));
        let (input, columns) = (file.input("input"), columns_of(&file, "input"));
        for (name, scale) in [("token", Fp8Scale::PerToken), ("group", PER_GROUP)] {
            let found = of_input(&input, columns, &fp8(scale), &[]);
            assert_eq!(
                bits(&found.f32_scales),
                bits(&file.f32s(&format!("{name}.scales"))),
                "{dtype}, {name}"
            );
            assert_codes(&found.codes, file.bytes(&format!("{name}.codes")), columns, |_, _| true);
            assert!(found.scales.is_empty());
        }
        let found = of_input(&input, columns, &fp8(Fp8Scale::Given), &file.f32s("given.scale"));
        assert_codes(&found.codes, file.bytes("given.codes"), columns, |_, _| true);
        assert!(found.scales.is_empty() && found.f32_scales.is_empty());
    }
}

/// A row by itself is a tensor with the scale of the token.
#[test]
fn fp8_per_tensor_equals_torchao_for_tensors_of_a_row() {
    let file = Tensors::read(FOLDER, &format!("{TORCHAO}-fp8-f32"));
    let (input, columns) = (file.f32s("input"), columns_of(&file, "input"));
    let expected = file.f32s("token.scales").into_iter().zip(file.bytes("token.codes").chunks(columns));
    for (row, (scale, codes)) in input.chunks(columns).zip(expected) {
        let found = of_rows(row, columns, &fp8(Fp8Scale::PerTensor), &Parts::default()).0;
        assert_eq!(bits(&found.f32_scales), [scale.to_bits()]);
        assert_eq!(found.codes, codes);
    }
}

/// Asserts that the codes of selected groups of a row are the same.
fn assert_codes(found: &[u8], expected: &[u8], columns: usize, selects: impl Fn(usize, usize) -> bool) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.chunks(GROUP).zip(expected.chunks(GROUP)).enumerate() {
        let (row, group) = (i / (columns / GROUP), i % (columns / GROUP));
        assert!(
            !selects(row, group) || found == expected,
            "row {row}, group {group}: {found:?}, not {expected:?}"
        );
    }
}

/// compressed-tensors has no least scale: it only replaces 0. It adds a zero point of 0, so −0
/// becomes +0.
#[test]
fn fp8_equals_compressed_tensors_above_the_least_scales() {
    let file = Tensors::read(FOLDER, "compressed-tensors-0.20.0-fp8-f32");
    let (input, columns) = (file.f32s("input"), columns_of(&file, "input"));
    for (name, scale, least, width) in [
        ("token", Fp8Scale::PerToken, LEAST_TOKEN_SCALE, columns),
        ("group", PER_GROUP, LEAST_GROUP_AMAX / 448.0, GROUP),
    ] {
        let found = of_rows(&input, columns, &fp8(scale), &Parts::default()).0;
        let (codes, scales) = (file.bytes(&format!("{name}.codes")), file.f32s(&format!("{name}.scales")));
        assert_eq!(found.f32_scales.len(), scales.len());
        let mut below = 0;
        for (i, (codes, expected)) in found.codes.chunks(width).zip(codes.chunks(width)).enumerate() {
            let zero = expected.iter().all(|code| code & 0x7F == 0);
            let is_below = scales[i] < least || zero;
            let right = if is_below { least } else { scales[i] };
            assert_eq!(found.f32_scales[i].to_bits(), right.to_bits(), "{name} {i}");
            below += usize::from(is_below);
            let without_zero = |(code, x): (&u8, &f32)| if *x == 0.0 { code & 0x7F } else { *code };
            let ours: Vec<u8> = codes.iter().zip(&input[i * width..]).map(without_zero).collect();
            assert!(ours == expected || scales[i] < least, "{name} {i}: {ours:?}, not {expected:?}");
        }
        assert!((3..scales.len() / 2).contains(&below), "{name}: {below} below the least scale");
    }
}

/// transformers has no least scale: a group of zeros has the scale 1.
#[test]
fn powers_of_two_per_group_equal_transformers_above_the_least_scale() {
    let least = power_of_two(-33) as f32;
    for dtype in ["f32", "bf16"] {
        let file = Tensors::read(FOLDER, &format!("{TRANSFORMERS}-fp8-{dtype}"));
        let (input, columns) = (file.input("input"), columns_of(&file, "input"));
        let found = of_input(&input, columns, &fp8(Fp8Scale::PerGroup { power_of_two: true }), &[]);
        let scales = file.f32s("power.scales");
        assert_eq!(found.f32_scales.len(), scales.len());
        let codes = file.bytes("power.codes");
        assert_codes(&found.codes, codes, columns, |row, group| {
            scales[row * (columns / GROUP) + group] >= least
        });
        let mut below = 0;
        for (i, expected) in codes.chunks(GROUP).enumerate() {
            let zero = expected.iter().all(|code| code & 0x7F == 0);
            let right = if zero || scales[i] < least { least } else { scales[i] };
            assert_eq!(found.f32_scales[i].to_bits(), right.to_bits(), "{dtype}, group {i}");
            below += usize::from(right == least);
        }
        assert!((3..scales.len() / 2).contains(&below), "{dtype}: {below} below the least scale");
    }
}

#[test]
fn nvfp4_equals_torchao_where_its_formula_is_transformer_engines() {
    for dtype in ["f32", "bf16"] {
        let file = Tensors::read(FOLDER, &format!("{TORCHAO}-nvfp4-{dtype}"));
        let columns = columns_of(&file, "given.input");
        let input = file.input("given.input");
        let scale = file.f32s("given.scale")[0];
        for (direction, scale) in [(Direction::Multiplier, scale), (Direction::Divisor, 1.0 / scale)] {
            let recipe = ActivationRecipe {
                layout: ActivationLayout::Swizzled128x4,
                ..ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::Given(direction)))
            };
            let found = of_input(&input, columns, &recipe, &[scale]);
            assert_eq!(found.scales, file.bytes("given.swizzled"), "{dtype}, {direction:?}");
            assert_eq!(found.codes, file.bytes("given.codes"), "{dtype}, {direction:?}");
            assert!(found.f32_scales.is_empty());
        }
        let recipe = ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::PerToken));
        let found = of_input(&file.input("token.input"), columns, &recipe, &[]);
        assert_eq!(bits(&found.f32_scales), bits(&file.f32s("token.row_scales")), "{dtype}");
        assert_eq!(found.scales, file.bytes("token.scales"), "{dtype}");
        assert_eq!(found.codes, file.bytes("token.codes"), "{dtype}");
    }
}

#[test]
fn swizzled_mx_equals_torchao() {
    use microscale::formats::ScaleRule::Floor;
    let file = Tensors::read(FOLDER, &format!("{TORCHAO}-mx-bf16"));
    for (name, format) in
        [("mxfp8", ActivationFormat::Mxfp8(Floor)), ("mxfp4", ActivationFormat::Mxfp4(Floor))]
    {
        let recipe =
            ActivationRecipe { layout: ActivationLayout::Swizzled128x4, ..ActivationRecipe::new(format) };
        let found = of_input(&file.input("input"), columns_of(&file, "input"), &recipe, &[]);
        assert_eq!(found.codes, file.bytes(&format!("{name}.codes")), "{name}");
        assert_eq!(found.scales, file.bytes(&format!("{name}.swizzled")), "{name}");
        assert!(found.f32_scales.is_empty());
    }
}

/// The files of weights, for the numerics that activations have.
#[test]
fn mx_blocks_equal_torchao() {
    let mut compared = 0;
    for folder in ["mxfp4", "mxfp8"] {
        for name in files(folder).iter().filter(|name| name.starts_with(TORCHAO)) {
            let golden = Golden::read(folder, name);
            let format = match golden.scheme {
                Scheme::Mxfp4(arithmetic) => {
                    assert_eq!((arithmetic.ties, arithmetic.negative_zero), (Ties::Even, NegativeZero::Keep));
                    ActivationFormat::Mxfp4(arithmetic.scale_rule)
                }
                Scheme::Mxfp8E4m3(rule) => ActivationFormat::Mxfp8(rule),
                _ => continue,
            };
            let found = of_input(&golden.input, golden.cols, &ActivationRecipe::new(format), &[]);
            for block in golden.blocks() {
                if golden.slips.contains(&block) || golden.non_finite.contains(&block) {
                    continue;
                }
                let index = block.0 * golden.cols / 32 + block.1;
                let codes = golden.format().block_bytes();
                let ours = (found.scales[index], &found.codes[index * codes..][..codes]);
                assert_eq!(ours, golden.block(block), "{name}, {}: {block:?}", golden.group(block.0));
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 8 + 4);
}

/// The tensors of weights under Transformer Engine's formula, with its global scale and as one row.
#[test]
fn nvfp4_equals_transformer_engines_formula() {
    let (mut given, mut by_row) = (0, 0);
    for name in files("nvfp4").iter().filter(|name| name.starts_with("transformer-engine-formula")) {
        let file = Nvfp4::read(name);
        assert!(file.degenerate.is_empty() && file.slips.is_empty());
        for case in &file.cases {
            let global = case.global_scale.expect("a global scale");
            let what = format!("{name}, {}", case.name);
            let same_blocks = |found: &QuantizedActivations| {
                for (index, block) in case.blocks().filter(|(_, block)| !file.non_finite.contains(block)) {
                    let ours = (found.scales[index], &found.codes[index * 8..][..8]);
                    assert_eq!(
                        ours,
                        (case.scales[index], &case.codes[index * 8..][..8]),
                        "{what}, {block:?}"
                    );
                }
            };
            if global.in_range() {
                let format = ActivationFormat::Nvfp4(ActivationScale::Given(global.direction()));
                let recipe = ActivationRecipe::new(format);
                same_blocks(&of_input(&case.input, 64, &recipe, &[global.value()]));
                given += 1;
            }
            let finite = !file.non_finite.iter().any(|(of, _, _)| *of == case.name);
            if file.variant == "computed" && finite {
                let recipe = ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::PerToken));
                let found = of_input(&case.input, case.rows * 64, &recipe, &[]);
                assert_eq!(bits(&found.f32_scales), bits(&[1.0 / global.value()]), "{what}");
                same_blocks(&found);
                by_row += 1;
            }
        }
    }
    assert!(given > 60 && by_row > 30, "{given} with a given scale, {by_row} as a row");
}

fn interleaved(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).flat_map(|(gate, up)| [*gate, *up]).collect()
}

fn halves(gate: &[f32], up: &[f32], columns: usize) -> Vec<f32> {
    gate.chunks(columns).zip(up.chunks(columns)).flat_map(|(gate, up)| [gate, up].concat()).collect()
}

/// Compares a gate in both orders with a library's results in f64.
fn compare_gate(
    glu: Glu,
    [gate, up]: [&[f32]; 2],
    expected: &[f64],
    columns: usize,
    error: impl Fn(f64, f64, f64) -> f64,
) {
    let within: Vec<Within> = expected
        .iter()
        .zip(gate.iter().zip(up))
        .map(|(expected, (gate, up))| {
            Within::around(*expected, error(*expected, f64::from(*gate), f64::from(*up)))
        })
        .collect();
    let orders =
        [(GluOrder::Halves, halves(gate, up, columns)), (GluOrder::Interleaved, interleaved(gate, up))];
    for (order, values) in orders {
        let recipe = ActivationRecipe { operation: RowOperation::Glu(glu, order), ..fp8(PER_GROUP) };
        let found = of_rows(&values, 2 * columns, &recipe, &Parts::default()).0;
        let loose = assert_within(&found, &within, columns, &format!("{glu:?}, {order:?}"));
        // gpt-oss' limits make quotients of 3/4, which are ties.
        let ties = if glu == Glu::Sigmoid(Gate::GPT_OSS) { 0.015 } else { 0.001 };
        assert!(loose < ties, "{glu:?}: {loose} of the codes are uncertain");
    }
}

#[test]
fn silu_and_gelu_are_within_their_bounds_of_torch() {
    let file = Tensors::read(FOLDER, &format!("{TORCH}-gates-f32"));
    let (gate, up, columns) = (file.f32s("gate"), file.f32s("up"), columns_of(&file, "gate"));
    compare_gate(Glu::SILU, [&gate, &up], &file.f64s("silu"), columns, |expected, gate, up| {
        gate_error(expected, gate, up, gate, 0.0)
    });
    compare_gate(Glu::GeluTanh, [&gate, &up], &file.f64s("gelu_tanh"), columns, |expected, gate, up| {
        // Five operations and three constants, of one sign. 1 + tanh cancels in f64.
        let argument = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
        gate_error(expected, gate, up, argument, 9.0) + power_of_two(-51) * (gate * up).abs()
    });
    compare_gate(Glu::Gelu, [&gate, &up], &file.f64s("gelu"), columns, |_, gate, up| {
        // 1 + erf cancels in f64.
        gelu_error(gate, up) + power_of_two(-51) * (gate * up).abs()
    });
}

#[test]
fn the_gate_of_gpt_oss_is_within_its_bound_of_transformers() {
    let file = Tensors::read(FOLDER, &format!("{TRANSFORMERS}-gates-f32"));
    let pairs = file.f32s("gate_up");
    let gate: Vec<f32> = pairs.iter().copied().step_by(2).collect();
    let up: Vec<f32> = pairs.iter().copied().skip(1).step_by(2).collect();
    let columns = columns_of(&file, "gpt_oss");
    let glu = Glu::Sigmoid(Gate::GPT_OSS);
    compare_gate(glu, [&gate, &up], &file.f64s("gpt_oss"), columns, |expected, gate, up| {
        let gate = gate.min(7.0);
        // The constant and the product.
        gate_error(expected, gate, up.clamp(-7.0, 7.0) + 1.0, 1.702 * gate, 2.0)
    });
}

#[test]
fn rms_norm_is_within_its_bound_of_torch() {
    let file = Tensors::read(FOLDER, &format!("{TORCH}-norms-f32"));
    let (x, weight, columns) = (file.f32s("x"), file.f32s("weight"), columns_of(&file, "x"));
    let bound = norm_error(sum_roundings(columns));
    let within: Vec<Within> =
        file.f64s("rms_norm").iter().map(|y| Within::around(*y, bound * y.abs())).collect();
    // In f32 the rounding before the weight changes nothing.
    for norm in [RmsNorm::flashinfer(EPSILON), RmsNorm::llama(EPSILON)] {
        let recipe = ActivationRecipe { operation: RowOperation::RmsNorm(norm), ..fp8(PER_GROUP) };
        let parts = Parts { weights: Some(&weight), ..Parts::default() };
        let (found, _) = of_rows(&x, columns, &recipe, &parts);
        let loose = assert_within(&found, &within, columns, &format!("{norm:?}"));
        assert!(loose < 0.001, "{norm:?}: {loose} of the codes are uncertain");
    }
}

/// Compares RMSNorm with transformers in the dtype of the rows.
///
/// In f16 and bf16 both results are the same number or neighbours: each is a value with an error
/// far below half their distance, rounded. For Llama the rounding comes before the weight, whose
/// product is rounded again: neighbours stay within two.
fn compare_norms<T: Exact>(dtype: &str, floats: fn(&Input) -> &Vec<T>) {
    let file = Tensors::read(FOLDER, &format!("{TRANSFORMERS}-norms-{dtype}"));
    for columns in [160, 1056] {
        let tensor = |name: &str| file.input(&format!("{columns}.{name}"));
        for (name, norm) in [("llama", RmsNorm::llama(EPSILON)), ("gemma", RmsNorm::gemma(EPSILON))] {
            let weight = tensor(&format!("{name}.weight"));
            let recipe = ActivationRecipe { operation: RowOperation::RmsNorm(norm), ..fp8(PER_GROUP) };
            for case in ["plain", "added"] {
                let what = format!("{dtype}, {columns}, {name}, {case}");
                let x = tensor("x");
                let residual = (case == "added").then(|| floats(&tensor("residual")).clone());
                let parts = Parts {
                    residual: residual.as_deref(),
                    weights: Some(floats(&weight)),
                    ..Parts::default()
                };
                let (found, sums) = of_rows(floats(&x), columns, &recipe, &parts);
                if let Some(sums) = sums {
                    let same =
                        sums.iter().zip(floats(&tensor("added"))).all(|(a, b)| a.to_f64() == b.to_f64());
                    assert!(same, "{what}: the residual");
                }
                let expected = tensor(&format!("{name}.{case}"));
                let expected = floats(&expected);
                let wide = T::BITS == 32;
                let within: Vec<Within> = expected
                    .iter()
                    .map(|y| {
                        if wide {
                            // torch adds K squares in an order of its own.
                            let bound = norm_error(sum_roundings(columns)) + norm_error(columns);
                            return Within::around(y.to_f64(), bound * y.to_f64().abs());
                        }
                        // Only zeros give 0 here.
                        if y.to_f64() == 0.0 {
                            return Within::around(0.0, 0.0);
                        }
                        let Within { low, high } = Within::neighbours(*y);
                        match name {
                            "llama" => Within {
                                low: Within::neighbours(T::round_f64(low)).low,
                                high: Within::neighbours(T::round_f64(high)).high,
                            },
                            _ => Within { low, high },
                        }
                    })
                    .collect();
                let loose = assert_within(&found, &within, columns, &what);
                let most = [("f32", 0.005), ("f16", 0.05), ("bf16", 0.3)];
                let most = most.iter().find(|(of, _)| *of == dtype).expect("a dtype").1;
                assert!(loose < most, "{what}: {loose} of the codes are uncertain");
                let theirs = of_rows(expected, columns, &fp8(PER_GROUP), &Parts::default()).0;
                let differ = found.codes.iter().zip(&theirs.codes).filter(|(a, b)| a != b).count();
                assert!(differ * 500 <= expected.len(), "{what}: {differ} codes differ");
            }
        }
    }
}

#[test]
fn norms_of_llama_and_gemma_match_transformers() {
    compare_norms::<f32>("f32", |input| match input {
        Input::F32(values) => values,
        other => panic!("of {}", other.what().0),
    });
    compare_norms::<f16>("f16", |input| match input {
        Input::F16(values) => values,
        other => panic!("of {}", other.what().0),
    });
    compare_norms::<bf16>("bf16", |input| match input {
        Input::Bf16(values) => values,
        other => panic!("of {}", other.what().0),
    });
}
