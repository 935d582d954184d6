//! Recipes, made of words.

use std::fmt::Display;
use std::str::FromStr;

use microscale::formats::layout::{TILE_COLS, TILE_ROWS};
use microscale::formats::{ScaleRule, Ties};
use microscale::{
    Error, Format, Global, GlobalScale, NonFinite, Numerics, QuantizedShape, ScaleLayout, Scheme, Search,
    Words,
};
use pyo3::prelude::*;

use crate::array::{Array, Kind};
use crate::errors::{error, of_tensors};
use crate::interface::new_output;

/// A format, and everything else that decides the bytes.
#[pyclass(frozen, module = "microscale._microscale")]
pub(crate) struct Recipe(pub(crate) microscale::Recipe);

/// A choice by its word.
pub(crate) fn word<T: FromStr<Err: Display>>(py: Python<'_>, word: &str) -> PyResult<T> {
    word.parse().map_err(|why| error(py, format!("{word:?}: {why}")))
}

/// A word that may be left out.
pub(crate) fn optional<T: FromStr<Err: Display>>(py: Python<'_>, given: Option<&str>) -> PyResult<Option<T>> {
    given.map(|given| word(py, given)).transpose()
}

/// A global scale as an argument: a number, or the word `none`.
#[derive(FromPyObject)]
pub(crate) enum GivenGlobal {
    Word(String),
    Number(f64),
}

#[pymethods]
impl Recipe {
    #[new]
    #[pyo3(signature = (format, numerics, scale_rule, ties, search, global_scale, layout, non_finite))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords of one call in Python")]
    fn new(
        py: Python<'_>,
        format: &str,
        numerics: Option<&str>,
        scale_rule: Option<&str>,
        ties: Option<&str>,
        search: Option<&str>,
        global_scale: Option<GivenGlobal>,
        layout: &str,
        non_finite: &str,
    ) -> PyResult<Self> {
        let format: Format = word(py, format)?;
        let numerics = optional(py, numerics)?.unwrap_or(Numerics::default_for(format));
        let of_tensors = |error| of_tensors(py, error);
        let mut recipe = microscale::Recipe::of(format, numerics).map_err(of_tensors)?;
        if let Some(rule) = optional::<ScaleRule>(py, scale_rule)? {
            let own = recipe.scheme.scale_rule_mut();
            *own.ok_or_else(|| error(py, format!("{format} has no scale_rule to choose; leave it out")))? =
                rule;
        }
        if let Some(ties) = optional::<Ties>(py, ties)? {
            let own = recipe.scheme.mxfp4_mut();
            own.ok_or_else(|| error(py, format!("{format} has no ties to choose; leave it out")))?.ties =
                ties;
        }
        recipe.search = optional::<Search>(py, search)?.unwrap_or_default();
        recipe.scale_layout = word(py, layout)?;
        recipe.non_finite = word::<NonFinite>(py, non_finite)?;
        if let Some(given) = global_scale {
            let Scheme::Nvfp4(arithmetic, global) = &mut recipe.scheme else {
                return Err(of_tensors(Error::NoGlobalScale { format }));
            };
            *global = match given {
                GivenGlobal::Number(number) => {
                    Global::Given(GlobalScale::of(arithmetic.direction, number as f32))
                }
                GivenGlobal::Word(word) if word == "none" => Global::Absent,
                GivenGlobal::Word(word) => {
                    return Err(error(
                        py,
                        format!("global_scale is {word:?}; pass a number, \"none\", or leave it out"),
                    ));
                }
            };
        }
        recipe.check().map_err(of_tensors)?;
        Ok(Self(recipe))
    }

    /// The format's word.
    #[getter]
    fn format(&self) -> &'static str {
        self.0.format().word()
    }

    /// The direction of the numerics' global scales, for NVFP4.
    #[getter]
    fn direction(&self) -> Option<&'static str> {
        match &self.0.scheme {
            Scheme::Nvfp4(arithmetic, _) => Some(arithmetic.direction.word()),
            _ => None,
        }
    }

    /// Everything that decides the bytes, name by name.
    fn facts(&self) -> Vec<(&'static str, String)> {
        self.0.facts()
    }

    /// The sizes of the parts of a matrix: code bytes a row, and rows and columns of the scales.
    fn parts(&self, py: Python<'_>, rows: usize, cols: usize) -> PyResult<(usize, usize, usize)> {
        let shape = QuantizedShape::new(self.0.format(), rows, cols).with_scale_layout(self.0.scale_layout);
        sizes(shape).map_err(|error| of_tensors(py, error))
    }
}

impl Recipe {
    /// New tensors of PyTorch for the codes and scales of an array ([`new_output`]).
    pub(crate) fn new_outputs(
        &self,
        values: &Array,
        [codes, scales]: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<[Array; 2]> {
        let Some((&cols, leading)) = values.dims().split_last() else {
            return Err(error(codes.py(), "x has no dimensions; it must have one or more"));
        };
        let shape = QuantizedShape::new(self.0.format(), leading.iter().product(), cols)
            .with_scale_layout(self.0.scale_layout);
        let (of_codes, of_scales) = shape.bytes().map_err(|why| of_tensors(codes.py(), why))?;
        let new = |object, what, count| new_output(object, what, (Kind::Bytes, count), values.place());
        Ok([new(codes, "codes", of_codes)?, new(scales, "scales", of_scales)?])
    }
}

/// The sizes of the parts of a matrix: code bytes a row, and rows and columns of the scales' bytes.
pub(crate) fn sizes(shape: QuantizedShape) -> Result<(usize, usize, usize), Error> {
    shape.bytes()?;
    let (blocks, format) = (shape.blocks_per_row(), shape.format);
    let (rows, blocks_there) = match shape.scale_layout {
        ScaleLayout::Linear => (shape.rows, blocks),
        ScaleLayout::Swizzled => (shape.rows.next_multiple_of(TILE_ROWS), blocks.next_multiple_of(TILE_COLS)),
    };
    Ok((blocks * format.block_bytes(), rows, blocks_there * format.scale_bytes()))
}
