//! Quantized inputs of linear layers, as engines with 4-bit or 8-bit activations have them.

use candle_core::{CpuStorage, CustomOp1, Device, Error, Layout, Module, Shape, Tensor, bail};
use microscale::formats::{E4m3, ScaleRule, words};
use microscale::{
    ActivationFormat, ActivationInput, ActivationRecipe, ActivationScale, Element, Format, Fp8Scale,
    GlobalScale, HadamardWidth, QuantizedActivations, QuantizedShape, QuantizedView, dequantize,
    quantize_activations,
};
use microscale_candle::hadamard;
use rayon::prelude::*;

use crate::error::Result;
use crate::source::{Layer, LayerName, Source, Stored};

/// The format of the inputs of linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// NVFP4 under the checkpoint's input scale, or else under one per token.
    Nvfp4,
    /// MXFP4, OCP's scale rule.
    Mxfp4,
    /// MXFP8 (E4M3), OCP's scale rule.
    Mxfp8,
    /// FP8 (E4M3) with a scale per token.
    Fp8,
}

words!(InputFormat, "format of activations" {
    InputFormat::Nvfp4 = "nvfp4",
    InputFormat::Mxfp4 = "mxfp4",
    InputFormat::Mxfp8 = "mxfp8",
    InputFormat::Fp8 = "fp8",
});

/// A checkpoint whose linear layers, except the head, have quantized inputs.
#[derive(Clone, Debug)]
pub struct QuantizedInputs {
    stored: Stored,
    format: InputFormat,
}

impl QuantizedInputs {
    /// Quantizes the inputs of all linear layers with quantized weights.
    pub fn new(stored: Stored, format: InputFormat) -> Self {
        Self { stored, format }
    }
}

impl Source for QuantizedInputs {
    fn device(&self) -> &Device {
        self.stored.device()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.stored.tensor(name, shape)
    }

    fn rows(&self, name: &str, shape: [usize; 2], rows: &[u32]) -> Result<Tensor> {
        self.stored.rows(name, shape, rows)
    }

    fn has(&self, name: &str) -> bool {
        self.stored.has(name)
    }

    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>> {
        let weight = name.weight();
        if !self.stored.weights().is_quantized(&weight) {
            return self.stored.layers(name);
        }
        let hadamard = self.stored.weights().hadamard(&weight);
        let layers = self.stored.layers_with(name, false)?;
        let scale = match self.format {
            InputFormat::Nvfp4 => self.stored.weights().input_scale(&weight),
            _ => None,
        };
        let quantized = layers
            .into_iter()
            .map(|layer| Box::new(QuantizedInput { layer, hadamard, format: self.format, scale }) as Layer);
        Ok(quantized.collect())
    }

    fn cache(&self, name: &str) -> Option<Layer> {
        self.stored.cache(name)
    }
}

/// A layer whose input is transformed, quantized and dequantized first.
struct QuantizedInput {
    layer: Layer,
    hadamard: Option<HadamardWidth>,
    format: InputFormat,
    /// NVFP4's given global scale.
    scale: Option<GlobalScale>,
}

impl Module for QuantizedInput {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = match self.hadamard {
            None => x.contiguous()?,
            Some(width) => hadamard(x, width)?,
        };
        let round_trip = RoundTrip { format: self.format, scale: self.scale };
        // Inputs on a GPU are rounded on the CPU: the GPU's kernels take no f32.
        let rounded = x.to_device(&Device::Cpu)?.apply_op1_no_bwd(&round_trip)?;
        self.layer.forward(&rounded.to_device(x.device())?)
    }
}

/// Rounds rows to a format and back.
struct RoundTrip {
    format: InputFormat,
    scale: Option<GlobalScale>,
}

impl CustomOp1 for RoundTrip {
    fn name(&self) -> &'static str {
        "microscale-round-trip"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("a tensor with gaps; make it contiguous")
        };
        let columns = layout.dims().last().copied().unwrap_or(1);
        let shape = microscale::Shape::new((end - begin) / columns.max(1), columns);
        let rounded = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.rounded(&x[begin..end], shape)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.rounded(&x[begin..end], shape)?),
            _ => bail!("inputs are f32 or bf16 here"),
        };
        Ok((rounded, layout.shape().clone()))
    }
}

impl RoundTrip {
    /// Quantizes and dequantizes rows. A NaN or an infinity makes its block NaN.
    fn rounded<T: Element>(&self, values: &[T], shape: microscale::Shape) -> candle_core::Result<Vec<T>> {
        let given = self.scale.map(|scale| [scale.value()]);
        let (format, elements) = match (self.format, self.scale) {
            (InputFormat::Nvfp4, Some(scale)) => {
                (ActivationFormat::Nvfp4(ActivationScale::Given(scale.direction())), Some(Format::Nvfp4))
            }
            (InputFormat::Nvfp4, None) => {
                (ActivationFormat::Nvfp4(ActivationScale::PerToken), Some(Format::Nvfp4))
            }
            (InputFormat::Mxfp4, _) => (ActivationFormat::Mxfp4(ScaleRule::Floor), Some(Format::Mxfp4)),
            (InputFormat::Mxfp8, _) => (ActivationFormat::Mxfp8(ScaleRule::Floor), Some(Format::Mxfp8E4m3)),
            (InputFormat::Fp8, _) => (ActivationFormat::Fp8(Fp8Scale::PerToken), None),
        };
        let input = ActivationInput::new(values, shape);
        let input = ActivationInput { scales: given.as_ref().map_or(&[], |given| given), ..input };
        let quantized = quantize_activations(input, &ActivationRecipe::new(format)).map_err(Error::wrap)?;
        let QuantizedActivations { codes, scales, f32_scales } = quantized;
        let mut rounded: Vec<f32> = match elements {
            Some(elements) => {
                let parts = QuantizedShape::new(elements, shape.rows, shape.cols);
                let view = QuantizedView::from_parts(parts, &codes, &scales).map_err(Error::wrap)?;
                let view = match self.scale {
                    Some(scale) if elements == Format::Nvfp4 => view.with_global_scale(scale),
                    _ => Ok(view),
                };
                dequantize(view.map_err(Error::wrap)?)
            }
            None => codes.par_iter().map(|code| E4m3::from_bits(*code).to_f32()).collect(),
        };
        if !f32_scales.is_empty() {
            let rows = rounded.par_chunks_mut(shape.cols.max(1)).zip(&f32_scales);
            rows.for_each(|(row, scale)| row.iter_mut().for_each(|x| *x *= scale));
        }
        Ok(rounded.into_iter().map(T::from_f32).collect())
    }
}
