//! How tensors are stored that stay out of four bits: as they are, or in Q8_0.

use microscale::formats::words;

use crate::checkpoint_format::CheckpointFormat;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::gguf::q8_0;
use crate::names::role::Role;
use crate::read::tensor::{Q8_0, Tensor};
use crate::reason::Reason;

/// How tensors are stored that stay out of four bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeptAs {
    /// As they are.
    #[default]
    Unchanged,
    /// In ggml's Q8_0, for the tensors of a GGUF file that llama.cpp would quantize: embeddings,
    /// the output head, layers that rules or their values leave unquantized, and layers whose rows
    /// or global scales do not fit a 4-bit format. Norms, routers, convolutions and excluded
    /// tensors are unchanged.
    Q8_0,
}

words!(KeptAs, "way to keep tensors" {
    Self::Unchanged = "unchanged",
    Self::Q8_0 = "q8_0",
});

impl KeptAs {
    /// Makes sure that files of a convention can have it.
    ///
    /// # Errors
    /// [`RecipeError::Settings`](crate::RecipeError::Settings).
    pub(crate) fn check(self, convention: CheckpointFormat) -> Result<()> {
        if self == Self::Unchanged || convention == CheckpointFormat::Gguf {
            return Ok(());
        }
        let why = "kept: q8_0 is a type of GGUF files; leave it out, or quantize a GGUF file".into();
        Err(Error::Recipe(RecipeError::Settings { why }))
    }

    /// The reason not to quantize a tensor to four bits, with what becomes of it instead.
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
