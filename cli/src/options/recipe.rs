//! Options of recipes, and recipes in words.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use microscale::formats::{ScaleRule, Ties};
use microscale::{Format, GptqOrder, HadamardWidth, NonFinite, Numerics, Search, Words, choice, searches};
use microscale_checkpoint::calibration;
use microscale_checkpoint::{self as checkpoint, Facts, GlobalSetting, Gptq, Recipes, Settings, UsedRecipe};

use crate::options::words::{
    is_stored, is_stored_format, pattern, stored_formats, stored_formats_list, stored_numerics, words,
};
use crate::text::table::count;

#[derive(clap::Args)]
pub(crate) struct RecipeArgs {
    #[command(flatten)]
    quality: QualityArgs,
    #[command(flatten)]
    numerics: NumericsArgs,
}

/// The tensors to quantize, their format and the effort.
#[derive(clap::Args)]
#[command(next_help_heading = "Quality")]
struct QualityArgs {
    #[arg(short, long, value_parser = stored_formats(), hide_possible_values = true)]
    #[arg(help = format!("{} [default: {}]", stored_formats_list(), Format::default()))]
    format: Option<Format>,
    /// Recipe file, or a built-in one (microscale recipes)
    ///
    /// A file ends with .toml or has a directory in its name. Other options override the recipe's
    /// settings for all tensors, not its rules for some.
    #[arg(short, long, value_name = "FILE|NAME")]
    recipe: Option<String>,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Importance matrix, which weights a search's errors
    ///
    /// For a GGUF file, an importance matrix of llama.cpp (imatrix, GGUF or .dat). Otherwise a
    /// .safetensors file with a vector of floats for each tensor X, called X.importance,
    /// X_importance or X, one number per column of X, such as the mean square of the activations in
    /// it. Tensors without a vector are searched unweighted.
    #[arg(long, alias = "imatrix", value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Directory of `calibrate`, for --search and --gptq
    ///
    /// A search weights its errors with the mean squares of each layer's inputs, and GPTQ uses
    /// their Hessians.
    #[arg(long, value_name = "DIR", conflicts_with = "importance")]
    calibration: Option<PathBuf>,
    /// Use GPTQ: minimize the errors of layers' outputs
    ///
    /// Needs --calibration. Later columns of a row compensate for the rounding of earlier ones. Each
    /// block scale is the one that leaves the least error, or another choice of --search. Works on
    /// the CPU, for mxfp4 and nvfp4.
    #[arg(long, requires = "calibration", conflicts_with = "search_global")]
    gptq: bool,
    /// Choose block scales before GPTQ's loop, not in it
    #[arg(long, requires = "gptq", hide_short_help = true)]
    gptq_static_scales: bool,
    /// Order of columns: blocks or columns with the largest inputs first, or natural [default: blocks]
    ///
    /// columns sorts columns without regard to blocks, so that scales are chosen before the loop.
    #[arg(long, value_name = "ORDER", requires = "gptq", hide_short_help = true, value_parser = parse_order)]
    gptq_order: Option<GptqOrder>,
    /// Part of the mean diagonal entry to add to Hessians [default: 0.01]
    #[arg(long, value_name = "X", requires = "gptq", hide_short_help = true)]
    gptq_damping: Option<f64>,
    /// Block Hadamard transform of weights and inputs, of 16, 32, 64 or 128 columns
    ///
    /// Each block of columns of a weight is multiplied by a Hadamard matrix, and engines multiply
    /// the inputs of its layer by it, which spreads outliers. For mxfp4 and nvfp4 in
    /// compressed-tensors, which vLLM runs on one GPU. Experts, heads and layers with a bias stay as
    /// they are.
    #[arg(long, value_name = "WIDTH", value_parser = words::<HadamardWidth>(), hide_possible_values = true)]
    #[arg(hide_short_help = true)]
    hadamard: Option<HadamardWidth>,
    /// Search for the global scale too (nvfp4, with --search)
    ///
    /// For each tensor, or all tensors that share one, the best of a few by unweighted squared
    /// error.
    #[arg(long, hide_short_help = true)]
    search_global: bool,
    /// Compare each chosen scale with all others, slowly (with --search full)
    ///
    /// Stops with an error if another scale has a smaller error.
    #[arg(long, hide_short_help = true)]
    check_search: bool,
}

