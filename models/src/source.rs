//! Where a model's tensors and linear layers come from.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Module, Tensor};
use microscale_candle::{QLinear, QMatrix, Weights};

use crate::error::Result;

/// A linear layer: y = x·Wᵀ + b for rows x. Inputs and outputs have one dtype, f32 or bf16.
pub type Layer = Box<dyn Module + Send + Sync>;

/// The name and the shape of a linear layer, or of a stack of experts.
#[derive(Clone, Debug)]
pub struct LayerName {
    /// The module, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The input's name. Layers with one input, such as q, k and v, share it.
    pub input: String,
    /// Columns of the weights, K.
    pub inputs: usize,
    /// Rows of the weights, M.
    pub outputs: usize,
    /// The number of experts if one tensor has all their weights, as in gpt-oss.
    pub stack: Option<usize>,
}

impl LayerName {
    /// The layer `prefix.end`, whose input is called `prefix.input`.
    pub(crate) fn new(prefix: &str, end: &str, input: &str, inputs: usize, outputs: usize) -> Self {
        let (module, input) = (format!("{prefix}.{end}"), format!("{prefix}.{input}"));
        Self { module, input, inputs, outputs, stack: None }
    }

    /// Returns the name of the weights.
    pub fn weight(&self) -> String {
        match self.stack {
            Some(_) => self.module.clone(),
            None => format!("{}.weight", self.module),
        }
    }

    /// Returns the name of the bias.
    fn bias(&self) -> String {
        match self.stack {
            Some(_) => format!("{}_bias", self.module),
            None => format!("{}.bias", self.module),
        }
    }
}

/// Where a model's tensors and linear layers come from.
pub trait Source {
    /// Returns the device of the tensors and layers.
    fn device(&self) -> &Device;

    /// Returns a tensor that is no weight of a linear layer, in f32, on the source's device.
    ///
    /// # Errors
    /// If there is no tensor of this name and shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor>;

    /// Returns rows of a matrix of a shape, in f32.
    ///
    /// # Errors
    /// If there is no matrix of this name and shape, or a row is not in it.
    fn rows(&self, name: &str, shape: [usize; 2], rows: &[u32]) -> Result<Tensor> {
        let matrix = self.tensor(name, &shape)?;
        Ok(matrix.index_select(&Tensor::new(rows, matrix.device())?, 0)?)
    }

    /// Returns whether there is a tensor.
    fn has(&self, name: &str) -> bool;

    /// Returns a linear layer, or the layers of all experts of a stack.
    ///
    /// # Errors
    /// If there are no weights of this name and shape.
    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>>;

    /// Returns a layer that keys or values pass through before attention reads them, if any.
    ///
    /// `name` is the module of the attention with `.k_cache` or `.v_cache`. Inputs are
    /// `[tokens, kv_heads · head_dim]`, keys after their rotary embedding.
    fn cache(&self, _name: &str) -> Option<Layer> {
        None
    }
}

/// Returns a layer that is no stack.
pub(crate) fn single(source: &dyn Source, name: &LayerName) -> Result<Layer> {
    let mut layers = source.layers(name)?;
    match layers.pop() {
        Some(layer) if layers.is_empty() => Ok(layer),
        _ => Err(candle_core::Error::msg(format!("{} is not one layer", name.module)).into()),
    }
}

/// The tensors of a checkpoint. Quantized weights are multiplied as they are stored.
#[derive(Clone, Debug)]
pub struct Stored(Weights);

impl Stored {
    /// Reads a checkpoint's tensors.
    pub fn new(weights: Weights) -> Self {
        Self(weights)
    }

    /// Returns the checkpoint's tensors.
    pub fn weights(&self) -> &Weights {
        &self.0
    }
}

impl Source for Stored {
    fn device(&self) -> &Device {
        self.0.device()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Ok(self.0.stored(shape, name)?.to_dtype(DType::F32)?)
    }

    fn rows(&self, name: &str, shape: [usize; 2], rows: &[u32]) -> Result<Tensor> {
        let matrix = self.0.stored(&shape[..], name)?;
        Ok(matrix.index_select(&Tensor::new(rows, matrix.device())?, 0)?.to_dtype(DType::F32)?)
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }

    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>> {
        self.layers_with(name, true)
    }
}

