//! The operations: checks of operands, then plans and launches.

pub(in crate::gpu) mod activations;
pub(in crate::gpu) mod epilogue;
pub(in crate::gpu) mod gemv;
pub(in crate::gpu) mod kv;
pub(in crate::gpu) mod linear;
pub(in crate::gpu) mod linear_experts;
pub(in crate::gpu) mod linear_experts_fp4;
pub(in crate::gpu) mod linear_experts_fp8;
pub(in crate::gpu) mod linear_fp4;
pub(in crate::gpu) mod linear_fp8;
pub(in crate::gpu) mod loaded;
pub(in crate::gpu) mod on_device;
pub(in crate::gpu) mod on_host;
pub(in crate::gpu) mod preload;
pub(in crate::gpu) mod quantize_options;
