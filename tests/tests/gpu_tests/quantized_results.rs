//! Products whose results are quantized give the bytes of two calls: a product, then
//! `quantize_activations_on`.

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::formats::{ActivationLayout, Glu, ScaleRule};
use microscale::gpu::cudarc::driver::CudaSlice;
use microscale::gpu::{
    DeviceActivationExperts, DeviceActivations, DeviceEpilogue, DeviceExperts, DeviceQuantizedActivations,
    DeviceResults, DeviceRouting, DeviceScales, DeviceTensor, ExpertRows, Fp8Activations, GemmWorkspace, Gpu,
    QuantizedResults,
};
use microscale::{
    Activation, ActivationFormat, ActivationRecipe, ActivationScale, Dtype, Error, Format, Fp8Scale, Gate,
    GluOrder, OperandFault, RowOperation, Shape,
};
use microscale_test_support::operands::{Scales, tensor};

use super::allocations::allocations;

/// The given scale of formats that take one.
const GIVEN: f32 = 37.5;

fn recipes() -> Vec<ActivationRecipe> {
    let swizzled = |format| {
        let layout = ActivationLayout::Swizzled128x4;
        ActivationRecipe { layout, ..ActivationRecipe::new(format) }
    };
    vec![
        ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor))),
        swizzled(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier))),
        swizzled(ActivationFormat::Nvfp4(ActivationScale::PerToken)),
        ActivationRecipe::new(ActivationFormat::Mxfp4(ScaleRule::Floor)),
        swizzled(ActivationFormat::Mxfp4(ScaleRule::Rceil)),
        ActivationRecipe::new(ActivationFormat::Fp8(Fp8Scale::PerToken)),
        ActivationRecipe::new(ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two: false })),
        ActivationRecipe::new(ActivationFormat::Mxfp8(ScaleRule::Floor)),
    ]
}

/// Quantized activations in memory that held other bytes before.
struct Output {
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    f32_scales: CudaSlice<f32>,
}

impl Output {
    fn new(gpu: &Gpu, recipe: &ActivationRecipe, rows: usize, scale_rows: usize, columns: usize) -> Self {
        let [codes, scales, f32_scales] = recipe.lengths(rows, scale_rows, columns).unwrap();
        let stream = gpu.stream();
        Self {
            codes: stream.clone_htod(&vec![0xA5; codes.max(1)]).unwrap(),
            scales: stream.clone_htod(&vec![0xA5; scales.max(1)]).unwrap(),
            f32_scales: stream.clone_htod(&vec![-7.0; f32_scales.max(1)]).unwrap(),
        }
    }

    fn there(&mut self) -> DeviceQuantizedActivations<'_> {
        let Self { codes, scales, f32_scales } = self;
        DeviceQuantizedActivations {
            codes: codes.into(),
            scales: scales.into(),
            f32_scales: f32_scales.into(),
        }
    }

    fn bytes(&self, gpu: &Gpu) -> (Vec<u8>, Vec<u8>, Vec<u32>) {
        let stream = gpu.stream();
        let f32_scales = stream.clone_dtoh(&self.f32_scales).unwrap();
        let bits = f32_scales.iter().map(|scale| scale.to_bits()).collect();
        (stream.clone_dtoh(&self.codes).unwrap(), stream.clone_dtoh(&self.scales).unwrap(), bits)
    }
}

fn given(recipe: &ActivationRecipe) -> DeviceScales<'static> {
    if recipe.format.takes_scales() { DeviceScales::Host(GIVEN) } else { DeviceScales::None }
}

