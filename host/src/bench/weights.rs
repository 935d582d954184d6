//! Measuring products of quantized weights and activations of 16 bits.

use super::{Size, Times, cpu, gemv, random};
use crate::cpu::{Isa, gemv_weights, gemv_weights_with};
use crate::device::Device;
use crate::error::Result;
use crate::gemv::Activation;
use crate::recipe::Recipe;
use crate::tensor::{QuantizedTensor, Shape};

/// What to multiply.
struct Product<T> {
    weights: QuantizedTensor,
    activations: Vec<T>,
    tokens: usize,
}

impl<T: Activation> Product<T> {
    fn new(recipe: &Recipe, size: Size) -> Result<Self> {
        let tokens = size.tokens.map_or(1, usize::from);
        // Activations and results must be countable.
        Shape::new(tokens, size.cols).span()?;
        Shape::new(tokens, size.rows).span()?;
        let weights = gemv::matrix(recipe, size)?;
        Ok(Self { weights, activations: random(tokens * size.cols, 2), tokens })
    }

    /// A result for each row and token.
    fn results(&self) -> Vec<T> {
        vec![T::default(); self.tokens * self.weights.rows()]
    }

    /// What the definition makes of it.
    fn expected(&self) -> Result<Vec<T>> {
        let mut expected = self.results();
        gemv_weights_with(Isa::Reference, &self.weights, &self.activations, self.tokens, &mut expected)?;
        Ok(expected)
    }
}

/// The bytes of the weights' codes and scales, and times.
pub(super) fn measure<T: Activation>(recipe: &Recipe, size: Size, device: &Device) -> Result<(u64, Times)> {
    let product = Product::<T>::new(recipe, size)?;
    let times = match device {
        Device::Cpu => on_cpu(&product)?,
        // GPUs need not give the CPU's bits: compare within the bound of `microscale_formats::weights`.
        #[cfg(feature = "cuda")]
        Device::Gpus(_) => {
            return Err(super::Op::GemvWeights.not_measured("on a GPU yet; choose the device cpu"));
        }
    };
    Ok(((product.weights.codes().len() + product.weights.scales().len()) as u64, times))
}

fn on_cpu<T: Activation>(product: &Product<T>) -> Result<Times> {
    let mut out = product.results();
    let times = cpu::measure_product(&product.weights, |weights| {
        gemv_weights(weights, &product.activations, product.tokens, &mut out)
    })?;
    gemv::verify("gemv-weights", &out, &product.expected()?)?;
    Ok(times)
}
