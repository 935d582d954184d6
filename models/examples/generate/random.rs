//! A model of random weights, for measurements.

use candle_core::{DType, Device, Tensor};
use microscale_models::{Layer, LayerName, Result, Source};

use super::layers::Held;

/// Random tensors for measurements, the same in every run.
pub(crate) struct Random(pub(crate) Held, pub(crate) DType, pub(crate) Device);

impl Random {
    fn values(&self, name: &str, shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
        if shape.len() == 1 {
            return Tensor::ones(shape, dtype, &self.2);
        }
        let seed = name.bytes().fold(1u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut rng = fastrand::Rng::with_seed(seed);
        let size = 1.0 / (shape[1] as f32).sqrt();
        let values =
            (0..shape.iter().product()).map(|_| (rng.f32() + rng.f32() - 1.0) * 2.0 * size).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(&self.2)
    }
}

impl Source for Random {
    fn device(&self) -> &Device {
        &self.2
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Ok(self.values(name, shape, DType::F32)?)
    }

    fn has(&self, name: &str) -> bool {
        name == "model.embed_tokens.weight"
    }

    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>> {
        let held = if name.module == "lm_head" { Held::Plain } else { self.0 };
        let weight = self.values(&name.module, &[name.outputs, name.inputs], self.1)?;
        Ok(vec![held.layer(weight, None)?])
    }
}
