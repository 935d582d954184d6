//! The epilogue of products, and the two kernels around products of activations in f32.

use microscale_formats::{Dtype, Gate};

use crate::grid::Divider;
use crate::launch::{Launch, THREADS};
use crate::memory::ApplyGlobal;

/// The steps after the global scale: bias, gate, residual, in this order; then the sum is rounded
/// and stored. All zeros for no steps.
///
/// A gate combines an even row, the gate, and the next row to one result. Results and residuals
/// then have half the columns.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Epilogue {
    /// The steps that are there, and the dtypes of operands and results that the kernel does not
    /// multiply in: a sum of these constants.
    pub steps: u32,
    /// The gate, if there is one.
    pub gate: Gate,
}

impl Epilogue {
    /// A bias for each row, of an expert's if there are experts, in [`Self::bias_dtype`].
    pub const BIAS: u32 = 1;
    /// A gate. There is an even number of rows.
    pub const GATED: u32 = 2;
    /// Values to add to results, in the same places and of the same dtype.
    pub const RESIDUAL: u32 = 4;
    /// Results in f32.
    pub const F32_RESULTS: u32 = 8;
    /// Results in f16.
    pub const F16_RESULTS: u32 = 16;
    /// A bias in f32.
    pub const F32_BIAS: u32 = 32;
    /// A bias in f16.
    pub const F16_BIAS: u32 = 64;
    /// No steps.
    pub const NONE: Self = Self { steps: 0, gate: Gate::SILU };

    /// Returns whether the epilogue has a step.
    #[inline(always)]
    pub const fn has(&self, step: u32) -> bool {
        self.steps & step != 0
    }

    /// The dtype of the bias, given the dtype that the kernel multiplies in.
    #[inline(always)]
    pub const fn bias_dtype(&self, multiplied: Dtype) -> Dtype {
        match self.steps & (Self::F32_BIAS | Self::F16_BIAS) {
            0 => multiplied,
            Self::F32_BIAS => Dtype::F32,
            _ => Dtype::F16,
        }
    }

    /// The dtype of results and residuals, given the dtype that the kernel multiplies in.
    #[inline(always)]
    pub const fn result_dtype(&self, multiplied: Dtype) -> Dtype {
        match self.steps & (Self::F32_RESULTS | Self::F16_RESULTS) {
            0 => multiplied,
            Self::F32_RESULTS => Dtype::F32,
            _ => Dtype::F16,
        }
    }

    /// The results per token of `rows` rows of weights.
    #[inline(always)]
    pub const fn results(&self, rows: u64) -> u64 {
        if self.has(Self::GATED) { rows / 2 } else { rows }
    }
}

/// The bf16 terms of an activation in f32, of eight bits each. Their sum is the activation, except
/// for bits below 2^−133.
pub const PARTS: u32 = 3;

/// Parameters of the split: activations in f32 become [`PARTS`] rows of bf16. A thread has four of
/// a row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SplitGrid {
    /// Columns.
    pub cols: u64,
    /// Fours of columns in a row, the last one in part.
    pub fours: Divider,
    /// Fours in all rows.
    pub count: u64,
    /// 1 if every four starts on 16 bytes, and of each part on 8.
    pub aligned: u64,
}

impl SplitGrid {
    /// The grid of `rows` rows and `cols` columns. `aligned` says whether they start on 16 bytes.
    pub const fn new(rows: u64, cols: u64, aligned: bool) -> Self {
        let fours = cols.div_ceil(4);
        let aligned = (aligned && cols.is_multiple_of(4)) as u64;
        Self { cols, fours: Divider::new(fours), count: rows * fours, aligned }
    }
}

/// Parameters of the merge: [`PARTS`] rows of sums in f32, or one, become one row of results. A
/// thread has one result.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MergeGrid {
    /// Sums in a row: rows of weights.
    pub rows: u64,
    /// Results in a row.
    pub results: Divider,
    /// Results in all.
    pub count: u64,
    /// Rows of sums per row of results.
    pub parts: u32,
    /// 0 if the dtypes of the epilogue's steps are given relative to f32, 1 for bf16.
    pub bf16: u32,
    /// Factor of the sums, where tokens have global scales.
    pub alpha: f32,
    /// How the global scales of the weights are applied, where tokens have global scales.
    pub weights: ApplyGlobal,
}

impl MergeGrid {
    /// The merge of the parts of `tokens` rows of f32 activations into rows of `results` results.
    /// There are `rows` rows of weights.
    pub const fn of_parts(rows: u64, results: u64, tokens: u64) -> Self {
        let (results, count) = (Divider::new(results), results * tokens);
        let weights = ApplyGlobal::Absent;
        Self { rows, results, count, parts: PARTS, bf16: 0, alpha: 1.0, weights }
    }

    /// One row of sums per row of results, whose tokens have global scales.
    pub const fn of_tokens(self, alpha: f32, weights: ApplyGlobal) -> Self {
        Self { parts: 1, bf16: 1, alpha, weights, ..self }
    }

    /// The dtype that the dtypes of the epilogue's steps are relative to.
    #[inline(always)]
    pub const fn multiplied(&self) -> Dtype {
        if self.bf16 == 0 { Dtype::F32 } else { Dtype::Bf16 }
    }
}

/// The launch of both kernels, a thread an element.
pub(crate) const ELEMENTWISE: Launch = (THREADS, THREADS, 0);
