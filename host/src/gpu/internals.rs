//! Instruments of tests and measurements. Needs the feature `internals`. Not covered by semantic
//! versioning.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaModule, CudaStream, LaunchConfig};
use cudarc::nvrtc::Ptx;
use microscale_kernels_abi::gemm::params::WeightsBoxes;
use microscale_kernels_abi::{GemmConfig, KernelId, TARGETS};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::gemv::Batch;
use crate::gpu::handle::Gpu;
use crate::gpu::launch::tensor_map;
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::plan::choose::takes;
pub use crate::gpu::plan::layers::{Layer, LayerExperts, Layers};
pub use crate::gpu::plan::times::{MeasuredProduct, Times};
use crate::gpu::runtime::device::{GpuInfo, primary_context};
use crate::gpu::runtime::driver::doing;
use crate::shape::QuantizedShape;

/// A module with a kernel that does nothing, for any GPU.
const EMPTY: &str = ".version 7.4\n.target sm_80\n.address_size 64\n.visible .entry empty()\n{\nret;\n}\n";

/// A kernel that does nothing: launching it takes the time that any launch takes.
#[derive(Debug)]
pub struct EmptyKernel(Arc<CudaModule>);

impl EmptyKernel {
    /// Compiles it.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let module = gpu.context.load_module(Ptx::from_src(EMPTY));
        module.map(Self).map_err(doing("compiling an empty kernel"))
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let function = self.0.load_function("empty").map_err(doing("finding an empty kernel"))?;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel has no parameters and does nothing.
        unsafe { stream.launch_builder(&function).launch(config) }
            .map_err(doing("launching an empty kernel"))?;
        Ok(())
    }
}

/// The tensor map of the codes of weights at an address, as kernels get it.
///
/// # Errors
/// [`Error::Gpu`].
pub fn weights_map(codes: u64, boxes: &WeightsBoxes) -> Result<[u64; 16]> {
    Ok(tensor_map(codes, boxes)?.opaque)
}

impl Gpu {
    /// Opens GPU number `ordinal` with the PTX of an older target, by its name, such as `sm_80`.
    ///
    /// # Errors
    /// The errors of [`Self::new`], and [`Error::NoGpu`] for a target that the GPU does not run.
    pub fn with_target(ordinal: usize, target: &str) -> Result<Self> {
        let context = primary_context(ordinal)?;
        let info = GpuInfo::of(&context)?;
        let found = TARGETS.iter().find(|of| of.name == target);
        let runs = |of: &&microscale_kernels_abi::Target| {
            let major = info.compute_capability.0;
            of.compute_capability <= info.compute_capability
                && (!of.family_only || of.compute_capability.0 == major)
        };
        let target = found
            .filter(runs)
            .ok_or_else(|| Error::NoGpu(format!("{} does not run PTX for {target}", info.name)))?;
        let stream = context.new_stream().map_err(doing("creating a stream"))?;
        Self::of_context(stream, Some(target))
    }

    /// Makes the kernels of the GPU's target ready one after the other and returns the time that
    /// each took: inflating its PTX, and the driver's compiling or finding it in its cache.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses.
    pub fn load_times(&self) -> Result<Vec<(KernelId, Duration)>> {
        let timed = |id| {
            let start = Instant::now();
            self.kernels.ready(id)?;
            Ok((id, start.elapsed()))
        };
        let of_target = |id: &KernelId| id.kernel().targets.contain(self.kernels.target());
        KernelId::all().filter(of_target).map(timed).collect()
    }

    /// The configurations of the GPU's target that multiply weights of a shape by activations that
    /// start on 16 bytes, with every number of slices that a thread block has warps for.
    pub fn gemm_configs(&self, weights: QuantizedShape) -> Vec<GemmConfig> {
        let target = self.kernels.target();
        let configs = GemmConfig::for_operands(weights.format, crate::element::Dtype::Bf16);
        let usable = configs.filter(|config| {
            config.mainloop.traits().targets.contain(target) && takes(*config, weights, true)
        });
        usable.flat_map(|config| config.slicings().map(move |slices| config.with_slices(slices))).collect()
    }

    /// The configurations for weights and FP8 activations on this GPU.
    pub fn fp8_configs(&self, weights: microscale_formats::Format) -> Vec<GemmConfig> {
        let configs = GemmConfig::for_fp8(weights, crate::element::Dtype::Bf16);
        configs.filter(|config| config.mainloop.traits().targets.contain(self.kernels.target())).collect()
    }

    /// [`Self::gemv_on`] by warps of 1, 2 or 4 rows each.
    ///
    /// # Errors
    /// The errors of [`Self::gemv_on`].
    pub fn gemv_by_rows_on<'m, 'v, 'o, T: Element>(
        &self,
        rows_per_warp: u32,
        stream: &Arc<CudaStream>,
        matrix: impl Into<DeviceTensorView<'m>>,
        vectors: impl Into<DeviceTensorView<'v>>,
        batch: Batch,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        self.gemv_with(rows_per_warp, stream, matrix, vectors, batch, out)
    }
}
