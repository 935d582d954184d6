//! Block Hadamard transforms of weights and of the inputs of their layers.
//!
//! Each block of consecutive columns of a row is multiplied by the orthonormal Hadamard matrix H of
//! Sylvester's construction. H is symmetric and its own inverse, so with transformed rows W·H and
//! inputs x·H a layer has the output (x·H)·(W·H)ᵀ = x·Wᵀ. Outliers of a column are spread over its
//! block, which helps formats whose scales are coarse.
//!
//! The transform is computed in f32, by [`hadamard`]: sums and differences of elements 1, 2, 4, …
//! apart, and one product with 1 / √width at the end.

use crate::activations::hadamard;

/// The number of columns of a block of a Hadamard transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HadamardWidth {
    /// 16 columns.
    W16,
    /// 32 columns.
    W32,
    /// 64 columns.
    W64,
    /// 128 columns.
    W128,
}

crate::words!(HadamardWidth, "width of a Hadamard transform" {
    HadamardWidth::W16 = "16",
    HadamardWidth::W32 = "32",
    HadamardWidth::W64 = "64",
    HadamardWidth::W128 = "128",
});

impl HadamardWidth {
    /// Returns the number of columns.
    pub const fn columns(self) -> usize {
        match self {
            Self::W16 => 16,
            Self::W32 => 32,
            Self::W64 => 64,
            Self::W128 => 128,
        }
    }

    /// Transforms each block of `values`, whose length must be a multiple of the width. The last
    /// block is left as it is if it is shorter.
    pub fn transform(self, values: &mut [f32]) {
        values.chunks_exact_mut(self.columns()).for_each(hadamard);
    }

    /// Returns whether the entry of H in this row and column is negative, before its division by
    /// √width.
    pub const fn is_negative(row: usize, column: usize) -> bool {
        (row & column).count_ones() % 2 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Words;
    use crate::activations::hadamard_factor;

    #[test]
    fn a_transformed_unit_vector_is_a_row_of_the_matrix() {
        for width in HadamardWidth::values() {
            let mut values = [0.0; 256];
            for row in [0, 1, 5, width.columns() - 1] {
                values.fill(0.0);
                values[width.columns() + row] = 1.0;
                width.transform(&mut values);
                let factor = hadamard_factor(width.columns());
                for (column, value) in values[width.columns()..][..width.columns()].iter().enumerate() {
                    let negative = HadamardWidth::is_negative(row, column);
                    assert_eq!(*value, if negative { -factor } else { factor }, "{width} {row} {column}");
                }
                assert!(values[..width.columns()].iter().all(|value| *value == 0.0));
            }
        }
    }
}
