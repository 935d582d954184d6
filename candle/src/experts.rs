//! The experts of a layer.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, D, DType, Device, Error, Layout, Result, Shape, Tensor, bail};
use microscale::{
    Activation, ExpertRows, Fp8Rows, gemm_experts, gemm_experts_fp4, gemm_experts_fp8, gemm_experts_int8,
    quantize,
};

#[cfg(feature = "cuda")]
use crate::cuda::ExpertsOnGpu;
use crate::matrix::{QMatrix, check_device, check_rounded, part};
use crate::rounded::RoundedInputs;

/// The linear layers of a mixture's experts, all of one shape.
///
/// Each token is multiplied with the weights of the experts that it is routed to. Each expert has
/// its own global scale.
///
/// Products are [`gemm_experts`]: an expert's weights are decoded once for all of its tokens, and
/// an expert without tokens costs nothing. A [`QLinear`](crate::QLinear) of the
/// expert gives the same results for its tokens together.
#[derive(Clone, Debug)]
pub struct QExperts {
    weights: Vec<QMatrix>,
    bias: Option<Tensor>,
    /// Rounds activations, if it is set.
    rounded: Option<RoundedInputs>,
    #[cfg(feature = "cuda")]
    on_gpu: Option<Arc<ExpertsOnGpu>>,
}

impl QExperts {
    /// Experts with weights `[M, K]` each, and their biases `[E, M]`.
    ///
    /// # Errors
    /// If there are no experts, if shapes differ, or if a matrix has a transform of its inputs.
    /// [`QMatrix::split`] splits weights `[E·M, K]`.
    pub fn new(weights: Vec<QMatrix>, bias: Option<Tensor>) -> Result<Self> {
        let Some(first) = weights.first() else { bail!("no experts") };
        let (rows, cols) = (first.view().rows(), first.view().cols());
        let other = weights.iter().map(|weight| [weight.view().rows(), weight.view().cols()]);
        if let Some((expert, shape)) = other.enumerate().find(|(_, shape)| *shape != [rows, cols]) {
            bail!("expert {expert} has weights of shape {shape:?}, and expert 0 of shape [{rows}, {cols}]");
        }
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [weights.len(), rows]) {
            bail!("biases of shape {:?} do not fit {} experts of {rows} rows", bias.dims(), weights.len());
        }
        if weights.iter().any(|weight| weight.hadamard().is_some()) {
            bail!("experts have no Hadamard transform of their inputs here; multiply with a QLinear of each");
        }
        Ok(Self {
            weights,
            bias,
            rounded: None,
            #[cfg(feature = "cuda")]
            on_gpu: None,
        })
    }

    /// Sets how products round activations: to INT8, FP8 or FP4, or not at all (`None`).
    ///
    /// NVFP4 has one global scale for all experts, given or computed from all rows.
    ///
    /// # Errors
    /// As for [`QLinear::with_activations`](crate::QLinear::with_activations).
    pub fn with_activations(self, rounded: impl Into<Option<RoundedInputs>>) -> Result<Self> {
        let rounded = rounded.into();
        #[cfg(feature = "cuda")]
        check_device(rounded, self.on_gpu.is_none())?;
        if let Some(rounded) = rounded {
            self.weights.iter().try_for_each(|weight| check_rounded(rounded, weight.view().shape()))?;
        }
        Ok(Self { rounded, ..self })
    }

    /// The experts on a device. On a GPU (feature `cuda`), the weights are copied to it.
    ///
    /// There, the global scales must have one direction, as in a checkpoint.
    ///
    /// # Errors
    /// For a device that is neither a CPU nor an NVIDIA GPU, for activations in INT8 on a GPU,
    /// for global scales of both directions, and if the driver fails.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let bias = self.bias.as_ref().map(|bias| bias.to_device(device)).transpose()?;
        check_device(self.rounded, device.is_cpu())?;
        let experts = Self::new(self.weights.clone(), bias)?;
        let experts = Self { rounded: self.rounded, ..experts };
        match device {
            Device::Cpu => Ok(experts),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let there = ExpertsOnGpu::of(self.weights.iter().map(QMatrix::view), gpu)?;
                Ok(Self { on_gpu: Some(there.into()), ..experts })
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => bail!("experts on a GPU need the feature `cuda` of microscale-candle"),
            Device::Metal(_) => bail!("there are experts on CPUs and NVIDIA GPUs, and none on Metal"),
        }
    }

    /// The numbers that activations are rounded to by [`Self::with_activations`]; `None` without.
    pub fn activations(&self) -> Option<RoundedInputs> {
        self.rounded
    }

    /// The weights, by expert.
    pub fn weights(&self) -> &[QMatrix] {
        &self.weights
    }

    /// The results of each token with each of its experts: `[tokens, k, M]`.
    ///
    /// `x` is `[tokens, K]`, or `[tokens, k, K]` if each pair of a token and an expert has its own
    /// input, in f32, f16 or bf16. On a GPU an f32 is split into three bf16, whose sum equals it
    /// except below 2^−133. `experts` is `[tokens, k]`, whole numbers, as in
    /// `candle_core::quantized::QMatMul::indexed_moe_forward`. A GPU does not check them: for a
    /// number without an expert, results without biases are zeros.
    ///
    /// # Errors
    /// If shapes do not match, or on a CPU if a number has no expert.
    pub fn forward(&self, x: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let chosen = experts.to_dtype(DType::U32)?.contiguous()?;
        let y = x.contiguous()?.apply_op2_no_bwd(&chosen, &Products { experts: self })?;
        let Some(bias) = &self.bias else { return Ok(y) };
        let bias = bias.to_dtype(y.dtype())?.index_select(&chosen.flatten_all()?, 0)?.reshape(y.shape())?;
        y + bias
    }

    /// The weighted sum of each token's results: `[tokens, M]`.
    ///
    /// `weights` is `[tokens, k]`, such as a router's probabilities.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn forward_weighted(&self, x: &Tensor, experts: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let y = self.forward(x, experts)?;
        y.broadcast_mul(&weights.to_dtype(y.dtype())?.unsqueeze(D::Minus1)?)?.sum(1)
    }
}

