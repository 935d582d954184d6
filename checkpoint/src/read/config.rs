//! The JSON files of a directory that describe its weights: config.json and ModelOpt's own.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::Result;
use crate::read::json::Object;

/// The config of a model.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// ModelOpt's own config.
pub(crate) const HF_QUANT_CONFIG_FILE: &str = "hf_quant_config.json";

/// A JSON file in a checkpoint directory.
pub(crate) struct Config {
    pub(crate) file: PathBuf,
    pub(crate) object: Object,
}

impl Config {
    /// The model's architecture, as transformers names it.
    pub(crate) fn model_type(&self) -> Option<&str> {
        self.object.json.get("model_type").and_then(Value::as_str)
    }

    pub(crate) fn read(directory: &Path, name: &str) -> Result<Option<Self>> {
        let file = directory.join(name);
        Ok(if file.is_file() { Some(Self { object: Object::read(&file)?, file }) } else { None })
    }
}
