//! Options that say how to quantize, and recipes in words.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use microscale::formats::{ScaleRule, Ties};
use microscale::{Format, NonFinite, Numerics, Search, Words};
use microscale_checkpoint::{self as checkpoint, Facts, GlobalSetting, Recipes, Settings, UsedRecipe};

use crate::options::words::{stored_formats, words};
use crate::text::table::count;

#[derive(clap::Args)]
pub(crate) struct RecipeArgs {
    /// A recipe file (*.toml, or a path), or one that comes with the program: `microscale recipes` lists
    /// them. Other options go before what it says for all tensors
    #[arg(long, value_name = "FILE|NAME")]
    recipe: Option<String>,
    /// The format [default: mxfp4]
    #[arg(long, value_parser = stored_formats())]
    format: Option<Format>,
    /// The library whose arithmetic is followed [default: ocp, and for nvfp4 compressed-tensors]
    #[arg(long, alias = "convention", value_parser = words::<Numerics>())]
    numerics: Option<Numerics>,
    /// How block scales follow from the largest magnitude, instead of the numerics' way (mxfp4, mxfp8)
    #[arg(long, value_parser = words::<ScaleRule>())]
    scale_rule: Option<ScaleRule>,
    /// Where values halfway between two codes go, instead of the numerics' way (mxfp4)
    #[arg(long, value_parser = words::<Ties>())]
    ties: Option<Ties>,
    #[arg(long, value_name = "VALUE|FILE|none", help = global_scale_help())]
    global_scale: Option<GlobalScaleArg>,
    /// Choose block scales by the squared error that they make, instead of by the largest magnitude: the
    /// better of two (four-six), the best near the usual one (window), or the best of all (full) (mxfp4,
    /// nvfp4) [default: none]
    #[arg(long, value_parser = words::<Search>())]
    search: Option<Search>,
    /// Weight errors by column in the search: an importance matrix of llama.cpp's (imatrix, GGUF or .dat) for a GGUF file, or a
    /// .safetensors file with a vector of floats for each tensor X, called X.importance, X_importance or X, one number for each
    /// column of X (such as the mean square of the activations that it meets). Tensors without one are searched unweighted
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Search for the global scale too: for each tensor, or all that share one, the best of a few by squared
    /// error, not weighted (nvfp4, with --search)
    #[arg(long)]
    search_global: bool,
    /// Compare each scale that was chosen with all that can be stored, slowly, and stop if one errs less
    /// (with --search full)
    #[arg(long)]
    pub(crate) check_search: bool,
    /// What to do about NaN and infinities [default: error]
    #[arg(long, value_parser = words::<NonFinite>())]
    non_finite: Option<NonFinite>,
}

/// The source of global scales, if not amax.
#[derive(Clone, Debug, PartialEq)]
enum GlobalScaleArg {
    None,
    Value(f32),
    File(PathBuf),
}

impl FromStr for GlobalScaleArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("", _) => Err("a number, a file or none".into()),
            ("none", _) => Ok(Self::None),
            (_, Ok(value)) => Ok(Self::Value(value)),
            _ => Ok(Self::File(text.into())),
        }
    }
}

/// Says the numerics' direction, out of the library's own table.
fn global_scale_help() -> String {
    let numerics = Numerics::WORDS.iter();
    let directions: Vec<_> = numerics
        .filter_map(|(word, numerics)| Some(format!("{word} a {}", numerics.nvfp4()?.direction.word())))
        .collect();
    format!(
        "The global scale of nvfp4, instead of one computed from the largest magnitude: a number for all tensors, in the \
         numerics' direction ({}); a .safetensors file with one for each tensor X, called X_global_scale (a divisor), \
         X_scale_2 (a multiplier) or X (the numerics' direction); or none, for block scales alone",
        directions.join(", ")
    )
}

impl RecipeArgs {
    /// The recipes: those of the file or preset, if one is named, with the options over them.
    pub(crate) fn recipes(&self) -> checkpoint::Result<Recipes> {
        let mut recipes = match &self.recipe {
            None => Recipes::default(),
            Some(named) => Recipes::named(named)?,
        };
        recipes.set(self.settings());
        Ok(recipes)
    }

    /// The settings that are given as options.
    fn settings(&self) -> Settings {
        Settings {
            format: self.format,
            numerics: self.numerics,
            scale_rule: self.scale_rule,
            ties: self.ties,
            global_scale: self.global_scale.as_ref().map(|global_scale| match global_scale {
                GlobalScaleArg::None => GlobalSetting::Absent,
                GlobalScaleArg::Value(value) => GlobalSetting::Value(*value),
                // Global scales of a file replace the computed ones when the plan is made.
                GlobalScaleArg::File(_) => GlobalSetting::FromAmax,
            }),
            search: self.search,
            search_global: self.search_global.then_some(true),
            non_finite: self.non_finite,
        }
    }

    /// The recipe's file, if it is one and no preset.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.recipe.as_deref().map(Path::new).filter(|path| path.is_file())
    }

    /// The file with importance by column.
    pub(crate) fn importance(&self) -> Option<&Path> {
        self.importance.as_deref()
    }

    /// The file with global scales.
    pub(crate) fn global_scales(&self) -> Option<&Path> {
        match &self.global_scale {
            Some(GlobalScaleArg::File(path)) => Some(path),
            _ => None,
        }
    }
}

