//! Facts that follow from the names of tensors.
//!
//! | file | contents |
//! |---|---|
//! | `architectures` | model architectures: their names for layers, and facts that no name shows |
//! | `naming` | the roles of a checkpoint's layers, and the names that loaders use for them |
//! | `weight` | the parts of a weight's name: layer and expert |
//! | `layers` | layer numbers in tensor names: which layers are first and last |
//! | `fused` | the layers that serving engines fuse |
//! | `role` | the roles of weights that are unquantized by default |
//! | `glob` | patterns of tensor names |

pub(crate) mod architectures;
pub(crate) mod fused;
pub(crate) mod glob;
pub(crate) mod layers;
pub(crate) mod naming;
pub(crate) mod role;
pub(crate) mod weight;
