//! All checkpoint formats: **the table of conventions**. A new convention gets a row here, and look-ups by
//! convention, format and recipe start here.

use microscale::formats::ScaleLayout;
use microscale::{Format, Recipe, Words};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::checkpoint_formats::{
    comfyui, compressed_tensors, deepseek, fp8_block, gguf, gpt_oss, modelopt, quark,
};
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;

/// Every convention.
pub(crate) const FORMATS: [&FormatSpec; 8] = [
    &compressed_tensors::SPEC,
    &modelopt::SPEC,
    &gpt_oss::SPEC,
    &gguf::SPEC,
    &deepseek::SPEC,
    &fp8_block::SPEC,
    &quark::SPEC,
    &comfyui::SPEC,
];

/// Every way of storing, of all conventions.
pub(crate) fn stored() -> impl Iterator<Item = &'static Storage> {
    FORMATS.into_iter().flat_map(|convention| convention.stored)
}

/// The reason why the codes and scales of a tensor of this name alone would be the wrong weights, if they would.
pub(crate) fn rescaled(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    FORMATS.iter().find_map(|convention| (convention.rescaled)(checkpoint, name))
}

impl CheckpointFormat {
    /// The convention's row; `None` would be a name without one.
    fn rules(self) -> Option<&'static FormatSpec> {
        FORMATS.into_iter().find(|convention| convention.name == self)
    }

    /// The formats that are written by it: none, if it is only read.
    pub fn formats(self) -> impl Iterator<Item = Format> {
        let written = self.rules().filter(|rules| rules.written);
        written.into_iter().flat_map(|rules| rules.stored).map(|stored| stored.format)
    }

    /// Says in the JSON files of a checkpoint how its layers are stored, the largest group first, and which
    /// linear layers are not quantized.
    pub(crate) fn describe(self, groups: &[Group], ignore: &[String], description: &mut Description) {
        if let Some(rules) = self.rules().filter(|_| !groups.is_empty()) {
            (rules.describe)(groups, ignore, description);
        }
    }

    /// Returns whether a config that names this method is of the convention.
    pub(crate) fn is_method(self, method: &str) -> bool {
        self.rules().is_some_and(|rules| (rules.is_method)(method))
    }

    /// Makes sure that files can hold what a recipe gives.
    ///
    /// # Errors
    /// [`FormatError::NotStored`](crate::FormatError::NotStored) for a format that the convention
    /// lacks, [`FormatError::ScaleLayout`](crate::FormatError::ScaleLayout) for scales that are not
    /// linear.
    pub fn check(self, recipe: &Recipe) -> Result<()> {
        Storage::of(self, recipe).map(|_| ())
    }
}

impl Storage {
    /// The storage of a recipe's result.
    ///
    /// # Errors
    /// Those of [`CheckpointFormat::check`].
    pub(crate) fn of(convention: CheckpointFormat, recipe: &Recipe) -> Result<&'static Self> {
        if recipe.scale_layout != ScaleLayout::Linear {
            return Err(Error::Format(FormatError::ScaleLayout { layout: recipe.scale_layout }));
        }
        Self::of_format(convention, recipe.format())
    }

    /// The storage of a format.
    ///
    /// # Errors
    /// [`FormatError::NotStored`](crate::FormatError::NotStored).
    pub(crate) fn of_format(convention: CheckpointFormat, format: Format) -> Result<&'static Self> {
        let written = convention.rules().filter(|rules| rules.written);
        let found = written.and_then(|rules| rules.stored.iter().find(|stored| stored.format == format));
        found.ok_or_else(|| {
            Error::Format(FormatError::NotStored {
                convention,
                format,
                instead: instead_of(convention, format),
            })
        })
    }
}

