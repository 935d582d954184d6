//! Checks the scales of an FP8 cache of keys and values.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::cache_names::{KEYS, VALUES, ends, is_cache_scale};
use super::contents::Contents;
use super::finding::{Defect, Finding};
use super::values::wrong_scale;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::quantization;

/// Checks that all scales of the cache are positive numbers, and that none is missing if the config
/// announces them.
pub(super) fn check_cache(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    for tensor in &contents.plain {
        if let Some(value) = wrong_scale(tensor).filter(|_| is_cache_scale(tensor.name)) {
            findings.push(Finding::of(Defect::CacheScale, tensor, format!("it is {value}")));
        }
    }
    let Some((file, says)) = announced(contents.checkpoint) else { return };
    // Whether each attention module has scales of keys and of values.
    let mut modules: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    for entry in contents.entries() {
        if ["k_proj", "v_proj", "qkv_proj"].iter().any(|part| module(entry.name).ends_with(part))
            && let Some((attention, _)) = module(entry.name).rsplit_once('.')
        {
            modules.entry(attention).or_default();
        }
    }
    let mut any = false;
    for tensor in &contents.plain {
        let is = [ends(tensor.name, &KEYS), ends(tensor.name, &VALUES)];
        any |= is.contains(&true);
        let mut parents = tensor.name.rmatch_indices('.').map(|(dot, _)| &tensor.name[..dot]);
        if let Some(attention) = parents.find(|parent| modules.contains_key(parent))
            && let Some(has) = modules.get_mut(attention)
        {
            *has = [has[0] || is[0], has[1] || is[1]];
        }
    }
    let mut found = |tensor: Option<String>, what: String| {
        findings.push(Finding { defect: Defect::CacheScale, tensor, file: file.into(), what });
    };
    if !any {
        return found(None, format!("{says}, and no layer has scales for it (k_scale, v_scale)"));
    }
    for (attention, [keys, values]) in modules {
        for (has, name) in [(keys, "k_scale"), (values, "v_scale")] {
            if !has {
                found(Some(format!("{attention}.{name}")), format!("{says}, and the scale is missing"));
            }
        }
    }
}

/// Returns the file that announces an FP8 cache with stored scales, and how.
fn announced(checkpoint: &Checkpoint) -> Option<(&Path, String)> {
    let of_config = checkpoint.config.as_ref().and_then(|config| {
        let scheme = quantization(&config.object.json)?.get("kv_cache_scheme")?;
        let is_fp8 = scheme.get("type").and_then(Value::as_str) == Some("float")
            && scheme.get("num_bits").and_then(Value::as_u64) == Some(8)
            && scheme.get("dynamic") != Some(&Value::Bool(true));
        is_fp8.then(|| (&*config.file, "kv_cache_scheme is FP8".to_string()))
    });
    let own = || {
        let config = checkpoint.hf_quant_config.as_ref()?;
        let word = config.object.json.get("quantization")?.get("kv_cache_quant_algo")?.as_str()?;
        word.eq_ignore_ascii_case("FP8").then(|| (&*config.file, "kv_cache_quant_algo is FP8".to_string()))
    };
    of_config.or_else(own)
}
