//! The quantization of layers' inputs that a config declares, in words.

use serde_json::Value;

use crate::read::checkpoint::Checkpoint;
use crate::read::description::quantization;

/// ModelOpt's words for quantized inputs, in addition to its words for weights.
const WITH_INPUTS: [&str; 7] =
    ["NVFP4", "MXFP8", "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8", "W4A8_AWQ", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"];

/// Returns how the config says that inputs of layers are quantized, if it does.
pub(crate) fn declared_inputs(checkpoint: &Checkpoint) -> Option<String> {
    let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
    let own = checkpoint.hf_quant_config.as_ref().and_then(|config| config.object.json.get("quantization"));
    let entries = || [config, own].into_iter().flatten();
    let groups = entries().filter_map(|entry| entry.get("config_groups")?.as_object());
    let of_groups =
        groups.flat_map(|groups| groups.values()).filter_map(|group| group.get("input_activations"));
    let of_quark = entries().filter_map(|entry| entry.get("global_quant_config")?.get("input_tensors"));
    let mut algorithms = entries().filter_map(|entry| entry.get("quant_algo")?.as_str());
    let by_algorithm = algorithms.find(|word| WITH_INPUTS.contains(word));
    of_groups.chain(of_quark).find_map(words).or_else(|| by_algorithm.map(Into::into))
}

/// Returns the words for the arguments of a quantization: of compressed-tensors and ModelOpt, or of
/// Quark, which has a list of stages.
fn words(args: &Value) -> Option<String> {
    let args = args.as_array().map_or(Some(args), |stages| stages.first())?;
    let word = |key| args.get(key).and_then(Value::as_str);
    match args.get("num_bits").and_then(Value::as_u64) {
        Some(bits) => Some(format!("{bits} bits, {}", word("type").unwrap_or("int"))),
        None => word("dtype").map(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_of_each_library_have_words() {
        assert_eq!(words(&Value::Null), None);
        assert_eq!(words(&json!({ "num_bits": 4, "type": "float" })).as_deref(), Some("4 bits, float"));
        assert_eq!(words(&json!({ "num_bits": 8 })).as_deref(), Some("8 bits, int"));
        assert_eq!(words(&json!({ "dtype": "fp4", "group_size": 32 })).as_deref(), Some("fp4"));
        let stages = json!([{ "dtype": "fp4" }, { "dtype": "fp8_e4m3", "is_scale_quant": true }]);
        assert_eq!(words(&stages).as_deref(), Some("fp4"));
    }
}
