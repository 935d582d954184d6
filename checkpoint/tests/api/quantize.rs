//! The bytes and the loss of quantized tensors, compared with a whole tensor quantized at once.

use half::{bf16, f16};
use microscale::{
    ErrorStats, Format, Global, GlobalScale, Numerics, QuantizeOptions, Quantized, Recipe, Search, Shape,
    WorstBlocks, quantize_with,
};
use microscale_checkpoint::{Outcome, Quantize, Settings, Summary, TensorSummary};
use microscale_test_support::Scratch;
use microscale_test_support::oracle::nvfp4;

use crate::input::{InFile, Stored, Tensor, noise, write_file, write_model};
use crate::{BAND, quantize, request, request_all, tensors};

/// Shapes smaller than a band, as large, and larger: whole rows, ragged rows, rows longer than a
/// band, and matrices of experts.
const SHAPES: [&[usize]; 9] = [
    &[4, 64],
    &[BAND / 1024, 1024],
    &[BAND / 1024 + 1, 1024],
    &[1000, 1056],
    &[3, BAND + 4096],
    &[1, BAND + 32],
    &[BAND / 32 + 3, 32],
    &[3, 200, 512],
    &[5, 7, 32],
];

/// The global scale that compressed-tensors computes for a largest magnitude.
pub(crate) fn global_scale<T: Stored>(amax: f64) -> GlobalScale {
    nvfp4::global_scale::<T>(Numerics::CompressedTensors, amax as f32)
}

pub(crate) fn amax<T: Stored>(values: &[T]) -> f64 {
    values.iter().map(|value| value.to_f64().abs()).fold(0.0, f64::max)
}

/// The default numerics of a format, under a global scale if the format has one.
pub(crate) fn recipe(format: Format, global: GlobalScale) -> Recipe {
    Recipe::of(format, Numerics::default_for(format)).unwrap().with_global(Global::Given(global))
}

/// The shape of a tensor as a matrix of all its rows.
pub(crate) fn matrix(shape: &[usize]) -> Shape {
    let cols = *shape.last().unwrap();
    Shape::new(shape.iter().product::<usize>() / cols, cols)
}

/// The outcome of a tensor.
pub(crate) fn summary_of<'s>(summary: &'s Summary, name: &str) -> &'s TensorSummary {
    summary.tensors.iter().find(|tensor| tensor.name == name).unwrap()
}

/// Checks a tensor of an output, and its loss in the summary, against the whole tensor quantized.
#[track_caller]
fn check<T: Stored>(tensor: &Tensor, found: &InFile<'_>, summary: &TensorSummary, expected: &Quantized) {
    let name = &tensor.name;
    assert!(found.codes == expected.tensor.codes(), "{name}: other codes");
    assert!(found.scales == expected.tensor.scales(), "{name}: other scales");
    assert_eq!(found.divisor, expected.tensor.global_scale().map(GlobalScale::value), "{name}");
    let Outcome::Quantized { report, errors, .. } = &summary.outcome else { panic!("{name} is copied") };
    let loss = ErrorStats::of_quantized(&tensor.values::<T>(), matrix(&tensor.shape), &expected.tensor);
    assert_eq!((report, errors), (&expected.report, &loss.unwrap()), "{name}");
}

fn every_shape<T: Stored>(format: Format) {
    let scratch = Scratch::new();
    let named = |(number, shape): (usize, &&[usize])| {
        Tensor::noise::<T>(format!("model.layers.{number}.mlp.down_proj.weight"), shape, number as u64)
    };
    let input: Vec<_> = SHAPES.iter().enumerate().map(named).collect();
    let file = write_file(&scratch, "in.safetensors", &input);
    let summary = quantize(&request_all(format), &file, &scratch.path("out.safetensors")).unwrap();
    let output = tensors(&scratch.path("out.safetensors"));
    let parts = if format == Format::Nvfp4 { 3 } else { 2 };
    assert_eq!(output.len(), parts * input.len());
    for tensor in &input {
        let values = tensor.values::<T>();
        let recipe = recipe(format, global_scale::<T>(amax(&values)));
        let expected = microscale::quantize(&values, matrix(&tensor.shape), &recipe).unwrap();
        let found = InFile::take(&output, &tensor.name, &tensor.shape, format);
        check::<T>(tensor, &found, summary_of(&summary, &tensor.name), &expected);
    }
}

#[test]
fn mxfp4_of_tensors_in_bands_is_mxfp4_of_whole_tensors() {
    every_shape::<f32>(Format::Mxfp4);
    every_shape::<f16>(Format::Mxfp4);
    every_shape::<bf16>(Format::Mxfp4);
}

#[test]
fn nvfp4_of_tensors_in_bands_is_nvfp4_of_whole_tensors() {
    every_shape::<f32>(Format::Nvfp4);
    every_shape::<f16>(Format::Nvfp4);
    every_shape::<bf16>(Format::Nvfp4);
}

#[test]
fn mxfp8_of_tensors_in_bands_is_mxfp8_of_whole_tensors() {
    every_shape::<f32>(Format::Mxfp8E4m3);
    every_shape::<f16>(Format::Mxfp8E4m3);
    every_shape::<bf16>(Format::Mxfp8E4m3);
}

