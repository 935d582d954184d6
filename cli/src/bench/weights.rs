//! Measuring products of quantized weights and activations of 16 bits.

use microscale::cpu::{Isa, gemv_weights, gemv_weights_with};
#[cfg(feature = "cuda")]
use microscale::formats::weights::tensor_core_gamma;
use microscale::{Activation, Device, QuantizedTensor, Recipe, Result, Shape};

use super::cpu;
#[cfg(feature = "cuda")]
use super::gpu::Effort;
use super::measurement::Times;
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
pub(super) fn measure<T: Activation>(recipe: &Recipe, size: Size, device: &Device) -> Result<(u64, Times)> {
    let product = WeightsProduct::<T>::new(recipe, size)?;
    let times = match device {
        Device::Cpu => on_cpu(&product)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => on_gpu(&product, gpus.first())?,
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
fn on_gpu<T: Activation>(product: &WeightsProduct<T>, gpu: &microscale::gpu::Gpu) -> Result<Times> {
    let tokens = product.tokens;
    let kernel = microscale::gpu::GemvWeightsKernel::choose(product.weights.shape(), tokens);
    let operation = by_kernels(product, gpu, &[(tokens, kernel)], Effort::FULL)?[0];
    let copy = super::gpu::copy_time(gpu.stream(), matrix_bytes(&product.weights) as u64)?;
    Ok(Times { operation, read: None, copy: Some(copy) })
}

/// Times on a GPU, of products with no more tokens than there are. Its sums are those of tensor cores: as far
/// from the CPU's as both may be from the exact ones.
#[cfg(feature = "cuda")]
pub(super) fn by_kernels<T: Activation>(
    product: &WeightsProduct<T>,
    gpu: &microscale::gpu::Gpu,
    products: &[super::gpu::ByKernel],
    effort: Effort,
) -> Result<Vec<f64>> {
    let WeightsProduct { weights, activations, tokens } = product;
    let mut expected = product.results();
    gemv_weights(weights, activations, *tokens, &mut expected)?;
    // The same without signs.
    let codes = weights.codes().iter().map(|codes| codes & 0x77).collect();
    let mut magnitudes_of = QuantizedTensor::from_parts(weights.shape(), codes, weights.scales().to_vec())?;
    if let Some(scale) = weights.global_scale() {
        magnitudes_of = magnitudes_of.with_global_scale(scale)?;
    }
    let activation_magnitudes: Vec<T> = activations.iter().map(|x| T::from_f32(x.to_f32().abs())).collect();
    let mut magnitudes = product.results();
    gemv_weights(&magnitudes_of, &activation_magnitudes, *tokens, &mut magnitudes)?;

    let gamma = tensor_core_gamma(weights.cols());
    // A unit in the last place of the dtype, relative to a number.
    let unit = 0.5f64.powi(T::SIGNIFICAND as i32 - 1);
    let near = |((found, expected), magnitude): ((&T, &T), &T)| {
        let [found, expected, magnitude] = [found, expected, magnitude].map(|x| f64::from(x.to_f32()));
        let allowed = unit * expected.abs() + 2.0 * gamma * magnitude + f64::from(f32::MIN_POSITIVE);
        found == expected || (found - expected).abs() <= allowed
    };
    super::gpu::measure_weights(
        gpu,
        matrix_bytes(weights) as u64,
        (weights, activations, expected.len()),
        (products, effort),
        |found| {
            let all = found.iter().zip(&expected).zip(&magnitudes).all(near);
            if all { Ok(()) } else { Err(microscale::Error::Wrong("gemv-weights on the GPU")) }
        },
    )
}
