//! Quantizing activations on a GPU gives the CPU's bytes.

use std::sync::Arc;

use half::{bf16, f16};
use microscale::formats::ScaleRule;
use microscale::formats::activations::RmsNorm;
use microscale::formats::nvfp4::Direction;
use microscale::gpu::cudarc::driver::{CudaSlice, CudaStream};
use microscale::gpu::{
    DeviceActivationExperts, DeviceActivations, DeviceQuantizedActivations, DeviceScales, Gpu,
};
use microscale::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationLayout, ActivationRecipe,
    ActivationScale, Element, Fp8Scale, Gate, Glu, GluOrder, RowOperation, Shape, quantize_activations,
};

use super::support::patterns;

fn recipes() -> impl Iterator<Item = ActivationRecipe> {
    let formats = [
        ActivationFormat::Fp8(Fp8Scale::Given),
        ActivationFormat::Fp8(Fp8Scale::PerToken),
        ActivationFormat::Fp8(Fp8Scale::PerTensor),
        ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two: false }),
        ActivationFormat::Mxfp8(ScaleRule::Rceil),
        ActivationFormat::Mxfp4(ScaleRule::Even),
        ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)),
        ActivationFormat::Nvfp4(ActivationScale::PerToken),
    ];
    let operations = [
        RowOperation::None,
        RowOperation::Glu(Glu::SILU, GluOrder::Halves),
        RowOperation::Glu(Glu::Sigmoid(Gate::GPT_OSS), GluOrder::Interleaved),
        RowOperation::Glu(Glu::Gelu, GluOrder::Halves),
        RowOperation::RmsNorm(RmsNorm::llama(1e-6)),
    ];
    let layouts = [ActivationLayout::Linear, ActivationLayout::Swizzled128x4, ActivationLayout::Swizzled8x4];
    formats.into_iter().flat_map(move |format| {
        operations.into_iter().flat_map(move |operation| {
            layouts.into_iter().map(move |layout| ActivationRecipe { operation, format, layout })
        })
    })
}

/// Memory that nothing has zeroed.
fn dirty<T: Element>(stream: &Arc<CudaStream>, count: usize) -> CudaSlice<T> {
    stream.clone_htod(&vec![T::from_f32(-7.0); count.max(1)]).expect("memory")
}

fn dirty_bytes(stream: &Arc<CudaStream>, count: usize) -> CudaSlice<u8> {
    stream.clone_htod(&vec![0xA5; count.max(1)]).expect("memory")
}

