//! Comparing two checkpoints, tensor by tensor. Floats, quantized or not, are compared as values;
//! all other tensors by their bytes.

use std::collections::HashMap;
use std::ops::Range;

use microscale::{Device, ErrorStats};

use crate::checkpoint_formats::ownership::logical_positions;
use crate::checkpoint_formats::packed::Logical;
use crate::checkpoint_formats::transforms::transforms;
use crate::checkpoint_formats::undone::check_same;
use crate::error::{Error, Result};
use crate::pipeline::{Worker, map};
use crate::progress::{Meter, OnProgress};
use crate::read::bands::band_for;
use crate::read::checkpoint::Checkpoint;
use crate::read::input::Input;
use crate::read::position::Position;
use crate::read::values::Values;

/// Differences between two checkpoints.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Comparison {
    /// The tensors that both have, in the first one's order.
    pub tensors: Vec<Compared>,
    /// The names that only the first has.
    pub only_first: Vec<String>,
    /// The names that only the second has.
    pub only_second: Vec<String>,
    /// Errors over all values that both have.
    pub total: ErrorStats,
}

/// The comparison of one tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// The difference.
    pub difference: Difference,
}

/// The difference between two tensors of one shape.
#[derive(Clone, Debug)]
pub enum Difference {
    /// Floats, quantized or not: the errors of the second against the first.
    Values(ErrorStats),
    /// Tensors that are not both floats, compared by dtype and bytes.
    Bytes {
        /// True if dtype and bytes are the same.
        same: bool,
    },
}

/// Compares the tensors of `second` with the tensors of the same names in `first`. Quantized
/// tensors are dequantized to F32.
///
/// # Errors
/// [`Error::ShapeMismatch`], [`Error::NothingInCommon`],
/// [`FormatError::Packed`](crate::FormatError::Packed),
/// [`FormatError::Transformed`](crate::FormatError::Transformed), [`Error::Tensor`],
/// [`Error::Interrupted`].
pub fn compare(
    first: &Checkpoint,
    second: &Checkpoint,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Comparison> {
    check_same(first, second)?;
    let [a, b] = [own_tensors(first)?, own_tensors(second)?];
    let mut others: HashMap<_, _> = b.iter().map(|tensor| (tensor.1.name(), tensor)).collect();
    let mut comparison = Comparison::default();
    let mut pairs = Vec::new();
    for tensor in &a {
        match others.remove(tensor.1.name()) {
            None => comparison.only_first.push(tensor.1.name().into()),
            Some(other) => pairs.push((tensor, other)),
        }
    }
    let left = b.iter().map(|(_, tensor)| tensor.name()).filter(|name| others.contains_key(name));
    comparison.only_second = left.map(Into::into).collect();
    if pairs.is_empty() {
        let first_of = |names: &[String]| names.first().cloned().unwrap_or_default();
        return Err(Error::NothingInCommon {
            first: first.path.clone(),
            first_name: first_of(&comparison.only_first),
            second: second.path.clone(),
            second_name: first_of(&comparison.only_second),
        });
    }
    let devices = device.workers(0).map_err(Error::Device)?;
    comparison.tensors = compare_pairs(first, second, &pairs, &devices, progress)?;
    for tensor in &comparison.tensors {
        if let Difference::Values(errors) = &tensor.difference {
            comparison.total += *errors;
        }
    }
    Ok(comparison)
}

/// Returns the model's own tensors, without the parameters of transforms that are undone.
fn own_tensors(checkpoint: &Checkpoint) -> Result<Vec<Positioned<'_>>> {
    let mut tensors = logical_positions(checkpoint)?;
    if let Some(transforms) = transforms(checkpoint).filter(|transforms| transforms.hadamards().is_some()) {
        tensors.retain(|(_, tensor)| !transforms.has_parameter(tensor.name()));
    }
    Ok(tensors)
}

/// A tensor that values are read of, by several threads.
#[derive(Clone)]
struct Reader<'a> {
    logical: &'a Logical<'a>,
    input: Input<'a>,
    device: &'a Device,
}

impl<'a> Reader<'a> {
    fn new(checkpoint: &Checkpoint, (position, logical): &'a Positioned<'a>, device: &'a Device) -> Self {
        Self { logical, input: Input::new(checkpoint, *logical.stored(), *position), device }
    }

    /// Calls `work` with the values of a band.
    fn with_values<R>(&self, band: Range<usize>, work: impl FnOnce(&Values<'_>) -> R) -> Result<R> {
        match self.logical {
            Logical::Plain(_) => self.input.with_values(band, |values| work(&values)),
            Logical::Packed(packed) => Ok(work(&Values::F32(packed.values_in(band, self.device)?.into()))),
        }
    }
}

/// A tensor and its position.
type Positioned<'a> = (Position, Logical<'a>);

/// Compares pairs of tensors.
fn compare_pairs<'env>(
    first: &Checkpoint,
    second: &Checkpoint,
    pairs: &'env [(&'env Positioned<'env>, &'env Positioned<'env>)],
    devices: &'env [Device],
    progress: &mut OnProgress<'_>,
) -> Result<Vec<Compared>> {
    type Pair<'a> = (&'a Positioned<'a>, &'a Positioned<'a>);
    let facts = |((_, tensor), _): &'env Pair<'env>| (tensor.name(), tensor.stored().data.len() as u64);
    let mut meter = Meter::new(pairs.iter().map(|pair| facts(pair).1).sum(), progress);
    let compare = |(a, b): &'env Pair<'env>, worker: &Worker<'_, 'env>| compared(first, a, second, b, worker);
    map(pairs, devices, &mut meter, facts, &compare)
}

/// Compares two tensors of one name.
fn compared<'env>(
    first: &Checkpoint,
    a: &'env Positioned<'env>,
    second: &Checkpoint,
    b: &'env Positioned<'env>,
    worker: &Worker<'_, 'env>,
) -> Result<Compared> {
    let readers = [Reader::new(first, a, worker.device), Reader::new(second, b, worker.device)];
    let difference = difference(&readers[0], &readers[1], worker)?;
    first.forget_all(a.1.all_stored());
    second.forget_all(b.1.all_stored());
    Ok(Compared { name: a.1.name().into(), shape: a.1.shape().into(), difference })
}

/// Checks that two tensors have one shape, and compares them.
fn difference<'env>(a: &Reader<'env>, b: &Reader<'env>, worker: &Worker<'_, 'env>) -> Result<Difference> {
    let (logical_a, logical_b) = (a.logical, b.logical);
    if logical_a.shape() != logical_b.shape() {
        return Err(Error::ShapeMismatch {
            tensor: logical_a.name().into(),
            first: logical_a.stored().file.into(),
            first_shape: logical_a.shape().into(),
            second: logical_b.stored().file.into(),
            second_shape: logical_b.shape().into(),
        });
    }
    if !logical_a.has_values() || !logical_b.has_values() {
        let (stored_a, stored_b) = (logical_a.stored(), logical_b.stored());
        let same = stored_a.dtype == stored_b.dtype && stored_a.data == stored_b.data;
        return Ok(Difference::Bytes { same });
    }
    let (bands, a, b) = (logical_a.bands_beside(logical_b, band_for(worker.device))?, a.clone(), b.clone());
    let last = bands.len();
    let compare = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        a.with_values(band.clone(), |a| b.with_values(band, |b| a.error_parts(b)))?
    };
    let mut errors = ErrorStats::default();
    worker.each_band(last, compare, |parts| {
        errors = errors.and_parts(&parts);
        Ok(())
    })?;
    Ok(Difference::Values(errors))
}
