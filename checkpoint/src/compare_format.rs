//! The loss that a checkpoint would have in a format, without writing a file. Formats for comparison have no
//! files.

use std::borrow::Cow;
use std::ops::{ControlFlow, Range};

use microscale::{Amax, Device, Dtype, Element, ErrorStats, Global, NonFinite, Recipe, Shape};

use crate::checkpoint_formats::ownership::logical;
use crate::checkpoint_formats::packed::Logical;
use crate::compare::{Compared, Comparison, Difference};
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::plan::selection::{Selection, Wish};
use crate::read::bands::row_bands;
use crate::read::checkpoint::Checkpoint;
use crate::read::memory::afford;
use crate::read::tensor::Tensor;
use crate::read::values::{Values, with_values};
use crate::write::progress::{OnProgress, Progress};

/// Quantizes the tensors of a checkpoint that a selection takes, one by one and along their last dimension,
/// and compares what becomes of them with what they are. Each has a global scale of its own, if the format
/// has any. Tensors that are not selected, or quantized already, are left out.
///
/// # Errors
/// [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize), [`Error::Tensor`],
/// [`Error::Interrupted`].
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
    let selected = |tensor: &Tensor<'_>| {
        selection.reason_to_copy(tensor, checkpoint.naming, Wish::Nothing, None).is_none()
    };
    let tensors: Vec<_> = tensors.filter(selected).collect();
    if tensors.is_empty() {
        return Err(Error::Plan(PlanError::NothingToQuantize { path: checkpoint.path.clone() }));
    }
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
        checkpoint.forget(tensor);
        done += tensor.data.len() as u64;
    }
    Ok(comparison)
}

/// The loss of a tensor, band by band.
fn errors(tensor: &Tensor<'_>, recipe: &Recipe, device: &Device) -> Result<ErrorStats> {
    let (rows, cols) = tensor.matrix();
    let bands: Vec<_> = row_bands(rows, cols, None).collect();
    let largest = bands.iter().map(|rows| rows.len().saturating_mul(cols)).max();
    afford(tensor, tensor.name, largest.unwrap_or(0))?;
    let failed = |mut source, band: &Range<usize>| {
        if let microscale::Error::NonFinite { first, .. } = &mut source {
            first.row += band.start;
        }
        Error::tensor(tensor.file, tensor.name, source)
    };
    // Selected tensors are of floats.
    let band = |rows: &Range<usize>| {
        tensor.values_in(rows.start * cols..rows.end * cols).unwrap_or(Values::F32(Cow::default()))
    };
    let mut recipe = *recipe;
    if bands.len() > 1
        && let Some(arithmetic) = recipe.scheme.global_from_amax()
    {
        let (mut most, dtype) = (0.0f32, tensor.values_dtype().unwrap_or(Dtype::F32));
        for rows in &bands {
            let shape = Shape::new(rows.len(), cols);
            let policy = recipe.non_finite;
            let amax = with_values!(&band(rows), slice => {
                device.amax(slice, shape).map(|amax| under(slice, amax, policy))
            });
            most = most.max(amax.map_err(|source| failed(source, rows))?);
        }
        let scale = arithmetic.global_scale(most, |x| microscale::narrow(dtype, x));
        recipe = recipe.with_global(Global::Given(scale));
    }
    let mut errors = ErrorStats::default();
    for rows in &bands {
        let shape = Shape::new(rows.len(), cols);
        let measured = with_values!(&band(rows), slice => {
            device
                .quantize(slice, shape, &recipe)
                .and_then(|quantized| errors.and_quantized(slice, shape, &quantized.tensor))
        });
        errors = measured.map_err(|source| failed(source, rows))?;
    }
    Ok(errors)
}

/// The amax that counts for values of a dtype.
fn under<T: Element>(_: &[T], amax: Amax, policy: NonFinite) -> f32 {
    amax.under::<T>(policy)
}
