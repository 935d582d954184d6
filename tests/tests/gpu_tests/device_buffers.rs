//! Tests operations on buffers in GPU memory.

use std::sync::Arc;

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::cudarc::driver::{CudaStream, CudaView};
use microscale::gpu::{DeviceAmax, DeviceQuantizeOptions, DeviceReport, DeviceTensor, DeviceView, Gpu};
use microscale::{
    Element, Error, Format, Global, GlobalScale, NonFinite, Numerics, Quantized, QuantizedShape, Recipe,
    ScaleLayout, Search, Shape, amax, quantize,
};
use microscale_test_support::cases::quantized_shape;

use super::support::{assert_is_cpus, default_recipes, patterns};

/// Returns OCP's MXFP4.
fn mxfp4() -> Recipe {
    let ocp = Recipe::of(Format::Mxfp4, Numerics::Ocp).unwrap();
    Recipe { non_finite: NonFinite::Propagate, ..ocp }
}

fn tensor(gpu: &Gpu, shape: Shape, recipe: &Recipe) -> DeviceTensor {
    DeviceTensor::zeros(gpu.stream(), quantized_shape(shape, recipe)).unwrap()
}

/// Enqueues quantization to a tensor, and adds to a report.
fn quantize_reporting<'v, T: Element>(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    values: impl Into<DeviceView<'v, T>>,
    shape: Shape,
    recipe: &Recipe,
    (out, report): (&mut DeviceTensor, &mut DeviceReport),
) -> microscale::Result<()> {
    gpu.quantize_on(stream, values, shape, recipe, DeviceQuantizeOptions::new().report(report), out)
}

/// Quantizes on the GPU's stream and copies the result to the host.
fn quantize_view<T: Element>(gpu: &Gpu, view: &CudaView<'_, T>, shape: Shape, recipe: &Recipe) -> Quantized {
    let (mut out, mut report) = (tensor(gpu, shape, recipe), DeviceReport::zeros(gpu.stream()).unwrap());
    quantize_reporting(gpu, gpu.stream(), view, shape, recipe, (&mut out, &mut report)).unwrap();
    let tensor = out.to_host(gpu.stream()).unwrap();
    Quantized { tensor, report: report.read(gpu.stream(), shape, recipe.format()).unwrap() }
}

pub(crate) fn may_start_anywhere(gpu: &Gpu) {
    let shape = Shape::new(9, 160);
    let values = patterns::<bf16>(shape.elements() + 16, true, 1);
    let whole = gpu.stream().clone_htod(&values).unwrap();
    for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        for recipe in default_recipes(scale_layout) {
            for start in 0..16 {
                let view = whole.slice(start..start + shape.elements());
                let found = quantize_view(gpu, &view, shape, &recipe);
                assert_is_cpus(&found, &values[start..], shape, &recipe);
            }
        }
    }
}

pub(crate) fn keep_gaps_between_rows(gpu: &Gpu) {
    let shape = Shape::new(50, 70).with_row_stride(88);
    let values = patterns::<f32>(shape.span().unwrap(), false, 2);
    for recipe in default_recipes(ScaleLayout::Linear) {
        let quantized = quantize(&values, shape, &recipe).unwrap().tensor;
        let device = DeviceTensor::from_host(gpu.stream(), &quantized).unwrap();
        let mut out = gpu.stream().clone_htod(&vec![-1.5f32; 50 * 88]).unwrap();
        gpu.dequantize_on(gpu.stream(), &device, &mut out, 88).unwrap();
        let found = gpu.stream().clone_dtoh(&out).unwrap();
        assert!(found.chunks(88).all(|row| row[70..].iter().all(|v| *v == -1.5)), "{recipe:?}");
    }
}

