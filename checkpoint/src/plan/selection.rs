//! Selects the tensors to quantize, and gives the reasons for copying the others.

use globset::GlobMatcher;

use crate::checkpoint_formats::not_converted::NotConverted;
use crate::checkpoint_formats::storage::Storage;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::names::glob::matcher;
use crate::names::naming::Naming;
use crate::names::weight::WEIGHT;
use crate::read::tensor::Tensor;
use crate::reason::Reason;

/// Selects the tensors to quantize.
///
/// By default it takes tensors called `*.weight` that have [values](crate::Tensor::values_dtype),
/// such as F32, F16 and BF16, and two dimensions; in GGUF files and for gpt-oss' experts also three.
/// It leaves out norms, embeddings, output heads, routers, convolutions, and the layers that an FP8
/// or INT8 checkpoint's own config leaves unquantized. The model's architecture identifies roles if
/// it is known, and whole words of the names otherwise.
///
/// Include patterns add any float tensor with at least two dimensions, whatever its name. Exclude
/// patterns override everything else. In a pattern, `*` matches any characters, including dots.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
}

/// Effect of a recipe's rules on the selection of a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Override {
    /// Name and shape decide.
    #[default]
    None,
    /// Quantize the tensor whatever its name, like an include pattern.
    Quantize,
    /// Copy the tensor.
    Copy(Reason),
    /// Copy the tensor along with its layer, if it would be quantized otherwise.
    CopyLayer(Reason),
}

impl Selection {
    /// Creates the default selection with include and exclude patterns.
    ///
    /// # Errors
    /// [`RecipeError::Glob`](crate::RecipeError::Glob) if a pattern is invalid.
    pub fn new(include: &[impl AsRef<str>], exclude: &[impl AsRef<str>]) -> Result<Self> {
        Ok(Self { include: matchers(include)?, exclude: matchers(exclude)? })
    }

    /// Creates a selection from compiled patterns.
    pub(crate) fn of(include: Vec<GlobMatcher>, exclude: Vec<GlobMatcher>) -> Self {
        Self { include, exclude }
    }

    /// Adds include and exclude patterns.
    ///
    /// # Errors
    /// [`RecipeError::Glob`](crate::RecipeError::Glob) if a pattern is invalid.
    pub fn add(&mut self, include: &[impl AsRef<str>], exclude: &[impl AsRef<str>]) -> Result<()> {
        self.include.extend(matchers(include)?);
        self.exclude.extend(matchers(exclude)?);
        Ok(())
    }

    /// Returns the include and the exclude patterns.
    pub(crate) fn patterns(&self) -> [Vec<&str>; 2] {
        [&self.include, &self.exclude]
            .map(|patterns| patterns.iter().map(|pattern| pattern.glob().glob()).collect())
    }

    /// Returns the reason to copy a tensor, or `None` if it is quantized.
    ///
    /// `naming` identifies roles for the checkpoint's architecture. `exempt` are the layers that
    /// the input's own config leaves unquantized. `rule` comes from the recipe, and `storage` is
    /// the storage of the quantized tensor.
    pub(crate) fn reason_to_copy(
        &self,
        tensor: &Tensor<'_>,
        naming: Naming,
        exempt: &NotConverted<'_>,
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
        let dimensions = tensor.shape.len();
        if dimensions < 2 {
            return Some(Reason::Dimensions(dimensions));
        }
        if !included {
            let of_experts = storage.is_some_and(|storage| storage.experts.is_some());
            if !tensor.name.ends_with(WEIGHT) && !of_experts {
                return Some(Reason::NotAWeight);
            }
            // Only gpt-oss' and llama.cpp's files have the experts of a layer in one quantized tensor.
            if dimensions > 2 && storage.is_some_and(|storage| !of_experts && storage.blocks.is_none()) {
                return Some(Reason::NotAMatrix(dimensions));
            }
            if exempt.exempts(naming, tensor.name) {
                return Some(Reason::NotConverted);
            }
        }
        if tensor.elements() == 0 {
            return Some(Reason::Empty);
        }
        if let Override::CopyLayer(reason) = rule {
            return Some(reason);
        }
        storage.and_then(|storage| storage.cannot_hold(tensor.name, tensor.shape))
    }

    /// Returns the patterns that match no name and are probably misspelled.
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
            .reason_to_copy(
                &tensor,
                Naming::default(),
                &NotConverted::default(),
                Override::None,
                Some(storage),
            )
            .map(|reason| reason.to_string())
    }

    #[test]
    fn the_default_takes_linear_layers_only() {
        let of = |name, dtype, shape: &[usize]| reason(&Selection::default(), name, dtype, shape);
        assert_eq!(of("model.layers.0.mlp.gate_proj.weight", FileDtype::BF16, &[8, 32]), None);
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
            (
                "experts.fc1.weight",
                FileDtype::BF16,
                &[2, 8, 64],
                "3-D, and loaders take only matrices quantized",
            ),
            ("experts.gate_up_proj", FileDtype::BF16, &[2, 8, 64], "not called *.weight"),
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
