//! The tensors that a plan is about: a checkpoint's as their values are read.

use std::collections::HashMap;

use crate::conventions::packed::{Logical, logical};
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// Every tensor of a checkpoint, in the order of the files. Codes under scales have these with them, which are no
/// tensors of the plan.
///
/// # Errors
/// [`PlanError::AlreadyQuantized`](crate::PlanError::AlreadyQuantized) if a config says that weights are quantized,
/// unless they are such codes; those of [`logical`].
pub(crate) fn sources(checkpoint: &Checkpoint) -> Result<Vec<Tensor<'_>>> {
    let logical = logical(checkpoint)?;
    let is_scaled = |tensor: &Logical<'_>| tensor.stored().scaling.is_some();
    let is_packed = |tensor: &Logical<'_>| matches!(tensor, Logical::Packed(_));
    if let Some((method, config)) = Description::method(checkpoint)
        && (logical.iter().any(is_packed) || !logical.iter().any(is_scaled))
    {
        return Err(Error::Plan(PlanError::AlreadyQuantized { config, method }));
    }
    let stored = logical.iter().flat_map(Logical::all_stored);
    let sources: HashMap<_, _> = stored.map(|tensor| (tensor.name, *tensor)).collect();
    Ok(checkpoint.tensors().filter_map(|tensor| sources.get(tensor.name).copied()).collect())
}
