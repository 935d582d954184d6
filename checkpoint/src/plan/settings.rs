//! Settings for quantizing, as files and command lines give them, and the resulting recipe.

use std::fmt;

use microscale::formats::{ScaleRule, Ties};
use microscale::{
    Format, Global, GlobalScale, HadamardWidth, NonFinite, Numerics, Recipe, Scheme, Search, Words,
};

use crate::error::Error;
use crate::error::plan::PlanError;

/// Settings of a recipe. Missing ones have defaults or come from other settings ([`Settings::or`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Settings {
    /// Format; MXFP4 by default.
    pub format: Option<Format>,
    /// Library whose arithmetic to follow. The default is [`Numerics::default_for`] the format.
    pub numerics: Option<Numerics>,
    /// Rule that computes block scales from the amax, instead of the numerics' rule. For MXFP4
    /// and MXFP8.
    pub scale_rule: Option<ScaleRule>,
    /// Rounding of values halfway between two codes, instead of the numerics' rule. For MXFP4.
    pub ties: Option<Ties>,
    /// Source of NVFP4's global scales.
    pub global_scale: Option<GlobalSetting>,
    /// Search for block scales.
    pub search: Option<Search>,
    /// True to search NVFP4's global scales, too.
    pub search_global: Option<bool>,
    /// Treatment of NaN and infinities.
    pub non_finite: Option<NonFinite>,
    /// Block Hadamard transform of layers' inputs, `Some(None)` for none. For MXFP4 and NVFP4.
    ///
    /// Layers whose transform no engine runs are quantized without it, with a warning.
    pub hadamard: Option<Option<HadamardWidth>>,
}

/// Source of NVFP4's global scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GlobalSetting {
    /// Computed from the amax of each tensor, or of the layer that engines fuse it into.
    FromAmax,
    /// The same number for all tensors, in the direction of the numerics.
    Value(f32),
    /// No global scale.
    Absent,
}

/// The key of a transform.
pub(crate) const HADAMARD: &str = "hadamard";

/// A setting that conflicts with the others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Misfit {
    /// Key of the setting in a recipe file.
    pub(crate) key: &'static str,
    /// Reason.
    pub(crate) why: Why,
}

/// Reason why a setting conflicts with the others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Why {
    /// The end of a sentence that begins with the setting's name.
    Is(String),
    /// A whole sentence.
    Whole(String),
}

impl Misfit {
    fn whole(key: &'static str, error: impl fmt::Display) -> Self {
        Self { key, why: Why::Whole(error.to_string()) }
    }

    /// Returns the message for a setting from the command line.
    pub(crate) fn of_option(&self) -> String {
        match &self.why {
            Why::Is(rest) => format!("--{} {rest}", self.key.replace('_', "-")),
            Why::Whole(sentence) => sentence.clone(),
        }
    }

    /// Returns the message for a setting from a file.
    pub(crate) fn of_key(&self) -> String {
        match &self.why {
            Why::Is(rest) => format!("{} {rest}", self.key),
            Why::Whole(sentence) => format!("{}: {sentence}", self.key),
        }
    }
}

impl Settings {
    /// Keys of the settings in files, in the order of the fields. docs/recipes.md lists them.
    pub const KEYS: [&'static str; 9] = [
        "format",
        "numerics",
        "scale_rule",
        "ties",
        "global_scale",
        "search",
        "search_global",
        "non_finite",
        "hadamard",
    ];

    /// Returns these settings, with missing ones from `defaults`.
    ///
    /// `scale_rule`, `ties`, `global_scale` and `search_global` belong to one format. They are not
    /// taken from settings for another format.
    pub fn or(self, defaults: Self) -> Self {
        let format = self.format.or(defaults.format);
        let same = format.unwrap_or_default() == defaults.format.unwrap_or_default();
        Self {
            format,
            numerics: self.numerics.or(defaults.numerics),
            scale_rule: self.scale_rule.or(defaults.scale_rule.filter(|_| same)),
            ties: self.ties.or(defaults.ties.filter(|_| same)),
            global_scale: self.global_scale.or(defaults.global_scale.filter(|_| same)),
            search: self.search.or(defaults.search),
            search_global: self.search_global.or(defaults.search_global.filter(|_| same)),
            non_finite: self.non_finite.or(defaults.non_finite),
            hadamard: self.hadamard.or(defaults.hadamard),
        }
    }

