//! Inspects a checkpoint: its tensors as they are stored, and distributions of scales and codes.

use rayon::prelude::*;

use crate::checkpoint_formats::ownership::{Ownership, StoredLogical};
use crate::checkpoint_formats::packed::Logical;
use crate::error::Error;
use crate::histogram::Histogram;
use crate::read::checkpoint::Checkpoint;

/// A tensor and, if it is quantized, the distribution of its scales and codes.
#[derive(Debug)]
#[non_exhaustive]
pub struct Inspected<'a> {
    /// The tensor.
    pub tensor: Logical<'a>,
    /// The distribution of scales and codes, if the tensor is quantized.
    pub histogram: Option<Box<Histogram>>,
    /// The reason why a tensor that seems to be quantized is listed as it is stored.
    pub unreadable: Option<Error>,
}

/// Inspects every tensor of a checkpoint. A tensor that seems to be quantized and cannot be read is
/// listed as it is stored.
pub fn inspect(checkpoint: &Checkpoint) -> Vec<Inspected<'_>> {
    let tensors: Vec<_> = Ownership::of(checkpoint).tensors().collect();
    let inspected = tensors.into_par_iter().filter_map(|StoredLogical { stored, logical, .. }| {
        let (tensor, unreadable) = match logical? {
            Ok(tensor) => (tensor, None),
            Err(error) => (Logical::Plain(stored), Some(error)),
        };
        let histogram = match &tensor {
            Logical::Packed(packed) => Some(Histogram::of(packed).into()),
            Logical::Plain(_) => None,
        };
        checkpoint.forget_all(tensor.all_stored());
        Some(Inspected { tensor, histogram, unreadable })
    });
    inspected.collect()
}
