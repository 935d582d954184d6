//! The workloads of quantizing activations and of KV caches: recipes, sizes and bytes.

use microscale::formats::kv::{KvOrder, KvShape};
use microscale::{ActivationFormat, ActivationLayout, ActivationRecipe, KvFormat, RowOperation, Shape};

/// Everything about a measurement but its times.
pub(super) struct ActivationWorkload {
    pub(super) recipe: ActivationRecipe,
    pub(super) shape: Shape,
    pub(super) adds: bool,
    pub(super) scales: &'static [f32],
    /// Bytes that the operation must move.
    pub(super) bytes: u64,
}

impl ActivationWorkload {
    pub(super) fn new(
        operation: RowOperation,
        format: ActivationFormat,
        adds: bool,
        (rows, columns): (usize, usize),
    ) -> Self {
        let recipe = ActivationRecipe { operation, format, layout: ActivationLayout::Swizzled128x4 };
        let gated = matches!(operation, RowOperation::Glu(..));
        let shape = Shape::new(rows, if gated { 2 * columns } else { columns });
        // Scales without the padding that few rows have.
        let linear = ActivationRecipe { layout: ActivationLayout::Linear, ..recipe };
        let [codes, scales, f32_scales] = linear.lengths(rows, rows, columns).unwrap_or_default();
        let residual = if adds { 4 * rows * columns } else { 0 };
        let bytes = 2 * shape.elements() + residual + codes + scales + 4 * f32_scales;
        let scales = if format.takes_scales() { &[0.5][..] } else { &[] };
        Self { recipe, shape, adds, scales, bytes: bytes as u64 }
    }

    /// The columns of the output.
    pub(super) fn columns(&self) -> usize {
        if matches!(self.recipe.operation, RowOperation::Glu(..)) {
            self.shape.cols / 2
        } else {
            self.shape.cols
        }
    }

    /// Whether the operation multiplies by weights.
    pub(super) fn weighs(&self) -> bool {
        matches!(self.recipe.operation, RowOperation::RmsNorm(_))
    }
}

/// A KV cache and the tokens to append.
pub(super) struct KvWorkload {
    pub(super) shape: KvShape,
    pub(super) format: KvFormat,
    pub(super) rows: Shape,
    pub(super) slots: Vec<i64>,
    /// Bytes that the operation must move.
    pub(super) bytes: u64,
}

impl KvWorkload {
    pub(super) fn new(format: KvFormat, tokens: usize) -> Self {
        let shape = KvShape::new(KvOrder::Nhd, tokens as u32 / 16, 16, 8, 128);
        let rows = Shape::new(tokens, 8 * 128);
        let mut slots: Vec<i64> = (0..tokens as i64).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut slots);
        let [codes, scales] = format.bytes(rows.elements());
        let bytes = 2 * (2 * rows.elements() + codes + scales) + 8 * tokens;
        Self { shape, format, rows, slots, bytes: bytes as u64 }
    }

    /// Bytes of codes and of block scales of K, and of V.
    pub(super) fn lengths(&self) -> [usize; 2] {
        self.format.bytes(self.rows.elements())
    }
}

/// The scales of K and V that are measured with.
pub(super) const KV_SCALES: [f32; 2] = [0.01, 0.01];