/// Without a report the bytes are the same, even if a report would count events.
pub(crate) fn need_no_report(gpu: &Gpu) {
    let shape = Shape::new(40, 200);
    let values = patterns::<f32>(shape.elements(), true, 7);
    let input = gpu.stream().clone_htod(&values).unwrap();
    let mut recipes = default_recipes(ScaleLayout::Linear);
    recipes.push(Recipe { search: Search::Full, ..mxfp4() });
    for recipe in recipes.into_iter().map(|recipe| Recipe { non_finite: NonFinite::Propagate, ..recipe }) {
        let counted = quantize_view(gpu, &input.as_view(), shape, &recipe);
        assert!(counted.report.nan > 0);
        let mut out = tensor(gpu, shape, &recipe);
        gpu.quantize_on(gpu.stream(), &input, shape, &recipe, DeviceQuantizeOptions::new(), &mut out)
            .unwrap();
        assert_eq!(out.to_host(gpu.stream()).unwrap(), counted.tensor, "{recipe:?}");
    }
}

/// A tensor that held another matrix keeps none of its bytes, not even in the padding.
pub(crate) fn used_tensors_are_overwritten(gpu: &Gpu) {
    let (stream, shape) = (gpu.stream(), Shape::new(130, 100));
    for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        for recipe in default_recipes(scale_layout) {
            let used = microscale_test_support::cases::used_tensor(quantized_shape(shape, &recipe));
            let mut out = DeviceTensor::from_host(stream, &used).unwrap();
            for seed in 0..3 {
                let values = patterns::<f32>(shape.elements(), false, seed);
                let input = stream.clone_htod(&values).unwrap();
                let mut report = DeviceReport::zeros(stream).unwrap();
                quantize_reporting(gpu, stream, &input, shape, &recipe, (&mut out, &mut report)).unwrap();
                let tensor = out.to_host(stream).unwrap();
                let report = report.read(stream, shape, recipe.format()).unwrap();
                assert_is_cpus(&Quantized { tensor, report }, &values, shape, &recipe);
            }
        }
    }
}

pub(crate) fn that_are_too_short_are_refused(gpu: &Gpu) {
    let shape = Shape::new(8, 64);
    let short = gpu.stream().alloc_zeros::<f32>(8 * 64 - 1).unwrap();
    let enough = gpu.stream().alloc_zeros::<f32>(8 * 64).unwrap();
    let mut report = DeviceReport::zeros(gpu.stream()).unwrap();
    for recipe in default_recipes(ScaleLayout::Linear) {
        let mut out = tensor(gpu, shape, &recipe);
        let refused = quantize_reporting(gpu, gpu.stream(), &short, shape, &recipe, (&mut out, &mut report));
        assert!(matches!(refused, Err(Error::Length { expected: 512, found: 511, .. })), "{refused:?}");
        let right = quantized_shape(shape, &recipe);
        let other_format = if recipe.format() == Format::Mxfp4 { Format::Mxfp8E4m3 } else { Format::Mxfp4 };
        for other in [
            QuantizedShape { cols: 32, ..right },
            QuantizedShape { rows: 7, ..right },
            QuantizedShape { format: other_format, ..right },
            right.with_scale_layout(ScaleLayout::Swizzled),
        ] {
            let mut wrong = DeviceTensor::zeros(gpu.stream(), other).unwrap();
            let refused =
                quantize_reporting(gpu, gpu.stream(), &enough, shape, &recipe, (&mut wrong, &mut report));
            let Err(Error::QuantizedShape { expected, found }) = refused else {
                panic!("{other:?} was accepted for {right:?}")
            };
            assert_eq!((expected, found), (right, other));
        }
        let mut output = gpu.stream().alloc_zeros::<f32>(8 * 64 - 1).unwrap();
        let refused = gpu.dequantize_on(gpu.stream(), &out, &mut output, 64);
        assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
    }
    let mut sum = DeviceAmax::zeros(gpu.stream()).unwrap();
    let refused = gpu.amax_on(gpu.stream(), &short, shape, &mut sum);
    assert!(matches!(refused, Err(Error::Length { expected: 512, found: 511, .. })), "{refused:?}");
}