/// Which tensors are quantized, and how their scales are searched.
#[derive(clap::Args)]
pub(crate) struct SelectionArgs {
    /// Also quantize matching tensors (repeatable)
    ///
    /// For example `--include lm_head.weight`. Only float tensors of two dimensions or more can be
    /// quantized.
    #[arg(long, value_name = "GLOB", value_parser = pattern)]
    pub(crate) include: Vec<String>,
    /// Leave matching tensors unquantized (repeatable)
    ///
    /// It overrides --include and the rules of a recipe.
    #[arg(long, alias = "ignore", value_name = "GLOB", value_parser = pattern)]
    pub(crate) exclude: Vec<String>,
    #[arg(long, value_parser = words::<Search>(), hide_possible_values = true)]
    #[arg(help = search_help(), long_help = search_long_help())]
    pub(crate) search: Option<Search>,
}

/// Whose arithmetic to follow.
#[derive(clap::Args)]
#[command(next_help_heading = "Compatibility")]
struct NumericsArgs {
    /// Library whose bytes to match, such as torchao
    #[arg(long, alias = "convention", value_name = "LIBRARY", value_parser = stored_numerics())]
    #[arg(hide_possible_values = true, long_help = numerics_help())]
    numerics: Option<Numerics>,
    /// How block scales follow from amax, instead of the numerics' rule (mxfp4, mxfp8)
    #[arg(long, value_name = "RULE", value_parser = words::<ScaleRule>(), hide_short_help = true)]
    scale_rule: Option<ScaleRule>,
    /// How to round values halfway between two codes, instead of the numerics' rule (mxfp4)
    #[arg(long, value_parser = words::<Ties>(), hide_short_help = true)]
    ties: Option<Ties>,
    #[arg(long, value_name = "VALUE|FILE|none", hide_short_help = true)]
    #[arg(help = "Global scale of nvfp4, instead of one computed from amax", long_help = global_scale_help())]
    global_scale: Option<GlobalScaleArg>,
    /// What to do with NaN and infinities [default: error]
    #[arg(long, value_name = "POLICY", value_parser = words::<NonFinite>(), hide_short_help = true)]
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

fn parse_order(word: &str) -> Result<GptqOrder, String> {
    let order = Gptq::ORDERS.into_iter().find(|(known, _)| *known == word);
    order.map(|(_, order)| order).ok_or_else(|| "pass blocks, columns or natural".into())
}

/// The help of `--search`.
fn search_help() -> String {
    format!("Search block scales: {}", searches())
}

fn search_long_help() -> String {
    format!(
        "{}\n\nChooses block scales by squared error, instead of by amax: the better of two (four-six), \
         the best near the amax's (window), or the best of all (full). For mxfp4 and nvfp4. The default \
         is none.",
        search_help()
    )
}

/// The help of `--numerics`.
fn numerics_help() -> String {
    let stored = Numerics::values().filter(|numerics| is_stored(*numerics)).map(Numerics::word);
    let stored_formats = Format::values().filter(|format| is_stored_format(*format));
    let defaults: Vec<_> =
        stored_formats.map(|format| format!("{} for {format}", Numerics::default_for(format))).collect();
    format!("Library whose bytes to match: {}\n\nThe default is {}.", choice(stored), defaults.join(", "))
}

/// The help of `--global-scale`, with the direction of each library's scale.
fn global_scale_help() -> String {
    let numerics = Numerics::WORDS.iter();
    let directions: Vec<_> = numerics
        .filter_map(|(word, numerics)| Some(format!("{word} a {}", numerics.nvfp4()?.direction.word())))
        .collect();
    format!(
        "Global scale of nvfp4, instead of one computed from amax\n\n\
         A number for all tensors, in the numerics' direction ({}). Or a .safetensors file with one for \
         each tensor X, called X_global_scale (a divisor), X_scale_2 (a multiplier) or X (the numerics' \
         direction). Or none, for block scales only.",
        directions.join(", ")
    )
}

impl RecipeArgs {
    /// The recipes of the file or preset, if one is named, changed by the options.
    pub(crate) fn recipes(&self) -> checkpoint::Result<Recipes> {
        let mut recipes = match &self.quality.recipe {
            None => Recipes::default(),
            Some(named) => Recipes::named(named)?,
        };
        recipes.set(self.settings());
        recipes.select(&self.quality.selection.include, &self.quality.selection.exclude)?;
        Ok(recipes)
    }