/// Recipes in words: a line for each, and one for what files they are in. `format  mxfp4, numerics ocp: …`.
pub(crate) fn recipes_text(recipes: &[UsedRecipe]) -> String {
    let line = |used: &UsedRecipe| match recipes.len() {
        1 => recipe_text(&used.facts),
        _ => {
            let tensors = used.sums.tensors;
            let plural = if tensors == 1 { "" } else { "s" };
            format!("{} ({} tensor{plural})", recipe_text(&used.facts), count(tensors))
        }
    };
    let lines: Vec<_> = recipes.iter().map(line).collect();
    let files = recipes.first().and_then(|used| fact(&used.facts, "files"));
    let files = files.map_or(String::new(), |files| format!("\nfiles   {files}"));
    format!("format  {}{files}", lines.join("\n        "))
}

/// A recipe's format, and in what it differs from the first one of that format: `nvfp4, search full`.
pub(crate) fn distinction(used: &UsedRecipe, recipes: &[UsedRecipe]) -> String {
    let format = used.recipe.format();
    let first = recipes.iter().find(|other| other.recipe.format() == format).unwrap_or(used);
    let other = |key: &&str| {
        let (fact, usual) = (fact(&used.facts, key), fact(&first.facts, key));
        (fact != usual).then(|| format!(", {} {}", key.replace('_', " "), fact.unwrap_or("none")))
    };
    format!("{format}{}", Settings::KEYS.iter().filter_map(other).collect::<String>())
}

fn fact<'f>(facts: &'f Facts, wanted: &str) -> Option<&'f str> {
    facts.iter().find(|(name, _)| *name == wanted).map(|(_, fact)| fact.as_str())
}

/// A recipe's facts in a line: `mxfp4, numerics ocp: scale rule floor, ties even, -0 keep`.
fn recipe_text(facts: &Facts) -> String {
    let fact = |wanted| fact(facts, wanted);
    let mut text = fact("format").unwrap_or_default().to_string();
    if let Some(numerics) = fact("numerics") {
        text += &format!(", numerics {numerics}");
    }
    let mut details = Vec::new();
    for (name, words) in [
        ("scale_rule", "scale rule"),
        ("ties", "ties"),
        ("block_scale", "block scale"),
        ("quotient", "quotient"),
    ]
    .into_iter()
    .chain([("negative_zero", "-0"), ("global_scale", "global scale")])
    {
        details.extend(fact(name).map(|fact| format!("{words} {fact}")));
    }
    match (fact("global_scale"), fact("global_scale_direction")) {
        (None | Some("none"), _) | (_, None) => {}
        (Some("from amax"), Some(direction)) => {
            details.push(format!("a {direction} that fused layers share"));
        }
        (_, Some(direction)) => details.push(format!("a {direction}")),
    }
    if let Some(search) = fact("search").filter(|search| *search != Search::None.word()) {
        details.push(format!("scales searched: {search}"));
    }
    if let Some(importance) = fact("importance") {
        details.push(format!("errors weighted by importance {importance}"));
    }
    if let Some(tried) = fact("search_global") {
        details.push(format!("global scale searched: amax to {tried}"));
    }
    format!("{text}: {}", details.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale::{Global, GlobalScale, Recipe};

    #[test]
    fn recipes_in_words() {
        let text = |format, numerics, global| {
            recipe_text(&Recipe::of(format, numerics).unwrap().with_global(global).facts())
        };
        assert_eq!(
            text(Format::Mxfp4, Numerics::Ocp, Global::FromAmax),
            "mxfp4, numerics ocp: scale rule floor, ties even, -0 keep"
        );
        assert_eq!(
            text(Format::Mxfp8E4m3, Numerics::Ocp, Global::FromAmax),
            "mxfp8-e4m3, numerics ocp: scale rule floor"
        );
        assert_eq!(
            text(Format::Nvfp4, Numerics::CompressedTensors, Global::FromAmax),
            "nvfp4, numerics compressed-tensors: block scale G * (amax / 6), quotient x / (b / G), -0 drop-input, \
             global scale from amax, a divisor that fused layers share"
        );
        let modelopt = |global| text(Format::Nvfp4, Numerics::Modelopt, global);
        assert!(modelopt(Global::Absent).ends_with(", global scale none"));
        let given = modelopt(Global::Given(GlobalScale::Multiplier(0.5)));
        assert!(given.ends_with(", global scale 0.5, a multiplier"), "{given}");
    }

    #[test]
    fn a_global_scale_is_a_number_a_file_or_none() {
        let parse = |text: &str| text.parse::<GlobalScaleArg>();
        assert_eq!(parse("none"), Ok(GlobalScaleArg::None));
        assert_eq!(parse("1e-3"), Ok(GlobalScaleArg::Value(1e-3)));
        assert_eq!(parse("./1"), Ok(GlobalScaleArg::File("./1".into())));
        assert!(parse("").is_err());
        let help = global_scale_help();
        for part in ["compressed-tensors a divisor", "torchao a multiplier", "modelopt a multiplier"] {
            assert!(help.contains(part), "{help}");
        }
        assert!(!help.contains("ggml"), "{help}");
    }
}
