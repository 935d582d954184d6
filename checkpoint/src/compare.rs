//! Comparing two checkpoints, tensor by tensor. Floats, quantized or not, are compared as values; all other
//! tensors by their bytes.

use std::collections::HashMap;
use std::ops::ControlFlow;

use microscale::{Device, ErrorStats};

use crate::checkpoint_formats::ownership::logical;
use crate::checkpoint_formats::packed::Logical;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::write::progress::{OnProgress, Progress};

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

/// Compares the tensors of `second` with those of the same names in `first`. Quantized ones are dequantized
/// to F32.
///
/// # Errors
/// [`Error::ShapeMismatch`], [`Error::NothingInCommon`], [`FormatError::Packed`](crate::FormatError::Packed), [`Error::Tensor`],
/// [`Error::Interrupted`].
pub fn compare(
    first: &Checkpoint,
    second: &Checkpoint,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Comparison> {
    let (a, b) = (logical(first)?, logical(second)?);
    let mut others: HashMap<_, _> = b.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let total = a.iter().map(|tensor| tensor.stored().data.len() as u64).sum();
    let mut done = 0;
    let mut comparison = Comparison::default();
    for tensor in &a {
        let (name, shape) = (tensor.name(), tensor.shape().to_vec());
        if let ControlFlow::Break(()) = progress(Progress { tensor: name, done, total }) {
            return Err(Error::Interrupted);
        }
        match others.remove(name) {
            None => comparison.only_first.push(name.into()),
            Some(other) => {
                let difference = difference(tensor, other, device)?;
                if let Difference::Values(errors) = &difference {
                    comparison.total += *errors;
                }
                comparison.tensors.push(Compared { name: name.into(), shape, difference });
                first.forget_all(tensor.all_stored());
                second.forget_all(other.all_stored());
            }
        }
        done += tensor.stored().data.len() as u64;
    }
    comparison.only_second =
        b.iter().map(Logical::name).filter(|name| others.contains_key(name)).map(Into::into).collect();
    if comparison.tensors.is_empty() {
        let first_of = |names: &[String]| names.first().cloned().unwrap_or_default();
        return Err(Error::NothingInCommon {
            first: first.path.clone(),
            first_name: first_of(&comparison.only_first),
            second: second.path.clone(),
            second_name: first_of(&comparison.only_second),
        });
    }
    Ok(comparison)
}

fn difference(a: &Logical<'_>, b: &Logical<'_>, device: &Device) -> Result<Difference> {
    if a.shape() != b.shape() {
        return Err(Error::ShapeMismatch {
            tensor: a.name().into(),
            first: a.stored().file.into(),
            first_shape: a.shape().into(),
            second: b.stored().file.into(),
            second_shape: b.shape().into(),
        });
    }
    let (stored_a, stored_b) = (a.stored(), b.stored());
    if !a.has_values() || !b.has_values() {
        let same = stored_a.dtype == stored_b.dtype && stored_a.data == stored_b.data;
        return Ok(Difference::Bytes { same });
    }
    let mut errors = ErrorStats::default();
    for band in a.bands_beside(b)? {
        errors = a.values_in(band.clone(), device)?.errors_of(&b.values_in(band, device)?, errors);
    }
    Ok(Difference::Values(errors))
}