/// Compares a product with two calls, byte for byte, for each recipe. `run` plans a product
/// whose results are quantized by a recipe, and stores `[rows, columns]` results.
fn check<O: Activation>(
    gpu: &Gpu,
    what: &str,
    [rows, columns]: [usize; 2],
    mut run: impl FnMut(Option<ActivationRecipe>, DeviceResults<'_, O>),
) {
    let stream = gpu.stream();
    let mut values = stream.alloc_zeros::<O>(rows * columns).unwrap();
    run(None, (&mut values).into());
    for recipe in recipes() {
        let mut expected = Output::new(gpu, &recipe, rows, rows, columns);
        let mut found = Output::new(gpu, &recipe, rows, rows, columns);
        let input = DeviceActivations {
            scales: given(&recipe),
            ..DeviceActivations::new(&values, Shape::new(rows, columns))
        };
        gpu.quantize_activations_on(stream, input, &recipe, expected.there()).unwrap();
        // Twice: the first may not leave anything that the second one needs.
        for _ in 0..2 {
            run(Some(recipe), QuantizedResults::new(found.there(), given(&recipe)).into());
        }
        assert!(found.bytes(gpu) == expected.bytes(gpu), "{what}, {recipe:?}");
    }
}

fn random<T: Activation>(gpu: &Gpu, count: usize, seed: u64) -> CudaSlice<T> {
    let mut random = fastrand::Rng::with_seed(seed);
    let values: Vec<_> = (0..count).map(|_| T::from_f32(random.f32() * 4.0 - 2.0)).collect();
    gpu.stream().clone_htod(&values).unwrap()
}

fn check_values<T: Activation>(gpu: &Gpu, format: Format, [rows, cols, tokens]: [usize; 3]) {
    let stream = gpu.stream();
    let weights = DeviceTensor::from_host(stream, &tensor(format, rows, cols, Scales::Common, 3)).unwrap();
    let (x, bias) = (random::<T>(gpu, tokens * cols, 1), random::<T>(gpu, rows, 2));
    let residual = random::<T>(gpu, tokens * rows, 4);
    for gate in [None, Some(Gate::SILU)] {
        let columns = if gate.is_some() { rows / 2 } else { rows };
        let what = format!("{format}, {tokens} tokens of {cols} and {rows} rows, {gate:?}");
        check::<T>(gpu, &what, [tokens, columns], |recipe, out| {
            let (bias, residual) = (Some((&bias).into()), Some((&residual).into()));
            let linear = gpu.linear::<T, T>(&weights).epilogue(DeviceEpilogue { bias, gate, residual });
            let plan = linear.quantize_results(recipe).plan(tokens).unwrap();
            let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
            plan.run(stream, &x, &mut workspace, out).unwrap();
            if recipe.is_some() {
                let bytes = gpu.gemm_workspace_bytes(weights.shape(), tokens, T::DTYPE).unwrap();
                let most = GemmWorkspace::bytes_with_results(bytes, tokens, columns);
                assert!(plan.workspace_bytes() <= most, "{what}: {plan:?} and {most} bytes");
            }
        });
    }
}

pub(crate) fn of_values_have_the_bytes_of_two_calls(gpu: &Gpu) {
    for format in Format::MULTIPLIED {
        for shape in [[320, 256, 1], [64, 416, 7], [1024, 2048, 33], [1000, 1024, 200]] {
            check_values::<bf16>(gpu, format, shape);
            check_values::<f16>(gpu, format, shape);
        }
    }
}

pub(crate) fn of_fp4_have_the_bytes_of_two_calls(gpu: &Gpu) {
    let stream = gpu.stream();
    for format in Format::MULTIPLIED {
        for [rows, cols, tokens] in [[320, 256, 3], [600, 1024, 130]] {
            let weights = tensor(format, rows, cols, Scales::Common, 3);
            let weights = DeviceTensor::from_host(stream, &weights).unwrap();
            let x = tensor(format, tokens, cols, Scales::Common, 4);
            let x = DeviceTensor::from_host(stream, &x).unwrap();
            let what = format!("{format} by FP4, {tokens} tokens of {cols} and {rows} rows");
            check::<bf16>(gpu, &what, [tokens, rows], |recipe, out| {
                let linear = gpu.linear_fp4::<bf16, bf16>(&weights).alpha(0.5);
                let plan = linear.quantize_results(recipe).plan(tokens).unwrap();
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                plan.run(stream, &x, &mut workspace, out).unwrap();
            });
        }
    }
}

pub(crate) fn of_fp8_have_the_bytes_of_two_calls(gpu: &Gpu) {
    if gpu.info().compute_capability != (9, 0) {
        return;
    }
    let stream = gpu.stream();
    for [rows, cols, tokens] in [[320, 256, 3], [600, 1024, 130]] {
        let weights = tensor(Format::Mxfp4, rows, cols, Scales::Common, 3);
        let weights = DeviceTensor::from_host(stream, &weights).unwrap();
        let x = random::<bf16>(gpu, tokens * cols, 1);
        let what = format!("FP8, {tokens} tokens of {cols} and {rows} rows");
        check::<bf16>(gpu, &what, [tokens, rows], |recipe, out| {
            let linear = gpu.linear_fp8::<bf16, bf16>(&weights).quantize_results(recipe);
            let plan = linear.plan(tokens).unwrap();
            let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
            plan.run(stream, Fp8Activations::Values((&x).into()), &mut workspace, out).unwrap();
        });
    }
}

pub(crate) fn of_experts_have_the_bytes_of_two_calls(gpu: &Gpu) {
    let (stream, top_k, count) = (gpu.stream(), 2, 5);
    let [rows, cols] = [300, 256];
    let mut numbers = fastrand::Rng::with_seed(7);
    let chosen: Vec<u32> = (0..120).map(|_| [0, 0, 0, 1, 3, 4][numbers.usize(..6)]).collect();
    let pairs = chosen.len();
    let mut routing = DeviceRouting::zeros(stream, count, pairs).unwrap();
    gpu.route_on(stream, &stream.clone_htod(&chosen).unwrap(), top_k, &mut routing).unwrap();
    for format in Format::MULTIPLIED {
        let experts: Vec<_> =
            (0..count as u64).map(|i| tensor(format, rows, cols, Scales::Common, 3 * i + 2)).collect();
        let experts = DeviceExperts::from_host(stream, &experts).unwrap();
        let x = random::<bf16>(gpu, pairs / top_k * cols, 1);
        for order in [ExpertRows::Gathered, ExpertRows::Indexed] {
            let what = format!("experts in {format}, {order:?}");
            check::<bf16>(gpu, &what, [pairs, rows], |recipe, out| {
                let linear = gpu.linear_experts::<bf16, bf16>(&experts).quantize_results(recipe);
                let plan = linear.plan(pairs).unwrap();
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                plan.run(stream, &x, &routing, order, &mut workspace, out).unwrap();
                if recipe.is_some() {
                    let bytes = gpu.experts_workspace_bytes(&experts, pairs, Dtype::Bf16).unwrap();
                    let most = GemmWorkspace::bytes_with_results(bytes, pairs, rows);
                    assert!(plan.workspace_bytes() <= most, "{what}: {plan:?} and {most} bytes");
                }
            });
        }
        // Each expert has a given scale, and tiles of scales of its own.
        let mut offsets = vec![0];
        let mut scale_offsets = vec![0];
        for expert in 0..count as u32 {
            let rows = chosen.iter().filter(|chosen| **chosen == expert).count() as u32;
            offsets.push(offsets[expert as usize] + rows);
            scale_offsets.push(scale_offsets[expert as usize] + rows.next_multiple_of(128));
        }
        let (offsets, scale_rows) = (stream.clone_htod(&offsets).unwrap(), scale_offsets[count] as usize);
        let scale_offsets = stream.clone_htod(&scale_offsets).unwrap();
        let by_expert = || DeviceActivationExperts::Sorted {
            offsets: (&offsets).into(),
            scale_offsets: (&scale_offsets).into(),
            scale_rows,
        };
        let scales = stream.clone_htod(&[300.0_f32, 1.0, 20.0, 7.0, 0.5]).unwrap();
        let recipe = ActivationRecipe {
            layout: ActivationLayout::Swizzled128x4,
            ..ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)))
        };
        let linear = gpu.linear_experts::<bf16, bf16>(&experts);
        let plan = linear.quantize_results(recipe).plan(pairs).unwrap();
        let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
        let mut found = Output::new(gpu, &recipe, pairs, scale_rows, rows);
        let given = || DeviceScales::Device((&scales).into());
        let results =
            QuantizedResults { experts: Some(by_expert()), ..QuantizedResults::new(found.there(), given()) };
        plan.run(stream, &x, &routing, ExpertRows::Gathered, &mut workspace, results).unwrap();
        let mut values = stream.alloc_zeros::<bf16>(pairs * rows).unwrap();
        let plan = linear.plan(pairs).unwrap();
        plan.run(stream, &x, &routing, ExpertRows::Gathered, &mut workspace, &mut values).unwrap();
        let mut expected = Output::new(gpu, &recipe, pairs, scale_rows, rows);
        let input = DeviceActivations {
            scales: given(),
            experts: Some(by_expert()),
            ..DeviceActivations::new(&values, Shape::new(pairs, rows))
        };
        gpu.quantize_activations_on(stream, input, &recipe, expected.there()).unwrap();
        assert!(found.bytes(gpu) == expected.bytes(gpu), "{format}, by expert");
    }
}

