//! The outline of a tensor of the output.

use crate::dtype::FileDtype;
use crate::read::tensor::{Q8_0, Tensor, elements};
use crate::reason::Reason;

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Outline {
    pub(crate) name: String,
    pub(crate) dtype: FileDtype,
    pub(crate) shape: Vec<usize>,
}

impl Outline {
    /// Bytes of the data.
    pub(crate) fn bytes(&self) -> u64 {
        self.dtype.bytes_of(elements(&self.shape))
    }
}

/// The outline of an unquantized tensor. FP8 and INT8 weights are stored as their values in bf16.
pub(crate) fn unquantized(tensor: &Tensor<'_>) -> Outline {
    let copied = unchanged(tensor);
    if tensor.scaling.is_some() { Outline { dtype: FileDtype::BF16, ..copied } } else { copied }
}

/// The outline of a tensor that stays unquantized for a reason, which may be Q8_0.
pub(crate) fn copied(tensor: &Tensor<'_>, reason: &Reason) -> Outline {
    match reason {
        Reason::InQ8_0(_) => Outline { dtype: Q8_0, ..unchanged(tensor) },
        _ => unquantized(tensor),
    }
}

/// The outline of a tensor that is copied.
pub(crate) fn unchanged(tensor: &Tensor<'_>) -> Outline {
    Outline { name: tensor.name.into(), dtype: tensor.dtype, shape: tensor.shape.into() }
}
