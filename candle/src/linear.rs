//! Linear layers.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor, bail};
use microscale::{
    Activation, Fp8Rows, Recipe, gemm_fp4, gemm_weights, gemm_weights_fp8, gemm_weights_int8, quantize,
};

#[cfg(feature = "cuda")]
use crate::cuda::OnGpu;
use crate::hadamard::hadamard;
use crate::matrix::{QMatrix, check_device, check_rounded, part};
use crate::rounded::RoundedInputs;

/// A linear layer with quantized weights, y = x·Wᵀ + b.
///
/// Replaces `candle_nn::Linear`: inputs have any number of dimensions, the last one of K elements,
/// in f32, f16 or bf16. Outputs have the same dtype.
///
/// Each product is within the bounds that [`microscale::formats::weights`] states, and rounded once
/// to the dtype. The bias is added afterwards, as in candle. An input without gaps is not copied,
/// unless [`QMatrix::hadamard`] transforms it.
#[derive(Clone, Debug)]
pub struct QLinear {
    weight: QMatrix,
    bias: Option<Tensor>,
    /// Rounds activations, if it is set.
    rounded: Option<RoundedInputs>,
    #[cfg(feature = "cuda")]
    on_gpu: Option<Arc<OnGpu>>,
}

impl QLinear {
    /// A layer of weights `[M, K]` and a bias `[M]`.
    ///
    /// The bias is converted to the dtype of the input if that differs.
    ///
    /// # Errors
    /// If the bias has another shape.
    pub fn new(weight: QMatrix, bias: Option<Tensor>) -> Result<Self> {
        let rows = weight.view().rows();
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [rows]) {
            bail!("a bias of shape {:?} does not fit weights of {rows} rows", bias.dims());
        }
        Ok(Self {
            weight,
            bias,
            rounded: None,
            #[cfg(feature = "cuda")]
            on_gpu: None,
        })
    }

    /// Sets how products round activations: to INT8, FP8 or FP4, or not at all (`None`).
    ///
    /// ```
    /// use candle_core::{Device, Module, Tensor};
    /// use microscale::Recipe;
    /// use microscale_candle::{QLinear, RoundedInputs};
    ///
    /// let weight = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
    /// let recipe = Recipe::default(); // MXFP4
    /// let layer = QLinear::quantize(&weight, None, &recipe)?;
    /// let layer = layer.with_activations(RoundedInputs::Fp4(recipe))?;
    /// let x = Tensor::randn(0f32, 1., (5, 64), &Device::Cpu)?;
    /// assert_eq!(layer.forward(&x)?.dims(), [5, 8]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// For NVFP4 weights with FP8 unless [`microscale::Fp8Options::round_weights`] is set, and for a
    /// recipe of another format than the weights'. For INT8 on a GPU.
    pub fn with_activations(self, rounded: impl Into<Option<RoundedInputs>>) -> Result<Self> {
        let rounded = rounded.into();
        #[cfg(feature = "cuda")]
        check_device(rounded, self.on_gpu.is_none())?;
        if let Some(rounded) = rounded {
            check_rounded(rounded, self.weight.view().shape())?;
        }
        Ok(Self { rounded, ..self })
    }

    /// The layer on a device. On a GPU (feature `cuda`), the weights are copied to it.
    ///
    /// # Errors
    /// For a device that is neither a CPU nor an NVIDIA GPU, for activations in INT8 on a GPU,
    /// and if the driver fails.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let layer = Self::new(
            self.weight.clone(),
            self.bias.as_ref().map(|bias| bias.to_device(device)).transpose()?,
        )?;
        check_device(self.rounded, device.is_cpu())?;
        let layer = Self { rounded: self.rounded, ..layer };
        match device {
            Device::Cpu => Ok(layer),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                Ok(Self { on_gpu: Some(OnGpu::of(self.weight.view(), gpu)?.into()), ..layer })
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => bail!("layers on a GPU need the feature `cuda` of microscale-candle"),
            Device::Metal(_) => bail!("there are layers on CPUs and NVIDIA GPUs, and none on Metal"),
        }
    }

    /// Quantizes a tensor `[M, K]` on the CPU, and makes a layer of it on the tensor's device.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use microscale::Recipe;
    /// use microscale_candle::QLinear;
    ///
    /// let weight = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
    /// let bias = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
    /// let layer = QLinear::quantize(&weight, Some(bias), &Recipe::default())?; // MXFP4
    /// let x = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
    /// assert_eq!(layer.forward(&x)?.dims(), [2, 5, 8]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the tensor is not a matrix of f32, f16 or bf16, and as for [`microscale::quantize`],
    /// [`QMatrix::new`], [`Self::new`] and [`Self::to_device`].
    pub fn quantize(weight: &Tensor, bias: Option<Tensor>, recipe: &Recipe) -> Result<Self> {
        let (rows, cols) = weight.dims2()?;
        let shape = microscale::Shape::new(rows, cols);
        let device = weight.device().clone();
        let weight = weight.flatten_all()?;
        let quantized = match weight.dtype() {
            DType::F32 => quantize(&weight.to_vec1::<f32>()?, shape, recipe),
            DType::F16 => quantize(&weight.to_vec1::<half::f16>()?, shape, recipe),
            DType::BF16 => quantize(&weight.to_vec1::<half::bf16>()?, shape, recipe),
            other => bail!("weights in {other:?} are not quantized; convert them to f32, f16 or bf16"),
        };
        Self::new(QMatrix::new(quantized.map_err(candle_core::Error::wrap)?.tensor)?, bias)?
            .to_device(&device)
    }

    /// The weights.
    pub fn weight(&self) -> &QMatrix {
        &self.weight
    }

    /// The numbers that activations are rounded to by [`Self::with_activations`]; `None` without.
    pub fn activations(&self) -> Option<RoundedInputs> {
        self.rounded
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for QLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = match self.weight.hadamard() {
            None => x.contiguous()?,
            Some(width) => hadamard(x, width)?,
        };
        let y = x.apply_op1_no_bwd(&Product(self))?;
        match &self.bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?),
        }
    }
}

