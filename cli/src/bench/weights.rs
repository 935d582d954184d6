//! Measurements of products of quantized weights and activations.

use half::{bf16, f16};
use microscale::cpu::{
    Isa, gemm_weights, gemm_weights_int8, gemm_weights_int8_with, gemv_weights, gemv_weights_with,
};
use microscale::formats::weights::segments_gamma;
use microscale::{Activation, ActivationRounding, Device, Dtype, QuantizedTensor, Recipe, Result, Shape};
#[cfg(feature = "cuda")]
use microscale::{
    ActivationFormat, ActivationInput, ActivationRecipe, Error, Format, Fp8Scale, Words,
    formats::weights::{gemm_gamma, tensor_core_gamma},
    formats::{E4m3, fp8_dot},
    gpu::Gpu,
    quantize_activations,
};

use super::case::Case;
use super::cpu;
#[cfg(feature = "cuda")]
use super::gpu::{Effort, by_config};
use super::measurement::Times;
#[cfg(feature = "cuda")]
use super::op::NO_F32;
use super::op::Op;
use super::product::{matrix, matrix_bytes, verify};
use super::size::Size;
use super::workload::random;

/// Quantized weights, and the activations to multiply them with.
pub(super) struct WeightsProduct<T> {
    pub(super) weights: QuantizedTensor,
    pub(super) activations: Vec<T>,
    pub(super) tokens: usize,
}

impl<T: Activation> WeightsProduct<T> {
    pub(super) fn new(recipe: &Recipe, size: Size) -> Result<Self> {
        let tokens = size.tokens.map_or(1, usize::from);
        // Sizes of activations and results must not overflow.
        Shape::new(tokens, size.cols).span()?;
        Shape::new(tokens, size.rows).span()?;
        let weights = matrix(recipe, size)?;
        Ok(Self { weights, activations: random(tokens * size.cols, 2), tokens })
    }

    /// Returns a buffer with one result per row and token.
    fn results(&self) -> Vec<T> {
        vec![T::default(); self.tokens * self.weights.rows()]
    }

    /// Returns the results of the reference.
    fn expected(&self) -> Result<Vec<T>> {
        let mut expected = self.results();
        gemv_weights_with(Isa::Reference, &self.weights, &self.activations, self.tokens, &mut expected)?;
        Ok(expected)
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
        (Device::Gpus(_), Dtype::F32) => Err(Error::NotMeasured { op: case.op.word(), how: NO_F32 }),
    }
}

fn on_cpu<T: Activation>(case: &Case) -> Result<(u64, Times)> {
    let product = WeightsProduct::<T>::new(&case.recipe, case.size)?;
    let WeightsProduct { weights, activations, tokens } = &product;
    let mut out = product.results();
    let many = case.op == Op::GemmWeights;
    let is_int8 = case.activations == ActivationRounding::Int8;
    let times = cpu::measure_product(weights, |weights| {
        if is_int8 {
            gemm_weights_int8(weights, activations, *tokens, &mut out)
        } else if many {
            gemm_weights(weights, activations, *tokens, &mut out)
        } else {
            gemv_weights(weights, activations, *tokens, &mut out)
        }
    })?;
    if is_int8 {
        // The reference is slow, and results do not depend on other tokens.
        let (rows, cols, last) = (weights.rows(), weights.cols(), tokens - 1);
        for token in [0, last] {
            let mut expected = vec![T::default(); rows];
            let x = &activations[token * cols..][..cols];
            gemm_weights_int8_with(Isa::Reference, weights, x, 1, &mut expected)?;
            verify("gemm-weights", &out[token * rows..][..rows], &expected)?;
        }
    } else if many {
        product.nearly(segments_gamma(weights.cols()))?.check("gemm-weights", &out)?;
    } else {
        verify("gemv-weights", &out, &product.expected()?)?;
    }
    Ok((matrix_bytes(weights) as u64, times))
}

