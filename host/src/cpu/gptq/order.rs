//! The order of quantization of a matrix's columns.

use crate::gptq::GptqOrder;

/// The columns of a matrix in their order of quantization.
#[derive(Clone, Debug)]
pub(super) struct ColumnOrder {
    /// The column at each position, with padding up to whole blocks.
    columns: Vec<usize>,
    block: usize,
    keeps_blocks: bool,
}

impl ColumnOrder {
    /// Orders columns by the diagonal of their Hessian.
    pub(super) fn new(diagonal: &[f32], block: usize, order: GptqOrder) -> Self {
        let padded = diagonal.len().next_multiple_of(block);
        // Padding is after all columns of its block.
        let weight = |column: usize| diagonal.get(column).map_or(-1.0, |entry| f64::from(*entry));
        let mut columns: Vec<usize> = (0..padded).collect();
        let descending = |weight: &dyn Fn(usize) -> f64, a: usize, b: usize| weight(b).total_cmp(&weight(a));
        if order == GptqOrder::Activation {
            let sum = |block: &[usize]| -> f64 { block.iter().map(|column| weight(*column).max(0.0)).sum() };
            let sums: Vec<f64> = columns.chunks(block).map(sum).collect();
            let mut blocks: Vec<usize> = (0..sums.len()).collect();
            // Stable sorts keep the order of equals.
            blocks.sort_by(|a, b| descending(&|block| sums[block], *a, *b));
            columns = blocks.iter().flat_map(|i| i * block..(i + 1) * block).collect();
            for columns in columns.chunks_mut(block) {
                columns.sort_by(|a, b| descending(&weight, *a, *b));
            }
        }
        if order == GptqOrder::ActivationColumns {
            columns.sort_by(|a, b| descending(&weight, *a, *b));
        }
        Self { columns, block, keeps_blocks: order != GptqOrder::ActivationColumns }
    }

    /// Returns whether the columns of each block are at consecutive positions.
    pub(super) fn keeps_blocks(&self) -> bool {
        self.keeps_blocks
    }

    /// The column at each position.
    pub(super) fn columns(&self) -> &[usize] {
        &self.columns
    }

    /// Positions, padding included.
    pub(super) fn len(&self) -> usize {
        self.columns.len()
    }

    /// The block of the column at a position.
    pub(super) fn block_at(&self, position: usize) -> usize {
        self.columns[position] / self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_stay_whole_and_padding_is_last_in_its_block() {
        let order = ColumnOrder::new(&[0.0, 1.0, 2.0, 2.0, 5.0, 9.0], 4, GptqOrder::Activation);
        assert_eq!(order.columns(), [5, 4, 6, 7, 2, 3, 1, 0]);
        assert_eq!([0, 4].map(|start| order.block_at(start)), [1, 0]);
        assert!(order.keeps_blocks());
        let single = ColumnOrder::new(&[0.0, 1.0, 2.0, 2.0, 5.0, 9.0], 4, GptqOrder::ActivationColumns);
        assert_eq!(single.columns(), [5, 4, 2, 3, 1, 0, 6, 7]);
        assert!(!single.keeps_blocks());
        let natural = ColumnOrder::new(&[0.0, 1.0, 2.0, 2.0, 5.0], 4, GptqOrder::Natural);
        assert_eq!(natural.columns(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