    /// Returns the keys that are set.
    pub(crate) fn given(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            self.format.is_some(),
            self.numerics.is_some(),
            self.scale_rule.is_some(),
            self.ties.is_some(),
            self.global_scale.is_some(),
            self.search.is_some(),
            self.search_global.is_some(),
            self.non_finite.is_some(),
            self.hadamard.is_some(),
        ];
        Self::KEYS.into_iter().zip(given).filter(|(_, given)| *given).map(|(key, _)| key)
    }

    /// Returns the recipe, and whether to search global scales, too.
    ///
    /// # Errors
    /// The first setting that conflicts with the others.
    pub(crate) fn recipe(&self) -> Result<(Recipe, bool), Misfit> {
        let format = self.format.unwrap_or_default();
        let numerics = self.numerics.unwrap_or(Numerics::default_for(format));
        let mut recipe = Recipe::of(format, numerics).map_err(|error| Misfit::whole("numerics", error))?;
        recipe.non_finite = self.non_finite.unwrap_or_default();
        recipe.search = self.search.unwrap_or_default();
        recipe.check().map_err(|error| Misfit::whole("search", error))?;
        if let Some(rule) = self.scale_rule {
            set_scale_rule(&mut recipe.scheme, rule)?;
        }
        if let Some(ties) = self.ties {
            set_ties(&mut recipe.scheme, ties)?;
        }
        if let Some(global_scale) = self.global_scale {
            recipe = recipe.with_global(global(global_scale, &recipe.scheme)?);
        }
        self.check_hadamard(format)?;
        let search_global = self.search_global == Some(true);
        if search_global {
            check_search_global(&recipe, false).map_err(|error| Misfit::whole("search_global", error))?;
        }
        Ok((recipe, search_global))
    }
}

impl Settings {
    /// Returns the width of the transform, if there is one.
    pub(crate) fn hadamard(&self) -> Option<HadamardWidth> {
        self.hadamard.flatten()
    }

    /// Checks that the other settings allow for a transform.
    fn check_hadamard(&self, format: Format) -> Result<(), Misfit> {
        let misfit = |why: String| Err(Misfit { key: HADAMARD, why: Why::Is(why) });
        match self.non_finite.unwrap_or_default() {
            _ if self.hadamard().is_none() => Ok(()),
            _ if !format.is_searched() => misfit(format!(
                "is for mxfp4 and nvfp4, and the format is {}; leave it out, or turn it off for these tensors by \
                 hadamard = \"none\" in a recipe's rule",
                format.word()
            )),
            NonFinite::Error => Ok(()),
            policy => misfit(format!(
                "spreads NaN and infinities over their block, which non_finite = \"{}\" allows; leave out one of both",
                policy.word()
            )),
        }
    }
}

fn set_scale_rule(scheme: &mut Scheme, rule: ScaleRule) -> Result<(), Misfit> {
    let format = scheme.format();
    let why = match scheme.scale_rule_mut() {
        Some(scale_rule) => {
            *scale_rule = rule;
            return Ok(());
        }
        None if format == Format::Nvfp4 => {
            "is about scales that are powers of two, which nvfp4 does not have; its block scales follow only \
             from the numerics"
                .into()
        }
        None => format!("is not for {format}, which has one rule"),
    };
    Err(Misfit { key: "scale_rule", why: Why::Is(why) })
}

fn set_ties(scheme: &mut Scheme, ties: Ties) -> Result<(), Misfit> {
    let format = scheme.format();
    let Some(arithmetic) = scheme.mxfp4_mut() else {
        let why = format!("is for mxfp4; every implementation of {format} takes ties to even");
        return Err(Misfit { key: "ties", why: Why::Is(why) });
    };
    arithmetic.ties = ties;
    Ok(())
}

