//! Tests products without rows, columns or tokens.

use std::sync::Arc;

use half::bf16;
use microscale::gpu::cudarc::driver::{CudaSlice, CudaStream};
use microscale::gpu::{
    DeviceEpilogue, DeviceExperts, DeviceRouting, DeviceTensor, DeviceView, ExpertRows, Fp8Activations,
    GemmWorkspace, Gpu,
};
use microscale::{Format, Fp8Options, Result};
use microscale_test_support::operands::{Scales, tensor};

/// The operands of every product: weights `[rows, cols]`, which both experts have, and tokens, which
/// all choose the second expert.
struct Operands {
    weights: DeviceTensor,
    experts: DeviceExperts,
    routing: DeviceRouting,
    /// Activations as values and in the format of the weights.
    x: CudaSlice<bf16>,
    quantized: DeviceTensor,
    bias: CudaSlice<bf16>,
    residual: CudaSlice<bf16>,
    /// The sums of bias and residual.
    right: Vec<f32>,
}

/// Copies values over, and one more, because there are no empty buffers.
fn there(stream: &Arc<CudaStream>, values: impl Iterator<Item = usize>) -> CudaSlice<bf16> {
    let values: Vec<_> = values.chain([100]).map(|value| bf16::from_f32(value as f32)).collect();
    stream.clone_htod(&values).unwrap()
}

impl Operands {
    fn new(gpu: &Gpu, format: Format, [rows, cols, tokens]: [usize; 3]) -> Self {
        let stream = gpu.stream();
        let weights = tensor(format, rows, cols, Scales::Common, 2);
        let quantized = tensor(format, tokens, cols, Scales::Common, 2);
        let mut routing = DeviceRouting::zeros(stream, 2, tokens.max(1)).unwrap();
        if tokens > 0 {
            let chosen = stream.clone_htod(&vec![1u32; tokens]).unwrap();
            gpu.route_on(stream, &chosen, 1, &mut routing).unwrap();
        }
        let bias = (0..2 * rows).map(|i| i % rows.max(1));
        let right = (0..tokens * rows).map(|i| (i % rows + 2 * i) as f32);
        Self {
            weights: DeviceTensor::from_host(stream, &weights).unwrap(),
            experts: DeviceExperts::from_host(stream, &[weights.clone(), weights]).unwrap(),
            routing,
            x: there(stream, 0..tokens * cols),
            quantized: DeviceTensor::from_host(stream, &quantized).unwrap(),
            bias: there(stream, bias),
            residual: there(stream, (0..tokens * rows).map(|i| 2 * i)),
            right: right.collect(),
        }
    }

    /// Checks that a product writes its results, and nothing else.
    fn check(
        &self,
        gpu: &Gpu,
        what: &str,
        multiply: impl FnOnce(DeviceEpilogue<'_, bf16, bf16>, &mut CudaSlice<bf16>) -> Result<()>,
    ) {
        let stream = gpu.stream();
        let mut out = stream.clone_htod(&vec![bf16::ONE; self.right.len() + 1]).unwrap();
        let [bias, residual] = [&self.bias, &self.residual].map(|values| Some(DeviceView::from(values)));
        multiply(DeviceEpilogue { bias, residual, gate: None }, &mut out).unwrap();
        let found: Vec<_> = stream.clone_dtoh(&out).unwrap().into_iter().map(f32::from).collect();
        let right = [&self.right[..], &[1.0]].concat();
        assert_eq!(found, right, "{what}, {:?}", self.weights.shape());
    }
}

pub(crate) fn gives_bias_and_residual(gpu: &Gpu) {
    let stream = gpu.stream();
    let space = |bytes| GemmWorkspace::new(stream, bytes).unwrap();
    let (options, order) = (Fp8Options { round_weights: true, ..Fp8Options::default() }, ExpertRows::Sorted);
    for format in Format::MULTIPLIED {
        for size in [[0, 64, 9], [3, 0, 1], [3, 0, 9], [3, 64, 0]] {
            let operands = Operands::new(gpu, format, size);
            let Operands { weights, experts, routing, x, quantized, .. } = &operands;
            let tokens = size[2];
            operands.check(gpu, "linear", |epilogue, out| {
                let plan = gpu.linear(weights).epilogue(epilogue).plan(tokens)?;
                plan.run(stream, x, &mut space(plan.workspace_bytes()), out)
            });
            operands.check(gpu, "linear_fp4", |epilogue, out| {
                let plan = gpu.linear_fp4(weights).epilogue(epilogue).plan(tokens)?;
                plan.run(stream, quantized, &mut space(plan.workspace_bytes()), out)
            });
            operands.check(gpu, "linear_experts", |epilogue, out| {
                let plan = gpu.linear_experts(experts).epilogue(epilogue).plan(tokens)?;
                plan.run(stream, x, routing, order, &mut space(plan.workspace_bytes()), out)
            });
            operands.check(gpu, "linear_experts_fp4", |epilogue, out| {
                let plan = gpu.linear_experts_fp4(experts).epilogue(epilogue).plan(tokens)?;
                plan.run(stream, quantized, routing, order, &mut space(plan.workspace_bytes()), out)
            });
            let values = || Fp8Activations::Values(x.into());
            operands.check(gpu, "linear_fp8", |epilogue, out| {
                let plan = gpu.linear_fp8(weights).options(options).epilogue(epilogue).plan(tokens)?;
                let most = gpu.fp8_workspace_bytes(weights.shape(), tokens)?;
                assert!(plan.workspace_bytes() <= most);
                plan.run(stream, values(), &mut space(plan.workspace_bytes()), out)
            });
            operands.check(gpu, "linear_experts_fp8", |epilogue, out| {
                let plan =
                    gpu.linear_experts_fp8(experts).options(options).epilogue(epilogue).plan(tokens)?;
                assert!(plan.workspace_bytes() <= gpu.experts_fp8_workspace_bytes(experts, tokens)?);
                plan.run(stream, values(), routing, order, &mut space(plan.workspace_bytes()), out)
            });
        }
    }
}
