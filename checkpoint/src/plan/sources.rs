//! Source tensors of a plan: the checkpoint's tensors, with the scales that their values need.

use std::collections::HashMap;

use microscale::Format;

use crate::checkpoint_formats::ownership::logical;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::checkpoint_formats::transforms::check_untransformed;
use crate::error::plan::{CONVERT, DEQUANTIZE, PlanError};
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::position::Position;
use crate::read::tensor::Tensor;

/// Tensors with their positions.
type Sources<'a> = Vec<(Position, Tensor<'a>)>;

/// Returns every tensor of a checkpoint by its stored name, in file order.
///
/// Codes that are dequantized before quantizing come with their scales, under the name of the
/// model's parameter. Their scales are not listed.
///
/// # Errors
/// [`FormatError::Transformed`](crate::FormatError::Transformed) if the weights are stored under a
/// transform; [`PlanError::AlreadyQuantized`](crate::PlanError::AlreadyQuantized) if a config
/// declares quantized weights other than such codes; errors of [`logical`].
pub(crate) fn sources(checkpoint: &Checkpoint, requantize: bool) -> Result<Sources<'_>> {
    check_untransformed(checkpoint, "quantizing")?;
    let (sources, quantized) = read(checkpoint, requantize)?;
    if let Some((method, config)) = Description::method(checkpoint)
        && (!quantized.is_empty() || sources.iter().all(|(_, tensor)| tensor.scaling.is_none()))
    {
        let advice = match quantized[..] {
            [] => Description::instead_of_unread(checkpoint),
            _ if quantized.contains(&Format::Mxfp4) => CONVERT,
            _ => DEQUANTIZE,
        };
        return Err(Error::Plan(PlanError::AlreadyQuantized { config, method, advice }));
    }
    Ok(sources)
}

/// Returns the positions of all [`sources`], including MXFP4 tensors that can be requantized.
///
/// # Errors
/// Errors of [`logical`].
pub(crate) fn source_positions(checkpoint: &Checkpoint) -> Result<Vec<Position>> {
    let (sources, _) = read(checkpoint, true)?;
    Ok(sources.into_iter().map(|(position, _)| position).collect())
}

/// Returns the tensors, and the formats of quantized tensors whose values are not read.
fn read(checkpoint: &Checkpoint, requantize: bool) -> Result<(Sources<'_>, Vec<Format>)> {
    let (mut sources, mut quantized) = (HashMap::new(), Vec::new());
    for tensor in logical(checkpoint)? {
        let scaled = match &tensor {
            Logical::Plain(tensor) => tensor.scaling.map(|_| *tensor),
            Logical::Packed(packed) => packed.scaled(checkpoint).filter(|_| requantize || is_source(packed)),
        };
        if let (None, Logical::Packed(packed)) = (&scaled, &tensor)
            && !quantized.contains(&packed.format)
        {
            quantized.push(packed.format);
        }
        match scaled {
            Some(scaled) => drop(sources.insert(tensor.stored().name, scaled)),
            None => sources.extend(tensor.all_stored().map(|stored| (stored.name, *stored))),
        }
    }
    let each =
        checkpoint.positions().filter_map(|(position, stored)| Some((position, *sources.get(stored.name)?)));
    Ok((each.collect(), quantized))
}

/// Returns whether a quantized tensor is dequantized and quantized again by default.
///
/// This applies to MXFP8, and to everything that is read-only.
fn is_source(packed: &Packed<'_>) -> bool {
    packed.format == Format::Mxfp8E4m3 || !packed.storage.is_written()
}
