//! Checks config.json against the weights of a checkpoint: the method, and the layers that it lists.

use microscale::Words;
use serde_json::Value;

use super::contents::Contents;
use super::finding::{Defect, Finding};
use super::layers::{check_formats, check_ignored};
use crate::read::description::{Description, QUANTIZATION, quantization};

/// Checks the config of a checkpoint directory. Single files have none.
pub(super) fn check_config(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let Contents { checkpoint, packed, plain, .. } = contents;
    let Some(config) = &checkpoint.config else { return };
    let mut found = |tensor: Option<&str>, what: String| {
        let tensor = tensor.map(Into::into);
        findings.push(Finding { defect: Defect::Config, tensor, file: config.file.clone(), what });
    };
    match (Description::method(checkpoint), packed.first()) {
        (None, None) => {}
        (None, Some(first)) => {
            let what = format!("there is no {QUANTIZATION}, but {} tensors are quantized", packed.len());
            found(Some(first.name), what);
        }
        // Such tensors have findings of their own.
        (Some(_), None) if !contents.unreadable.is_empty() => {}
        (Some(_), None) if plain.iter().any(|tensor| tensor.scaling.is_some()) => {}
        (Some((method, file)), None) => {
            let (file, instead) = (file.display(), Description::instead_of_unread(checkpoint));
            let what = format!("{file} says {method}, but no tensor is quantized in a known way: {instead}");
            found(None, what);
        }
        (Some((method, _)), Some(_)) => {
            let quantization = quantization(&config.object.json).and_then(Value::as_object);
            for packed in packed.iter().filter(|packed| !packed.checkpoint_format().is_method(&method)) {
                let stored = packed.checkpoint_format().word();
                found(
                    Some(packed.name),
                    format!("the method is {method}, but the tensor is stored as {stored}"),
                );
            }
            if let Some(quantization) = quantization {
                check_formats(contents, quantization, &mut found);
                check_ignored(contents, quantization, &mut found);
            }
        }
    }
}
