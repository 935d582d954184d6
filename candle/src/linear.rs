//! Linear layers.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail};
use microscale::{Activation, Recipe, quantize};

use crate::matrix::QMatrix;

/// A linear layer with quantized weights, y = x·Wᵀ + b. Takes the place of `candle_nn::Linear`: it has inputs of any number of
/// dimensions, the last one of K elements, in f32, f16 or bf16, and outputs in the same dtype.
///
/// Each product is within the bounds that [`microscale::formats::weights`] states, and rounded once to the dtype; the bias is
/// added afterwards, as candle does it. An input without gaps is not copied.
#[derive(Clone, Debug)]
pub struct QLinear {
    weight: QMatrix,
    bias: Option<Tensor>,
}

impl QLinear {
    /// A layer of weights `[M, K]` and a bias `[M]`, which is converted to the dtype of an input that has another.
    ///
    /// # Errors
    /// If the bias has another shape.
    pub fn new(weight: QMatrix, bias: Option<Tensor>) -> Result<Self> {
        let rows = weight.view().rows();
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [rows]) {
            bail!("a bias of shape {:?} does not fit weights of {rows} rows", bias.dims());
        }
        Ok(Self { weight, bias })
    }

    /// A layer of the weights `[M, K]` of a tensor, quantized on the CPU.
    ///
    /// # Errors
    /// If the tensor is no matrix of f32, f16 or bf16, and those of [`microscale::quantize`], [`QMatrix::new`] and [`Self::new`].
    pub fn quantize(weight: &Tensor, bias: Option<Tensor>, recipe: &Recipe) -> Result<Self> {
        let (rows, cols) = weight.dims2()?;
        let shape = microscale::Shape::new(rows, cols);
        let weight = weight.flatten_all()?;
        let quantized = match weight.dtype() {
            DType::F32 => quantize(&weight.to_vec1::<f32>()?, shape, recipe),
            DType::F16 => quantize(&weight.to_vec1::<half::f16>()?, shape, recipe),
            DType::BF16 => quantize(&weight.to_vec1::<half::bf16>()?, shape, recipe),
            other => bail!("weights in {other:?} are not quantized; convert them to f32, f16 or bf16"),
        };
        Self::new(QMatrix::new(quantized.map_err(candle_core::Error::wrap)?.tensor)?, bias)
    }

    /// The weights.
    pub fn weight(&self) -> &QMatrix {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for QLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.contiguous()?.apply_op1_no_bwd(&Product(&self.weight))?;
        match &self.bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?),
        }
    }
}

/// The product of inputs without gaps and weights.
struct Product<'a>(&'a QMatrix);

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        "microscale-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, cols) = (self.0.view().rows(), self.0.view().cols());
        let mut dims = layout.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == cols => *last = rows,
            _ => {
                bail!("an input of shape {:?} does not fit weights of shape [{rows}, {cols}]", layout.dims())
            }
        }
        let tokens = dims[..dims.len() - 1].iter().product();
        let out = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.multiply(part(x, layout)?, tokens)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.multiply(part(x, layout)?, tokens)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.multiply(part(x, layout)?, tokens)?),
            _ => bail!("an input is f32, f16 or bf16 here; convert it"),
        };
        Ok((out, dims.into()))
    }
}

impl Product<'_> {
    fn multiply<T: Activation>(&self, x: &[T], tokens: usize) -> Result<Vec<T>> {
        let mut out = vec![T::default(); tokens * self.0.view().rows()];
        self.0.multiply(x, tokens, &mut out)?;
        Ok(out)
    }
}

/// The elements of a tensor without gaps.
pub(crate) fn part<'a, T>(storage: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(&storage[begin..end]),
        None => bail!("a tensor with gaps; make it contiguous"),
    }
}

/// A linear layer that a checkpoint has quantized, or not: layers that were left out of quantizing, such as a model's head.
#[derive(Clone, Debug)]
pub enum Linear {
    /// Quantized weights.
    Quantized(QLinear),
    /// Other weights.
    Plain(candle_nn::Linear),
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Quantized(layer) => layer.forward(x),
            Self::Plain(layer) => layer.forward(x),
        }
    }
}