#[cfg(feature = "cuda")]
fn on_gpu<T: Activation>(case: &Case, gpu: &Gpu) -> Result<(u64, Times)> {
    let product = WeightsProduct::<T>::new(&case.recipe, case.size)?;
    let bytes = matrix_bytes(&product.weights) as u64;
    let given = case.kernel();
    let weights = microscale::gpu::DeviceTensor::from_host(gpu.stream(), &product.weights)?;
    let config = by_config(gpu.linear::<T, T>(&weights), given).plan(product.tokens)?.config();
    let operation = by_configs(&product, gpu, &[(product.tokens, given)], Effort::FULL)?[0];
    let times = Times {
        operation,
        read: None,
        copy: Some(super::gpu::copy_time(gpu.stream(), bytes)?),
        kernel: config.map(|config| config.to_string()),
        tensor_cores_per_second: super::gpu::tensor_cores_per_second(gpu)?,
    };
    Ok((bytes, times))
}

/// Returns the bytes of the weights' codes and scales, and times of a product with activations in
/// FP8, quantized per token.
pub(super) fn measure_fp8(case: &Case, device: &Device) -> Result<(u64, Times)> {
    match (device, case.dtype) {
        #[cfg(feature = "cuda")]
        (Device::Gpus(gpus), Dtype::F16) => fp8_on_gpu::<f16>(case, gpus.first()),
        #[cfg(feature = "cuda")]
        (Device::Gpus(gpus), Dtype::Bf16) => fp8_on_gpu::<bf16>(case, gpus.first()),
        _ => Err(case.op.not_measured("on CPUs, or with activations in f32; choose f16 or bf16")),
    }
}

#[cfg(feature = "cuda")]
fn fp8_on_gpu<T: Activation>(case: &Case, gpu: &Gpu) -> Result<(u64, Times)> {
    let product = WeightsProduct::<T>::new(&case.recipe, case.size)?;
    let WeightsProduct { weights, activations, tokens } = &product;
    let (bytes, nearly) = (matrix_bytes(weights) as u64, product.nearly_in_fp8()?);
    let (operation, config) =
        super::gpu::measure_fp8(gpu, (weights, activations, *tokens), case.kernel(), |found| {
            nearly.check("weights times FP8 activations on the GPU", found)
        })?;
    let times = Times {
        operation,
        read: None,
        copy: Some(super::gpu::copy_time(gpu.stream(), bytes)?),
        kernel: config.map(|config| config.to_string()),
        tensor_cores_per_second: super::gpu::tensor_cores_per_second(gpu)?.map(|rate| 2.0 * rate),
    };
    Ok((bytes, times))
}

/// Returns the CPU time of planning and launching a product again.
#[cfg(feature = "internals")]
pub(super) fn measure_launch(case: &Case, device: &Device) -> Result<(u64, Times)> {
    let Device::Gpus(gpus) = device else {
        return Err(Error::NoGpu("launches are measured on GPUs only".into()));
    };
    let product = WeightsProduct::<bf16>::new(&case.recipe, case.size)?;
    let operands = (&product.weights, &product.activations[..], product.tokens);
    let operation = super::gpu::measure_launch(gpus.first(), operands)?;
    Ok((0, Times { operation, ..Times::default() }))
}

/// Maximum number of tokens whose results are compared.
const COMPARED: usize = 32;

/// Reference results of some tokens, and their error bound.
pub(super) struct Nearly<T> {
    rows: usize,
    /// The compared tokens, including the first and the last.
    compared: Vec<usize>,
    expected: Vec<T>,
    /// The sums of magnitudes, for the error bound.
    magnitudes: Vec<T>,
    gamma: f64,
}

impl<T: Activation> WeightsProduct<T> {
    /// Computes the results with the arithmetic for few tokens, given the other arithmetic's γ.
    pub(super) fn nearly(&self, gamma: f64) -> Result<Nearly<T>> {
        let Self { weights, activations, tokens } = self;
        let (rows, cols) = (weights.rows(), weights.cols());
        let count = COMPARED.min(*tokens);
        let compared: Vec<_> = (0..count).map(|i| i * (tokens - 1) / (count - 1).max(1)).collect();
        let of_compared: Vec<T> =
            compared.iter().flat_map(|token| &activations[token * cols..][..cols]).copied().collect();
        let mut expected = vec![T::default(); count * rows];
        gemv_weights(weights, &of_compared, count, &mut expected)?;
        let codes = weights.codes().iter().map(|codes| codes & 0x77).collect();
        let mut without_signs =
            QuantizedTensor::from_parts(weights.shape(), codes, weights.scales().to_vec())?;
        if let Some(scale) = weights.global_scale() {
            without_signs = without_signs.with_global_scale(scale)?;
        }
        let of_compared: Vec<T> = of_compared.iter().map(|x| T::from_f32(x.to_f32().abs())).collect();
        let mut magnitudes = vec![T::default(); count * rows];
        gemv_weights(&without_signs, &of_compared, count, &mut magnitudes)?;
        Ok(Nearly { rows, compared, expected, magnitudes, gamma })
    }
}

