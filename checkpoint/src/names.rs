//! Names of tensors, and the facts that they tell.
//!
//! | file | what it knows |
//! |---|---|
//! | `architectures` | architectures of models: what their files call layers, and what names do not tell |
//! | `naming` | what the layers of a checkpoint are, and what loaders call them |
//! | `weight` | the parts of a weight's name: its layer, and experts |
//! | `layers` | layers by the names of tensors: which are the first and the last |
//! | `fused` | the layers that serving engines fuse |
//! | `kept` | weights that are left alone by default |
//! | `glob` | patterns of tensor names |

pub(crate) mod architectures;
pub(crate) mod fused;
pub(crate) mod glob;
pub(crate) mod layers;
pub(crate) mod naming;
pub(crate) mod role;
pub(crate) mod weight;
