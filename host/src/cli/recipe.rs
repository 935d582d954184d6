//! Options that say how to quantize, and recipes in words.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;

use super::Usage;
use super::words::words;
use crate::checkpoint::Importance;
use crate::formats::{ScaleRule, Ties};
use crate::recipe::Words;
use crate::{Convention, Error, Format, Global, GlobalScale, NonFinite, Recipe, Scheme, Search};

#[derive(clap::Args)]
pub(super) struct RecipeArgs {
    /// The format
    #[arg(long, default_value = "mxfp4", value_parser = words::<Format>())]
    format: Format,
    /// The library whose arithmetic is followed [default: ocp, and for nvfp4 compressed-tensors]
    #[arg(long, value_parser = words::<Convention>())]
    convention: Option<Convention>,
    /// How block scales follow from the largest magnitude, instead of the convention's way (mxfp4, mxfp8)
    #[arg(long, value_parser = words::<ScaleRule>())]
    scale_rule: Option<ScaleRule>,
    /// Where values halfway between two codes go, instead of the convention's way (mxfp4)
    #[arg(long, value_parser = words::<Ties>())]
    ties: Option<Ties>,
    #[arg(long, value_name = "VALUE|FILE|none", help = global_scale_help())]
    global_scale: Option<GlobalScaleArg>,
    /// Choose block scales by the squared error that they make, instead of by the largest magnitude: the better of two (four-six), the
    /// best near the usual one (window), or the best of all (full) (mxfp4, nvfp4)
    #[arg(long, default_value = "none", value_parser = words::<Search>())]
    search: Search,
    /// Weight errors by column in the search: a .safetensors file with a vector of floats for each tensor X, called X.importance,
    /// X_importance or X, one number for each column of X (such as the mean square of the activations that it meets). Tensors
    /// without one are searched unweighted
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Search for the global scale too: for each tensor, or all that share one, the best of a few by squared error, not weighted
    /// (nvfp4, with --search)
    #[arg(long)]
    pub(super) search_global: bool,
    /// Compare each scale that was chosen with all that can be stored, slowly, and stop if one errs less (with --search full)
    #[arg(long)]
    pub(super) check_search: bool,
    /// What to do about NaN and infinities
    #[arg(long, default_value = "error", value_parser = words::<NonFinite>())]
    non_finite: NonFinite,
}

/// Where global scales come from, if not from amax.
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

/// Says each convention's direction, out of the library's own table.
fn global_scale_help() -> String {
    let conventions = Convention::WORDS.iter();
    let directions: Vec<_> = conventions
        .filter_map(|(word, convention)| Some(format!("{word} a {}", convention.nvfp4()?.direction.word())))
        .collect();
    format!(
        "The global scale of nvfp4, instead of one computed from the largest magnitude: a number for all tensors, in the \
         convention's direction ({}); a .safetensors file with one for each tensor X, called X_global_scale (a divisor), \
         X_scale_2 (a multiplier) or X (the convention's direction); or none, for block scales alone",
        directions.join(", ")
    )
}

impl RecipeArgs {
    /// The recipe.
    ///
    /// # Errors
    /// [`Usage`] for options that do not go together.
    pub(super) fn recipe(&self) -> Result<Recipe> {
        let format = self.format;
        let convention = self.convention.unwrap_or(Convention::default_for(format));
        let mut recipe = Recipe::of(format, convention).map_err(Usage::new)?;
        recipe.non_finite = self.non_finite;
        recipe.search = self.search;
        recipe.check().map_err(Usage::new)?;
        if let Some(rule) = self.scale_rule {
            set_scale_rule(&mut recipe.scheme, rule)?;
        }
        if let Some(ties) = self.ties {
            set_ties(&mut recipe.scheme, ties)?;
        }
        if let Some(global_scale) = &self.global_scale {
            recipe = recipe.with_global(global(global_scale, &recipe.scheme)?);
        }
        if self.importance.is_some() {
            Importance::check(&recipe).map_err(Usage::new)?;
        }
        Ok(recipe)
    }

    /// The file with weights by column.
    pub(super) fn importance(&self) -> Option<&Path> {
        self.importance.as_deref()
    }

    /// The file with global scales.
    pub(super) fn global_scales(&self) -> Option<&Path> {
        match &self.global_scale {
            Some(GlobalScaleArg::File(path)) => Some(path),
            _ => None,
        }
    }
}

fn set_scale_rule(scheme: &mut Scheme, rule: ScaleRule) -> Result<()> {
    match scheme {
        Scheme::Mxfp4(arithmetic) => arithmetic.scale_rule = rule,
        Scheme::Mxfp8E4m3(scale_rule) | Scheme::Mxfp8E5m2(scale_rule) => *scale_rule = rule,
        Scheme::Nvfp4(..) => {
            let why = "--scale-rule is about scales that are powers of two, which nvfp4 does not have; its block scales \
                       follow from --convention alone";
            return Err(Usage::new(why).into());
        }
    }
    Ok(())
}

fn set_ties(scheme: &mut Scheme, ties: Ties) -> Result<()> {
    let format = scheme.format();
    let Scheme::Mxfp4(arithmetic) = scheme else {
        let why = format!("--ties is for mxfp4; every implementation of {format} takes ties to even");
        return Err(Usage::new(why).into());
    };
    arithmetic.ties = ties;
    Ok(())
}

/// Where the global scale comes from. Those of a file take the place of computed ones when the plan is made.
fn global(global_scale: &GlobalScaleArg, scheme: &Scheme) -> Result<Global> {
    let Scheme::Nvfp4(arithmetic, _) = scheme else {
        return Err(Usage::new(Error::NoGlobalScale { format: scheme.format() }).into());
    };
    Ok(match global_scale {
        GlobalScaleArg::None => Global::Absent,
        GlobalScaleArg::File(_) => Global::FromAmax,
        GlobalScaleArg::Value(value) => {
            let given = GlobalScale::of(arithmetic.direction, *value);
            if !given.in_range() {
                return Err(Usage::new(Error::GlobalScale { given }).into());
            }
            Global::Given(given)
        }
    })
}

/// A recipe's facts in a line: `mxfp4, convention ocp: scale rule floor, ties even, -0 keep`.
pub(super) fn recipe_text(facts: &[(&'static str, String)]) -> String {
    let fact = |wanted| facts.iter().find(|(name, _)| *name == wanted).map(|(_, fact)| fact.as_str());
    let mut text = fact("format").unwrap_or_default().to_string();
    if let Some(convention) = fact("convention") {
        text += &format!(", convention {convention}");
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
    let files = fact("files").map_or(String::new(), |files| format!("\nfiles   {files}"));
    format!("{text}: {}{files}", details.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_in_words() {
        let text = |format, convention, global| {
            recipe_text(&Recipe::of(format, convention).unwrap().with_global(global).facts())
        };
        assert_eq!(
            text(Format::Mxfp4, Convention::Ocp, Global::FromAmax),
            "mxfp4, convention ocp: scale rule floor, ties even, -0 keep"
        );
        assert_eq!(
            text(Format::Mxfp8E4m3, Convention::Ocp, Global::FromAmax),
            "mxfp8-e4m3, convention ocp: scale rule floor"
        );
        assert_eq!(
            text(Format::Nvfp4, Convention::CompressedTensors, Global::FromAmax),
            "nvfp4, convention compressed-tensors: block scale G * (amax / 6), quotient x / (b / G), -0 drop-input, \
             global scale from amax, a divisor that fused layers share"
        );
        let modelopt = |global| text(Format::Nvfp4, Convention::Modelopt, global);
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
