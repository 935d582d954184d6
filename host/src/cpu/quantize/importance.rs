//! The importance of errors, checked and prepared for the search in pieces of rows.

use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::isa::Isa;
use crate::cpu::rounding::params::QuantizeParams;
use crate::cpu::search::hessian::HessianStore;
use crate::elements::Elements;
use crate::error::Result;
use crate::options::Importance;
use crate::recipe::{Recipe, check_importance};

/// The importance of a matrix's errors.
pub(in crate::cpu) enum PreparedImportance<'a> {
    /// All errors count alike.
    Equal,
    /// A number for each column.
    Columns(&'a [f32]),
    /// A Hessian for each block of columns.
    Hessians(HessianStore),
}

impl<'a> PreparedImportance<'a> {
    /// Checks importance for a matrix of so many columns, and prepares it.
    pub(in crate::cpu) fn new(importance: Importance<'a>, recipe: &Recipe, columns: usize) -> Result<Self> {
        Ok(match importance {
            Importance::Equal => Self::Equal,
            Importance::Columns(numbers) => {
                check_importance(numbers, columns)?;
                Self::Columns(numbers)
            }
            Importance::Hessians(entries) => Self::Hessians(HessianStore::new(entries, recipe, columns)?),
        })
    }

    /// Quantizes a piece of a row that begins at column `col`, the first of a block. Where errors count alike,
    /// the piece may be of several rows.
    pub(in crate::cpu) fn quantize(
        &self,
        isa: Isa,
        values: Elements<'_>,
        col: usize,
        params: &QuantizeParams,
        output: Output<'_>,
    ) -> Tally {
        match self {
            Self::Equal => isa.quantize(values, None, params, output),
            Self::Columns(numbers) => {
                isa.quantize(values, Some(&numbers[col..][..values.len()]), params, output)
            }
            Self::Hessians(store) => {
                let hessians = store.at_column(col, output.scales.len());
                isa.quantize_hessian(values, hessians, params, output)
            }
        }
    }
}