pub(crate) fn reports_add_up_and_clear(gpu: &Gpu) {
    let shape = Shape::new(40, 320);
    let values = patterns::<f32>(shape.elements(), true, 3);
    let input = gpu.stream().clone_htod(&values).unwrap();
    for recipe in default_recipes(ScaleLayout::Linear) {
        let once = quantize(&values, shape, &recipe).unwrap().report;
        assert!(once.nan > 0 && once.infinite > 0, "{recipe:?}");
        if recipe.format() == Format::Mxfp4 {
            assert!(once.clipped_blocks > 0 && once.saturated_scales > 0, "{once:?}");
        }
        let mut out = tensor(gpu, shape, &recipe);
        let mut report = DeviceReport::zeros(gpu.stream()).unwrap();
        for _ in 0..3 {
            quantize_reporting(gpu, gpu.stream(), &input, shape, &recipe, (&mut out, &mut report)).unwrap();
        }
        let thrice = report.read(gpu.stream(), shape, recipe.format()).unwrap();
        assert_eq!((thrice.nan, thrice.infinite), (3 * once.nan, 3 * once.infinite), "{recipe:?}");
        assert_eq!(thrice.clipped_blocks, 3 * once.clipped_blocks, "{recipe:?}");
        assert_eq!(thrice.flushed_blocks, 3 * once.flushed_blocks, "{recipe:?}");
        assert_eq!(thrice.saturated_scales, 3 * once.saturated_scales, "{recipe:?}");
        assert_eq!(thrice.first_non_finite, once.first_non_finite, "{recipe:?}");
        report.clear(gpu.stream()).unwrap();
        let cleared = report.read(gpu.stream(), shape, recipe.format()).unwrap();
        assert_eq!(cleared, microscale::Report::default(), "{recipe:?}");
    }
}

/// Layers that share a global scale are quantized like one matrix of all their rows.
///
/// No operation waits for their amax.
pub(crate) fn layers_share_an_amax(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        const LAYERS: usize = 3;
        let (stream, shape) = (gpu.stream(), Shape::new(20, 112));
        // One layer has the largest magnitude.
        let layers: [Vec<T>; LAYERS] = std::array::from_fn(|layer| {
            let size = if layer == 1 { 5.0 } else { 0.3 };
            (0..shape.elements()).map(|i| T::from_f32(size * (i as f32 * 0.7).sin())).collect()
        });
        let inputs = layers.each_ref().map(|layer| stream.clone_htod(layer).unwrap());
        for numerics in [Numerics::CompressedTensors, Numerics::Torchao, Numerics::Modelopt] {
            let recipe = Recipe::of(Format::Nvfp4, numerics).unwrap();
            let together = Shape { rows: LAYERS * shape.rows, ..shape };
            let expected = quantize(&layers.concat(), together, &recipe).unwrap().tensor;
            let mut amax = DeviceAmax::zeros(stream).unwrap();
            for input in &inputs {
                gpu.amax_on(stream, input, shape, &mut amax).unwrap();
            }
            for (i, input) in inputs.iter().enumerate() {
                let mut out = tensor(gpu, shape, &recipe);
                let options = DeviceQuantizeOptions::new().amax(&amax);
                gpu.quantize_on(stream, input, shape, &recipe, options, &mut out).unwrap();
                let found = out.to_host(stream).unwrap();
                assert_eq!(found.global_scale(), expected.global_scale(), "layer {i}: {recipe:?}");
                let (codes, scales) = (found.codes().len(), found.scales().len());
                assert!(found.codes() == &expected.codes()[i * codes..][..codes], "layer {i}: {recipe:?}");
                assert!(
                    found.scales() == &expected.scales()[i * scales..][..scales],
                    "layer {i}: {recipe:?}"
                );
            }
        }
    }
    run::<f32>(gpu);
    run::<bf16>(gpu);
}

