//! The selection of the tensors of a checkpoint that are quantized, and the reasons against the
//! others.

use globset::GlobMatcher;

use crate::checkpoint_formats::storage::Storage;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::names::glob::matcher;
use crate::names::naming::Naming;
use crate::read::tensor::Tensor;
use crate::reason::Reason;

/// The selection of tensors to quantize.
///
/// By default those called `*.weight` that are F32, F16, BF16 or other values that are
/// [read](crate::Tensor::values_dtype), have two dimensions or more and are not norms, embeddings,
/// output heads, routers or convolutions, by the model's architecture if it is known and by their
/// names if not. Patterns to include add any float tensor of two dimensions or more, whatever its
/// name; patterns to exclude have the last word. In a pattern `*` stands for any characters, dots
/// included.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
}

/// A recipe's rule that overrides the default choice by name and shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Override {
    /// Name and shape decide.
    #[default]
    None,
    /// Quantize the tensor, whatever its name, like a pattern to include.
    Quantize,
    /// Copy the tensor.
    Copy(Reason),
    /// Copy the tensor with its layer, if it would be quantized.
    CopyLayer(Reason),
}

impl Selection {
    /// The default, with patterns to include and to exclude.
    ///
    /// # Errors
    /// [`RecipeError::Glob`](crate::RecipeError::Glob).
    pub fn new(include: &[impl AsRef<str>], exclude: &[impl AsRef<str>]) -> Result<Self> {
        Ok(Self { include: matchers(include)?, exclude: matchers(exclude)? })
    }

    /// Makes a selection of patterns that are compiled already.
    pub(crate) fn of(include: Vec<GlobMatcher>, exclude: Vec<GlobMatcher>) -> Self {
        Self { include, exclude }
    }

    /// Adds patterns.
    ///
    /// # Errors
    /// [`RecipeError::Glob`](crate::RecipeError::Glob).
    pub fn add(&mut self, include: &[impl AsRef<str>], exclude: &[impl AsRef<str>]) -> Result<()> {
        self.include.extend(matchers(include)?);
        self.exclude.extend(matchers(exclude)?);
        Ok(())
    }

    /// The reason not to quantize a tensor, given its checkpoint's architecture, the rules of a
    /// recipe and the storage of the quantized tensor; `None` if it is quantized.
    pub(crate) fn reason_to_copy(
        &self,
        tensor: &Tensor<'_>,
        naming: Naming,
        rule: Override,
        storage: Option<&Storage>,
    ) -> Option<Reason> {
        if let Some(pattern) = self.exclude.iter().find(|pattern| pattern.is_match(tensor.name)) {
            return Some(Reason::Excluded(pattern.glob().to_string()));
        }
        if let Override::Copy(reason) = rule {
            return Some(reason);
        }
        if tensor.values_dtype().is_none() {
            return Some(Reason::Dtype(tensor.dtype));
        }
        let included =
            rule == Override::Quantize || self.include.iter().any(|pattern| pattern.is_match(tensor.name));
        if !included && let Some(role) = naming.unquantized_role(tensor.name, tensor.shape) {
            return Some(Reason::Role(role));
        }
        if tensor.shape.len() < 2 {
            return Some(Reason::Dimensions(tensor.shape.len()));
        }
        let named =
            tensor.name.ends_with(".weight") || storage.is_some_and(|storage| storage.experts.is_some());
        if !included && !named {
            return Some(Reason::NotAWeight);
        }
        if tensor.elements() == 0 {
            return Some(Reason::Empty);
        }
        if let Override::CopyLayer(reason) = rule {
            return Some(reason);
        }
        storage.and_then(|storage| storage.cannot_hold(tensor.name, tensor.shape))
    }

    /// The patterns that match none of the names: likely misspelt.
    pub fn unmatched(&self, names: &[&str]) -> Vec<&str> {
        let patterns = self.include.iter().chain(&self.exclude);
        let unmatched = patterns.filter(|pattern| !names.iter().any(|name| pattern.is_match(name)));
        unmatched.map(|pattern| pattern.glob().glob()).collect()
    }
}

fn matchers(patterns: &[impl AsRef<str>]) -> Result<Vec<GlobMatcher>> {
    let refused = |pattern: &str, why| Error::Recipe(RecipeError::Glob { pattern: pattern.into(), why });
    let patterns = patterns.iter().map(AsRef::as_ref);
    patterns.map(|pattern| matcher(pattern).map_err(|why| refused(pattern, why))).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint_format::CheckpointFormat;
    use crate::dtype::FileDtype;
    use microscale::Format;

    fn reason(selection: &Selection, name: &str, dtype: FileDtype, shape: &[usize]) -> Option<String> {
        let tensor =
            Tensor { name, dtype, shape, data: &[], file: Path::new("x"), scaling: None, columns: None };
        let storage = Storage::of_format(CheckpointFormat::CompressedTensors, Format::Mxfp4).unwrap();
        selection
            .reason_to_copy(&tensor, Naming::default(), Override::None, Some(storage))
            .map(|reason| reason.to_string())
    }

    #[test]
    fn the_default_takes_linear_layers_only() {
        let of = |name, dtype, shape: &[usize]| reason(&Selection::default(), name, dtype, shape);
        assert_eq!(of("model.layers.0.mlp.gate_proj.weight", FileDtype::BF16, &[8, 32]), None);
        assert_eq!(of("experts.down.weight", FileDtype::F16, &[2, 8, 64]), None);
        for (name, dtype, shape, why) in [
            ("model.norm.weight", FileDtype::BF16, &[32][..], "norm"),
            ("model.embed_tokens.weight", FileDtype::BF16, &[8, 32], "embedding"),
            ("transformer.wte.weight", FileDtype::F32, &[8, 32], "embedding"),
            ("lm_head.weight", FileDtype::F32, &[8, 32], "output head"),
            ("mlp.gate.weight", FileDtype::F32, &[8, 32], "router"),
            ("fc.bias", FileDtype::F32, &[32], "1-D"),
            ("temperature", FileDtype::F32, &[], "scalar"),
            ("ids.weight", FileDtype::I64, &[8, 32], "dtype I64"),
            ("table", FileDtype::F32, &[8, 32], "not called *.weight"),
            ("fc.weight", FileDtype::F32, &[0, 32], "no elements"),
            ("fc.weight", FileDtype::F32, &[8, 100], "K = 100 is not a multiple of 32"),
        ] {
            assert_eq!(of(name, dtype, shape).as_deref(), Some(why), "{name}");
        }
    }

    #[test]
    fn include_overrides_the_default_and_exclude_overrides_both() {
        let selection = Selection::new(&["lm_head.*", "table", "*.bias"], &["*.1.*"]).unwrap();
        let of = |name, shape: &[usize]| reason(&selection, name, FileDtype::F32, shape);
        assert_eq!(of("lm_head.weight", &[8, 32]), None);
        assert_eq!(of("table", &[8, 32]), None);
        assert_eq!(of("fc.bias", &[32]).as_deref(), Some("1-D"));
        assert_eq!(of("layers.1.fc.weight", &[8, 32]).as_deref(), Some("excluded by \"*.1.*\""));
        assert_eq!(selection.unmatched(&["table", "a.1.b"]), ["lm_head.*", "*.bias"]);
        assert!(matches!(Selection::new(&["[a"], &[""; 0]), Err(Error::Recipe(RecipeError::Glob { .. }))));
    }
}