    /// The settings that are given as options.
    fn settings(&self) -> Settings {
        let (quality, numerics) = (&self.quality, &self.numerics);
        Settings {
            format: quality.format,
            numerics: numerics.numerics,
            scale_rule: numerics.scale_rule,
            ties: numerics.ties,
            global_scale: numerics.global_scale.as_ref().map(|global_scale| match global_scale {
                GlobalScaleArg::None => GlobalSetting::Absent,
                GlobalScaleArg::Value(value) => GlobalSetting::Value(*value),
                // Global scales of a file replace the computed ones when the plan is made.
                GlobalScaleArg::File(_) => GlobalSetting::FromAmax,
            }),
            search: quality.selection.search.or(quality.gptq.then_some(Search::Full)),
            search_global: quality.search_global.then_some(true),
            non_finite: numerics.non_finite,
            hadamard: quality.hadamard.map(Some),
        }
    }

    /// Whether to compare each chosen scale with all others.
    pub(crate) fn check_search(&self) -> bool {
        self.quality.check_search
    }

    /// The recipe's file, if it is one and no preset.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.quality.recipe.as_deref().map(Path::new).filter(|path| path.is_file())
    }

    /// The file with importance by column, unless GPTQ replaces it.
    ///
    /// # Errors
    /// [`GivenError::Incomplete`](checkpoint::GivenError::Incomplete) for an interrupted calibration.
    pub(crate) fn importance(&self) -> checkpoint::Result<Option<PathBuf>> {
        let calibrated = self.quality.calibration.as_ref().filter(|_| !self.quality.gptq);
        let calibrated = calibrated.map(|directory| calibration::importance(directory)).transpose()?;
        Ok(self.quality.importance.clone().or(calibrated))
    }

    /// The options of GPTQ.
    pub(crate) fn gptq(&self) -> Option<Gptq> {
        let quality = &self.quality;
        let statistics = quality.calibration.as_ref().filter(|_| quality.gptq)?;
        let (order, static_scales) = (quality.gptq_order, quality.gptq_static_scales);
        Some(Gptq::new(statistics).with(order, static_scales, quality.gptq_damping))
    }

    /// The file with global scales.
    pub(crate) fn global_scales(&self) -> Option<&Path> {
        match &self.numerics.global_scale {
            Some(GlobalScaleArg::File(path)) => Some(path),
            _ => None,
        }
    }
}

/// Recipes in words, a line for each, and a line for the checkpoint format:
/// `format  mxfp4, numerics ocp: …`.
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

/// A recipe's format, and its differences from the first recipe of that format:
/// `nvfp4, search full`.
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
    if let Some(width) = fact("hadamard") {
        details.push(format!("Hadamard transform of {width} columns"));
    }
    if let Some(search) = fact("search").filter(|search| *search != Search::None.word()) {
        details.push(format!("scales searched: {search}"));
    }
    if let Some(importance) = fact("importance") {
        details.push(format!("errors weighted by importance {importance}"));
    }
    if let Some(gptq) = fact("gptq") {
        details.push(format!("GPTQ: {gptq}"));
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
