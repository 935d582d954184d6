//! **The table of checkpoint formats.** A new one gets a row here. Look-ups by checkpoint format,
//! format and recipe start here.

use microscale::formats::ScaleLayout;
use microscale::{Format, Recipe, Words};

use crate::checkpoint_format::{CheckpointFormat, Written};
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

/// All checkpoint formats.
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

/// Returns the storages of all checkpoint formats. Written ones come before read-only ones of the
/// same names, dtypes and shapes.
pub(crate) fn stored() -> impl Iterator<Item = &'static Storage> {
    let also_read = FORMATS.into_iter().flat_map(|spec| spec.also_read);
    FORMATS.into_iter().flat_map(|spec| spec.stored).chain(also_read)
}

/// Returns why the codes and scales of a tensor of this name are not the whole weight, if there is
/// more to it.
pub(crate) fn rescaled(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    FORMATS.iter().find_map(|spec| (spec.rescaled)(checkpoint, name))
}

impl CheckpointFormat {
    /// Returns the row, or `None` for a name without one.
    fn spec(self) -> Option<&'static FormatSpec> {
        FORMATS.into_iter().find(|spec| spec.name == self)
    }

    /// Returns which commands write it.
    pub fn written(self) -> Written {
        self.spec().map_or(Written::No, |spec| spec.written)
    }

    /// Returns the formats that quantizing can write. There are none for a read-only checkpoint
    /// format.
    pub fn formats(self) -> impl Iterator<Item = Format> {
        let written = self.spec().filter(|spec| spec.written == Written::Yes);
        written.into_iter().flat_map(|spec| spec.stored).map(|stored| stored.format)
    }

    /// Writes to the JSON files of a checkpoint how its layers are stored, the largest group first,
    /// and which linear layers are not quantized.
    pub(crate) fn describe(self, groups: &[Group], ignore: &[String], description: &mut Description) {
        if let Some(spec) = self.spec().filter(|spec| spec.stored.is_empty() || !groups.is_empty()) {
            (spec.describe)(groups, ignore, description);
        }
    }

    /// Returns whether a config with this method is of the checkpoint format.
    pub(crate) fn is_method(self, method: &str) -> bool {
        self.spec().is_some_and(|spec| (spec.is_method)(method))
    }

    /// Checks that files can hold the result of a recipe.
    ///
    /// # Errors
    /// [`FormatError::NotStored`](crate::FormatError::NotStored) for a format that the checkpoint
    /// format lacks, [`FormatError::ScaleLayout`](crate::FormatError::ScaleLayout) for scales that
    /// are not linear.
    pub fn check(self, recipe: &Recipe) -> Result<()> {
        Storage::of(self, recipe).map(|_| ())
    }
}

impl Storage {
    /// Returns the storage of a recipe's result.
    ///
    /// # Errors
    /// The errors of [`CheckpointFormat::check`].
    pub(crate) fn of(checkpoint_format: CheckpointFormat, recipe: &Recipe) -> Result<&'static Self> {
        if recipe.scale_layout != ScaleLayout::Linear {
            return Err(Error::Format(FormatError::ScaleLayout { layout: recipe.scale_layout }));
        }
        Self::of_format(checkpoint_format, recipe.format())
    }

    /// Returns whether quantizing can write it.
    pub(crate) fn is_written(&self) -> bool {
        self.blocks_per_scale == 1 && self.checkpoint_format.formats().any(|format| format == self.format)
    }

    /// Returns the storage of a format.
    ///
    /// # Errors
    /// [`FormatError::NotStored`](crate::FormatError::NotStored).
    pub(crate) fn of_format(checkpoint_format: CheckpointFormat, format: Format) -> Result<&'static Self> {
        let written = checkpoint_format.spec().filter(|spec| spec.written == Written::Yes);
        let found = written.and_then(|spec| spec.stored.iter().find(|stored| stored.format == format));
        found.ok_or_else(|| {
            Error::Format(FormatError::NotStored {
                checkpoint_format,
                format,
                instead: instead_of(checkpoint_format, format),
            })
        })
    }
}