impl Stored {
    /// Returns layers that transform their inputs as the checkpoint says, or layers for inputs that
    /// are transformed already.
    pub(crate) fn layers_with(&self, name: &LayerName, transform: bool) -> Result<Vec<Layer>> {
        let LayerName { inputs, outputs, .. } = *name;
        let (weight, bias) = (name.weight(), name.bias());
        let count = name.stack.unwrap_or(1);
        let biases = match (self.has(&bias), name.stack) {
            (false, _) => vec![None; count],
            (true, None) => vec![Some(self.tensor(&bias, &[outputs])?)],
            (true, Some(_)) => {
                let all = self.tensor(&bias, &[count, outputs])?;
                (0..count).map(|expert| Ok(Some(all.get(expert)?))).collect::<Result<_>>()?
            }
        };
        let matrix = self.0.matrix(&weight, [count * outputs, inputs])?;
        let weights = match matrix {
            Some(matrix) => {
                let matrix = if transform { matrix } else { matrix.with_hadamard(None)? };
                let each = if name.stack.is_some() { matrix.split(count)? } else { vec![matrix] };
                each.into_iter().map(Held::Quantized).collect::<Vec<_>>()
            }
            // Unquantized stacks are stored as [experts, inputs, outputs].
            None if name.stack.is_some() => {
                let all = self.0.stored((count, inputs, outputs), &weight)?;
                (0..count).map(|expert| Ok(Held::Plain(all.get(expert)?.t()?))).collect::<Result<_>>()?
            }
            None if !transform && self.0.hadamard(&weight).is_some() => {
                return Err(candle_core::Error::msg(format!(
                    "{weight} has a transform of its inputs, which are quantized here for MXFP4 and NVFP4 only"
                ))
                .into());
            }
            None => vec![Held::Plain(self.0.stored((outputs, inputs), &weight)?)],
        };
        weights.into_iter().zip(biases).map(|(weight, bias)| weight.layer(bias, self.device())).collect()
    }
}

/// Weights of a layer.
enum Held {
    Quantized(QMatrix),
    /// `[outputs, inputs]`, in the checkpoint's dtype.
    Plain(Tensor),
}

impl Held {
    fn layer(self, bias: Option<Tensor>, device: &Device) -> Result<Layer> {
        Ok(match self {
            Self::Quantized(matrix) => Box::new(QLinear::new(matrix, bias)?.to_device(device)?),
            Self::Plain(weight) => Box::new(PlainLinear { weight, bias }),
        })
    }
}

/// A linear layer with unquantized weights, which stay in their dtype until they are multiplied.
#[derive(Debug)]
pub struct PlainLinear {
    /// `[outputs, inputs]` in any dtype.
    weight: Tensor,
    /// `[outputs]` in f32.
    bias: Option<Tensor>,
}

impl PlainLinear {
    /// A layer of weights `[outputs, inputs]` in any dtype, and a bias `[outputs]` in f32.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }
}

impl Module for PlainLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let dtype = compute_dtype(x);
        let y = x.to_dtype(dtype)?.matmul(&self.weight.to_dtype(dtype)?.t()?)?;
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(&bias.to_dtype(dtype)?)?,
            None => y,
        };
        y.to_dtype(x.dtype())
    }
}

/// Returns the dtype to multiply rows in: f32 on CPUs, where candle multiplies no bf16.
pub(crate) fn compute_dtype(x: &Tensor) -> DType {
    if x.device().is_cpu() { DType::F32 } else { x.dtype() }
}

/// A source whose layers are replaced by others: recorded, compared, or with quantized inputs.
pub struct Wrapped<'a, L, C> {
    /// The source of tensors and of the layers to replace.
    pub source: &'a dyn Source,
    /// Returns the replacement of a layer, or of all layers of a stack.
    pub layers: L,
    /// Returns the layer of a cache, see [`Source::cache`].
    pub cache: C,
}

/// Locks what layers record. A panic ends the operation, so a poisoned record is not used.
pub(crate) fn lock<T>(record: &Mutex<T>) -> MutexGuard<'_, T> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows nothing of the closures.
impl<L, C> fmt::Debug for Wrapped<'_, L, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapped").finish_non_exhaustive()
    }
}

impl<L, C> Source for Wrapped<'_, L, C>
where
    L: Fn(&LayerName, Vec<Layer>) -> Result<Vec<Layer>>,
    C: Fn(&str) -> Option<Layer>,
{
    fn device(&self) -> &Device {
        self.source.device()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.source.tensor(name, shape)
    }

    fn rows(&self, name: &str, shape: [usize; 2], rows: &[u32]) -> Result<Tensor> {
        self.source.rows(name, shape, rows)
    }

    fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }

    fn layers(&self, name: &LayerName) -> Result<Vec<Layer>> {
        (self.layers)(name, self.source.layers(name)?)
    }

    fn cache(&self, name: &str) -> Option<Layer> {
        (self.cache)(name)
    }
}