/// The product of inputs without gaps and a layer's weights.
struct Product<'a>(&'a QLinear);

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        "microscale-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, shape) = self.shapes(layout)?;
        let out = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.multiply(part(x, layout)?, tokens)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.multiply(part(x, layout)?, tokens)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.multiply(part(x, layout)?, tokens)?),
            _ => bail!("an input is f32, f16 or bf16 here; convert it"),
        };
        Ok((out, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (tokens, shape) = self.shapes(layout)?;
        let Some(weights) = &self.0.on_gpu else {
            bail!("the layer is on a CPU, and its input on a GPU; see `to_device`")
        };
        Ok((weights.multiply(storage, layout, tokens, self.0.rounded)?, shape))
    }
}

impl Product<'_> {
    /// The rows of an input, and the shape of the output.
    fn shapes(&self, layout: &Layout) -> Result<(usize, Shape)> {
        let (rows, cols) = (self.0.weight.view().rows(), self.0.weight.view().cols());
        let mut dims = layout.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == cols => *last = rows,
            _ => {
                bail!("an input of shape {:?} does not fit weights of shape [{rows}, {cols}]", layout.dims())
            }
        }
        Ok((dims[..dims.len() - 1].iter().product(), dims.into()))
    }

    fn multiply<T: Activation>(&self, x: &[T], tokens: usize) -> Result<Vec<T>> {
        let weight = &self.0.weight;
        let mut out = vec![T::default(); tokens * weight.view().rows()];
        let done = match self.0.rounded {
            None => gemm_weights(weight.view(), x, tokens, &mut out),
            Some(RoundedInputs::Int8) => gemm_weights_int8(weight.view(), x, tokens, &mut out),
            Some(RoundedInputs::Fp8(options)) => {
                gemm_weights_fp8(weight.view(), Fp8Rows::Values(x), tokens, options, &mut out)
            }
            Some(RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe)) => {
                let shape = microscale::Shape::new(tokens, weight.view().cols());
                let quantized = quantize(x, shape, &recipe);
                quantized.and_then(|x| gemm_fp4(&x.tensor, weight.view(), &mut out))
            }
        };
        done.map_err(candle_core::Error::wrap)?;
        Ok(out)
    }
}

/// A linear layer that the checkpoint stores quantized or not.
///
/// Some layers are left unquantized, such as a model's head.
#[derive(Clone, Debug)]
pub enum Linear {
    /// Quantized weights.
    Quantized(QLinear),
    /// Unquantized weights.
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
