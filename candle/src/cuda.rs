//! Products on NVIDIA GPUs, on candle's stream and in memory of its pool.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, CudaView, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorageSlice, DeviceId};
use candle_core::{CudaStorage, Error, Layout, Result, bail};
use microscale::gpu::{
    DeviceExperts, DeviceQuantizeOptions, DeviceRouting, DeviceTensor, Fp8Activations, GemmWorkspace, Gpu,
};
use microscale::{
    Activation, ActivationRounding, ExpertRows, OperandFault, QuantizedShape, QuantizedView, Recipe, Shape,
};

use crate::rounded::RoundedInputs;

/// A dtype of inputs and results.
trait OnDevice: Activation + CudaDType + DeviceRepr + ValidAsZeroBits {}

impl<T: Activation + CudaDType + DeviceRepr + ValidAsZeroBits> OnDevice for T {}

/// A matrix in a GPU's memory, and the kernels that multiply with it.
pub(crate) struct OnGpu {
    gpu: Arc<Gpu>,
    weights: DeviceTensor,
}

/// Shows the weights' shape.
impl fmt::Debug for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnGpu").field(&self.weights).finish()
    }
}

impl OnGpu {
    /// Copies a matrix, on the device's stream.
    pub(crate) fn of(weights: QuantizedView<'_>, device: &CudaDevice) -> Result<Self> {
        let weights = DeviceTensor::from_host(&device.cuda_stream(), weights).map_err(Error::wrap)?;
        Ok(Self { gpu: gpu(device)?, weights })
    }

    /// The products of the matrix and rows without gaps, which may be `rounded` first.
    pub(crate) fn multiply(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        tokens: usize,
        rounded: Option<RoundedInputs>,
    ) -> Result<CudaStorage> {
        match &x.slice {
            CudaStorageSlice::F32(_) => self.multiply_as::<f32>(x, layout, tokens, rounded),
            CudaStorageSlice::F16(_) => self.multiply_as::<half::f16>(x, layout, tokens, rounded),
            CudaStorageSlice::BF16(_) => self.multiply_as::<half::bf16>(x, layout, tokens, rounded),
            _ => bail!("an input on a GPU is f32, f16 or bf16 here; convert it"),
        }
    }

    fn multiply_as<T: OnDevice>(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        tokens: usize,
        rounded: Option<RoundedInputs>,
    ) -> Result<CudaStorage> {
        let (device, stream) = (x.device().clone(), x.device().cuda_stream());
        let mut out = device.alloc_zeros::<T>(tokens * self.weights.view().shape().rows)?;
        if tokens > 0 {
            let x = part::<T>(x, layout)?;
            let mut multiply = || match rounded {
                None => {
                    let plan = self.gpu.linear(&self.weights).plan(tokens)?;
                    let mut workspace = GemmWorkspace::new(&stream, plan.workspace_bytes())?;
                    plan.run(&stream, &x, &mut workspace, &mut out)
                }
                Some(RoundedInputs::Int8) => Err(refused_int8()),
                Some(RoundedInputs::Fp8(options)) => {
                    let plan = self.gpu.linear_fp8(&self.weights).options(options).plan(tokens)?;
                    let mut workspace = GemmWorkspace::new(&stream, plan.workspace_bytes())?;
                    plan.run(&stream, Fp8Activations::Values((&x).into()), &mut workspace, &mut out)
                }
                Some(RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe)) => {
                    let shape = Shape::new(tokens, self.weights.view().cols());
                    let quantized = quantized(&self.gpu, &stream, &x, shape, &recipe)?;
                    let linear = self.gpu.linear_fp4::<T, T>(&self.weights);
                    let is_fast = matches!(rounded, Some(RoundedInputs::Fp4Fast(_)));
                    let linear = if is_fast { linear.fast_accumulation() } else { linear };
                    let plan = linear.plan(tokens)?;
                    let mut workspace = GemmWorkspace::new(&stream, plan.workspace_bytes())?;
                    plan.run(&stream, &quantized, &mut workspace, &mut out)
                }
            };
            multiply().map_err(Error::wrap)?;
        }
        Ok(CudaStorage::wrap_cuda_slice(out, device))
    }
}

/// Matrices of experts in a GPU's memory, and the kernels that multiply with them.
pub(crate) struct ExpertsOnGpu {
    gpu: Arc<Gpu>,
    experts: DeviceExperts,
}

/// Shows the weights' shape.
impl fmt::Debug for ExpertsOnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExpertsOnGpu").field(&self.experts).finish()
    }
}

