//! The tensors that a plan is about: a checkpoint's as their values are read.

use std::collections::HashMap;

use crate::conventions::packed::{Logical, logical};
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// Every tensor of a checkpoint, in the order of the files. Codes of eight bits have their scales with
/// them, which are no tensors of the plan.
///
/// # Errors
/// [`PlanError::AlreadyQuantized`](crate::PlanError::AlreadyQuantized) if a config says that weights are quantized,
/// unless they are such codes; those of [`logical`].
pub(crate) fn sources(checkpoint: &Checkpoint) -> Result<Vec<Tensor<'_>>> {
    let (mut sources, mut quantized) = (HashMap::new(), false);
    for tensor in logical(checkpoint)? {
        let scaled = match &tensor {
            Logical::Plain(tensor) => tensor.scaling.map(|_| *tensor),
            Logical::Packed(packed) => packed.scaled(),
        };
        quantized |= scaled.is_none() && matches!(tensor, Logical::Packed(_));
        match scaled {
            Some(scaled) => drop(sources.insert(scaled.name, scaled)),
            None => sources.extend(tensor.all_stored().map(|stored| (stored.name, *stored))),
        }
    }
    if let Some((method, config)) = Description::method(checkpoint)
        && (quantized || sources.values().all(|tensor| tensor.scaling.is_none()))
    {
        return Err(Error::Plan(PlanError::AlreadyQuantized { config, method }));
    }
    Ok(checkpoint.tensors().filter_map(|tensor| sources.get(tensor.name).copied()).collect())
}
