//! Checks ModelOpt's configs: the algorithm, the group size, and hf_quant_config.json against
//! config.json.

use microscale::{Format, Words};
use serde_json::{Map, Value};

use super::contents::Contents;
use super::finding::{Defect, Finding};
use super::layers::check_ignored;
use crate::read::config::Config;
use crate::read::description::quantization;

/// What an algorithm of ModelOpt stores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    Format(Format),
    Fp8,
    /// Other weights than this crate reads.
    Unread,
    /// Several, by layer.
    Mixed,
}

/// Returns what an algorithm stores, or `None` if ModelOpt has no such word.
fn stored_by(algorithm: &str) -> Option<Stored> {
    Some(match algorithm.to_ascii_uppercase().as_str() {
        "MIXED_PRECISION" => Stored::Mixed,
        word if word.contains("NVFP4") => Stored::Format(Format::Nvfp4),
        word if word.contains("MXFP4") => Stored::Format(Format::Mxfp4),
        word if word.contains("MXFP8") => Stored::Format(Format::Mxfp8E4m3),
        word if word.starts_with("FP8") => Stored::Fp8,
        word if ["AWQ", "INT", "W4A8", "W8A8", "W8A16", "NF4"].iter().any(|part| word.contains(part)) => {
            Stored::Unread
        }
        _ => return None,
    })
}

/// Checks ModelOpt's entry in config.json, and hf_quant_config.json.
pub(super) fn check_modelopt(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let checkpoint = contents.checkpoint;
    let of_config = checkpoint.config.as_ref().and_then(|config| {
        let quantization = quantization(&config.object.json)?.as_object()?;
        let method = quantization.get("quant_method")?.as_str()?;
        Some((config, quantization, method))
    });
    let own = checkpoint.hf_quant_config.as_ref();
    if let Some((config, quantization, _)) = of_config.filter(|(.., method)| method.starts_with("modelopt")) {
        check_algorithm(contents, config, quantization, findings);
    }
    let Some(own) = own else { return };
    let mut found = |what: String| {
        findings.push(Finding { defect: Defect::Config, tensor: None, file: own.file.clone(), what });
    };
    let Some(quantization) = own.object.json.get("quantization").and_then(Value::as_object) else {
        return found("it has no \"quantization\"".into());
    };
    if let Some((_, other, method)) = of_config {
        if !method.starts_with("modelopt") {
            found(format!("it describes ModelOpt's quantization, and config.json says {method}"));
        }
        let algorithms = [quantization, other].map(|config| config.get("quant_algo").and_then(Value::as_str));
        if let [Some(here), Some(there)] = algorithms
            && !here.eq_ignore_ascii_case(there)
        {
            found(format!("quant_algo is {here}, and {there} in config.json"));
        }
        let here = quantization.get("kv_cache_quant_algo").and_then(Value::as_str);
        let here = here.filter(|word| !word.eq_ignore_ascii_case("none"));
        let there = other.get("kv_cache_scheme").filter(|scheme| !scheme.is_null());
        if here.is_some() != there.is_some() && method.starts_with("modelopt") {
            let (here, there) = (here.unwrap_or("null"), there.map_or("null".into(), Value::to_string));
            found(format!("kv_cache_quant_algo is {here}, and kv_cache_scheme in config.json {there}"));
        }
    }
    if let Some(algorithm) = quantization.get("quant_algo").and_then(Value::as_str)
        && algorithm.to_ascii_uppercase().contains("NVFP4")
    {
        let missing = ["group_size", "kv_cache_quant_algo", "exclude_modules"];
        let missing: Vec<_> = missing.into_iter().filter(|key| !quantization.contains_key(*key)).collect();
        if !missing.is_empty() {
            found(format!("it lacks {}, without which vLLM 0.33 refuses it", missing.join(" and ")));
        }
    }
    check_algorithm(contents, own, quantization, findings);
    let mut of_layer = |tensor: Option<&str>, what: String| {
        let (defect, file, tensor) = (Defect::Config, own.file.clone(), tensor.map(Into::into));
        findings.push(Finding { defect, tensor, file, what: format!("{what} (hf_quant_config.json)") });
    };
    check_ignored(contents, quantization, &mut of_layer);
}

/// Checks the algorithm and the group size of a config against the quantized tensors.
fn check_algorithm(
    contents: &Contents<'_>,
    config: &Config,
    quantization: &Map<String, Value>,
    findings: &mut Vec<Finding>,
) {
    let mut found = |tensor: Option<&str>, what: String| {
        let (defect, file, tensor) = (Defect::Config, config.file.clone(), tensor.map(Into::into));
        findings.push(Finding { defect, tensor, file, what });
    };
    let Some(algorithm) = quantization.get("quant_algo").filter(|algorithm| !algorithm.is_null()) else {
        if !contents.packed.is_empty() {
            found(None, "there is no quant_algo".into());
        }
        return;
    };
    let word = algorithm.as_str().unwrap_or_default();
    let Some(expected) = stored_by(word) else {
        return found(None, format!("quant_algo is {algorithm}, which ModelOpt does not have"));
    };
    let differs = |format: Format| match expected {
        Stored::Format(expected) => format != expected,
        Stored::Fp8 | Stored::Unread => true,
        Stored::Mixed => false,
    };
    let mut differing = contents.packed.iter().filter(|packed| differs(packed.format));
    if let Some(first) = differing.next() {
        let (count, format) = (1 + differing.count(), first.format);
        found(
            Some(first.name),
            format!("quant_algo is {word}, but {count} tensors are {format}, this one first"),
        );
    }
    let mut fp8 = contents.plain.iter().filter(|tensor| tensor.scaling.is_some());
    if let (Some(first), Stored::Format(_)) = (fp8.next(), expected) {
        let count = 1 + fp8.count();
        found(
            Some(first.name),
            format!("quant_algo is {word}, but {count} tensors are {}, this one first", first.dtype),
        );
    }
    let layers = quantization.get("quantized_layers").and_then(Value::as_object);
    for packed in contents.packed.iter().filter(|_| expected == Stored::Mixed) {
        let names = contents.checkpoint.naming.spellings(crate::names::weight::module(packed.name));
        let layer = names.iter().find_map(|name| layers?.get(name.as_str()));
        let word = layer.and_then(|layer| layer.get("quant_algo")?.as_str());
        match word.map(|word| (word, stored_by(word))) {
            Some((_, Some(Stored::Format(format)))) if format == packed.format => {}
            Some((word, _)) => found(
                Some(packed.name),
                format!("quant_algo of the layer is {word}, but it is {}", packed.format.word()),
            ),
            None if layers.is_some() => {
                found(Some(packed.name), "it is quantized, and quantized_layers does not list it".into());
            }
            None => {}
        }
    }
    if let Some(size) = quantization.get("group_size").and_then(Value::as_u64)
        && let Some(packed) =
            contents.packed.iter().find(|packed| packed.storage.elements_per_scale() as u64 != size)
    {
        let (format, block) = (packed.format, packed.storage.elements_per_scale());
        found(Some(packed.name), format!("group_size is {size}, but blocks of {format} have {block}"));
    }
}
