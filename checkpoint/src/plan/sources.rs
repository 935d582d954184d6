//! The tensors that a plan is about: a checkpoint's as their values are read.

use std::collections::HashMap;

use microscale::Format;

use crate::checkpoint_formats::packed::{Logical, Packed, logical};
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::job::Position;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// Every tensor of a checkpoint by its name in the files, in their order. Codes whose values are read have their scales with
/// them, which are no tensors of the plan, and the name of the model's parameter.
///
/// # Errors
/// [`PlanError::AlreadyQuantized`](crate::PlanError::AlreadyQuantized) if a config says that weights are quantized,
/// unless they are such codes; those of [`logical`].
pub(crate) fn sources(checkpoint: &Checkpoint, requantize: bool) -> Result<Vec<(Position, Tensor<'_>)>> {
    let (sources, quantized) = read(checkpoint, requantize)?;
    if let Some((method, config)) = Description::method(checkpoint)
        && (quantized || sources.iter().all(|(_, tensor)| tensor.scaling.is_none()))
    {
        return Err(Error::Plan(PlanError::AlreadyQuantized { config, method }));
    }
    Ok(sources)
}

/// The positions of the tensors that [`sources`] has, whether or not MXFP4 was quantized again.
///
/// # Errors
/// The errors of [`logical`].
pub(crate) fn source_positions(checkpoint: &Checkpoint) -> Result<Vec<Position>> {
    let (sources, _) = read(checkpoint, true)?;
    Ok(sources.into_iter().map(|(position, _)| position).collect())
}

/// The tensors, and whether some are quantized that are not read as values.
fn read(checkpoint: &Checkpoint, requantize: bool) -> Result<(Vec<(Position, Tensor<'_>)>, bool)> {
    let (mut sources, mut quantized) = (HashMap::new(), false);
    for tensor in logical(checkpoint)? {
        let scaled = match &tensor {
            Logical::Plain(tensor) => tensor.scaling.map(|_| *tensor),
            Logical::Packed(packed) => packed.scaled(checkpoint).filter(|_| requantize || is_source(packed)),
        };
        quantized |= scaled.is_none() && matches!(tensor, Logical::Packed(_));
        match scaled {
            Some(scaled) => drop(sources.insert(tensor.stored().name, scaled)),
            None => sources.extend(tensor.all_stored().map(|stored| (stored.name, *stored))),
        }
    }
    let each =
        checkpoint.positions().filter_map(|(position, stored)| Some((position, *sources.get(stored.name)?)));
    Ok((each.collect(), quantized))
}

/// Returns whether quantizing begins with the values of a quantized tensor: MXFP8's, and those of what is read alone, which
/// nothing else can be made of.
fn is_source(packed: &Packed<'_>) -> bool {
    packed.format == Format::Mxfp8E4m3 || packed.convention().formats().next().is_none()
}