pub(crate) fn are_refused_where_they_do_not_fit(gpu: &Gpu) {
    let stream = gpu.stream();
    let weights = tensor(Format::Mxfp4, 64, 64, Scales::Common, 3);
    let weights = DeviceTensor::from_host(stream, &weights).unwrap();
    let refused = |error: Error, word: &str| {
        assert!(matches!(error, Error::Operands(OperandFault::Results { .. })), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    let recipe = ActivationRecipe::new(ActivationFormat::Fp8(Fp8Scale::PerToken));
    let wide = gpu.linear::<bf16, f32>(&weights).quantize_results(recipe);
    refused(wide.plan(2).map(drop).unwrap_err(), "f16 or bf16");
    let gated = ActivationRecipe { operation: RowOperation::Glu(Glu::SILU, GluOrder::Halves), ..recipe };
    let linear = gpu.linear::<bf16, bf16>(&weights);
    refused(linear.quantize_results(gated).plan(2).map(drop).unwrap_err(), "epilogue");

    let x = stream.alloc_zeros::<bf16>(2 * 64).unwrap();
    let mut values = stream.alloc_zeros::<bf16>(2 * 64).unwrap();
    let plan = linear.quantize_results(recipe).plan(2).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    refused(plan.run(stream, &x, &mut workspace, &mut values).unwrap_err(), "QuantizedResults");
    let mut out = Output::new(gpu, &recipe, 2, 2, 64);
    let results = QuantizedResults::new(out.there(), DeviceScales::None);
    let error = linear.plan(2).unwrap().run(stream, &x, &mut workspace, results).unwrap_err();
    refused(error, "quantize_results");
    // Scales that the format does not take, and outputs that are too short.
    let results = QuantizedResults::new(out.there(), DeviceScales::Host(1.0));
    let error = plan.run(stream, &x, &mut workspace, results).unwrap_err();
    assert!(matches!(error, Error::Activations(_)), "{error}");
    let mut short = Output::new(gpu, &recipe, 1, 1, 64);
    let results = QuantizedResults::new(short.there(), DeviceScales::None);
    let error = plan.run(stream, &x, &mut workspace, results).unwrap_err();
    assert!(matches!(error, Error::Length { .. }), "{error}");
}

/// Planning again and running allocates nothing on the host.
pub(crate) fn are_enqueued_without_allocating(_: &Gpu) {
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: everything below is on one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let weights = tensor(Format::Nvfp4, 640, 1024, Scales::Common, 3);
    let weights = DeviceTensor::from_host(stream, &weights).unwrap();
    for (recipe, tokens) in recipes().into_iter().flat_map(|recipe| [1, 40].map(|tokens| (recipe, tokens))) {
        let x = stream.alloc_zeros::<bf16>(tokens * 1024).unwrap();
        let mut out = Output::new(&gpu, &recipe, tokens, tokens, 640);
        let linear = gpu.linear::<bf16, bf16>(&weights).quantize_results(recipe);
        let bytes = linear.plan(tokens).unwrap().workspace_bytes();
        let mut workspace = GemmWorkspace::new(stream, bytes).unwrap();
        let mut product = || {
            let results = QuantizedResults::new(out.there(), given(&recipe));
            linear.plan(tokens).unwrap().run(stream, &x, &mut workspace, results).unwrap();
        };
        product();
        assert_eq!(allocations(product), 0, "{recipe:?}, {tokens} tokens");
    }
    stream.synchronize().unwrap();
    // SAFETY: nothing is in flight; later tests may use several streams again.
    unsafe { gpu.context().enable_event_tracking() };
}
