//! The importance of errors: checks it, and hands each run its part.

use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::isa::Isa;
use crate::cpu::rounding::params::QuantizeParams;
use crate::cpu::search::hessian::HessianStore;
use crate::elements::Elements;
use crate::error::Result;
use crate::options::Importance;
use crate::recipe::{Recipe, check_importance};

/// The importance of a matrix's errors, checked.
pub(in crate::cpu) enum PreparedImportance<'a> {
    /// All errors count alike.
    Equal,
    /// One weight per column.
    Columns(&'a [f32]),
    /// One Hessian per block of columns.
    Hessians(HessianStore),
}

impl<'a> PreparedImportance<'a> {
    /// Checks and prepares the importance for a matrix of `columns` columns.
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

    /// Quantizes a run that starts at column `col`, which is the first of a block.
    ///
    /// If errors count alike, the run may span several rows.
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
