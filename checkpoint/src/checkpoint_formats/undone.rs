//! Checks that transforms are undone where values are read, or carried out where layers are run.

use crate::checkpoint_formats::ignored::is_linear;
use crate::checkpoint_formats::ownership::Ownership;
use crate::checkpoint_formats::packed::Logical;
use crate::checkpoint_formats::transforms::{Transforms, transforms};
use crate::error::Result;
use crate::error::format::FormatError;
use crate::read::checkpoint::Checkpoint;

/// Locations that engines transform while they run, one of both at a time.
const RUN: [&str; 2] = ["input", "output"];

/// Returns whether all transforms of a checkpoint are block Hadamard transforms of the inputs of
/// quantized layers. These are undone when values are read.
fn is_undone(checkpoint: &Checkpoint, transforms: &Transforms<'_>) -> bool {
    let Some(hadamards) = transforms.hadamards() else { return false };
    Ownership::of(checkpoint).tensors().all(|tensor| match tensor.logical {
        Some(Ok(Logical::Plain(plain))) => {
            transforms.has_parameter(plain.name)
                || is_linear(checkpoint.naming, &plain) == Some(false)
                || hadamards.width_of(checkpoint.naming, plain.name).is_none()
        }
        Some(Ok(Logical::Packed(packed))) => {
            packed.hadamard == hadamards.width_of(checkpoint.naming, packed.name)
        }
        _ => true,
    })
}

/// Checks that values of a checkpoint are read without a transform: it declares none, or only
/// transforms that are undone.
///
/// # Errors
/// [`FormatError::Transformed`].
pub(crate) fn check_undone(checkpoint: &Checkpoint, doing: &str) -> Result<()> {
    match transforms(checkpoint) {
        Some(transforms) if !is_undone(checkpoint, &transforms) => Err(transforms.lost(doing.into())),
        _ => Ok(()),
    }
}

/// Checks that two checkpoints declare the same transforms, without which their values are not
/// comparable. Transforms that are undone do not count.
///
/// # Errors
/// [`FormatError::Transformed`].
pub(crate) fn check_same(first: &Checkpoint, second: &Checkpoint) -> Result<()> {
    let both = [(first, transforms(first)), (second, transforms(second))];
    let mut left =
        both.iter().filter_map(|(checkpoint, transforms)| Some((checkpoint, transforms.as_ref()?)));
    if left.all(|(checkpoint, transforms)| is_undone(checkpoint, transforms)) {
        return Ok(());
    }
    let [first, second] = both.map(|(_, transforms)| transforms);
    if first.as_ref().map(Transforms::declared) == second.as_ref().map(Transforms::declared) {
        return Ok(());
    }
    let different = [first, second].into_iter().flatten().next();
    different.map_or(Ok(()), |transforms| {
        let (file, what) = (transforms.file.clone(), transforms.described());
        let doing = "comparing with a checkpoint without the same transform".into();
        let instead = "compare checkpoints with the same transform_config".into();
        Err(FormatError::Transformed { file, what, doing, instead }.into())
    })
}

impl Checkpoint {
    /// Checks that layers of a checkpoint are run right without another transform than
    /// [`Packed::hadamard`](crate::Packed::hadamard).
    ///
    /// Transforms of weights are part of the stored values, and transforms of queries and keys
    /// cancel each other.
    ///
    /// # Errors
    /// [`FormatError::Transformed`] for other transforms of a layer's inputs or outputs.
    pub fn check_transforms(&self) -> Result<()> {
        let Some(transforms) = transforms(self) else { return Ok(()) };
        let mut locations = transforms.locations().peekable();
        let is_run = locations.peek().is_none() || locations.any(|(_, location)| RUN.contains(&location));
        match is_run && !is_undone(self, &transforms) {
            true => Err(transforms.lost("running its layers".into())),
            false => Ok(()),
        }
    }
}
