//! Recipes: the format, and everything else that determines the bytes.

#[cfg(feature = "serde")]
mod in_words;

use microscale_formats::{Format, ScaleLayout, Search, Words};

use crate::error::{Error, Result};
use crate::report::Report;
use crate::scheme::{Global, NonFinite, Numerics, Scheme};
use crate::shape::{QuantizedShape, Shape};

/// A recipe for quantization. The default is OCP's MXFP4 with linear scales and no non-finite
/// input.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recipe {
    /// The format and its arithmetic.
    pub scheme: Scheme,
    /// How block scales are chosen.
    pub search: Search,
    /// The layout of scale bytes.
    pub scale_layout: ScaleLayout,
    /// How NaN and infinities are treated.
    pub non_finite: NonFinite,
}

impl Recipe {
    /// Returns the recipe of a library's numerics in a format.
    ///
    /// # Errors
    /// [`Error::NoNumerics`] if the library does not have the format.
    pub fn of(format: Format, numerics: Numerics) -> Result<Self> {
        let scheme = numerics.scheme(format).ok_or(Error::NoNumerics { format, numerics })?;
        Ok(Self { scheme, ..Self::default() })
    }

    /// Returns the format.
    pub const fn format(&self) -> Format {
        self.scheme.format()
    }

    /// Replaces the global scale. Formats without one are unchanged.
    pub const fn with_global(mut self, global: Global) -> Self {
        if let Scheme::Nvfp4(arithmetic, _) = self.scheme {
            self.scheme = Scheme::Nvfp4(arithmetic, global);
        }
        self
    }

    /// Returns everything that determines the bytes as named facts, for messages and JSON.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let mut facts = vec![("format", self.format().to_string())];
        if let Some(numerics) = self.scheme.numerics() {
            facts.push(("numerics", numerics.word().into()));
        }
        let mut add = |name, value: &str| facts.push((name, value.into()));
        match self.scheme {
            Scheme::Mxfp4(arithmetic) => {
                add("scale_rule", arithmetic.scale_rule.word());
                add("ties", arithmetic.ties.word());
                add("negative_zero", arithmetic.negative_zero.word());
            }
            Scheme::Mxfp8E4m3(rule) | Scheme::Mxfp8E5m2(rule) => add("scale_rule", rule.word()),
            Scheme::Comparison(_) => {}
            Scheme::Nvfp4(arithmetic, global) => {
                add("block_scale", arithmetic.block_scale.word());
                add("quotient", arithmetic.quotient.word());
                add("negative_zero", arithmetic.negative_zero.word());
                match global {
                    Global::FromAmax => add("global_scale", "from amax"),
                    Global::Given(given) => add("global_scale", &given.value().to_string()),
                    Global::Absent => add("global_scale", "none"),
                }
                add("global_scale_direction", arithmetic.direction.word());
            }
        }
        add("search", self.search.word());
        add("scale_layout", self.scale_layout.word());
        add("non_finite", self.non_finite.word());
        facts
    }

    /// Applies the policy for NaN and infinities to the report of a quantization.
    pub(crate) fn accept(&self, report: Report) -> Result<Report> {
        match report.first_non_finite {
            Some(first) if self.non_finite == NonFinite::Error => Err(Error::NonFinite { first, report }),
            _ => Ok(report),
        }
    }

    /// Checks a given global scale, and that the format supports the search.
    ///
    /// All operations do this. Call it to learn about errors before starting.
    ///
    /// # Errors
    /// [`Error::NoSearch`], [`Error::GlobalScaleDirection`], [`Error::GlobalScale`].
    pub fn check(&self) -> Result<()> {
        if self.search != Search::None && !self.format().is_searched() {
            return Err(Error::NoSearch { format: self.format() });
        }
        match self.scheme {
            Scheme::Nvfp4(arithmetic, Global::Given(given)) => {
                if given.direction() != arithmetic.direction {
                    let (given, expected) = (given.direction(), arithmetic.direction);
                    return Err(Error::GlobalScaleDirection { given, expected });
                }
                if !given.in_range() {
                    return Err(Error::GlobalScale { given });
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Checks that importance has one finite non-negative number per column.
pub(crate) fn check_importance(importance: &[f32], columns: usize) -> Result<()> {
    let wrong = importance.iter().position(|number| !(*number >= 0.0 && number.is_finite()));
    if importance.len() != columns || wrong.is_some() {
        return Err(Error::Importance { found: importance.len(), columns, wrong });
    }
    Ok(())
}

impl QuantizedShape {
    /// Returns the shape of the tensor that a recipe makes of a matrix.
    pub const fn of(recipe: &Recipe, shape: Shape) -> Self {
        Self::new(recipe.format(), shape.rows, shape.cols).with_scale_layout(recipe.scale_layout)
    }
}