fn equal_bytes<T: Element>(
    gpu: &Gpu,
    recipe: &ActivationRecipe,
    rows: usize,
    columns: usize,
    gap: usize,
    seed: u64,
) {
    let what = format!("{recipe:?}, {rows} rows of {columns}, {gap} apart");
    let stream = gpu.stream();
    let gated = matches!(recipe.operation, RowOperation::Glu(..));
    let normalizes = matches!(recipe.operation, RowOperation::RmsNorm(_));
    let input_columns = if gated { 2 * columns } else { columns };
    let shape = Shape::new(rows, input_columns).with_row_stride(input_columns + gap);
    let values = patterns::<T>(shape.span().expect("a shape"), seed.is_multiple_of(3), seed);
    let mut residual = normalizes.then(|| patterns::<T>(rows * columns, false, seed + 1));
    let weights = normalizes.then(|| patterns::<T>(columns, false, seed + 2));
    let takes = matches!(
        recipe.format,
        ActivationFormat::Fp8(Fp8Scale::Given) | ActivationFormat::Nvfp4(ActivationScale::Given(_))
    );
    let scales = if takes { vec![0.75] } else { Vec::new() };

    let on_device = stream.clone_htod(&values).expect("memory");
    let mut residual_on_device =
        residual.as_ref().map(|residual| stream.clone_htod(residual).expect("memory"));
    let weights_on_device = weights.as_ref().map(|weights| stream.clone_htod(weights).expect("memory"));
    let expected = quantize_activations(
        ActivationInput {
            values: &values,
            shape,
            residual: residual.as_deref_mut(),
            weights: weights.as_deref(),
            scales: &scales,
            experts: None,
        },
        recipe,
    )
    .expect("the CPU quantizes");

    let mut codes = dirty_bytes(stream, expected.codes.len());
    let mut block_scales = dirty_bytes(stream, expected.scales.len());
    let mut f32_scales = dirty::<f32>(stream, expected.f32_scales.len());
    let input = DeviceActivations {
        residual: residual_on_device.as_mut().map(Into::into),
        weights: weights_on_device.as_ref().map(Into::into),
        scales: scales.first().map_or(DeviceScales::None, |scale| DeviceScales::Host(*scale)),
        ..DeviceActivations::new(&on_device, shape)
    };
    let out = DeviceQuantizedActivations {
        codes: (&mut codes).into(),
        scales: (&mut block_scales).into(),
        f32_scales: (&mut f32_scales).into(),
    };
    gpu.quantize_activations_on(stream, input, recipe, out).unwrap_or_else(|error| panic!("{what}: {error}"));
    let found = stream.clone_dtoh(&codes).expect("codes");
    assert_eq!(found[..expected.codes.len()], expected.codes, "{what}: codes");
    let found = stream.clone_dtoh(&block_scales).expect("scales");
    assert_eq!(found[..expected.scales.len()], expected.scales, "{what}: scales");
    let found = stream.clone_dtoh(&f32_scales).expect("f32 scales");
    assert_eq!(found[..expected.f32_scales.len()], expected.f32_scales, "{what}: f32 scales");
    if let (Some(residual), Some(on_device)) = (residual, residual_on_device) {
        let found = stream.clone_dtoh(&on_device).expect("the residual");
        let same = |(a, b): (&T, &T)| {
            let (a, b) = (a.to_f32(), b.to_f32());
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
        };
        assert!(found.iter().zip(&residual).all(same), "{what}: residual");
    }
}

pub(crate) fn equal_those_of_the_cpu(gpu: &Gpu) {
    for (i, recipe) in recipes().enumerate() {
        let seed = i as u64;
        equal_bytes::<bf16>(gpu, &recipe, 1, 4096, 0, seed);
        equal_bytes::<bf16>(gpu, &recipe, 130, 2880, 0, seed + 1);
        equal_bytes::<f16>(gpu, &recipe, 17, 1000, 8, seed + 2);
        equal_bytes::<f16>(gpu, &recipe, 5, 333, 1, seed + 3);
        equal_bytes::<bf16>(gpu, &recipe, 3, 28_672, 0, seed + 4);
    }
}

