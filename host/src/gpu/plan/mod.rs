//! Planning products: their kernels, launch parameters and workspace.
//!
//! | file | contents |
//! |---|---|
//! | `layers` | layers of language models, to tune for and to report on |
//! | `times` | measured times of the GEMM's configurations, a table per GPU |
//! | `cost` | a model of a configuration's time, fitted to the measured times |
//! | `estimate` | a configuration's time: the model, and the nearest measured times |
//! | `request` | a product to plan, and its GPU |
//! | `choose` | the configuration for a product: the least estimated time |
//! | `product` | launch parameters of a configuration |
//! | `planned` | a product's key and its kernels, also with experts' weights |
//! | `linear` | the kernels of products of values |
//! | `fp4`, `fp8` | the kernels of products of FP4 and FP8 activations |
//! | `cache` | plans that were made before |

pub(in crate::gpu) mod cache;
pub(in crate::gpu) mod choose;
pub(in crate::gpu) mod cost;
pub(in crate::gpu) mod estimate;
pub(in crate::gpu) mod fp4;
pub(in crate::gpu) mod fp8;
#[cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, dead_code, reason = "only `bench` reads all of them")
)]
pub(in crate::gpu) mod layers;
pub(in crate::gpu) mod linear;
pub(in crate::gpu) mod planned;
pub(in crate::gpu) mod product;
pub(in crate::gpu) mod request;
#[cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, dead_code, reason = "only `bench --tune` writes tables")
)]
pub(in crate::gpu) mod times;