/// The products of inputs without gaps and the weights of experts.
struct Products<'a> {
    experts: &'a QExperts,
}

impl CustomOp2 for Products<'_> {
    fn name(&self) -> &'static str {
        "microscale-experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        experts: &CpuStorage,
        experts_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, shape) = self.shapes(x_layout, experts_layout)?;
        let CpuStorage::U32(experts) = experts else { bail!("the numbers of experts are not u32") };
        let (experts, k, count) =
            (part(experts, experts_layout)?, shape.dims()[1], self.experts.weights.len());
        if let Some(expert) = experts.iter().find(|expert| **expert as usize >= count) {
            bail!("expert {expert} of {count}: numbers of experts begin at 0");
        }
        let out = match x {
            CpuStorage::F32(x) => CpuStorage::F32(self.multiply(part(x, x_layout)?, experts, k, rows)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.multiply(part(x, x_layout)?, experts, k, rows)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.multiply(part(x, x_layout)?, experts, k, rows)?),
            _ => bail!("an input is f32, f16 or bf16 here; convert it"),
        };
        Ok((out, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        experts: &CudaStorage,
        experts_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, shape) = self.shapes(x_layout, experts_layout)?;
        let Some(weights) = &self.experts.on_gpu else {
            bail!("the experts are on a CPU, and their input on a GPU; see `to_device`")
        };
        let k = shape.dims()[1];
        let rounded = self.experts.rounded;
        Ok((weights.multiply((x, x_layout), (experts, experts_layout), k, rows, rounded)?, shape))
    }
}

impl Products<'_> {
    /// The order of rows, and the shape of the output.
    fn shapes(&self, x: &Layout, experts: &Layout) -> Result<(ExpertRows, Shape)> {
        let weights = self.experts.weights[0].view();
        let (rows, cols) = (weights.rows(), weights.cols());
        let (x_dims, dims) = (x.dims(), experts.dims());
        let &[tokens, k] = dims else { bail!("experts of shape {dims:?}: expected [tokens, k]") };
        let order = match *x_dims {
            [n, found] if n == tokens && found == cols => ExpertRows::Indexed,
            [n, m, found] if n == tokens && m == k && found == cols => ExpertRows::Paired,
            _ => bail!(
                "an input of shape {x_dims:?} does not fit experts of shape {dims:?} with weights of shape [{rows}, {cols}]: \
                 expected [{tokens}, {cols}] or [{tokens}, {k}, {cols}]"
            ),
        };
        Ok((order, (tokens, k, rows).into()))
    }

    fn multiply<T: Activation>(
        &self,
        x: &[T],
        experts: &[u32],
        k: usize,
        rows: ExpertRows,
    ) -> Result<Vec<T>> {
        let weights = &self.experts.weights;
        let mut out = vec![T::default(); experts.len() * weights[0].view().rows()];
        if !experts.is_empty() {
            let cols = weights[0].view().cols();
            let weights = weights.iter().map(QMatrix::view);
            let done = match self.experts.rounded {
                Some(RoundedInputs::Fp8(options)) => {
                    gemm_experts_fp8(weights, Fp8Rows::Values(x), experts, k, rows, options, &mut out)
                }
                Some(RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe)) => {
                    let shape = microscale::Shape::new(x.len().checked_div(cols).unwrap_or(0), cols);
                    let quantized = quantize(x, shape, &recipe);
                    quantized.and_then(|x| gemm_experts_fp4(weights, &x.tensor, experts, k, rows, &mut out))
                }
                Some(RoundedInputs::Int8) => gemm_experts_int8(weights, x, experts, k, rows, &mut out),
                None => gemm_experts(weights, x, experts, k, rows, &mut out),
            };
            done.map_err(Error::wrap)?;
        }
        Ok(out)
    }
}
