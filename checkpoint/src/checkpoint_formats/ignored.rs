//! Unquantized linear layers, which a config must tell loaders to ignore.

use serde_json::Value;

use crate::names::naming::Naming;
use crate::names::role::Role;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// Returns the unquantized linear layers of a checkpoint, by every name that a loader has for them.
///
/// `copied` are the unquantized tensors. Layers that may be linear are included, because loaders do
/// not mind unknown names.
pub(crate) fn ignored<'t>(checkpoint: &Checkpoint, copied: impl Iterator<Item = Tensor<'t>>) -> Vec<String> {
    let naming = checkpoint.naming;
    let left = copied.filter(|tensor| is_linear(naming, tensor) != Some(false));
    let mut modules: Vec<_> = left.flat_map(|tensor| naming.spellings(module(tensor.name))).collect();
    modules.extend(tied_head(checkpoint));
    modules.sort();
    modules.dedup();
    modules
}

/// Returns whether an unquantized tensor is the weight of a linear layer, or `None` if its name
/// leaves that open. Embeddings and norms are no linear layers to loaders.
pub(crate) fn is_linear(naming: Naming, tensor: &Tensor<'_>) -> Option<bool> {
    tensor.values_dtype().map_or(Some(false), |_| naming.is_linear(tensor.name, tensor.shape))
}

/// Returns the module of the output head if a model generates text, but stores no head because it
/// is the embedding's transpose.
pub(crate) fn tied_head(checkpoint: &Checkpoint) -> Option<String> {
    let generates = |name: &Value| {
        let name = name.as_str().unwrap_or_default();
        ["ForCausalLM", "ForConditionalGeneration", "LMHeadModel"].iter().any(|end| name.ends_with(end))
    };
    let config = &checkpoint.config.as_ref()?.object.json;
    let architectures = config.get("architectures").and_then(Value::as_array)?;
    let head = checkpoint.naming.head();
    let is_head = |tensor: Tensor<'_>| {
        let name = checkpoint.naming.module(tensor.name);
        let is_its = name.strip_prefix(head).is_some_and(|rest| rest.starts_with('.'));
        is_its || checkpoint.naming.unquantized_role(tensor.name, tensor.shape) == Some(Role::OutputHead)
    };
    let stored = checkpoint.tensors().any(is_head);
    (architectures.iter().any(generates) && !stored).then(|| head.into())
}