/// A global scale in device memory gives the same bytes as one from the host.
pub(crate) fn global_scales_may_be_in_device_memory(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        let (stream, shape) = (gpu.stream(), Shape::new(50, 112));
        let values = patterns::<T>(shape.elements(), true, 9);
        let input = stream.clone_htod(&values).unwrap();
        let numerics =
            [Numerics::CompressedTensors, Numerics::Torchao, Numerics::Modelopt, Numerics::TransformerEngine];
        for numerics in numerics {
            for (search, value) in [(Search::None, 7.0), (Search::None, 1e-30), (Search::Full, 0.3)] {
                let non_finite = NonFinite::Saturate;
                let recipe = Recipe { search, non_finite, ..Recipe::of(Format::Nvfp4, numerics).unwrap() };
                let direction = recipe.scheme.global_from_amax().expect("NVFP4").direction;
                let given = GlobalScale::of(direction, value);
                let expected = quantize(&values, shape, &recipe.with_global(Global::Given(given))).unwrap();
                let there = stream.clone_htod(&[value]).unwrap();
                let (mut out, mut report) =
                    (tensor(gpu, shape, &recipe), DeviceReport::zeros(stream).unwrap());
                let options =
                    DeviceQuantizeOptions::new().global_scale(direction, &there).report(&mut report);
                gpu.quantize_on(stream, &input, shape, &recipe, options, &mut out).unwrap();
                let found = out.to_host(stream).unwrap();
                assert!(found == expected.tensor, "{recipe:?} under {given:?}");
                let report = report.read(stream, shape, recipe.format()).unwrap();
                assert_eq!(report, expected.report, "{recipe:?} under {given:?}");

                let other = match direction {
                    Direction::Divisor => Direction::Multiplier,
                    Direction::Multiplier => Direction::Divisor,
                };
                let options = DeviceQuantizeOptions::new().global_scale(other, &there);
                let refused = gpu.quantize_on(stream, &input, shape, &recipe, options, &mut out);
                assert!(matches!(refused, Err(Error::GlobalScaleDirection { .. })), "{refused:?}");
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn streams_overlap(gpu: &Gpu) {
    // cudarc's events order the uses of each buffer: one stream may read another's writes.
    let shape = Shape::new(300, 1024);
    for recipe in default_recipes(ScaleLayout::Swizzled) {
        let streams = [gpu.context().new_stream().unwrap(), gpu.context().new_stream().unwrap()];
        let values =
            [patterns::<f32>(shape.elements(), false, 4), patterns::<f32>(shape.elements(), false, 5)];
        let mut results = Vec::new();
        for (stream, values) in streams.iter().zip(&values) {
            let input = stream.clone_htod(values).unwrap();
            let mut out = DeviceTensor::zeros(stream, quantized_shape(shape, &recipe)).unwrap();
            let mut report = DeviceReport::zeros(stream).unwrap();
            quantize_reporting(gpu, stream, &input, shape, &recipe, (&mut out, &mut report)).unwrap();
            results.push((out, report));
        }
        for ((out, report), values) in results.iter().zip(&values) {
            let tensor = out.to_host(gpu.stream()).unwrap();
            let report = report.read(gpu.stream(), shape, recipe.format()).unwrap();
            assert_is_cpus(&Quantized { tensor, report }, values, shape, &recipe);
        }
    }
}

/// Captures quantization with a computed global scale in a graph.
///
/// Also captures its amax, a layout conversion, and dequantization.
///
/// The same graph is replayed for each input.
pub(crate) fn graphs_capture_and_replay(_: &Gpu) {
    // This test has its own handle because captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    for recipe in default_recipes(ScaleLayout::Linear) {
        replay(&gpu, &recipe);
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}

fn replay(gpu: &Gpu, recipe: &Recipe) {
    let (stream, shape) = (gpu.stream().clone(), Shape::new(64, 512));
    let inputs = [6, 7].map(|seed| patterns::<f32>(shape.elements(), true, seed));
    // Finite values too, of another size, for another global scale.
    let small: Vec<f32> = (0..shape.elements()).map(|i| (i as f32).sin() * 1e-3).collect();
    let mut input = stream.clone_htod(&inputs[0]).unwrap();
    let (mut out, mut report) = (tensor(gpu, shape, recipe), DeviceReport::zeros(&stream).unwrap());
    let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..*recipe };
    let (mut other, mut sum) = (tensor(gpu, shape, &swizzled), DeviceAmax::zeros(&stream).unwrap());
    let mut back = stream.alloc_zeros::<f32>(shape.elements()).unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    report.clear(&stream).unwrap();
    sum.clear(&stream).unwrap();
    gpu.amax_on(&stream, &input, shape, &mut sum).unwrap();
    quantize_reporting(gpu, &stream, &input, shape, recipe, (&mut out, &mut report)).unwrap();
    gpu.convert_layout_on(&stream, &out, &mut other).unwrap();
    gpu.dequantize_on(&stream, &other, &mut back, shape.cols).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for values in [&inputs[0], &inputs[1], &small, &inputs[0]] {
        stream.memcpy_htod(values, &mut input).unwrap();
        graph.launch().unwrap();
        let tensor = out.to_host(&stream).unwrap();
        let expected: Vec<f32> = microscale::dequantize(&tensor);
        let found = stream.clone_dtoh(&back).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found), bits(&expected), "{recipe:?}");
        assert_eq!(sum.read(&stream).unwrap(), amax(values, shape).unwrap(), "{recipe:?}");
        let converted = other.to_host(&stream).unwrap();
        assert_eq!(converted, tensor.convert_layout(ScaleLayout::Swizzled), "{recipe:?}");
        let report = report.read(&stream, shape, recipe.format()).unwrap();
        assert_is_cpus(&Quantized { tensor, report }, values, shape, recipe);
    }
}