/// The alternatives where a convention lacks a format, in words.
fn instead_of(convention: CheckpointFormat, format: Format) -> String {
    let formats: Vec<_> = convention.formats().map(Words::word).collect();
    let others = CheckpointFormat::WORDS.iter().filter(|(_, other)| other.formats().any(|has| has == format));
    let others: Vec<_> = others.map(|(word, _)| *word).collect();
    let others: String = match others.as_slice() {
        [] => format!(
            "and no other has it (the library quantizes single tensors to it, and \
             `microscale compare A --format {format}` measures what A would lose)"
        ),
        others => format!("or a convention that has it: {}", others.join(", ")),
    };
    match formats.is_empty() {
        true => {
            let others = others.trim_start_matches("or ");
            match convention {
                CheckpointFormat::Fp8Block => {
                    format!("as convert alone writes it, from what is exact in it; choose {others}")
                }
                _ => format!("it is read and not written, so choose {others}"),
            }
        }
        false => format!("choose among its formats ({}), {others}", formats.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::FileDtype;
    use crate::read::description::QUANTIZATION;
    use crate::reason::Reason;
    use crate::write::outline::Outline;
    use microscale::Convention;
    use serde_json::Value;

    const E4M3: FileDtype = FileDtype::F8_E4M3;
    const U8: FileDtype = FileDtype::U8;

    /// Name, dtype and shape.
    type Part<'a> = (&'a str, FileDtype, &'a [usize]);

    fn stored_as(convention: CheckpointFormat, format: Format, name: &str, shape: &[usize]) -> Vec<Outline> {
        Storage::of_format(convention, format).unwrap().outlines(name, shape, true)
    }

    #[test]
    fn names_dtypes_and_shapes_of_the_conventions() {
        let ct = CheckpointFormat::CompressedTensors;
        let expected: [(_, _, _, &[usize], &[Part<'_>]); 5] = [
            (
                ct,
                Format::Mxfp4,
                "a.weight",
                &[8, 96],
                &[("a.weight_packed", U8, &[8, 48]), ("a.weight_scale", U8, &[8, 3])],
            ),
            (
                ct,
                Format::Nvfp4,
                "experts.down",
                &[2, 8, 48],
                &[
                    ("experts.down_packed", U8, &[2, 8, 24]),
                    ("experts.down_scale", E4M3, &[2, 8, 3]),
                    ("experts.down_global_scale", FileDtype::F32, &[1]),
                ],
            ),
            (
                ct,
                Format::Mxfp8E4m3,
                "a.weight",
                &[8, 96],
                &[("a.weight", E4M3, &[8, 96]), ("a.weight_scale", U8, &[8, 3])],
            ),
            (
                CheckpointFormat::Modelopt,
                Format::Nvfp4,
                "a.weight",
                &[8, 96],
                &[
                    ("a.weight", U8, &[8, 48]),
                    ("a.weight_scale", E4M3, &[8, 6]),
                    ("a.weight_scale_2", FileDtype::F32, &[]),
                ],
            ),
            (
                CheckpointFormat::GptOss,
                Format::Mxfp4,
                "mlp.experts.down_proj",
                &[4, 96, 5],
                &[
                    ("mlp.experts.down_proj_blocks", U8, &[4, 5, 3, 16]),
                    ("mlp.experts.down_proj_scales", U8, &[4, 5, 3]),
                ],
            ),
        ];
        for (convention, format, name, shape, expected) in expected {
            let outlines = stored_as(convention, format, name, shape);
            let found: Vec<_> = outlines
                .iter()
                .map(|outline| (outline.name.as_str(), outline.dtype, &outline.shape[..]))
                .collect();
            assert_eq!(found, expected);
            let storage = Storage::of_format(convention, format).unwrap();
            let model_shape = storage.model_shape(&outlines[0].shape, Some(&outlines[1].shape));
            assert_eq!(model_shape.as_deref(), Some(shape));
            assert_eq!(storage.model_shape(&outlines[0].shape, Some(&[8, 2])), None);
        }
    }

    #[test]
    fn what_cannot_be_stored_is_said() {
        let storage = |convention, format| Storage::of_format(convention, format).unwrap();
        let ct = |format| storage(CheckpointFormat::CompressedTensors, format);
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 96]), None);
        assert_eq!(ct(Format::Nvfp4).cannot_hold("a", &[8, 48]), None);
        let columns = |cols, block| Some(Reason::Columns { cols, block });
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 48]), columns(48, 32));
        let experts = storage(CheckpointFormat::GptOss, Format::Mxfp4);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 96, 5]), None);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 48, 32]), columns(48, 32));
        assert_eq!(experts.cannot_hold("a.experts.down_proj_bias", &[4, 96]), Some(Reason::NotAnExpert));
        let e5m2 = Recipe::of(Format::Mxfp8E5m2, Convention::Ocp).unwrap();
        for convention in CheckpointFormat::WORDS.iter().map(|(_, convention)| *convention) {
            let refused = convention.check(&e5m2).unwrap_err();
            assert!(
                matches!(refused, Error::Format(FormatError::NotStored { format: Format::Mxfp8E5m2, .. })),
                "{refused}"
            );
        }
        let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..Recipe::default() };
        let refused = CheckpointFormat::CompressedTensors.check(&swizzled);
        assert!(matches!(refused, Err(Error::Format(FormatError::ScaleLayout { .. }))));
        for read in [CheckpointFormat::DeepSeek, CheckpointFormat::Quark] {
            let refused = read.check(&Recipe::default()).unwrap_err().to_string();
            assert!(
                refused.contains("read and not written, so choose a convention that has it"),
                "{refused}"
            );
        }
        let refused = CheckpointFormat::Modelopt.check(&Recipe::default()).unwrap_err().to_string();
        assert!(
            refused.contains("its formats (nvfp4)") && refused.contains("compressed-tensors, gpt-oss"),
            "{refused}"
        );
    }

    #[test]
    fn every_global_scale_can_be_stored() {
        use microscale::GlobalScale::{Divisor, Multiplier};
        let stored = |convention, scale| {
            Storage::of_format(convention, Format::Nvfp4).unwrap().stored_global_scale(scale).unwrap()
        };
        let (ct, modelopt) = (CheckpointFormat::CompressedTensors, CheckpointFormat::Modelopt);
        assert_eq!((stored(ct, None), stored(modelopt, None)), (Divisor(1.0), Multiplier(1.0)));
        assert_eq!(stored(ct, Some(Divisor(3.0))), Divisor(3.0));
        assert_eq!(stored(ct, Some(Multiplier(0.25))), Divisor(4.0));
        assert_eq!(stored(modelopt, Some(Divisor(4.0))), Multiplier(0.25));
        for value in [f32::MIN_POSITIVE, f32::MAX / 448.0] {
            let scale = Multiplier(value);
            assert!(scale.in_range() && stored(ct, Some(scale)).in_range(), "{scale:?}");
        }
    }

    #[test]
    fn configs_are_added_and_removed_without_touching_the_rest() {
        let original = serde_json::json!({ "a": 1, "z": { "b": [1.5e-6] } });
        for storage in
            stored().filter(|storage| storage.is_linear() && storage.convention.formats().next().is_some())
        {
            let mut description = Description {
                config: original.as_object().cloned(),
                fp8_cache: true,
                ..Description::default()
            };
            let groups = [Group { storage, layers: vec!["fc".into()] }];
            storage.convention.describe(&groups, &["lm_head".into()], &mut description);
            let quantization = &description.config.as_ref().unwrap()[QUANTIZATION];
            let method = quantization["quant_method"].as_str().unwrap();
            let expected = match storage.convention {
                CheckpointFormat::CompressedTensors => "compressed-tensors",
                CheckpointFormat::Modelopt => "modelopt",
                CheckpointFormat::GptOss => "mxfp4",
                other => unreachable!("{other:?} has no config.json, or is read alone"),
            };
            assert_eq!(method, expected);
            assert!(quantization.to_string().contains("lm_head"));
            if storage.convention != CheckpointFormat::GptOss {
                let mut again = Description { fp8_cache: false, ..description };
                assert_eq!((again.take_cache(), again.fp8_cache), (None, true));
                description = again;
            }
            description.remove();
            assert_eq!(Value::Object(description.config.unwrap()).to_string(), original.to_string());
            assert_eq!(description.hf_quant_config, None);
        }
    }
}
