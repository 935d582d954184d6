//! Storage of unquantized tensors: unchanged, or in Q8_0.

use microscale::formats::words;

use crate::checkpoint_format::CheckpointFormat;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::gguf::q8_0;
use crate::names::role::Role;
use crate::read::tensor::{Q8_0, Tensor};
use crate::reason::Reason;

/// Storage of tensors that are not quantized to four bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeptAs {
    /// Unchanged.
    #[default]
    Unchanged,
    /// In ggml's Q8_0, for tensors of a GGUF file that llama.cpp quantizes.
    ///
    /// These are embeddings, the output head, layers that a rule or their number keeps, and tensors
    /// whose rows or global scales do not fit a 4-bit format. Norms, routers, convolutions and
    /// excluded tensors stay unchanged.
    Q8_0,
}

words!(KeptAs, "way to keep tensors" {
    Self::Unchanged = "unchanged",
    Self::Q8_0 = "q8_0",
});

impl KeptAs {
    /// Checks that a checkpoint format can store tensors this way.
    ///
    /// # Errors
    /// [`RecipeError::Settings`](crate::RecipeError::Settings) for Q8_0 outside of GGUF.
    pub(crate) fn check(self, checkpoint_format: CheckpointFormat) -> Result<()> {
        if self == Self::Unchanged || checkpoint_format == CheckpointFormat::Gguf {
            return Ok(());
        }
        let why = "kept: q8_0 is a type of GGUF files; leave it out, or quantize a GGUF file".into();
        Err(Error::Recipe(RecipeError::Settings { why }))
    }

    /// Wraps the reason in [`Reason::InQ8_0`] if the tensor is stored in Q8_0.
    pub(crate) fn applied(self, tensor: &Tensor<'_>, reason: Reason) -> Reason {
        let may = match reason {
            Reason::Role(role) => matches!(role, Role::Embedding | Role::OutputHead),
            Reason::KeptByRule(_)
            | Reason::FirstLayers(_)
            | Reason::LastLayers(_)
            | Reason::NoGlobalScale(_)
            | Reason::Columns { .. } => true,
            _ => false,
        };
        let takes = tensor.values_dtype().is_some()
            && tensor.dtype != Q8_0
            && q8_0::accepts(tensor.name, tensor.shape);
        if self == Self::Q8_0 && may && takes { Reason::InQ8_0(reason.into()) } else { reason }
    }
}