#[cfg(feature = "cuda")]
impl<T: Activation> WeightsProduct<T> {
    /// Computes the results with activations that are rounded to FP8, per token.
    pub(super) fn nearly_in_fp8(&self) -> Result<Nearly<T>> {
        let Self { weights, activations, tokens } = self;
        let cols = weights.cols();
        let recipe = ActivationRecipe::new(ActivationFormat::Fp8(Fp8Scale::PerToken));
        let quantized =
            quantize_activations(ActivationInput::new(activations, Shape::new(*tokens, cols)), &recipe)?;
        let codes = quantized.codes.iter().map(|code| E4m3::from_bits(*code).to_f32());
        let rounded = codes.enumerate().map(|(i, code)| code * quantized.f32_scales[i / cols]).collect();
        let rounded =
            WeightsProduct::<f32> { weights: weights.clone(), activations: rounded, tokens: *tokens };
        // NVFP4 weights are rounded by up to 2^-4 each.
        let loss = if weights.format() == Format::Nvfp4 { 0.0625 } else { 0.0 };
        Ok(rounded.nearly(loss + fp8_dot::gamma(cols))?.of::<T>())
    }
}

#[cfg(feature = "cuda")]
impl Nearly<f32> {
    /// The same results in another dtype.
    fn of<T: Activation>(self) -> Nearly<T> {
        let Self { rows, compared, expected, magnitudes, gamma } = self;
        let [expected, magnitudes] =
            [expected, magnitudes].map(|values| values.into_iter().map(T::from_f32).collect());
        Nearly { rows, compared, expected, magnitudes, gamma }
    }
}

impl<T: Activation> Nearly<T> {
    /// Checks the results of the compared tokens.
    ///
    /// # Errors
    /// [`microscale::Error::Wrong`].
    pub(super) fn check(&self, what: &'static str, found: &[T]) -> Result<()> {
        // The relative size of a unit in the last place of the dtype.
        let unit = 0.5f64.powi(T::SIGNIFICAND as i32 - 1);
        let near = |((found, expected), magnitude): ((&T, &T), &T)| {
            let [found, expected, magnitude] = [found, expected, magnitude].map(|x| f64::from(x.to_f32()));
            let allowed = unit * expected.abs() + 2.0 * self.gamma * magnitude + f64::from(f32::MIN_POSITIVE);
            found == expected || (found - expected).abs() <= allowed
        };
        let rows = self.rows;
        let found = self.compared.iter().map_while(|token| found.get(token * rows..)?.get(..rows));
        let right = self.expected.chunks(rows).zip(self.magnitudes.chunks(rows));
        let all = found
            .zip(right)
            .all(|(found, (expected, magnitudes))| found.iter().zip(expected).zip(magnitudes).all(near));
        if all { Ok(()) } else { Err(microscale::Error::Wrong(what)) }
    }
}

/// Times products on a GPU. Tensor cores sum in another order than the CPU, so the check allows the
/// error bounds of both.
#[cfg(feature = "cuda")]
pub(super) fn by_configs<T: Activation>(
    product: &WeightsProduct<T>,
    gpu: &Gpu,
    products: &[super::gpu::ByConfig],
    effort: Effort,
) -> Result<Vec<f64>> {
    let WeightsProduct { weights, activations, tokens } = product;
    let cols = weights.cols();
    let nearly = product.nearly(tensor_core_gamma(cols).max(gemm_gamma(cols)))?;
    super::gpu::measure_weights(gpu, (weights, activations, *tokens), (products, effort), |found| {
        nearly.check("weights times activations on the GPU", found)
    })
}
