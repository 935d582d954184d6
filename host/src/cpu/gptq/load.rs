//! Loads rows of weights into lanes, in the order of positions.

use super::order::ColumnOrder;
use crate::cpu::simd::{LANES, Lanes};
use crate::element::Element;
use crate::report::{Position, Report};
use crate::scheme::NonFinite;
use crate::shape::Strided;

/// The rows of a task.
pub(super) struct LoadedRows {
    /// `[groups, positions]`, 0 in padding and in NaN blocks.
    pub(super) weights: Vec<Lanes<f32>>,
    /// `[groups, blocks]`: bit `i` is set if the block of lane `i` is a NaN block.
    pub(super) poisoned: Vec<u16>,
    /// The counts of non-finite values.
    pub(super) report: Report,
}

/// Loads rows `first .. first + count`.
pub(super) fn load<T: Element>(
    values: &[T],
    shape: &Strided,
    policy: NonFinite,
    order: &ColumnOrder,
    block: usize,
    (first, count): (usize, usize),
) -> LoadedRows {
    let groups = count.div_ceil(LANES);
    let (positions, blocks) = (order.len(), order.len() / block);
    let mut loaded = LoadedRows {
        weights: vec![[0.0; LANES]; groups * positions],
        poisoned: vec![0; groups * blocks],
        report: Report::default(),
    };
    for i in 0..count {
        let (group, lane, row) = (i / LANES, i % LANES, first + i);
        let start = shape.start(row);
        let weights = &mut loaded.weights[group * positions..][..positions];
        for (weights, col) in weights.iter_mut().zip(order.columns()) {
            if *col >= shape.cols {
                continue;
            }
            let value = values[start + col * shape.col_stride].to_f32();
            if value.is_finite() {
                weights[lane] = value;
                continue;
            }
            loaded.report += Report {
                nan: value.is_nan().into(),
                infinite: value.is_infinite().into(),
                first_non_finite: Some(Position { row, col: *col }),
                ..Report::default()
            };
            weights[lane] = policy.replaced::<T>(value);
            if !weights[lane].is_finite() {
                loaded.poisoned[group * blocks + col / block] |= 1 << lane;
            }
        }
        for (position, weights) in weights.iter_mut().enumerate() {
            let poisoned = loaded.poisoned[group * blocks + order.columns()[position] / block];
            if poisoned >> lane & 1 != 0 {
                weights[lane] = 0.0;
            }
        }
    }
    loaded
}
