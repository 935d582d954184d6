//! The loss that a checkpoint would have in a format, without writing a file. Formats for
//! comparison have no files.

use std::ops::Range;
use std::sync::Arc;

use microscale::{Amax, Device, Dtype, Element, ErrorStats, Global, NonFinite, Recipe, Shape};

use crate::checkpoint_formats::not_converted::NotConverted;
use crate::checkpoint_formats::ownership::logical_positions;
use crate::checkpoint_formats::packed::Logical;
use crate::compare::{Compared, Comparison, Difference};
use crate::error::plan::{PlanError, instead};
use crate::error::{Error, Result};
use crate::pipeline::{Worker, map};
use crate::plan::selection::{Override, Selection};
use crate::progress::{Meter, OnProgress};
use crate::quantize::matrix::below;
use crate::read::bands::{band_for, row_bands};
use crate::read::checkpoint::Checkpoint;
use crate::read::input::Input;
use crate::read::memory::afford;
use crate::read::position::Position;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::reason::Reason;

/// Quantizes the selected tensors of a checkpoint one by one, along their last dimension, and
/// measures the loss of each. Each has its own global scale, if the format has any. Other tensors
/// and tensors that are quantized already are skipped.
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
    let exempt = NotConverted::of(checkpoint);
    let (mut tensors, mut copied, mut quantized) = (Vec::new(), Vec::new(), false);
    for (position, tensor) in logical_positions(checkpoint)? {
        let Logical::Plain(tensor) = tensor else {
            quantized = true;
            continue;
        };
        match selection.reason_to_copy(&tensor, checkpoint.naming, &exempt, Override::None, None) {
            None => tensors.push((position, tensor)),
            Some(reason) => copied.push((tensor.elements(), reason)),
        }
    }
    if tensors.is_empty() {
        let reason = Reason::of_largest(copied.iter().map(|(elements, reason)| (*elements, reason)));
        let advice = match quantized {
            true => "its weights are quantized: measure the checkpoint that they were made from".into(),
            false => instead(reason.as_deref()),
        };
        return Err(Error::Plan(PlanError::NothingToQuantize { path: checkpoint.path.clone(), advice }));
    }
    let devices = device.workers(0).map_err(Error::Device)?;
    let all = measure(checkpoint, &tensors, recipe, &devices, progress)?;
    let mut comparison = Comparison::default();
    for ((_, tensor), errors) in tensors.iter().zip(all) {
        comparison.total += errors;
        let (name, shape) = (tensor.name.into(), tensor.shape.to_vec());
        comparison.tensors.push(Compared { name, shape, difference: Difference::Values(errors) });
    }
    Ok(comparison)
}

/// The loss of each tensor.
fn measure<'env>(
    checkpoint: &Checkpoint,
    tensors: &'env [(Position, Tensor<'env>)],
    recipe: &Recipe,
    devices: &'env [Device],
    progress: &mut OnProgress<'_>,
) -> Result<Vec<ErrorStats>> {
    let facts = |(_, tensor): &'env (Position, Tensor<'env>)| (tensor.name, tensor.data.len() as u64);
    let mut meter = Meter::new(tensors.iter().map(|tensor| facts(tensor).1).sum(), progress);
    let measure = |(position, tensor): &'env (Position, Tensor<'env>), worker: &Worker<'_, 'env>| {
        let errors = errors(&Input::new(checkpoint, *tensor, *position), *recipe, worker)?;
        checkpoint.forget(tensor);
        Ok(errors)
    };
    map(tensors, devices, &mut meter, facts, &measure)
}

/// The loss of a tensor, band by band.
fn errors<'env>(input: &Input<'env>, mut recipe: Recipe, worker: &Worker<'_, 'env>) -> Result<ErrorStats> {
    let (tensor, device) = (input.tensor, worker.device);
    let (rows, cols) = tensor.matrix();
    let bands: Arc<[Range<usize>]> = row_bands(rows, cols, None, band_for(device)).collect();
    let largest = bands.iter().map(|rows| rows.len().saturating_mul(cols)).max();
    afford(&tensor, tensor.name, largest.unwrap_or(0))?;
    let failed = move |source: microscale::Error, band: &Range<usize>| {
        let source = source.map_position(|at| below(at, band.start));
        Error::tensor(tensor.file, tensor.name, source)
    };
    let elements = move |rows: &Range<usize>| rows.start * cols..rows.end * cols;
    if bands.len() > 1
        && let Some(arithmetic) = recipe.scheme.global_from_amax()
    {
        let (mut most, dtype) = (0.0f32, tensor.values_dtype().unwrap_or(Dtype::F32));
        let (each, bands_of, policy) = (input.clone(), bands.clone(), recipe.non_finite);
        let amax = move |number: usize| {
            let rows = &bands_of[number];
            let shape = Shape::new(rows.len(), cols);
            let amax = each.with_values(elements(rows), |values| {
                with_values!(&values, slice => {
                    device.amax(slice, shape).map(|amax| under(slice, amax, policy))
                })
            });
            amax?.map_err(|source| failed(source, rows))
        };
        worker.each_band(bands.len(), amax, |amax| {
            most = most.max(amax);
            Ok(())
        })?;
        let scale = arithmetic.global_scale(most, |x| microscale::narrow(dtype, x));
        recipe = recipe.with_global(Global::Given(scale));
    }
    let (each, count) = (input.clone(), bands.len());
    let measure = move |number: usize| {
        let rows = &bands[number];
        let shape = Shape::new(rows.len(), cols);
        let parts = each.with_values(elements(rows), |values| {
            with_values!(&values, slice => {
                device
                    .quantize(slice, shape, &recipe)
                    .and_then(|quantized| ErrorStats::parts_of_quantized(slice, shape, &quantized.tensor))
            })
        });
        parts?.map_err(|source| failed(source, rows))
    };
    let mut errors = ErrorStats::default();
    worker.each_band(count, measure, |parts| {
        errors = errors.and_parts(&parts);
        Ok(())
    })?;
    Ok(errors)
}

/// The amax that counts for values of a dtype.
fn under<T: Element>(_: &[T], amax: Amax, policy: NonFinite) -> f32 {
    amax.under::<T>(policy)
}
