//! The factor of a layer's Hessian, which all matrices with the same inputs share.

use std::sync::Arc;

use microscale_formats::Format;
use rayon::prelude::*;

use super::cholesky;
use super::order::ColumnOrder;
use super::products::TILE;
use super::triangle::Triangle;
use crate::cpu::isa::Isa;
use crate::error::{Error, GptqFault, Result};
use crate::gptq::{Copies, GPTQ_DAMPING, GptqOptions};

/// The largest accepted asymmetry, relative to the geometric mean of the diagonal entries.
///
/// Products summed in 16 bits differ by this much.
const ASYMMETRY: f64 = 1.0 / 256.0;

/// The factor of the Hessian of a layer's inputs, for [`quantize_gptq`](crate::quantize_gptq()).
///
/// Layers with the same inputs, such as the projections to queries, keys and values, share one. It
/// has 2·K² bytes for K columns. GPUs that quantize with it keep a copy until it is dropped.
///
/// # Definition
/// The Hessian H is damped: the damping times the mean diagonal entry is added to its diagonal. It
/// is divided by that mean, and its rows and columns are sorted as [`GptqOrder`] says. In f64, H =
/// R·Rᵀ with R upper triangular. The factor has Rₖₖ and the quotients Rⱼₖ / Rₖₖ in f32.
///
/// A column whose diagonal entry is 0 is never active. Its other entries are ignored, and so it is
/// quantized plainly: no other column compensates for it. Its diagonal entry is the damping (1 % if
/// there is none), so that it hardly influences the scale of its block.
///
/// [`GptqOrder`]: crate::GptqOrder
#[derive(Clone, Debug)]
pub struct GptqFactor {
    pub(super) format: Format,
    pub(super) cols: usize,
    pub(super) order: ColumnOrder,
    /// Rⱼₖ / Rₖₖ above the diagonal, by position.
    pub(super) feedback: Triangle<f32>,
    /// Rₖₖ by position, and 0 for padding.
    pub(super) pivots: Vec<f32>,
    /// The divisor of the Hessian: its mean diagonal entry.
    pub(super) unit: f64,
    /// Copies in the memories of GPUs.
    pub(super) copies: Arc<Copies>,
}

impl GptqFactor {
    /// Factors the Hessian of a layer's inputs.
    ///
    /// `hessian` is H = XᵀX `[columns, columns]` of the inputs X `[tokens, columns]`, in any unit.
    /// Of mirrored entries one is used. Besides the Hessian, this needs 6·K² bytes.
    ///
    /// # Errors
    /// [`Error::Gptq`]: the format is neither MXFP4 nor NVFP4, the damping is not a number of at
    /// least 0, or the Hessian has another length, is not finite, not symmetric (beyond 1/256 of
    /// the geometric mean of its diagonal entries), negative on the diagonal, or, with the damping,
    /// not positive definite.
    pub fn new(hessian: &[f32], columns: usize, format: Format, options: GptqOptions) -> Result<Self> {
        Self::new_with(Isa::best(), hessian, columns, format, options)
    }

    /// [`Self::new`] with a given instruction set, for tests and comparisons.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    #[doc(hidden)]
    pub fn new_with(
        isa: Isa,
        hessian: &[f32],
        columns: usize,
        format: Format,
        options: GptqOptions,
    ) -> Result<Self> {
        let damping = options.damping;
        check(hessian, columns, format, damping).map_err(Error::Gptq)?;
        let diagonal: Vec<f32> = (0..columns).map(|i| hessian[i * columns + i]).collect();
        let order = ColumnOrder::new(&diagonal, format.block(), options.order);
        let active = diagonal.iter().filter(|entry| **entry > 0.0).count();
        let sum: f64 = diagonal.iter().map(|entry| f64::from(*entry)).sum();
        let unit = if active == 0 { 1.0 } else { sum / active as f64 };
        let damped = DampedHessian { entries: hessian, diagonal: &diagonal, order: &order, unit, damping };
        let tiles = order.len() / TILE;
        let mut matrix = Triangle::from_squares(tiles, |i, tile, square| damped.fill(i, tile, square));
        let factored = match isa {
            Isa::Reference => cholesky::factor_reference(&mut matrix),
            _ => cholesky::factor(isa, &mut matrix),
        };
        factored.map_err(|reversed| {
            let column = order.columns()[order.len() - 1 - reversed];
            Error::Gptq(GptqFault::NotPositiveDefinite { column, damping })
        })?;
        let pivot = |position: usize| {
            let reversed = order.len() - 1 - position;
            matrix.at(reversed, reversed)
        };
        let pivots = (0..order.len()).map(|position| {
            let padding = order.columns()[position] >= columns;
            if padding { 0.0 } else { pivot(position) as f32 }
        });
        let pivots = pivots.collect();
        let feedback = Triangle::from_squares(tiles, |i, tile, square| {
            // Reversed, R is the transposed factor.
            let row = (tiles - 1 - tile) * TILE;
            let of_factor = &matrix.0[tiles - 1 - i][row..][..TILE];
            for (j, entries) in square.iter_mut().enumerate() {
                for (k, entry) in entries.iter_mut().enumerate() {
                    if i * TILE + j < tile * TILE + k {
                        let other = of_factor[TILE - 1 - k][TILE - 1 - j];
                        *entry = (other / pivot(tile * TILE + k)) as f32;
                    }
                }
            }
        });
        Ok(Self { format, cols: columns, order, feedback, pivots, unit, copies: Arc::default() })
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.cols
    }

