//! The loss that a checkpoint would have in a format, without writing a file. Formats for comparison have no
//! files.

use std::ops::ControlFlow;

use microscale::{Device, ErrorStats, Recipe, Shape};

use crate::compare::{Compared, Comparison, Difference};
use crate::conventions::packed::{Logical, logical};
use crate::error::{Error, Result};
use crate::plan::selection::{Selection, Wish};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::write::progress::{OnProgress, Progress};

/// Quantizes the tensors of a checkpoint that a selection takes, one by one and along their last dimension,
/// and compares what becomes of them with what they are. Each has a global scale of its own, if the format
/// has any. Tensors that are not selected, or quantized already, are left out.
///
/// # Errors
/// [`Error::Tensor`], [`Error::Interrupted`].
pub fn compare_format(
    checkpoint: &Checkpoint,
    selection: &Selection,
    recipe: &Recipe,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Comparison> {
    let tensors = logical(checkpoint)?.into_iter().filter_map(|tensor| match tensor {
        Logical::Plain(tensor) => Some(tensor),
        Logical::Packed(_) => None,
    });
    let selected = |tensor: &Tensor<'_>| selection.reason_to_copy(tensor, Wish::Nothing, None).is_none();
    let tensors: Vec<_> = tensors.filter(selected).collect();
    let total = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
    let mut done = 0;
    let mut comparison = Comparison::default();
    for tensor in &tensors {
        if let ControlFlow::Break(()) = progress(Progress { tensor: tensor.name, done, total }) {
            return Err(Error::Interrupted);
        }
        let errors = errors(tensor, recipe, device)?;
        comparison.total += errors;
        let (name, shape) = (tensor.name.into(), tensor.shape.to_vec());
        comparison.tensors.push(Compared { name, shape, difference: Difference::Values(errors) });
        done += tensor.data.len() as u64;
    }
    Ok(comparison)
}

/// The loss of a tensor.
fn errors(tensor: &Tensor<'_>, recipe: &Recipe, device: &Device) -> Result<ErrorStats> {
    let (rows, cols) = tensor.matrix();
    let shape = Shape::new(rows, cols);
    // Selected tensors are of floats.
    let Some(values) = tensor.values() else { return Ok(ErrorStats::default()) };
    let errors = with_values!(&values, slice => {
        device
            .quantize(slice, shape, recipe)
            .and_then(|quantized| ErrorStats::of_quantized(slice, shape, &quantized.tensor))
    });
    errors.map_err(|source| Error::tensor(tensor.file, tensor.name, source))
}
