//! How the JSON files of a checkpoint directory describe its weights: config.json and ModelOpt's
//! own.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::checkpoint_format::CheckpointFormat;
use crate::read::checkpoint::Checkpoint;
use crate::read::config::{CONFIG_FILE, Config, HF_QUANT_CONFIG_FILE};

/// The key in config.json for how weights are quantized.
pub(crate) const QUANTIZATION: &str = "quantization_config";

/// The key that compressed-tensors used before transformers supported it.
const COMPRESSION: &str = "compression_config";

/// The key for the language model of a multimodal model. It may contain the other keys.
const TEXT: &str = "text_config";

/// How weights are quantized according to a config, wherever loaders look for it.
pub(crate) fn quantization(config: &Map<String, Value>) -> Option<&Value> {
    quantizations(config).next()
}

/// All statements of a config about how weights are quantized. The first one counts.
pub(crate) fn quantizations(config: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let of_text = config.get(TEXT).and_then(|text| text.get(QUANTIZATION));
    let entries = [config.get(QUANTIZATION), of_text, config.get(COMPRESSION)];
    // Some libraries write null for unquantized weights.
    entries.into_iter().flatten().filter(|entry| !entry.is_null())
}

/// What to do with MLX's weights.
pub(crate) const MLX: &str = "its weights are MLX's, which are not read here: start from the original, or make an unquantized \
     checkpoint of it with mlx_lm.convert --dequantize";

/// The JSON files of a checkpoint directory, to be updated for the output.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Description {
    /// config.json, if there is one.
    pub(crate) config: Option<Map<String, Value>>,
    /// ModelOpt's own file.
    pub(crate) hf_quant_config: Option<Map<String, Value>>,
    /// True if the inputs of layers are quantized too.
    pub(crate) activations: bool,
    /// True if the KV cache is FP8.
    pub(crate) fp8_cache: bool,
    /// compressed-tensors' entry of transforms, if there are any.
    pub(crate) transforms: Option<Value>,
}

impl Description {
    /// Reads the description of a checkpoint directory.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Self {
        let json = |config: &Option<Config>| config.as_ref().map(|config| config.object.json.clone());
        let (config, hf_quant_config) = (json(&checkpoint.config), json(&checkpoint.hf_quant_config));
        Self { config, hf_quant_config, activations: false, fp8_cache: false, transforms: None }
    }

    /// The files with their names.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&'static str, &Map<String, Value>)> {
        let files = [(CONFIG_FILE, &self.config), (HF_QUANT_CONFIG_FILE, &self.hf_quant_config)];
        files.into_iter().filter_map(|(name, json)| Some((name, json.as_ref()?)))
    }

    /// Sets how weights are quantized in config.json.
    pub(crate) fn set(&mut self, quantization: Value) {
        if let Some(config) = &mut self.config {
            config.insert(QUANTIZATION.into(), quantization);
        }
    }

    /// The quantization method and the file that names it, if the checkpoint says it is quantized.
    pub(crate) fn method(checkpoint: &Checkpoint) -> Option<(String, PathBuf)> {
        if let Some(config) = &checkpoint.config
            && let Some(quantization) = quantization(&config.object.json)
        {
            let method = quantization.get("quant_method").and_then(Value::as_str);
            return Some((method.unwrap_or("of an unknown method").into(), config.file.clone()));
        }
        checkpoint.hf_quant_config.as_ref().map(|config| ("modelopt".into(), config.file.clone()))
    }

    /// What to do with a checkpoint whose config says that it is quantized, but whose weights are in
    /// none of the formats that are read.
    pub(crate) fn instead_of_unread(checkpoint: &Checkpoint) -> &'static str {
        if Self::is_mlx(checkpoint) {
            return MLX;
        }
        "none of its weights is in a format that is read here: start from the original, or dequantize it with the software that wrote \
         it; if the weights are unquantized, remove quantization_config"
    }

    /// Returns whether the config describes MLX's weights: mlx-lm 0.32 names no method.
    pub(crate) fn is_mlx(checkpoint: &Checkpoint) -> bool {
        let config = checkpoint.config.as_ref();
        let quantization = config.and_then(|config| quantization(&config.object.json));
        let has = |key: &str| quantization.is_some_and(|quantization| quantization.get(key).is_some());
        has("bits") && has("group_size") && !has("quant_method")
    }

    /// How either file says that the KV cache is quantized.
    ///
    /// It understands the words that compressed-tensors and ModelOpt share. Of Quark's description
    /// it returns the dtype.
    fn cache(&self) -> Option<&Value> {
        let quantization = self.config.as_ref().and_then(quantization);
        let own = self.hf_quant_config.as_ref().and_then(|config| config.get("quantization"));
        let cache = quantization.and_then(|quantization| quantization.get("kv_cache_scheme"));
        let of_quark = || {
            let layers = quantization?.get("kv_cache_quant_config")?.as_object()?;
            layers.values().find_map(|layer| layer.get("output_tensors")?.get("dtype"))
        };
        let cache = cache.or_else(|| own?.get("kv_cache_quant_algo")).or_else(of_quark);
        cache.filter(|cache| !cache.is_null())
    }

    /// Records whether the KV cache is FP8. Returns its quantization if it is neither FP8 nor
    /// unquantized.
    pub(crate) fn take_cache(&mut self) -> Option<String> {
        let cache = self.cache()?;
        let number = |key| cache.get(key).and_then(Value::as_u64);
        let is_float = cache.get("type").and_then(Value::as_str) == Some("float");
        self.fp8_cache = cache.as_str() == Some("FP8") || is_float && number("num_bits") == Some(8);
        (!self.fp8_cache).then(|| self.cache().map(Value::to_string)).flatten()
    }

    /// The KV cache's quantization, if the config has one that `to` cannot express.
    ///
    /// gpt-oss configs cannot express any.
    pub(crate) fn dropped_cache(checkpoint: &Checkpoint, to: CheckpointFormat) -> Option<String> {
        let mut description = Self::of(checkpoint);
        let other = description.take_cache();
        other.or_else(|| (description.fp8_cache && to == CheckpointFormat::GptOss).then(|| "FP8".into()))
    }

    /// Removes all statements that weights are quantized.
    pub(crate) fn remove(&mut self) {
        if let Some(config) = &mut self.config {
            config.shift_remove(QUANTIZATION);
            config.shift_remove(COMPRESSION);
            if let Some(Value::Object(text)) = config.get_mut(TEXT) {
                text.shift_remove(QUANTIZATION);
            }
        }
        self.hf_quant_config = None;
    }
}