pub(crate) fn of_masked_experts_equal_those_of_the_cpu(gpu: &Gpu) {
    let (room, columns, counts) = (70, 1056, [70_u32, 0, 1, 33]);
    let stream = gpu.stream();
    let values = patterns::<bf16>(room * counts.len() * columns, false, 11);
    let on_device = stream.clone_htod(&values).expect("memory");
    let counts_there = stream.clone_htod(&counts).expect("memory");
    for format in [
        ActivationFormat::Fp8(Fp8Scale::PerToken),
        ActivationFormat::Mxfp8(ScaleRule::Rceil),
        ActivationFormat::Mxfp4(ScaleRule::Ceil),
        ActivationFormat::Nvfp4(ActivationScale::PerToken),
    ] {
        let recipe =
            ActivationRecipe { layout: ActivationLayout::Swizzled8x4, ..ActivationRecipe::new(format) };
        let shape = Shape::new(room * counts.len(), columns);
        let experts = Some(ActivationExperts::Masked { counts: &counts });
        let input = ActivationInput { experts, ..ActivationInput::new(&values, shape) };
        let expected = quantize_activations(input, &recipe).expect("the CPU quantizes");
        let mut codes = dirty_bytes(stream, expected.codes.len());
        let mut block_scales = dirty_bytes(stream, expected.scales.len());
        let mut f32_scales = dirty::<f32>(stream, expected.f32_scales.len());
        let experts = Some(DeviceActivationExperts::Masked { counts: (&counts_there).into() });
        let input = DeviceActivations { experts, ..DeviceActivations::new(&on_device, shape) };
        let out = DeviceQuantizedActivations {
            codes: (&mut codes).into(),
            scales: (&mut block_scales).into(),
            f32_scales: (&mut f32_scales).into(),
        };
        gpu.quantize_activations_on(stream, input, &recipe, out).expect("the GPU quantizes");
        // The codes of rows that do not exist, and their scales per token, are not written.
        let found = stream.clone_dtoh(&codes).expect("codes");
        let of_scales = stream.clone_dtoh(&f32_scales).expect("f32 scales");
        for (expert, count) in counts.iter().enumerate() {
            let rows = expert * room..expert * room + *count as usize;
            let bytes = rows.start * format.row_bytes(columns)..rows.end * format.row_bytes(columns);
            assert_eq!(found[bytes.clone()], expected.codes[bytes], "{format:?}, expert {expert}: codes");
            if !expected.f32_scales.is_empty() {
                assert_eq!(of_scales[rows.clone()], expected.f32_scales[rows], "{format:?}, expert {expert}");
            }
        }
        let found = stream.clone_dtoh(&block_scales).expect("scales");
        assert_eq!(found[..expected.scales.len()], expected.scales, "{format:?}: scales");
    }
}

pub(crate) fn by_expert_equal_those_of_the_cpu(gpu: &Gpu) {
    let columns = 2048;
    let stream = gpu.stream();
    let recipe = ActivationRecipe {
        layout: ActivationLayout::Swizzled128x4,
        ..ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)))
    };
    let offsets = [0_u32, 3, 3, 140, 141];
    let scale_offsets = [0_u32, 128, 128, 384, 512];
    let scales = [300.0_f32, 1.0, 20.0, 7.0];
    let (rows, scale_rows) = (141, 640);
    let values = patterns::<bf16>(rows * columns, false, 9);
    let input = ActivationInput {
        scales: &scales,
        experts: Some(ActivationExperts::Sorted { offsets: &offsets, scale_offsets: &scale_offsets }),
        ..ActivationInput::new(&values, Shape::new(rows, columns))
    };
    let expected = quantize_activations(input, &recipe).expect("the CPU quantizes");

    let on_device = stream.clone_htod(&values).expect("memory");
    let scales = stream.clone_htod(&scales).expect("memory");
    let (offsets, scale_offsets) =
        (stream.clone_htod(&offsets).expect("memory"), stream.clone_htod(&scale_offsets).expect("memory"));
    let [codes, block_scales, _] = recipe.lengths(rows, scale_rows, columns).expect("lengths");
    let (mut codes, mut block_scales) = (dirty_bytes(stream, codes), dirty_bytes(stream, block_scales));
    let mut none = dirty::<f32>(stream, 0);
    let input = DeviceActivations {
        scales: DeviceScales::Device((&scales).into()),
        experts: Some(DeviceActivationExperts::Sorted {
            offsets: (&offsets).into(),
            scale_offsets: (&scale_offsets).into(),
            scale_rows,
        }),
        ..DeviceActivations::new(&on_device, Shape::new(rows, columns))
    };
    let out = DeviceQuantizedActivations {
        codes: (&mut codes).into(),
        scales: (&mut block_scales).into(),
        f32_scales: (&mut none).into(),
    };
    gpu.quantize_activations_on(stream, input, &recipe, out).expect("the GPU quantizes");
    assert_eq!(stream.clone_dtoh(&codes).expect("codes"), expected.codes);
    let found = stream.clone_dtoh(&block_scales).expect("scales");
    assert_eq!(found[..expected.scales.len()], expected.scales);
    assert!(found[expected.scales.len()..].iter().all(|scale| *scale == 0), "rows after the last expert's");
}
