//! Quantizing and dequantizing on NVIDIA GPUs, with the PTX that this library embeds.
//!
//! Nothing but the driver is needed, and it is looked for when a GPU is first asked for. [`Gpu`] owns a
//! context, a stream and the kernels. The driver compiles each kernel when it is first used, or before that
//! by [`Gpu::preload`] and [`Gpu::preload_recipe`].
//!
//! Host-slice operations ([`Gpu::quantize`], [`Gpu::dequantize`]) move data and wait. Device-buffer
//! operations ([`Gpu::quantize_on`], [`Gpu::dequantize_on`], [`Gpu::amax_on`], [`Gpu::convert_layout_on`])
//! only enqueue on a stream, so that a caller can overlap them and capture them in a CUDA graph. They take views,
//! [`DeviceView`] and [`DeviceTensorView`] of what they read, [`DeviceViewMut`] and [`DeviceTensorViewMut`] of what
//! they write, which references to cudarc's buffers and to a [`DeviceTensor`] become by themselves; and so does
//! device memory that is somebody else's, by its address.
//!
//! Buffers and streams are cudarc's, re-exported here as [`cudarc`]: version 0.19, and a later one with a
//! breaking version of this crate only. A program that has cudarc for other reasons, such as candle's or
//! cubecl's, shares it: this crate asks for no way of linking and no version of CUDA, but loads the driver and
//! takes the newest version known where nobody asks. By default cudarc orders uses of a
//! buffer on several streams by events, which a graph capture does not allow; a caller who captures turns
//! that off first (`CudaContext::disable_event_tracking`) and orders streams itself.

mod arguments;
mod bench_kernels;
mod device;
mod driver;
mod epilogue;
mod experts;
mod experts_kernel;
mod experts_view;
mod gemm_experts;
mod gemm_times;
mod gemm_weights;
mod gemm_weights_kernel;
mod gemm_workspace;
mod gemv;
mod gemv_choices;
mod gemv_kernel;
mod gemv_weights;
mod gemv_weights_kernel;
mod gpus;
mod handle;
mod kernels;
mod launch;
mod loaded;
mod memory;
mod on_device;
mod on_host;
mod preload;
mod ptx;
mod quantize_options;
mod routing_mut;
mod staging;
mod tensor;
mod tensor_view;
mod tensor_view_mut;

pub use crate::experts::ExpertRows;
pub use crate::gemv::{ProductOf, TensorCoreActivation};
#[doc(hidden)]
pub use bench_kernels::Baseline;
pub use cudarc;
pub use device::{GpuInfo, device_count, devices, primary_context};
#[doc(hidden)]
pub use driver::{Relaxed, doing};
pub use epilogue::DeviceEpilogue;
pub use experts::{DeviceExperts, DeviceRouting};
#[doc(hidden)]
pub use experts_kernel::ExpertsKernel;
pub use experts_view::DeviceExpertsView;
#[doc(hidden)]
pub use gemm_times::GemmTimes;
#[doc(hidden)]
pub use gemm_weights_kernel::GemmWeightsKernel;
pub use gemm_weights_kernel::GemmWorkspace;
pub use gemm_workspace::GemmWorkspaceMut;
#[doc(hidden)]
pub use gemv_choices::{GemvChoices, GemvWeightsChoices, Tuned};
#[doc(hidden)]
pub use gemv_kernel::GemvKernel;
#[doc(hidden)]
pub use gemv_weights_kernel::GemvWeightsKernel;
pub use gpus::Gpus;
pub use handle::Gpu;
pub(crate) use loaded::{LoadedOnGpu, QuantizedOnGpu};
pub use memory::{DeviceView, DeviceViewMut};
pub use microscale_kernels_abi::{Family, KernelId};
pub use quantize_options::DeviceQuantizeOptions;
pub use routing_mut::DeviceRoutingMut;
pub use tensor::{DeviceAmax, DeviceReport, DeviceTensor};
pub use tensor_view::DeviceTensorView;
pub use tensor_view_mut::DeviceTensorViewMut;