/// Returns the alternatives to a format that a checkpoint format lacks, for an error message.
fn instead_of(checkpoint_format: CheckpointFormat, format: Format) -> String {
    let formats: Vec<_> = checkpoint_format.formats().map(Words::word).collect();
    let others = CheckpointFormat::WORDS.iter().filter(|(_, other)| other.formats().any(|has| has == format));
    let others: Vec<_> = others.map(|(word, _)| *word).collect();
    let others: String = match others.as_slice() {
        [] => format!(
            "and no other has it (the library quantizes single tensors to it, and \
             `microscale compare A --format {format}` measures what A would lose)"
        ),
        others => format!("or a checkpoint format that has it: {}", others.join(", ")),
    };
    let choices = others.trim_start_matches("or ");
    match checkpoint_format.written() {
        Written::Yes => format!("choose among its formats ({}), {others}", formats.join(", ")),
        Written::ByConvert => {
            format!("as convert alone writes it, from what is exact in it; choose {choices}")
        }
        Written::No => format!("it is read and not written, so choose {choices}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::FileDtype;
    use crate::read::description::QUANTIZATION;
    use crate::reason::Reason;
    use crate::write::outline::Outline;
    use microscale::Numerics;
    use serde_json::Value;

    const E4M3: FileDtype = FileDtype::F8_E4M3;
    const U8: FileDtype = FileDtype::U8;

    /// Name, dtype and shape.
    type Part<'a> = (&'a str, FileDtype, &'a [usize]);

    fn stored_as(
        checkpoint_format: CheckpointFormat,
        format: Format,
        name: &str,
        shape: &[usize],
    ) -> Vec<Outline> {
        Storage::of_format(checkpoint_format, format).unwrap().outlines(name, shape, true)
    }

    #[test]
    fn every_checkpoint_format_has_a_row() {
        for (word, checkpoint_format) in CheckpointFormat::WORDS {
            assert!(checkpoint_format.spec().is_some(), "{word}");
        }
    }

    #[test]
    fn outlines_have_the_names_dtypes_and_shapes_of_each_checkpoint_format() {
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
        for (checkpoint_format, format, name, shape, expected) in expected {
            let outlines = stored_as(checkpoint_format, format, name, shape);
            let found: Vec<_> = outlines
                .iter()
                .map(|outline| (outline.name.as_str(), outline.dtype, &outline.shape[..]))
                .collect();
            assert_eq!(found, expected);
            let storage = Storage::of_format(checkpoint_format, format).unwrap();
            let model_shape = storage.model_shape(&outlines[0].shape, Some(&outlines[1].shape));
            assert_eq!(model_shape.as_deref(), Some(shape));
            assert_eq!(storage.model_shape(&outlines[0].shape, Some(&[8, 2])), None);
        }
    }

    #[test]
    fn formats_and_shapes_that_cannot_be_stored_are_refused() {
        let storage = |checkpoint_format, format| Storage::of_format(checkpoint_format, format).unwrap();
        let ct = |format| storage(CheckpointFormat::CompressedTensors, format);
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 96]), None);
        assert_eq!(ct(Format::Nvfp4).cannot_hold("a", &[8, 48]), None);
        let columns = |cols, block| Some(Reason::Columns { cols, block });
        assert_eq!(ct(Format::Mxfp4).cannot_hold("a", &[8, 48]), columns(48, 32));
        let experts = storage(CheckpointFormat::GptOss, Format::Mxfp4);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 96, 5]), None);
        assert_eq!(experts.cannot_hold("a.experts.down_proj", &[4, 48, 32]), columns(48, 32));
        assert_eq!(experts.cannot_hold("a.experts.down_proj_bias", &[4, 96]), Some(Reason::NotAnExpert));
        let e5m2 = Recipe::of(Format::Mxfp8E5m2, Numerics::Ocp).unwrap();
        for (_, checkpoint_format) in CheckpointFormat::WORDS {
            let refused = checkpoint_format.check(&e5m2).unwrap_err();
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
                refused.contains("read and not written, so choose a checkpoint format that has it"),
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
        let stored = |checkpoint_format, scale| {
            let storage = Storage::of_format(checkpoint_format, Format::Nvfp4).unwrap();
            storage.stored_global_scale(scale).unwrap()
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
    fn configs_are_added_and_removed_without_other_changes() {
        let original = serde_json::json!({ "a": 1, "z": { "b": [1.5e-6] } });
        for storage in FORMATS
            .into_iter()
            .flat_map(|spec| spec.stored)
            .filter(|storage| storage.is_linear() && storage.checkpoint_format.formats().next().is_some())
        {
            let mut description = Description {
                config: original.as_object().cloned(),
                fp8_cache: true,
                ..Description::default()
            };
            let groups = [Group { storage, layers: vec!["fc".into()] }];
            storage.checkpoint_format.describe(&groups, &["lm_head".into()], &mut description);
            let quantization = &description.config.as_ref().unwrap()[QUANTIZATION];
            let method = quantization["quant_method"].as_str().unwrap();
            let expected = match storage.checkpoint_format {
                CheckpointFormat::CompressedTensors => "compressed-tensors",
                CheckpointFormat::Modelopt => "modelopt",
                CheckpointFormat::GptOss => "mxfp4",
                other => unreachable!("{other:?} has no config.json, or is read-only"),
            };
            assert_eq!(method, expected);
            assert!(quantization.to_string().contains("lm_head"));
            if storage.checkpoint_format != CheckpointFormat::GptOss {
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
