//! Measurements of products of weights and activations that are both in NVFP4 or both in MXFP4.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_experts_fp4_with, gemm_fp4_gated_with, gemm_fp4_with};
#[cfg(feature = "cuda")]
use microscale::deinterleave_rows;
#[cfg(feature = "cuda")]
use microscale::gpu::{
    DeviceEpilogue, DeviceExperts, DeviceQuantizeOptions, DeviceRouting, DeviceTensor, Fp4, GemmWorkspace,
    Gpu, Linear, LinearExperts, doing as failed,
};
use microscale::{
    Activation, Device, Dtype, ExpertRows, Fp4Weights, Gate, Global, QuantizedShape, QuantizedTensor,
    QuantizedView, Recipe, Result, ScaleLayout, Shape, quantize,
};

use super::case::Case;
use super::cpu;
#[cfg(feature = "cuda")]
use super::gpu::{Effort, Turns, copy_time, each_in_rotation, tensor_cores_per_second};
use super::measurement::Times;
use super::op::Op;
use super::product::{chosen, experts_bytes, matrix, matrix_bytes, matrix_of, verify};
use super::workload::random;

/// Operands of a product. With experts, the weights of all are stacked.
struct Fp4Product<T> {
    weights: QuantizedTensor,
    values: Vec<T>,
    /// The values, quantized.
    x: QuantizedTensor,
    /// Quantizes values with the global scale of `x`.
    recipe: Recipe,
    tokens: usize,
    /// The rows of results of a token.
    rows: usize,
    experts: usize,
    /// The expert of each pair of a token and an expert.
    chosen: Vec<u32>,
    top_k: usize,
}

impl<T: Activation> Fp4Product<T> {
    fn new(case: &Case) -> Result<Self> {
        let Case { op, ref recipe, size, .. } = *case;
        let tokens = size.tokens.map_or(1, usize::from);
        let top_k = size.top_k.clamp(1, size.batches);
        // Sizes of activations and results must not overflow.
        Shape::new(tokens * top_k, size.cols).span()?;
        Shape::new(tokens * top_k, size.rows).span()?;
        let shape = Shape::new(tokens, size.cols);
        let values: Vec<T> = random(shape.elements(), 2);
        let x = quantize(&values, shape, recipe)?.tensor;
        let recipe = x.global_scale().map_or(*recipe, |scale| recipe.with_global(Global::Given(scale)));
        let chosen = if op.is_of_experts() { chosen(size) } else { Vec::new() };
        let rows = if op == Op::GemmFp4Gated { size.rows / 2 } else { size.rows };
        let weights = matrix(&Recipe { scale_layout: ScaleLayout::Linear, ..recipe }, size)?;
        Ok(Self { weights, values, x, recipe, tokens, rows, experts: size.batches, chosen, top_k })
    }

    /// Returns a buffer for the results.
    fn results(&self) -> Vec<T> {
        vec![T::default(); self.tokens * self.top_k * self.rows]
    }

    /// Multiplies tokens on the CPU.
    fn multiply(
        &self,
        (isa, op): (Isa, Op),
        x: QuantizedView<'_>,
        weights: QuantizedView<'_>,
        out: &mut [T],
    ) -> Result<()> {
        match op {
            Op::GemmExpertsFp4 => {
                let experts = (0..self.experts).map(|expert| matrix_of(weights, self.experts, expert));
                let experts = experts.collect::<Result<Vec<_>>>()?;
                let rows = ExpertRows::Gathered;
                gemm_experts_fp4_with(isa, experts, x, &self.chosen, self.top_k, rows, out)
            }
            Op::GemmFp4Gated => {
                let both = [matrix_of(weights, 2, 0)?, matrix_of(weights, 2, 1)?];
                gemm_fp4_gated_with(isa, x, both.map(Fp4Weights::from), Gate::SILU, out)
            }
            _ => gemm_fp4_with(isa, x, weights, out),
        }
    }

    /// Returns the bytes of the codes and scales that are multiplied.
    fn bytes(&self) -> u64 {
        match self.chosen[..] {
            [] => matrix_bytes(&self.weights) as u64,
            _ => experts_bytes(&self.weights, self.experts, &self.chosen),
        }
    }
}

/// Returns the bytes of the weights' codes and scales, and times.
pub(super) fn measure(case: &Case, device: &Device) -> Result<(u64, Times)> {
    match (device, case.dtype) {
        (Device::Cpu, Dtype::F32) => on_cpu::<f32>(case),
        (Device::Cpu, Dtype::F16) => on_cpu::<f16>(case),
        (Device::Cpu, Dtype::Bf16) => on_cpu::<bf16>(case),
        #[cfg(feature = "cuda")]
        (Device::Gpus(gpus), Dtype::F16) => on_gpu::<f16>(case, gpus.first()),
        #[cfg(feature = "cuda")]
        (Device::Gpus(gpus), Dtype::Bf16) => on_gpu::<bf16>(case, gpus.first()),
        #[cfg(feature = "cuda")]
        (Device::Gpus(_), Dtype::F32) => Err(case.op.not_measured(super::op::NO_F32)),
    }
}

