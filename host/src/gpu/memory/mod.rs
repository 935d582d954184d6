//! Device memory: owned buffers, views of any memory, and copies from and to the host.

pub(in crate::gpu) mod activations;
pub(in crate::gpu) mod experts;
pub(in crate::gpu) mod experts_view;
pub(in crate::gpu) mod gptq;
pub(in crate::gpu) mod kv;
pub(in crate::gpu) mod pool;
pub(in crate::gpu) mod routing_mut;
pub(in crate::gpu) mod staging;
pub(in crate::gpu) mod tensor;
pub(in crate::gpu) mod tensor_view;
pub(in crate::gpu) mod tensor_view_mut;
pub(in crate::gpu) mod view;
pub(in crate::gpu) mod workspace;
