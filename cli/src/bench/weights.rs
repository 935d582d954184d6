//! Measuring products of quantized weights and activations of 16 bits.

use microscale::cpu::{Isa, gemv_weights, gemv_weights_with};
use microscale::{Activation, Device, QuantizedTensor, Recipe, Result, Shape};
#[cfg(feature = "cuda")]
use microscale::{
    Error, Words,
    formats::weights::{gemm_gamma, tensor_core_gamma},
    gpu::{ExpertsKernel, GemvWeightsKernel, Gpu},
};

use super::case::Case;
use super::cpu;
#[cfg(feature = "cuda")]
use super::gpu::{Effort, WeightsKernel};
use super::measurement::Times;
#[cfg(feature = "cuda")]
use super::op::Op;
use super::product::{matrix, matrix_bytes, verify};
use super::size::Size;
use super::workload::random;

/// Quantized weights, and the activations to multiply them with.
pub(super) struct WeightsProduct<T> {
    pub(super) weights: QuantizedTensor,
    activations: Vec<T>,
    tokens: usize,
}

impl<T: Activation> WeightsProduct<T> {
    pub(super) fn new(recipe: &Recipe, size: Size) -> Result<Self> {
        let tokens = size.tokens.map_or(1, usize::from);
        // Activations and results must be countable.
        Shape::new(tokens, size.cols).span()?;
        Shape::new(tokens, size.rows).span()?;
        let weights = matrix(recipe, size)?;
        Ok(Self { weights, activations: random(tokens * size.cols, 2), tokens })
    }

    /// A result for each row and token.
    fn results(&self) -> Vec<T> {
        vec![T::default(); self.tokens * self.weights.rows()]
    }

    /// The results by the definition.
    fn expected(&self) -> Result<Vec<T>> {
        let mut expected = self.results();
        gemv_weights_with(Isa::Reference, &self.weights, &self.activations, self.tokens, &mut expected)?;
        Ok(expected)
    }
}

/// The bytes of the weights' codes and scales, and times.
pub(super) fn measure<T: Activation>(case: &Case, device: &Device) -> Result<(u64, Times)> {
    let product = WeightsProduct::<T>::new(&case.recipe, case.size)?;
    let times = match device {
        Device::Cpu => on_cpu(&product)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => on_gpu(&product, case, gpus.first())?,
    };
    Ok((matrix_bytes(&product.weights) as u64, times))
}

fn on_cpu<T: Activation>(product: &WeightsProduct<T>) -> Result<Times> {
    let mut out = product.results();
    let times = cpu::measure_product(&product.weights, |weights| {
        gemv_weights(weights, &product.activations, product.tokens, &mut out)
    })?;
    verify("gemv-weights", &out, &product.expected()?)?;
    Ok(times)
}

#[cfg(feature = "cuda")]
fn on_gpu<T: Activation>(product: &WeightsProduct<T>, case: &Case, gpu: &Gpu) -> Result<Times> {
    let (tokens, shape) = (product.tokens, product.weights.shape());
    let for_few = GemvWeightsKernel::choose(shape, tokens);
    let (kernel, name) = if case.op == Op::GemmWeights {
        let asked = match case.kernel {
            Some(ExpertsKernel::Many(kernel)) => Some(kernel),
            Some(ExpertsKernel::Few(_)) => {
                return Err(Error::NotMeasured { op: case.op.word(), how: "by a kernel for few tokens" });
            }
            None => None,
        };
        let chosen = asked.or_else(|| gpu.gemm_kernel(shape, tokens));
        (WeightsKernel::Gemm(asked), chosen.map_or(for_few.word(), |kernel| kernel.word()))
    } else {
        (WeightsKernel::Gemv(for_few), for_few.word())
    };
    let operation = by_kernels(product, gpu, &[(tokens, kernel)], Effort::FULL)?[0];
    Ok(Times {
        operation,
        read: None,
        copy: Some(super::gpu::copy_time(gpu.stream(), matrix_bytes(&product.weights) as u64)?),
        kernel: Some(name),
        tensor_cores_per_second: super::gpu::tensor_cores_per_second(gpu)?,
    })
}

/// The most tokens whose results are compared.
#[cfg(feature = "cuda")]
const COMPARED: usize = 32;

/// Times on a GPU, of products with no more tokens than there are. Its sums are those of tensor cores: as far
/// from the CPU's as both may be from the exact ones.
#[cfg(feature = "cuda")]
pub(super) fn by_kernels<T: Activation>(
    product: &WeightsProduct<T>,
    gpu: &Gpu,
    products: &[super::gpu::ByKernel],
    effort: Effort,
) -> Result<Vec<f64>> {
    let WeightsProduct { weights, activations, tokens } = product;
    let (rows, cols) = (weights.rows(), weights.cols());
    // The first and the last among them.
    let count = COMPARED.min(*tokens);
    let compared: Vec<_> = (0..count).map(|i| i * (tokens - 1) / (count - 1).max(1)).collect();
    let of_compared: Vec<T> =
        compared.iter().flat_map(|token| &activations[token * cols..][..cols]).copied().collect();
    let mut expected = vec![T::default(); count * rows];
    gemv_weights(weights, &of_compared, count, &mut expected)?;
    // The same without signs.
    let codes = weights.codes().iter().map(|codes| codes & 0x77).collect();
    let mut magnitudes_of = QuantizedTensor::from_parts(weights.shape(), codes, weights.scales().to_vec())?;
    if let Some(scale) = weights.global_scale() {
        magnitudes_of = magnitudes_of.with_global_scale(scale)?;
    }
    let of_compared: Vec<T> = of_compared.iter().map(|x| T::from_f32(x.to_f32().abs())).collect();
    let mut magnitudes = vec![T::default(); count * rows];
    gemv_weights(&magnitudes_of, &of_compared, count, &mut magnitudes)?;

    let gamma = tensor_core_gamma(cols).max(gemm_gamma(cols));
    // A unit in the last place of the dtype, relative to a number.
    let unit = 0.5f64.powi(T::SIGNIFICAND as i32 - 1);
    let near = |((found, expected), magnitude): ((&T, &T), &T)| {
        let [found, expected, magnitude] = [found, expected, magnitude].map(|x| f64::from(x.to_f32()));
        let allowed = unit * expected.abs() + 2.0 * gamma * magnitude + f64::from(f32::MIN_POSITIVE);
        found == expected || (found - expected).abs() <= allowed
    };
    super::gpu::measure_weights(gpu, (weights, activations, *tokens), (products, effort), |found| {
        let found = compared.iter().map_while(|token| found.get(token * rows..)?.get(..rows));
        let right = expected.chunks(rows).zip(magnitudes.chunks(rows));
        let all = found
            .zip(right)
            .all(|(found, (expected, magnitudes))| found.iter().zip(expected).zip(magnitudes).all(near));
        if all { Ok(()) } else { Err(microscale::Error::Wrong("weights times activations on the GPU")) }
    })
}
