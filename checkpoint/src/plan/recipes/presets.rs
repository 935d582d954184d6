//! Presets: the recipes in checkpoint/recipes, which are compiled into the library.

use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};

/// A recipe that is compiled into the library.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// The text of its file.
    pub text: &'static str,
}

/// All presets.
pub const fn presets() -> &'static [Preset] {
    PRESETS
}

/// Makes the table of presets from the names of their files.
macro_rules! table {
    ($($name:literal),+ $(,)?) => {
        const PRESETS: &[Preset] =
            &[$(Preset { name: $name, text: include_str!(concat!("../../../recipes/", $name, ".toml")) }),+];
    };
}
table!["nvfp4", "mxfp4", "nvfp4-keep-ends", "mxfp4-keep-ends", "nvfp4-mxfp4-experts"];

impl Preset {
    /// The preset with this name.
    ///
    /// # Errors
    /// [`RecipeError::NoPreset`](crate::RecipeError::NoPreset) if there is none.
    pub fn called(name: &str) -> Result<&'static Self> {
        let found = PRESETS.iter().find(|preset| preset.name == name);
        let names = || PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| Error::Recipe(RecipeError::NoPreset { name: name.into(), presets: names() }))
    }

    /// The purpose: the first sentence of the comment at the top of the file.
    pub fn summary(&self) -> String {
        let lines = self.text.lines().map_while(|line| line.strip_prefix("# "));
        let comment = lines.collect::<Vec<_>>().join(" ");
        comment.split_once(". ").map_or(comment.trim_end_matches('.'), |(first, _)| first).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint_format::CheckpointFormat;
    use crate::plan::recipes::Recipes;

    #[test]
    fn every_preset_is_a_recipe_with_a_summary() {
        for preset in presets() {
            Recipes::named(preset.name).unwrap().check(CheckpointFormat::default()).unwrap();
            assert!(preset.summary().len() > 20, "{}", preset.name);
        }
    }

    #[test]
    fn unknown_presets_and_missing_files_are_errors() {
        let error = |word| Recipes::named(word).unwrap_err();
        assert!(error("fp4").to_string().contains("nvfp4-keep-ends"), "{}", error("fp4"));
        for file in ["nowhere.toml", "./nvfp4", "nowhere/mxfp4"] {
            assert!(matches!(error(file), Error::Io { .. }), "{file}");
        }
    }
}
