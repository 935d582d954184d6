//! Recipes in serde's formats, with the words of `Display` and `FromStr`. Needs the feature
//! `serde`.

use std::borrow::Cow;
use std::str::FromStr;

use microscale_formats::{
    Format, GlobalScale, NegativeZero, ScaleLayout, ScaleRule, Search, Ties, UnknownWord, Words,
};
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Recipe;
use crate::scheme::{Global, NonFinite, Numerics, Scheme};

/// A value that is serialized as its word.
struct Word<T>(T);

impl<T: Words> Serialize for Word<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.word())
    }
}

impl<'de, T: Words + FromStr<Err = UnknownWord>> Deserialize<'de> for Word<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let word = Cow::<str>::deserialize(deserializer)?;
        word.parse().map(Self).map_err(|error| D::Error::custom(format_args!("{word:?}: {error}")))
    }
}

/// The source of a global scale.
#[derive(Serialize, Deserialize)]
enum GlobalInWords {
    #[serde(rename = "from amax")]
    FromAmax,
    #[serde(rename = "none")]
    Absent,
    #[serde(rename = "divisor")]
    Divisor(f32),
    #[serde(rename = "multiplier")]
    Multiplier(f32),
}

impl From<Global> for GlobalInWords {
    fn from(global: Global) -> Self {
        match global {
            Global::FromAmax => Self::FromAmax,
            Global::Absent => Self::Absent,
            Global::Given(GlobalScale::Divisor(value)) => Self::Divisor(value),
            Global::Given(GlobalScale::Multiplier(value)) => Self::Multiplier(value),
        }
    }
}

impl From<GlobalInWords> for Global {
    fn from(global: GlobalInWords) -> Self {
        match global {
            GlobalInWords::FromAmax => Self::FromAmax,
            GlobalInWords::Absent => Self::Absent,
            GlobalInWords::Divisor(value) => Self::Given(GlobalScale::Divisor(value)),
            GlobalInWords::Multiplier(value) => Self::Given(GlobalScale::Multiplier(value)),
        }
    }
}

/// A serialized recipe. Missing fields have the format's defaults.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InWords {
    format: Word<Format>,
    #[serde(default, alias = "convention", skip_serializing_if = "Option::is_none")]
    numerics: Option<Word<Numerics>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale_rule: Option<Word<ScaleRule>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ties: Option<Word<Ties>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    negative_zero: Option<Word<NegativeZero>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_scale: Option<GlobalInWords>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    search: Option<Word<Search>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale_layout: Option<Word<ScaleLayout>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    non_finite: Option<Word<NonFinite>>,
}

/// Serializes the format, the name of the numerics or else their rules, and the other choices.
///
/// Each is a word. NVFP4 numerics without a name are an error.
impl Serialize for Recipe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let numerics = self.scheme.numerics();
        let mut words = InWords {
            format: Word(self.format()),
            numerics: numerics.map(Word),
            scale_rule: None,
            ties: None,
            negative_zero: None,
            global_scale: None,
            search: Some(Word(self.search)),
            scale_layout: Some(Word(self.scale_layout)),
            non_finite: Some(Word(self.non_finite)),
        };
        match (self.scheme, numerics) {
            (Scheme::Nvfp4(_, global), Some(_)) => words.global_scale = Some(global.into()),
            (Scheme::Nvfp4(..), None) => {
                return Err(S::Error::custom("an NVFP4 arithmetic of no library has no name"));
            }
            (Scheme::Mxfp4(arithmetic), None) => {
                words.scale_rule = Some(Word(arithmetic.scale_rule));
                words.ties = Some(Word(arithmetic.ties));
                words.negative_zero = Some(Word(arithmetic.negative_zero));
            }
            (Scheme::Mxfp8E4m3(rule) | Scheme::Mxfp8E5m2(rule), None) => words.scale_rule = Some(Word(rule)),
            (Scheme::Mxfp4(_) | Scheme::Mxfp8E4m3(_) | Scheme::Mxfp8E5m2(_) | Scheme::Comparison(_), _) => {}
        }
        words.serialize(serializer)
    }
}

