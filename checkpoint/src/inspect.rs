//! Looking into a checkpoint: its tensors as they are stored, and distributions of scales and codes.

use crate::checkpoint_formats::ownership::Ownership;
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
    /// The reason why a tensor that seems to be packed is listed as it is stored.
    pub unreadable: Option<Error>,
}

/// Looks at every tensor of a checkpoint. What is packed in a way that cannot be read is listed as it is
/// stored.
pub fn inspect(checkpoint: &Checkpoint) -> Vec<Inspected<'_>> {
    let mut inspected = Vec::new();
    for (stored, logical) in Ownership::of(checkpoint).tensors() {
        let (tensor, unreadable) = match logical {
            None => continue,
            Some(Ok(tensor)) => (tensor, None),
            Some(Err(error)) => (Logical::Plain(stored), Some(error)),
        };
        let histogram = match &tensor {
            Logical::Packed(packed) => Some(Histogram::of(packed).into()),
            Logical::Plain(_) => None,
        };
        checkpoint.forget_all(tensor.all_stored());
        inspected.push(Inspected { tensor, histogram, unreadable });
    }
    inspected
}
