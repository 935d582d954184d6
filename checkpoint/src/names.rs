//! Names of tensors, and the facts that they tell.
//!
//! | file | what it knows |
//! |---|---|
//! | `weight` | the parts of a weight's name: its layer, and experts |
//! | `layers` | layers by the names of tensors: which are the first and the last |
//! | `fused` | the layers that serving engines fuse |
//! | `kept` | weights that are left alone by default |
//! | `glob` | patterns of tensor names |

pub(crate) mod fused;
pub(crate) mod glob;
pub(crate) mod kept;
pub(crate) mod layers;
pub(crate) mod weight;
