//! Tensors of a checkpoint by name.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use microscale::{GlobalScale, HadamardWidth, QuantizedView};
use microscale_checkpoint::{Checkpoint, Logical, Values, logical};
use yoke::{Yoke, Yokeable};

use crate::experts::QExperts;
use crate::linear::{Linear, QLinear};
use crate::matrix::QMatrix;

/// The tensors of a checkpoint by the model's names, like candle's `VarBuilder`. Cheap to clone.
///
/// Takes every checkpoint format that `microscale-checkpoint` reads. [`Self::pp`] appends to the
/// prefix.
#[derive(Clone)]
pub struct Weights {
    tensors: Arc<Mapped>,
    prefix: String,
    dtype: DType,
    device: Device,
}

/// Tensors and the mapped files that hold them.
type Mapped = Yoke<Tensors<'static>, Arc<Checkpoint>>;

#[derive(Yokeable)]
struct Tensors<'a>(HashMap<&'a str, Logical<'a>>);

/// Shows the prefix and the dtype.
impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("prefix", &self.prefix)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl Weights {
    /// Opens a `.safetensors` or `.gguf` file, or a checkpoint directory, and maps the files.
    ///
    /// Unquantized tensors come out in `dtype`, and all tensors on `device`.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`], [`logical`] and [`Checkpoint::check_transforms`].
    pub fn open(path: &Path, dtype: DType, device: &Device) -> Result<Self> {
        Self::of(Checkpoint::open(path).map_err(Error::wrap)?, dtype, device)
    }

    /// [`Self::open`] for a checkpoint that is already open.
    ///
    /// # Errors
    /// As for [`logical`] and [`Checkpoint::check_transforms`].
    pub fn of(checkpoint: Checkpoint, dtype: DType, device: &Device) -> Result<Self> {
        checkpoint.check_transforms().map_err(Error::wrap)?;
        let tensors = Yoke::try_attach_to_cart(Arc::new(checkpoint), |checkpoint| {
            let tensors = logical(checkpoint)?;
            Ok(Tensors(tensors.into_iter().map(|tensor| (tensor.name(), tensor)).collect()))
        });
        let tensors = tensors.map_err(|error: microscale_checkpoint::Error| Error::wrap(error))?;
        Ok(Self { tensors: Arc::new(tensors), prefix: String::new(), dtype, device: device.clone() })
    }

    /// The tensors whose names continue with another part and a dot.
    #[must_use]
    pub fn pp(&self, part: impl fmt::Display) -> Self {
        Self { prefix: format!("{}{part}.", self.prefix), ..self.clone() }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        self.tensors.backing_cart()
    }

    /// The dtype of unquantized tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns whether there is a tensor of this name.
    pub fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.get().0.contains_key(&*self.full(name))
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The values of a tensor in the weights' dtype, dequantized if necessary.
    ///
    /// # Errors
    /// If there is no tensor of this name and shape, or if reading it fails.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.stored(shape, name)?.to_dtype(self.dtype)
    }

    /// The values of a tensor in the dtype that the checkpoint stores. Quantized tensors are
    /// dequantized to f32.
    ///
    /// # Errors
    /// As for [`Self::get`].
    pub fn stored(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        let (name, shape) = (self.full(name), shape.into());
        let tensor = self.find(&name)?;
        if tensor.shape() != shape.dims() {
            bail!("{name} is of shape {:?} in the checkpoint, and not {:?}", tensor.shape(), shape.dims());
        }
        match tensor {
            Logical::Packed(packed) => {
                let values = packed.values::<f32>(&microscale::Device::Cpu).map_err(Error::wrap)?;
                Tensor::from_vec(values, shape, &self.device)
            }
            Logical::Plain(plain) => match plain.values() {
                Some(Values::F32(values)) => Tensor::from_vec(values.into_owned(), shape, &self.device),
                Some(Values::F16(values)) => Tensor::from_vec(values.into_owned(), shape, &self.device),
                Some(Values::Bf16(values)) => Tensor::from_vec(values.into_owned(), shape, &self.device),
                None => bail!("{name} is in {}, which are no values of a layer", plain.dtype),
            },
        }
    }

    /// The linear layer of `weight`, `[outputs, inputs]`, and `bias`, `[outputs]`, if it has one.
    ///
    /// Quantized weights stay in the mapped file. Other weights, and MXFP8, which has no products,
    /// come out in the dtype.
    ///
    /// # Errors
    /// If there are no tensors of these names and shapes, or if reading them fails.
    pub fn linear(&self, inputs: usize, outputs: usize, bias: bool) -> Result<Linear> {
        let bias = bias.then(|| self.get(outputs, "bias")).transpose()?;
        match self.matrix("weight", [outputs, inputs])? {
            Some(weight) => Ok(Linear::Quantized(QLinear::new(weight, bias)?.to_device(&self.device)?)),
            None => Ok(Linear::Plain(candle_nn::Linear::new(self.get((outputs, inputs), "weight")?, bias))),
        }
    }

    /// The experts of a layer.
    ///
    /// They are either all in one tensor `name`, with biases `name_bias` (gpt-oss), or one by one:
    /// `0.name.weight` with `0.name.bias`, and so on.
    ///
    /// # Errors
    /// If there are no tensors of these names and shapes, if they are not in MXFP4 or NVFP4, or if
    /// reading them fails.
    pub fn experts(
        &self,
        count: usize,
        inputs: usize,
        outputs: usize,
        name: &str,
        bias: bool,
    ) -> Result<QExperts> {
        let quantized = |weights: Option<QMatrix>, name: &str| {
            weights
                .ok_or_else(|| Error::msg(format!("{} is not quantized to MXFP4 or NVFP4", self.full(name))))
        };
        if self.contains_tensor(name) {
            let weights = quantized(self.matrix(name, [count * outputs, inputs])?, name)?;
            let bias = bias.then(|| self.get((count, outputs), &format!("{name}_bias"))).transpose()?;
            return QExperts::new(weights.split(count)?, bias)?.to_device(&self.device);
        }
        let each = (0..count).map(|expert| format!("{expert}.{name}"));
        let weights = each.clone().map(|expert| {
            let name = format!("{expert}.weight");
            quantized(self.matrix(&name, [outputs, inputs])?, &name)
        });
        let weights = weights.collect::<Result<_>>()?;
        let biases = bias.then(|| {
            each.map(|expert| self.get(outputs, &format!("{expert}.bias"))).collect::<Result<Vec<_>>>()
        });
        let bias = biases.transpose()?.map(|biases| Tensor::stack(&biases, 0)).transpose()?;
        QExperts::new(weights, bias)?.to_device(&self.device)
    }

    /// A quantized matrix `[rows, columns]` with products, or `None` for any other tensor.
    ///
    /// # Errors
    /// If there is no tensor of this name and shape, or if reading it fails.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Option<QMatrix>> {
        let name = self.full(name);
        let packed = match self.find(&name)? {
            Logical::Packed(packed) if packed.format.is_multiplied() => packed,
            _ => return Ok(None),
        };
        // GGUF's blocks and ComfyUI's order of codes have no view.
        let hadamard = packed.hadamard;
        let matrix = match packed.view().map_err(Error::wrap)? {
            Some(_) => QMatrix::of(self.tensors.clone(), |tensors| viewed(tensors, &name)),
            None => QMatrix::new(packed.read().map_err(Error::wrap)?),
        }?
        .with_hadamard(hadamard)?;
        let found = [matrix.view().rows(), matrix.view().cols()];
        if found != shape {
            bail!("{name} has rows and columns {found:?} in the checkpoint, and not {shape:?}");
        }
        Ok(Some(matrix))
    }

    /// Returns whether there is a quantized tensor of this name.
    pub fn is_quantized(&self, name: &str) -> bool {
        matches!(self.tensors.get().0.get(&*self.full(name)), Some(Logical::Packed(_)))
    }

    /// Returns the transform of the inputs of a layer whose weights have this name.
    pub fn hadamard(&self, name: &str) -> Option<HadamardWidth> {
        match self.tensors.get().0.get(&*self.full(name)) {
            Some(Logical::Packed(packed)) => packed.hadamard,
            _ => None,
        }
    }

    /// Returns the stored global scale of the inputs of a layer whose weights have this name.
    pub fn input_scale(&self, name: &str) -> Option<GlobalScale> {
        match self.tensors.get().0.get(&*self.full(name)) {
            Some(Logical::Packed(packed)) => packed.input_scale.as_ref().map(|(_, scale)| *scale),
            _ => None,
        }
    }

    fn find(&self, name: &str) -> Result<&Logical<'_>> {
        let tensors = &self.tensors.get().0;
        tensors.get(name).ok_or_else(|| Error::CannotFindTensor { path: name.into() }.bt())
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// The mapped bytes of a quantized tensor that has a view.
fn viewed<'a>(tensors: &'a Mapped, name: &str) -> Result<QuantizedView<'a>> {
    match tensors.get().0.get(name) {
        Some(Logical::Packed(packed)) => {
            let view = packed.view().map_err(Error::wrap)?;
            view.ok_or_else(|| Error::msg(format!("{name} cannot be multiplied where it is mapped")))
        }
        _ => bail!("{name} is not quantized"),
    }
}