/// Deserializes the output of `Serialize`. Only the format is required.
///
/// The default numerics are [`Numerics::default_for`] the format, and the rest is as in
/// [`Recipe::of`]. Rules override the numerics.
///
/// ```
/// use microscale::{Numerics, Format, Recipe};
///
/// let recipe: Recipe = serde_json::from_str(r#"{"format": "nvfp4", "numerics": "modelopt"}"#)?;
/// assert_eq!(recipe, Recipe::of(Format::Nvfp4, Numerics::Modelopt).expect("ModelOpt's NVFP4"));
/// assert!(serde_json::to_string(&recipe)?.contains(r#""global_scale":"from amax""#));
/// # Ok::<(), serde_json::Error>(())
/// ```
impl<'de> Deserialize<'de> for Recipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let words = InWords::deserialize(deserializer)?;
        let format = words.format.0;
        let numerics = words.numerics.map_or(Numerics::default_for(format), |word| word.0);
        let mut recipe = Self::of(format, numerics).map_err(D::Error::custom)?;
        let none = |key| D::Error::custom(format_args!("{format} has no {key}"));
        if let Some(Word(rule)) = words.scale_rule {
            *recipe.scheme.scale_rule_mut().ok_or_else(|| none("scale_rule"))? = rule;
        }
        if let Some(Word(ties)) = words.ties {
            recipe.scheme.mxfp4_mut().ok_or_else(|| none("ties"))?.ties = ties;
        }
        if let Some(Word(negative_zero)) = words.negative_zero {
            recipe.scheme.mxfp4_mut().ok_or_else(|| none("negative_zero"))?.negative_zero = negative_zero;
        }
        if let Some(global) = words.global_scale {
            let Scheme::Nvfp4(_, of_scheme) = &mut recipe.scheme else { return Err(none("global_scale")) };
            *of_scheme = global.into();
        }
        recipe.search = words.search.map_or(recipe.search, |word| word.0);
        recipe.scale_layout = words.scale_layout.map_or(recipe.scale_layout, |word| word.0);
        recipe.non_finite = words.non_finite.map_or(recipe.non_finite, |word| word.0);
        recipe.check().map_err(D::Error::custom)?;
        Ok(recipe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comes_back(recipe: Recipe) {
        let text = serde_json::to_string(&recipe).expect("a recipe in words");
        let back: Recipe = serde_json::from_str(&text).expect(&text);
        assert_eq!(back, recipe, "{text}");
    }

    #[test]
    fn recipes_round_trip() {
        for (_, format) in Format::WORDS {
            for (_, numerics) in Numerics::WORDS {
                let Ok(recipe) = Recipe::of(*format, *numerics) else { continue };
                comes_back(recipe);
                for (_, non_finite) in NonFinite::WORDS {
                    comes_back(Recipe { non_finite: *non_finite, ..recipe });
                }
                for (_, scale_layout) in ScaleLayout::WORDS {
                    comes_back(Recipe { scale_layout: *scale_layout, ..recipe });
                }
                for (_, search) in Search::WORDS.iter().filter(|_| format.is_searched()) {
                    comes_back(Recipe { search: *search, ..recipe });
                }
                comes_back(recipe.with_global(Global::Absent));
                let Scheme::Nvfp4(arithmetic, _) = recipe.scheme else { continue };
                let given = GlobalScale::of(arithmetic.direction, 0.37);
                comes_back(recipe.with_global(Global::Given(given)));
                let text = serde_json::to_value(recipe.with_global(Global::Given(given))).expect("words");
                assert!(text["global_scale"][arithmetic.direction.word()].is_number(), "{text}");
            }
        }
        for (_, rule) in ScaleRule::WORDS {
            comes_back(Recipe { scheme: Scheme::Mxfp8E5m2(*rule), ..Recipe::default() });
            for (_, ties) in Ties::WORDS {
                for (_, negative_zero) in NegativeZero::WORDS {
                    let (scale_rule, ties, negative_zero) = (*rule, *ties, *negative_zero);
                    let arithmetic = microscale_formats::mx::Arithmetic { scale_rule, ties, negative_zero };
                    comes_back(Recipe { scheme: Scheme::Mxfp4(arithmetic), ..Recipe::default() });
                }
            }
        }
    }

    #[test]
    fn wrong_recipes_are_refused_with_a_reason() {
        for (text, reason) in [
            (r#"{"format": "mxfp5"}"#, "unknown format; there are mxfp4, "),
            (r#"{"numerics": "ocp"}"#, "missing field `format`"),
            (r#"{"format": "nvfp4", "numerics": "ggml"}"#, "nvfp4 has no numerics ggml"),
            (r#"{"format": "nvfp4", "ties": "even"}"#, "nvfp4 has no ties"),
            (r#"{"format": "mxfp4", "global_scale": "none"}"#, "mxfp4 has no global_scale"),
            (r#"{"format": "mxfp8-e4m3", "search": "full"}"#, "cannot be searched"),
            (r#"{"format": "mxfp4", "block": 16}"#, "unknown field `block`"),
            (r#"{"format": "nvfp4", "global_scale": {"multiplier": 2.0}}"#, "these numerics take a divisor"),
        ] {
            let error = serde_json::from_str::<Recipe>(text).expect_err(text).to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
