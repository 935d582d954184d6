//! The directory that `microscale calibrate` writes: names of its files and tensors.
//!
//! | file | contents |
//! |---|---|
//! | [`INDEX`] | the run, and the input of each layer, by the name of the layer's weights |
//! | [`IMPORTANCE`] | mean squares of each weight's inputs by column: [`Quantize::importance`] |
//! | [`INPUT_AMAX`] | the largest magnitude of each layer's inputs: [`InputScales::read`] |
//! | [`KV_AMAX`] | the largest magnitudes of keys and values |
//! | [`layer_file`] | importance of a decoder layer's weights, and Hessians: [`Quantize::gptq`] |
//!
//! Importance and the largest magnitudes are also there for inputs under each block Hadamard
//! transform: [`transformed`].
//!
//! [`Quantize::importance`]: crate::Quantize::importance
//! [`Quantize::gptq`]: crate::Quantize::gptq
//! [`InputScales::read`]: crate::InputScales::read

use std::path::{Path, PathBuf};

use microscale::HadamardWidth;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::error::given::GivenError;
use crate::names::weight::is_expert;
use crate::read::json::Object;

/// The index.
pub const INDEX: &str = "calibration.json";
/// The index' object of inputs, by the name of weights.
pub const INPUTS: &str = "inputs";
/// The index' object of the model, the text and the options.
pub const RUN: &str = "run";
/// The index' mark of a complete calibration.
pub const COMPLETE: &str = "complete";
/// Importance of all weights.
pub const IMPORTANCE: &str = "importance.safetensors";
/// The largest magnitudes of inputs.
pub const INPUT_AMAX: &str = "input_amax.json";
/// The largest magnitudes of keys and values.
pub const KV_AMAX: &str = "kv_amax.json";

/// Returns the file of a decoder layer's statistics.
pub fn layer_file(layer: usize) -> String {
    format!("layer-{layer}.safetensors")
}

/// Returns the name for facts about the inputs of a weight or a module under a transform, such as
/// `NAME.hadamard_32`.
pub fn transformed(name: &str, hadamard: Option<HadamardWidth>) -> String {
    hadamard.map_or_else(|| name.into(), |width| format!("{name}.hadamard_{width}"))
}

/// Returns whether the inputs of a module may be transformed. Engines transform no inputs of
/// experts.
pub fn may_be_transformed(module: &str) -> bool {
    !is_expert(module)
}

/// Returns the name of the Hessian of an input, or of one expert's.
///
/// It is XᵀX divided by the number of tokens, `[K, K]` in F32. An expert without tokens has none.
pub fn hessian(input: &str, expert: Option<usize>) -> String {
    match expert {
        Some(expert) => format!("{input}.{expert}.hessian"),
        None => format!("{input}.hessian"),
    }
}

/// Returns the file with the importance of a complete calibration.
///
/// # Errors
/// [`GivenError::Incomplete`] for an interrupted calibration, and
/// errors of reading.
pub fn importance(directory: &Path) -> Result<PathBuf> {
    index(directory)?;
    Ok(directory.join(IMPORTANCE))
}

/// Reads the index of a complete calibration.
///
/// # Errors
/// As of [`importance`].
pub(crate) fn index(directory: &Path) -> Result<Map<String, Value>> {
    let index = Object::read(&directory.join(INDEX))?.json;
    if index.get(COMPLETE).and_then(Value::as_bool) == Some(true) {
        return Ok(index);
    }
    let run = |fact: &str, word: &str| {
        let fact = index.get(RUN).and_then(|run| run.get(fact)).and_then(Value::as_str);
        fact.unwrap_or(word).to_string()
    };
    let (model, text) = (run("model", "MODEL"), run("text", "FILE"));
    Err(GivenError::Incomplete { directory: directory.into(), model, text }.into())
}
