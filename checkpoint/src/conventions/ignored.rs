//! Linear layers that stay as they are, in the words of a config: loaders must be told to ignore them.

use serde_json::Value;

use crate::names::kept::{Kept, kept};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::read::values::float_dtype;

/// The linear layers of a checkpoint that its config must tell loaders to ignore, given the tensors that are
/// not quantized.
pub(crate) fn ignored<'t>(checkpoint: &Checkpoint, copied: impl Iterator<Item = Tensor<'t>>) -> Vec<String> {
    let modules = copied.filter_map(|tensor| ignored_module(&tensor));
    let mut modules: Vec<_> = modules.chain(tied_head(checkpoint)).collect();
    modules.sort();
    modules
}

/// The module of a linear layer that is not quantized: what the config must tell loaders to ignore.
/// Embeddings and norms are no linear layers to them.
pub(crate) fn ignored_module(tensor: &Tensor<'_>) -> Option<String> {
    let module = tensor.name.strip_suffix(".weight")?;
    let other = matches!(kept(tensor.name), Some(Kept::Norm | Kept::Embedding));
    let linear = tensor.shape.len() == 2 && float_dtype(tensor.dtype).is_some() && !other;
    linear.then(|| module.into())
}

/// The output head's module, for a model that generates text and stores no head because it is the embedding's
/// transpose.
fn tied_head(checkpoint: &Checkpoint) -> Option<String> {
    let generates = |name: &Value| {
        let name = name.as_str().unwrap_or_default();
        name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration")
    };
    let config = &checkpoint.config.as_ref()?.object.json;
    let architectures = config.get("architectures").and_then(Value::as_array)?;
    let stored = checkpoint.tensors().any(|tensor| kept(tensor.name) == Some(Kept::OutputHead));
    (architectures.iter().any(generates) && !stored).then(|| "lm_head".into())
}