fn on_cpu<T: Activation>(case: &Case) -> Result<(u64, Times)> {
    let product = Fp4Product::<T>::new(case)?;
    let Fp4Product { values, x, recipe, tokens, rows, .. } = &product;
    let (op, mut out) = (case.op, product.results());
    let times = cpu::measure_product(&product.weights, |weights| {
        let quantized;
        let x = if op == Op::QuantizeGemmFp4 {
            quantized = quantize(values, Shape::new(*tokens, x.cols()), recipe)?.tensor;
            quantized.view()
        } else {
            x.view()
        };
        product.multiply((Isa::best(), op), x, weights.view(), &mut out)
    })?;
    // The reference is slow. It multiplies the first token, whose results are first without
    // experts.
    if product.chosen.is_empty() {
        let (scales, shape) = (x.view().linear_scales(), QuantizedShape::new(x.format(), 1, x.cols()));
        let (codes, scales) = (&x.codes()[..x.codes().len() / tokens], &scales[..x.blocks_per_row()]);
        let first = QuantizedView::from_parts(shape, codes, scales)?;
        let first = x.global_scale().map_or(Ok(first), |scale| first.with_global_scale(scale))?;
        let mut expected = vec![T::default(); *rows];
        product.multiply((Isa::Reference, op), first, product.weights.view(), &mut expected)?;
        verify("gemm-fp4", &out[..*rows], &expected)?;
    }
    Ok((product.bytes(), times))
}

/// The weights on a GPU.
#[cfg(feature = "cuda")]
enum OnGpu {
    Matrix(DeviceTensor),
    Experts(DeviceExperts),
}

#[cfg(feature = "cuda")]
fn on_gpu<T: Activation>(case: &Case, gpu: &Gpu) -> Result<(u64, Times)> {
    // SAFETY: all work of this function is on one stream, which orders it without events. A capture
    // does not allow events.
    unsafe { gpu.context().disable_event_tracking() };
    let product = Fp4Product::<T>::new(case)?;
    let Fp4Product { weights, values, x, recipe, tokens, rows, experts, chosen, top_k } = &product;
    let (stream, bytes) = (gpu.stream(), product.bytes());
    let copying = failed("copying the activations");
    let values = stream.clone_htod(values).map_err(&copying)?;
    let mut x_there = DeviceTensor::from_host(stream, x)?;
    let pairs = chosen.len();
    let mut routing = DeviceRouting::zeros(stream, *experts, pairs.max(1))?;
    if pairs > 0 {
        gpu.route_on(stream, &stream.clone_htod(chosen).map_err(&copying)?, *top_k, &mut routing)?;
    }
    let of_all = || -> Result<OnGpu> {
        if pairs == 0 {
            return Ok(OnGpu::Matrix(DeviceTensor::from_host(stream, weights)?));
        }
        let views = (0..*experts).map(|expert| matrix_of(weights.view(), *experts, expert));
        Ok(OnGpu::Experts(DeviceExperts::from_host(stream, views.collect::<Result<Vec<_>>>()?)?))
    };
    let (workspace_bytes, config) = match &of_all()? {
        OnGpu::Matrix(weights) => {
            let plan = linear::<T>(gpu, weights, case).plan(*tokens)?;
            (plan.workspace_bytes(), plan.config())
        }
        OnGpu::Experts(experts) => {
            let plan = linear_experts::<T>(gpu, experts, case).plan(pairs)?;
            (plan.workspace_bytes(), plan.config())
        }
    };
    let mut workspace = GemmWorkspace::new(stream, workspace_bytes)?;
    let in_fp8 = config.is_some_and(|config| config.mainloop.takes_fp8());
    let nearly = product.nearly(case.op, in_fp8)?;
    let set = || {
        let out = stream.alloc_zeros::<T>(tokens * top_k * rows).map_err(failed("allocating the output"))?;
        Ok((of_all()?, out))
    };
    let turns = Turns::of(bytes, bytes, Effort::FULL);
    let operation = each_in_rotation(
        stream,
        set,
        (&[()], turns, Effort::FULL),
        |(), (weights, out)| {
            if case.op == Op::QuantizeGemmFp4 {
                let (shape, options) = (Shape::new(*tokens, x.cols()), DeviceQuantizeOptions::new());
                gpu.quantize_on(stream, &values, shape, recipe, options, &mut x_there)?;
            }
            match weights {
                OnGpu::Matrix(weights) => {
                    let plan = linear(gpu, weights, case).plan(*tokens)?;
                    plan.run(stream, &x_there, &mut workspace, out)
                }
                OnGpu::Experts(experts) => {
                    let (plan, order) =
                        (linear_experts(gpu, experts, case).plan(pairs)?, ExpertRows::Gathered);
                    plan.run(stream, &x_there, &routing, order, &mut workspace, out)
                }
            }
        },
        |(), (_, out)| nearly.check(&stream.clone_dtoh(out).map_err(failed("copying the output back"))?),
    )?[0];
    // Tensor cores with block scales have four times the rate of 16 bits, and FP8 twice.
    let native = config.is_some_and(|config| config.mainloop.takes_fp4());
    let times_16_bits = if native { 4.0 } else { f64::from(1 + u8::from(in_fp8)) };
    let times = Times {
        operation,
        read: None,
        copy: Some(copy_time(stream, bytes)?),
        kernel: config.map(|config| config.to_string()),
        tensor_cores_per_second: tensor_cores_per_second(gpu)?.map(|rate| times_16_bits * rate),
    };
    Ok((bytes, times))
}