    /// Returns the format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Checks that the factor is for a matrix of `found` columns in `recipe`.
    pub(super) fn require(&self, found: usize, recipe: Format) -> Result<()> {
        let Self { format, cols: columns, .. } = *self;
        if found != columns || recipe != format {
            return Err(Error::Gptq(GptqFault::Factor { columns, format, found, recipe }));
        }
        Ok(())
    }
}

/// The Hessian to factor: damped, divided by its unit, in the reverse order of positions.
struct DampedHessian<'a> {
    entries: &'a [f32],
    diagonal: &'a [f32],
    order: &'a ColumnOrder,
    unit: f64,
    damping: f64,
}

impl DampedHessian<'_> {
    /// Fills rows 8i to 8i + 7 of a tile.
    fn fill(&self, i: usize, tile: usize, square: &mut [[f64; TILE]; TILE]) {
        let columns = self.order.columns();
        let column = |reversed: usize| columns[columns.len() - 1 - reversed];
        for lane in 0..TILE {
            let col = column(tile * TILE + lane);
            for (k, entries) in square.iter_mut().enumerate() {
                entries[lane] = self.entry(column(i * TILE + k), col);
            }
        }
    }

    fn entry(&self, row: usize, col: usize) -> f64 {
        let cols = self.diagonal.len();
        // Padding has a diagonal of 1.
        let [of_row, of_col] = [row, col].map(|i| self.diagonal.get(i).copied());
        match (of_row, of_col) {
            _ if row == col => match of_col {
                None => 1.0,
                Some(0.0) if self.damping == 0.0 => GPTQ_DAMPING,
                Some(entry) => f64::from(entry) / self.unit + self.damping,
            },
            (Some(a), Some(b)) if a > 0.0 && b > 0.0 => f64::from(self.entries[col * cols + row]) / self.unit,
            _ => 0.0,
        }
    }
}

/// Checks the operands of a factor.
fn check(hessian: &[f32], columns: usize, format: Format, damping: f64) -> Result<(), GptqFault> {
    if !format.is_searched() {
        return Err(GptqFault::Format { format });
    }
    if !(damping >= 0.0 && damping.is_finite()) {
        return Err(GptqFault::Damping { damping });
    }
    let (expected, found) = (columns.saturating_mul(columns), hessian.len());
    if found != expected {
        return Err(GptqFault::HessianLength { columns, expected, found });
    }
    let wrong = |row: usize| {
        let entries = &hessian[row * columns..][..columns];
        // Without an early exit the compiler vectorizes the loop.
        if entries.iter().fold(true, |all, entry| all & entry.is_finite()) {
            return (entries[row] < 0.0).then_some((row, row));
        }
        entries.iter().position(|entry| !entry.is_finite()).map(|col| (row, col))
    };
    if let Some((row, col)) = (0..columns).into_par_iter().find_map_first(wrong) {
        return Err(GptqFault::HessianEntry { row, col, value: hessian[row * columns + col] });
    }
    match (0..columns.div_ceil(SQUARE)).into_par_iter().find_map_first(|i| asymmetric(hessian, columns, i)) {
        Some((row, col)) => Err(GptqFault::NotSymmetric { row, col }),
        None => Ok(()),
    }
}

/// Rows and columns that are compared at once, so that both halves stay in the cache.
const SQUARE: usize = 64;

/// The first asymmetric entry below the diagonal in rows `SQUARE * band ..`.
fn asymmetric(hessian: &[f32], columns: usize, band: usize) -> Option<(usize, usize)> {
    let at = |row: usize, col: usize| f64::from(hessian[row * columns + col]);
    let rows = band * SQUARE..columns.min((band + 1) * SQUARE);
    for first in (0..rows.end).step_by(SQUARE) {
        for row in rows.clone() {
            for col in first..row.min(first + SQUARE) {
                let difference = at(row, col) - at(col, row);
                let limit = ASYMMETRY * ASYMMETRY * at(row, row) * at(col, col);
                // Entries of columns that are never active are ignored.
                if difference * difference > limit && limit > 0.0 {
                    return Some((row, col));
                }
            }
        }
    }
    None
}
