//! Planning products: their kernels, launch parameters and workspace.
//!
//! | file | contents |
//! |---|---|
//! | `layers` | layers of language models, to tune for and to report on |
//! | `times` | measured times of the GEMM's configurations, a table per GPU |
//! | `cost` | a model of a configuration's time, fitted to the measured times |
//! | `estimate` | the time of a configuration for a product: the model, and the nearest measured times |
//! | `choose` | the configuration for a product: the least estimated time |
//! | `product` | launch parameters of a configuration |
//! | `linear` | the kernels of a product, and of one with f32 activations |
//! | `experts` | the kernels of a product with experts' weights |
//! | `cache` | plans that were made before |

pub(in crate::gpu) mod cache;
pub(in crate::gpu) mod choose;
pub(in crate::gpu) mod cost;
pub(in crate::gpu) mod estimate;
pub(in crate::gpu) mod experts;
#[cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, dead_code, reason = "only `bench` reads all of them")
)]
pub(in crate::gpu) mod layers;
pub(in crate::gpu) mod linear;
pub(in crate::gpu) mod product;
#[cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, dead_code, reason = "only `bench --tune` writes tables")
)]
pub(in crate::gpu) mod times;