/// The product with the requested configuration, or with the plan's choice.
#[cfg(feature = "cuda")]
fn linear<'a, T: Activation>(gpu: &'a Gpu, weights: &'a DeviceTensor, case: &Case) -> Linear<'a, T, T, Fp4> {
    let gate = (case.op == Op::GemmFp4Gated).then_some(Gate::SILU);
    let linear = gpu.linear_fp4(weights).epilogue(DeviceEpilogue { gate, ..DeviceEpilogue::default() });
    match case.kernel() {
        #[cfg(feature = "internals")]
        Some(config) if config.mainloop.accumulates_fast() => linear.fast_accumulation().by(config),
        #[cfg(feature = "internals")]
        Some(config) => linear.by(config),
        _ => linear,
    }
}

/// [`linear`] with experts' weights.
#[cfg(feature = "cuda")]
fn linear_experts<'a, T: Activation>(
    gpu: &'a Gpu,
    experts: &'a DeviceExperts,
    case: &Case,
) -> LinearExperts<'a, T, T, Fp4> {
    let linear = gpu.linear_experts_fp4(experts);
    match case.kernel() {
        #[cfg(feature = "internals")]
        Some(config) => linear.by(config),
        _ => linear,
    }
}

/// The CPU's results, and how far a GPU's may be from them.
#[cfg(feature = "cuda")]
struct Nearly<T> {
    expected: Vec<T>,
    allowed: f64,
}

#[cfg(feature = "cuda")]
impl<T: Activation> Fp4Product<T> {
    /// Computes the results on the CPU. Gates have the rows of `weights` in turn.
    ///
    /// With fast accumulation `in_fp8`, each of K / 32 steps may lose 2^−13 of a sum.
    fn nearly(&self, op: Op, in_fp8: bool) -> Result<Nearly<T>> {
        let mut expected = self.results();
        if op == Op::GemmFp4Gated {
            let both = deinterleave_rows(&self.weights)?;
            let both = both.each_ref().map(Fp4Weights::from);
            gemm_fp4_gated_with(Isa::best(), self.x.view(), both, Gate::SILU, &mut expected)?;
        } else {
            self.multiply((Isa::best(), op), self.x.view(), self.weights.view(), &mut expected)?;
        }
        let largest = expected.iter().map(|y| f64::from(y.to_f32().abs())).fold(0.0, f64::max);
        let steps = if in_fp8 { self.x.cols().div_ceil(32) as f64 } else { 0.0 };
        Ok(Nearly { expected, allowed: largest * (1.0 / 4096.0 + steps / 8192.0) })
    }
}

#[cfg(feature = "cuda")]
impl<T: Activation> Nearly<T> {
    /// Checks that results differ by less than 2⁻⁷ of each and 2⁻¹² of the largest, and in FP8 by
    /// more: the sums of both sides round, and gates amplify it. Tests check the bounds.
    fn check(&self, found: &[T]) -> Result<()> {
        let near = |(found, expected): (&T, &T)| {
            let [found, expected] = [found, expected].map(|y| f64::from(y.to_f32()));
            found == expected || (found - expected).abs() <= expected.abs() / 128.0 + self.allowed
        };
        if found.iter().zip(&self.expected).all(near) && found.len() == self.expected.len() {
            return Ok(());
        }
        Err(microscale::Error::Wrong("FP4 weights times FP4 activations on the GPU"))
    }
}
