//! Upper triangular matrices in tiles of columns.

use rayon::prelude::*;

use super::products::TILE;

/// An upper triangular matrix: tile t has columns 8t to 8t + 7, and their rows up to 8t + 7.
///
/// The eight columns of a row are contiguous, and so are the rows of a tile. Both operands of
/// `subtract_products` are therefore read in the order of memory.
#[derive(Clone, Debug)]
pub(super) struct Triangle<T>(pub(super) Vec<Vec<[T; TILE]>>);

impl<T: Copy + Default + Send + Sync> Triangle<T> {
    /// Makes a matrix from its 8×8 tiles. `square` fills rows 8i to 8i + 7 of tile t.
    pub(super) fn from_squares(
        tiles: usize,
        square: impl Fn(usize, usize, &mut [[T; TILE]; TILE]) + Sync,
    ) -> Self {
        let fill = |tile: usize| {
            let mut rows = vec![[T::default(); TILE]; (tile + 1) * TILE];
            let squares = rows.as_chunks_mut::<TILE>().0;
            squares.iter_mut().enumerate().for_each(|(i, rows)| square(i, tile, rows));
            rows
        };
        Self((0..tiles).into_par_iter().map(fill).collect())
    }

    /// The entry of a row and a column. The row is at most the column's tile's last.
    pub(super) fn at(&self, row: usize, col: usize) -> T {
        self.0[col / TILE][row][col % TILE]
    }
}