pub(crate) fn more_than_2_to_the_32_elements(gpu: &Gpu) {
    const PART: usize = 1 << 26;
    const PARTS: usize = 65;
    let needed = PART * PARTS * 2 + PART * PARTS;
    let (free, _) = gpu.context().mem_get_info().unwrap();
    if free < needed {
        println!("skipped: {needed} bytes of GPU memory are needed and {free} are free");
        return;
    }
    // All parts are equal, so the CPU quantizes only one. Its amax is the amax of all.
    let values = patterns::<bf16>(PART, true, 8);
    let part = gpu.stream().clone_htod(&values).unwrap();
    let mut input = gpu.stream().alloc_zeros::<bf16>(PART * PARTS).unwrap();
    let nvfp4 = Recipe::of(Format::Nvfp4, Numerics::Torchao).unwrap();
    for recipe in [mxfp4(), Recipe { non_finite: NonFinite::Propagate, ..nvfp4 }] {
        for i in 0..PARTS {
            gpu.stream().memcpy_dtod(&part, &mut input.slice_mut(i * PART..(i + 1) * PART)).unwrap();
        }
        let shape = Shape::new(PARTS, PART);
        let (mut out, mut report) = (tensor(gpu, shape, &recipe), DeviceReport::zeros(gpu.stream()).unwrap());
        quantize_reporting(gpu, gpu.stream(), &input, shape, &recipe, (&mut out, &mut report)).unwrap();
        let expected = quantize(&values, Shape::new(1, PART), &recipe).unwrap();
        let found = out.to_host(gpu.stream()).unwrap();
        assert_eq!(found.global_scale(), expected.tensor.global_scale(), "{recipe:?}");
        let (codes, scales) = (expected.tensor.codes().len(), expected.tensor.scales().len());
        for i in 0..PARTS {
            let same = found.codes()[i * codes..][..codes] == *expected.tensor.codes();
            assert!(same, "codes of row {i}: {recipe:?}");
            let same = found.scales()[i * scales..][..scales] == *expected.tensor.scales();
            assert!(same, "scales of row {i}: {recipe:?}");
        }
        let report = report.read(gpu.stream(), shape, recipe.format()).unwrap();
        assert_eq!(report.nan, expected.report.nan * PARTS as u64, "{recipe:?}");
        gpu.dequantize_on(gpu.stream(), &out, &mut input, PART).unwrap();
        let last = gpu.stream().clone_dtoh(&input.slice((PARTS - 1) * PART..)).unwrap();
        let expected: Vec<bf16> = microscale::dequantize(&expected.tensor);
        let same = bytemuck::cast_slice::<bf16, u16>(&last) == bytemuck::cast_slice::<bf16, u16>(&expected);
        assert!(same, "{recipe:?}");
    }
}