impl ExpertsOnGpu {
    /// Copies matrices. Waits for the device's stream.
    pub(crate) fn of<'a>(
        weights: impl Iterator<Item = QuantizedView<'a>>,
        device: &CudaDevice,
    ) -> Result<Self> {
        let experts = DeviceExperts::from_host(&device.cuda_stream(), weights).map_err(Error::wrap)?;
        Ok(Self { gpu: gpu(device)?, experts })
    }

    /// The products of rows without gaps, which may be `rounded` first, and the weights of each
    /// token's `top_k` experts.
    pub(crate) fn multiply(
        &self,
        x: (&CudaStorage, &Layout),
        chosen: (&CudaStorage, &Layout),
        top_k: usize,
        rows: ExpertRows,
        rounded: Option<RoundedInputs>,
    ) -> Result<CudaStorage> {
        match &x.0.slice {
            CudaStorageSlice::F32(_) => self.multiply_as::<f32>(x, chosen, top_k, rows, rounded),
            CudaStorageSlice::F16(_) => self.multiply_as::<half::f16>(x, chosen, top_k, rows, rounded),
            CudaStorageSlice::BF16(_) => self.multiply_as::<half::bf16>(x, chosen, top_k, rows, rounded),
            _ => bail!("an input on a GPU is f32, f16 or bf16 here; convert it"),
        }
    }

    fn multiply_as<T: OnDevice>(
        &self,
        (x, layout): (&CudaStorage, &Layout),
        (chosen, of_chosen): (&CudaStorage, &Layout),
        top_k: usize,
        rows: ExpertRows,
        rounded: Option<RoundedInputs>,
    ) -> Result<CudaStorage> {
        let (device, stream) = (x.device().clone(), x.device().cuda_stream());
        let (gpu, experts) = (&self.gpu, &self.experts);
        let pairs = of_chosen.shape().elem_count();
        let mut out = device.alloc_zeros::<T>(pairs * experts.shape().rows)?;
        if pairs > 0 {
            let (activations, chosen) = (part::<T>(x, layout)?, part::<u32>(chosen, of_chosen)?);
            let mut done = || {
                let mut routing = DeviceRouting::zeros(&stream, experts.count(), pairs)?;
                gpu.route_on(&stream, &chosen, top_k, &mut routing)?;
                match rounded {
                    None => {
                        let mut workspace = gpu.experts_workspace(&stream, experts, pairs, T::DTYPE)?;
                        let plan = gpu.linear_experts(experts).plan(pairs)?;
                        plan.run(&stream, &activations, &routing, rows, &mut workspace, &mut out)
                    }
                    Some(RoundedInputs::Int8) => Err(refused_int8()),
                    Some(RoundedInputs::Fp8(options)) => {
                        let plan = gpu.linear_experts_fp8(experts).options(options).plan(pairs)?;
                        let mut workspace = GemmWorkspace::new(&stream, plan.workspace_bytes())?;
                        let x = Fp8Activations::Values((&activations).into());
                        plan.run(&stream, x, &routing, rows, &mut workspace, &mut out)
                    }
                    Some(RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe)) => {
                        let cols = experts.shape().cols;
                        let shape = Shape::new(layout.shape().elem_count() / cols, cols);
                        let quantized = quantized(gpu, &stream, &activations, shape, &recipe)?;
                        let plan = gpu.linear_experts_fp4::<T, T>(experts).plan(pairs)?;
                        let mut workspace = GemmWorkspace::new(&stream, plan.workspace_bytes())?;
                        plan.run(&stream, &quantized, &routing, rows, &mut workspace, &mut out)
                    }
                }
            };
            done().map_err(Error::wrap)?;
        }
        Ok(CudaStorage::wrap_cuda_slice(out, device))
    }
}

/// The error for activations in INT8, which layers refuse before.
fn refused_int8() -> microscale::Error {
    microscale::Error::Operands(OperandFault::Rounding { rounding: ActivationRounding::Int8 })
}

/// Quantizes rows by a recipe.
fn quantized<T: OnDevice>(
    gpu: &Gpu,
    stream: &Arc<CudaStream>,
    x: &CudaView<'_, T>,
    shape: Shape,
    recipe: &Recipe,
) -> microscale::Result<DeviceTensor> {
    let quantized_shape =
        QuantizedShape::new(recipe.format(), shape.rows, shape.cols).with_scale_layout(recipe.scale_layout);
    let mut quantized = DeviceTensor::zeros(stream, quantized_shape)?;
    gpu.quantize_on(stream, x, shape, recipe, DeviceQuantizeOptions::default(), &mut quantized)?;
    Ok(quantized)
}

/// The elements of a tensor without gaps.
fn part<'a, T: CudaDType>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(storage.as_cuda_slice::<T>()?.slice(begin..end)),
        None => bail!("a tensor with gaps; make it contiguous"),
    }
}

/// The kernels of a candle device, which all layers share.
fn gpu(device: &CudaDevice) -> Result<Arc<Gpu>> {
    static GPUS: Mutex<Vec<(DeviceId, Arc<Gpu>)>> = Mutex::new(Vec::new());
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpu)) = gpus.iter().find(|(id, _)| *id == device.id()) {
        return Ok(gpu.clone());
    }
    let gpu = Arc::new(Gpu::from_stream(device.cuda_stream()).map_err(Error::wrap)?);
    gpus.push((device.id(), gpu.clone()));
    Ok(gpu)
}
