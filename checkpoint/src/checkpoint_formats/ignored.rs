//! Unquantized linear layers, which a config must tell loaders to ignore.

use std::collections::HashSet;

use serde_json::Value;

use crate::checkpoint_formats::transforms::transforms;
use crate::dtype::FileDtype;
use crate::names::naming::Naming;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// Parts of the names of transformers' classes that have a head in spite of the ending.
const HEADED: &[&str] = &["LMHead", "MTModel", "EncoderDecoderModel"];

/// Endings of transformers' classes without a head over the vocabulary.
const HEADLESS: &[&str] = &["Model", "Encoder", "Classification", "QuestionAnswering", "MultipleChoice"];

/// Returns the unquantized linear layers of a checkpoint, by every name that a loader has for them.
///
/// `copied` are the unquantized tensors. Layers that may be linear are included, because loaders do
/// not mind unknown names.
pub(crate) fn ignored<'t>(checkpoint: &Checkpoint, copied: impl Iterator<Item = Tensor<'t>>) -> Vec<String> {
    let naming = checkpoint.naming;
    let transforms = transforms(checkpoint);
    let is_transform =
        |tensor: &Tensor<'_>| transforms.as_ref().is_some_and(|found| found.has_parameter(tensor.name));
    let left = copied.filter(|tensor| is_linear(naming, tensor) != Some(false) && !is_transform(tensor));
    let mut modules: Vec<_> = left.flat_map(|tensor| naming.spellings(module(tensor.name))).collect();
    modules.extend(tied_heads(checkpoint).into_iter().map(String::from));
    modules.sort();
    modules.dedup();
    modules
}

/// Returns whether an unquantized tensor is the weight of a linear layer, or `None` if its name
/// leaves that open. Embeddings and norms are no linear layers to loaders.
pub(crate) fn is_linear(naming: Naming, tensor: &Tensor<'_>) -> Option<bool> {
    let is_float = tensor.values_dtype().is_some() || tensor.dtype.is_fp8() || tensor.dtype == FileDtype::F64;
    if is_float { naming.is_linear(tensor.name, tensor.shape) } else { Some(false) }
}

/// Returns the modules of output heads that have no weight in the file, because they are tied to an
/// embedding.
///
/// Loaders quantize every linear layer that a config does not exempt, so they must be told about
/// heads, too. The heads of all classes of the architecture are included, because loaders do not
/// mind names of modules that a class lacks.
pub(crate) fn tied_heads(checkpoint: &Checkpoint) -> Vec<&'static str> {
    let Some(config) = &checkpoint.config else { return Vec::new() };
    let mut classes =
        config.object.json.get("architectures").and_then(Value::as_array).into_iter().flatten().peekable();
    let is_headless = |class: &Value| {
        let class = class.as_str().unwrap_or_default();
        HEADED.iter().all(|part| !class.contains(part)) && HEADLESS.iter().any(|end| class.ends_with(end))
    };
    // Without classes, the loader chooses one by `model_type`.
    if config.model_type().is_none() && classes.peek().is_none()
        || classes.peek().is_some() && classes.all(is_headless)
    {
        return Vec::new();
    }
    let naming = checkpoint.naming;
    // Weights, codes and scales, but no biases: these are stored also where weights are tied.
    let parts = checkpoint.tensors().filter_map(|tensor| tensor.name.rsplit_once('.'));
    let weights = parts.filter(|(_, part)| part.starts_with("weight"));
    let stored: HashSet<_> = weights.flat_map(|(layer, _)| naming.modules(layer)).collect();
    naming.heads().iter().copied().filter(|head| !stored.contains(*head)).collect()
}