#[test]
fn fused_layers_share_the_scale_of_the_largest_amax_and_others_do_not() {
    let scratch = Scratch::new();
    // The amax of each layer is in its last row. The last one is largest in `up_proj`.
    let layer = |name: &str, amax: f32| {
        let mut values: Vec<f32> = noise(BAND + 2048, 7);
        values.iter_mut().for_each(|value| *value = value.clamp(-0.5, 0.5));
        values[BAND + 2047] = -amax;
        Tensor::of(format!("model.layers.0.{name}.weight"), &[BAND / 64 + 32, 64], &values)
    };
    let attention = |part: &str, amax| layer(&format!("self_attn.{part}_proj"), amax);
    let input = [
        ("a.safetensors", vec![attention("q", 1.5), attention("o", 3.25), layer("mlp.up_proj", 9.0)]),
        ("b.safetensors", vec![attention("k", 5.5), layer("mlp.gate_proj", 6.5)]),
        ("c.safetensors", vec![attention("v", 0.75), layer("mlp.down_proj", 0.625)]),
    ];
    let model = write_model(&scratch, "IN", &input);
    let summary = quantize(&request(Format::Nvfp4), &model, &scratch.path("OUT")).unwrap();
    let output = tensors(&scratch.path("OUT"));
    for tensor in input.iter().flat_map(|(_, tensors)| tensors) {
        let largest = match tensor.name.split('.').nth(4).unwrap() {
            "q_proj" | "k_proj" | "v_proj" => 5.5,
            "gate_proj" | "up_proj" => 9.0,
            "o_proj" => 3.25,
            _ => 0.625,
        };
        let recipe = recipe(Format::Nvfp4, global_scale::<f32>(largest));
        let values = tensor.values::<f32>();
        let expected = microscale::quantize(&values, matrix(&tensor.shape), &recipe).unwrap();
        let found = InFile::take(&output, &tensor.name, &tensor.shape, Format::Nvfp4);
        check::<f32>(tensor, &found, summary_of(&summary, &tensor.name), &expected);
    }
}

#[test]
fn a_search_with_importance_by_expert_is_the_search_of_each_expert() {
    let scratch = Scratch::new();
    // One and a half bands for each expert, so that bands end at experts' ends.
    let (experts, rows, cols) = (3, 3 * BAND / 2 / 1024, 1024);
    let tensor = Tensor::noise::<bf16>("model.experts.down.weight", &[experts, rows, cols], 3);
    let importance: Vec<f32> = noise(experts * cols, 4);
    let importance: Vec<_> = importance.into_iter().map(f32::abs).collect();
    let file = write_file(&scratch, "in.safetensors", std::slice::from_ref(&tensor));
    let vectors = Tensor::of("model.experts.down.weight.importance", &[experts, cols], &importance);
    let vectors = write_file(&scratch, "importance.safetensors", &[vectors]);
    let settings = Settings { search: Some(Search::Window), ..Settings::default() };
    let mut request = request_all(Format::Mxfp4);
    request.recipes.set(settings);
    let request = Quantize { importance: Some(vectors), worst_blocks: Some(9), ..request };
    let summary = quantize(&request, &file, &scratch.path("out.safetensors")).unwrap();
    let output = tensors(&scratch.path("out.safetensors"));
    let found = InFile::take(&output, &tensor.name, &tensor.shape, Format::Mxfp4);
    let recipe = Recipe { search: Search::Window, ..Recipe::default() };
    let (values, shape) = (tensor.values::<bf16>(), Shape::new(rows, cols));
    let (mut codes, mut scales, mut errors) = (Vec::new(), Vec::new(), ErrorStats::default());
    for (values, importance) in values.chunks(rows * cols).zip(importance.chunks(cols)) {
        let options = QuantizeOptions::new().importance(importance);
        let expected = quantize_with(values, shape, &recipe, options).unwrap().tensor;
        codes.extend_from_slice(expected.codes());
        scales.extend_from_slice(expected.scales());
        errors = errors.and_quantized(values, shape, &expected).unwrap();
    }
    assert!(found.codes == codes && found.scales == scales);
    let Outcome::Quantized { errors: found, plain, .. } = &summary.tensors[0].outcome else { panic!() };
    assert_eq!(*found, errors);
    let (shape, unsearched) = (matrix(&tensor.shape), Recipe::default());
    let unsearched = microscale::quantize(&values, shape, &unsearched).unwrap().tensor;
    let unsearched = ErrorStats::of_quantized(&values, shape, &unsearched).unwrap();
    assert_eq!(plain.as_ref().unwrap().errors, unsearched);
    assert_ne!(unsearched, errors);

    // The worst blocks of all bands are the worst blocks of the whole tensor.
    let whole = microscale::QuantizedShape::new(Format::Mxfp4, shape.rows, cols);
    let whole = microscale::QuantizedTensor::from_parts(whole, codes, scales).unwrap();
    let worst = WorstBlocks::of(&values, shape, &whole, 9).unwrap();
    let blocks = |found: Vec<(_, &microscale::BlockError)>| -> Vec<_> {
        found.into_iter().map(|(_, block): (&TensorSummary, _)| *block).collect()
    };
    assert_eq!(blocks(summary.worst_relative(9)), worst.relative);
    assert_eq!(blocks(summary.worst_absolute(9)), worst.absolute);
}
