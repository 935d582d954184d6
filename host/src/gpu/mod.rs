//! Quantizing and dequantizing on NVIDIA GPUs, with the PTX that this library embeds.
//!
//! Only the driver is needed, and it is loaded when the program first asks for a GPU. [`Gpu`] owns
//! a context, a stream and the kernels. The driver compiles each kernel on first use, or earlier
//! with [`Gpu::preload`] and [`Gpu::preload_recipe`].
//!
//! Host-slice operations ([`Gpu::quantize`], [`Gpu::dequantize`]) move data and wait. Device-buffer
//! operations ([`Gpu::quantize_on`], [`Gpu::quantize_activations_on`], [`Gpu::dequantize_on`],
//! [`Gpu::amax_on`], [`Gpu::convert_layout_on`]) only enqueue on a stream, so that a caller can
//! overlap them and capture them in a CUDA graph. They take views: [`DeviceView`] and
//! [`DeviceTensorView`] for inputs, [`DeviceViewMut`] and [`DeviceTensorViewMut`] for outputs.
//! References to cudarc's buffers and to a [`DeviceTensor`] convert to views. So does foreign
//! device memory, by its address.
//!
//! Buffers and streams are cudarc's, re-exported here as [`cudarc`]: version 0.19. A later version
//! of cudarc comes only with a breaking version of this crate. A program that uses cudarc for other
//! reasons, such as candle's or cubecl's, shares it: this crate enables no feature for linking or
//! for a CUDA version. Unless another crate chooses, the driver is loaded at run time, with the
//! newest known version. By default cudarc orders uses of a buffer on several streams by events,
//! which a graph capture does not allow. A caller who captures turns that off first
//! (`CudaContext::disable_event_tracking`) and orders streams itself.

mod handle;
#[cfg(feature = "internals")]
pub mod internals;
mod launch;
mod memory;
mod ops;
mod plan;
mod runtime;

pub use crate::experts::ExpertRows;
pub use crate::gemv::ProductOf;
pub use cudarc;
pub use handle::Gpu;
pub use memory::activations::{
    DeviceActivationExperts, DeviceActivations, DeviceQuantizedActivations, DeviceScales,
};
pub use memory::experts::{DeviceExperts, DeviceRouting};
pub use memory::experts_view::DeviceExpertsView;
pub use memory::kv::{DeviceIntegers, DeviceKvCache, DeviceKvCacheMut, DeviceKvScales, DeviceSlots};
pub use memory::routing_mut::DeviceRoutingMut;
pub use memory::tensor::{DeviceAmax, DeviceReport, DeviceTensor};
pub use memory::tensor_view::DeviceTensorView;
pub use memory::tensor_view_mut::DeviceTensorViewMut;
pub use memory::view::{DeviceView, DeviceViewMut};
pub use memory::workspace::{GemmWorkspace, GemmWorkspaceMut};
pub use microscale_kernels_abi::{Family, GemmConfig, KernelId};
pub use ops::epilogue::DeviceEpilogue;
pub use ops::groups::GroupsPlan;
pub use ops::linear::{ExpertsPlan, Fp4, Fp8, Linear, LinearExperts, Plan, Values};
pub use ops::linear_activations::{Fp4Activations, Fp8Activations};
pub(crate) use ops::loaded::{LoadedOnGpu, QuantizedOnGpu};
pub use ops::quantize_options::DeviceQuantizeOptions;
pub use ops::results::{DeviceResults, QuantizedResults};
pub use runtime::device::{GpuInfo, device_count, devices, primary_context};
#[doc(hidden)]
pub use runtime::driver::{Relaxed, doing};
pub use runtime::gpus::Gpus;
