//! The operations: checks of operands, then plans and launches.

pub(in crate::gpu) mod activations;
pub(in crate::gpu) mod epilogue;
pub(in crate::gpu) mod gemv;
mod gptq;
pub(in crate::gpu) mod groups;
pub(in crate::gpu) mod kv;
pub(in crate::gpu) mod linear;
pub(in crate::gpu) mod linear_activations;
mod linear_run;
pub(in crate::gpu) mod linear_workspaces;
pub(in crate::gpu) mod loaded;
pub(in crate::gpu) mod on_device;
pub(in crate::gpu) mod on_host;
pub(in crate::gpu) mod preload;
pub(in crate::gpu) mod quantize_options;
pub(in crate::gpu) mod results;
mod route;
