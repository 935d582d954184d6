//! The driver, its GPUs, and the kernels that it compiles from the embedded PTX.

pub(in crate::gpu) mod device;
pub(in crate::gpu) mod driver;
pub(in crate::gpu) mod gpus;
pub(in crate::gpu) mod kernels;
pub(in crate::gpu) mod ptx;