fn global(global_scale: GlobalSetting, scheme: &Scheme) -> Result<Global, Misfit> {
    let misfit = |error| Err(Misfit::whole("global_scale", error));
    let Scheme::Nvfp4(arithmetic, _) = scheme else {
        return misfit(microscale::Error::NoGlobalScale { format: scheme.format() });
    };
    Ok(match global_scale {
        GlobalSetting::Absent => Global::Absent,
        GlobalSetting::FromAmax => Global::FromAmax,
        GlobalSetting::Value(value) => {
            let given = GlobalScale::of(arithmetic.direction, value);
            if !given.in_range() {
                return misfit(microscale::Error::GlobalScale { given });
            }
            Global::Given(given)
        }
    })
}

/// Checks that a recipe leaves a global scale to search.
///
/// `in_file` is true if a file gives the global scales.
pub(crate) fn check_search_global(recipe: &Recipe, in_file: bool) -> Result<(), Error> {
    let why = match recipe.scheme {
        Scheme::Nvfp4(_, Global::FromAmax) if !in_file => match recipe.search {
            Search::None => "block scales are not searched".into(),
            _ => return Ok(()),
        },
        Scheme::Nvfp4(_, Global::Absent) => "there is none (--global-scale none)".into(),
        Scheme::Nvfp4(..) => "it is given (--global-scale)".into(),
        _ => format!("the format is {}", recipe.format().word()),
    };
    Err(Error::Plan(PlanError::NoGlobalSearch { why }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_settings_are_taken_from_the_defaults() {
        let below = Settings {
            format: Some(Format::Mxfp4),
            numerics: Some(Numerics::CompressedTensors),
            ties: Some(Ties::Away),
            search: Some(Search::Full),
            ..Settings::default()
        };
        let rule = Settings { scale_rule: Some(ScaleRule::Ceil), ..Settings::default() };
        assert_eq!(rule.or(below), Settings { scale_rule: Some(ScaleRule::Ceil), ..below });
        assert_eq!(below.or(rule), rule.or(below));
        // Another format drops the settings that belong to one format.
        let nvfp4 = Settings { format: Some(Format::Nvfp4), ..Settings::default() };
        let both = nvfp4.or(below);
        assert_eq!((both.ties, both.numerics, both.search), (None, below.numerics, below.search));
        assert!(both.recipe().is_ok());
        // MXFP4 is the default format.
        assert_eq!(nvfp4.or(Settings { format: None, ..below }).ties, None);
        assert_eq!(below.or(Settings { format: None, ..below }).ties, Some(Ties::Away));
        let given: Vec<_> = below.given().collect();
        assert_eq!(given, ["format", "numerics", "ties", "search"]);
        assert_eq!(Settings::default().recipe(), Ok((Recipe::default(), false)));
    }

    #[test]
    fn misfits_are_called_by_their_names() {
        let nvfp4 = Settings { format: Some(Format::Nvfp4), ..Settings::default() };
        let misfit = |settings: Settings| settings.recipe().unwrap_err();
        let ties = misfit(Settings { ties: Some(Ties::Even), ..nvfp4 });
        assert!(ties.of_option().starts_with("--ties is for mxfp4"), "{ties:?}");
        assert!(ties.of_key().starts_with("ties is for mxfp4"), "{ties:?}");
        let rule = misfit(Settings { scale_rule: Some(ScaleRule::Even), ..nvfp4 });
        assert!(rule.of_option().starts_with("--scale-rule is about"), "{rule:?}");
        let numerics = misfit(Settings { numerics: Some(Numerics::Ocp), ..nvfp4 });
        assert!(numerics.of_key().starts_with("numerics: nvfp4 has no numerics ocp"), "{numerics:?}");
        let global = misfit(Settings { global_scale: Some(GlobalSetting::Value(0.0)), ..nvfp4 });
        assert_eq!(global.key, "global_scale");
        let searched = misfit(Settings { search_global: Some(true), ..nvfp4 });
        assert!(searched.of_key().contains("block scales are not searched"), "{searched:?}");
        let mxfp8 =
            Settings { format: Some(Format::Mxfp8E4m3), search: Some(Search::Full), ..Settings::default() };
        assert_eq!(misfit(mxfp8).key, "search");
    }
}
