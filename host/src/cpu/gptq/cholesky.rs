//! The Cholesky factorization in f64, tile by tile.
//!
//! The symmetric matrix is given by its upper triangle, and the factor M with MᵀM = H replaces it.
//! Every entry is computed by the textbook's operations in the textbook's order:
//!
//! ```text
//! M[j][i] = (H[j][i] − M[0][j]·M[0][i] − M[1][j]·M[1][i] − … − M[j−1][j]·M[j−1][i]) / M[j][j]
//! ```
//!
//! where each product and its difference are one fused operation, so the bits do not depend on the
//! number of threads or the instruction set. Panels of [`PANEL`] tiles are finished from left to
//! right. The columns of a panel are finished by one thread, and all later columns of its rows in
//! parallel.

use rayon::prelude::*;

use super::products::{CHUNK, TILE, subtract_products_f64, tile_at};
use super::triangle::Triangle;
use crate::cpu::isa::Isa;

/// Tiles in a panel. A chunk of its rows fits the L2 cache.
const PANEL: usize = 16;

/// Rows of a tile, eight columns each.
type Rows = [[f64; TILE]];

/// Factors a matrix in place.
///
/// # Errors
/// The first column whose pivot is not positive.
pub(super) fn factor(isa: Isa, matrix: &mut Triangle<f64>) -> Result<(), usize> {
    let tiles = &mut matrix.0;
    for first in (0..tiles.len()).step_by(PANEL) {
        let count = PANEL.min(tiles.len() - first);
        let (panel, rest) = tiles[first..].split_at_mut(count);
        let start = first * TILE;
        {
            let (done, mut open): (Vec<&Rows>, Vec<&mut Rows>) = panel
                .iter_mut()
                .map(|tile| {
                    let (done, open) = tile.split_at_mut(start);
                    (&*done, open)
                })
                .unzip();
            open.par_iter_mut().enumerate().for_each(|(tile, open)| {
                isa.subtract_panel(&done[..=tile], done[tile], open);
            });
        }
        isa.factor_panel(first, panel)?;
        let panel = &*panel;
        rest.par_iter_mut().for_each(|tile| {
            let (done, open) = tile.split_at_mut(start);
            let of_panel: Vec<&Rows> = panel.iter().map(|tile| &tile[..start]).collect();
            isa.subtract_panel(&of_panel, done, open);
            isa.solve_panel(start, panel, tile);
        });
    }
    Ok(())
}

/// Subtracts the products of finished rows from a panel's rows of one tile.
///
/// `panel` has the finished rows of the panel's tiles, `done` this tile's, and `open` has
/// eight rows for each tile of the panel, or more.
#[inline(always)]
pub(in crate::cpu) fn subtract_panel(panel: &[&Rows], done: &Rows, open: &mut Rows) {
    for first in (0..done.len()).step_by(CHUNK) {
        let last = done.len().min(first + CHUNK);
        for (rows, tile) in panel.iter().zip(open.as_chunks_mut::<TILE>().0) {
            subtract_products_f64(tile, &rows[first..last], &done[first..last]);
        }
    }
}

/// Finishes a panel's rows of one tile, given the panel's finished tiles.
///
/// `start` is the first row of the panel.
#[inline(always)]
pub(in crate::cpu) fn solve(start: usize, panel: &[Vec<[f64; TILE]>], tile: &mut Rows) {
    for (i, of_panel) in panel.iter().enumerate() {
        let row = start + i * TILE;
        let (done, open) = tile.split_at_mut(row);
        let rows = tile_at(open, 0);
        subtract_products_f64(rows, &of_panel[start..row], &done[start..]);
        for k in 0..TILE {
            let of_row = &of_panel[row + k];
            rows[k].iter_mut().for_each(|entry| *entry /= of_row[k]);
            let finished = rows[k];
            for m in k + 1..TILE {
                for lane in 0..TILE {
                    rows[m][lane] = (-of_row[m]).mul_add(finished[lane], rows[m][lane]);
                }
            }
        }
    }
}

/// Finishes the last rows of a panel's tiles, from tile `first` on, whose rows before the panel are
/// finished and subtracted.
///
/// # Errors
/// The first column whose pivot is not positive.
#[inline(always)]
pub(in crate::cpu) fn factor_panel(first: usize, panel: &mut [Vec<[f64; TILE]>]) -> Result<(), usize> {
    let start = first * TILE;
    for tile in 0..panel.len() {
        let (earlier, later) = panel.split_at_mut(tile);
        solve(start, earlier, &mut later[0]);
        factor_tile(start, first + tile, &mut later[0])?;
    }
    Ok(())
}

/// Factors the last eight rows of a tile, whose earlier rows are finished.
#[inline(always)]
fn factor_tile(start: usize, tile: usize, rows: &mut Rows) -> Result<(), usize> {
    let row = tile * TILE;
    let (done, open) = rows.split_at_mut(row);
    let square = tile_at(open, 0);
    subtract_products_f64(square, &done[start..], &done[start..]);
    for k in 0..TILE {
        let pivot = square[k][k];
        // A NaN is not positive either.
        if !(pivot > 0.0 && pivot < f64::INFINITY) {
            return Err(row + k);
        }
        let root = pivot.sqrt();
        square[k][..k].fill(0.0);
        square[k][k] = root;
        square[k][k + 1..].iter_mut().for_each(|entry| *entry /= root);
        let finished = square[k];
        for m in k + 1..TILE {
            for lane in m..TILE {
                square[m][lane] = (-finished[m]).mul_add(finished[lane], square[m][lane]);
            }
        }
    }
    Ok(())
}

/// [`factor`] by the textbook: one entry after the other.
///
/// # Errors
/// The errors of [`factor`].
pub(super) fn factor_reference(matrix: &mut Triangle<f64>) -> Result<(), usize> {
    for i in 0..matrix.0.len() * TILE {
        for j in 0..=i {
            let mut entry = matrix.at(j, i);
            for k in 0..j {
                entry = (-matrix.at(k, j)).mul_add(matrix.at(k, i), entry);
            }
            if j == i && !(entry > 0.0 && entry < f64::INFINITY) {
                return Err(i);
            }
            matrix.0[i / TILE][j][i % TILE] = if j == i { entry.sqrt() } else { entry / matrix.at(j, j) };
        }
        for below in i + 1..(i / TILE + 1) * TILE {
            matrix.0[i / TILE][below][i % TILE] = 0.0;
        }
    }
    Ok(())
}
