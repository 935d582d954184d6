//! The result of a measurement: the median times, and the rates and ratios that follow from them.

use microscale::{Dtype, Recipe};

use super::op::Op;
use super::size::Size;

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Measurement {
    /// The operation.
    pub op: Op,
    /// The recipe: its format is reported.
    pub recipe: Recipe,
    /// The dtype of the unquantized values.
    pub dtype: Dtype,
    /// The matrix.
    pub size: Size,
    /// The device, in words.
    pub device: String,
    /// CPU threads; 0 on a GPU.
    pub threads: usize,
    /// Bytes that the operation must move: values, codes and scales, each once; of a product, the matrices'
    /// codes and scales.
    pub bytes: u64,
    /// The kernel that was measured, of an operation that chooses among them.
    pub kernel: Option<String>,
    /// Operations that the GPU's tensor cores can do a second, if that is known.
    pub tensor_cores_per_second: Option<f64>,
    /// The median time of one operation.
    pub median_seconds: f64,
    /// The median time of reading `bytes`; products on a CPU have one.
    pub read_seconds: Option<f64>,
    /// The median time of a copy that reads and writes `bytes` together; the empty kernel has none.
    pub copy_seconds: Option<f64>,
}

impl Measurement {
    /// Bytes moved a second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.median_seconds
    }

    /// Multiplications and additions a second, of products of weights with tokens.
    pub(crate) fn operations_per_second(&self) -> Option<f64> {
        let Size { rows, cols, tokens, top_k, .. } = self.size;
        let counts = [rows, cols, tokens?.get(), top_k.max(1)].map(|count| count as f64);
        Some(2.0 * counts.iter().product::<f64>() / self.median_seconds)
    }

    /// [`Self::operations_per_second`] over what tensor cores can do.
    pub(crate) fn tensor_core_ratio(&self) -> Option<f64> {
        Some(self.operations_per_second()? / self.tensor_cores_per_second?)
    }

    /// Bytes that the copy of the same run moved a second, read and written ones together.
    pub(crate) fn copy_bytes_per_second(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// Bytes that were read a second, in the same run.
    pub(crate) fn read_bytes_per_second(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// The time of reading over the operation's.
    pub(crate) fn read_ratio(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| seconds / self.median_seconds)
    }

    /// The copy's time over the operation's.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| seconds / self.median_seconds)
    }
}

/// Median times, in seconds, and what they are of.
#[derive(Default)]
pub(super) struct Times {
    pub(super) operation: f64,
    pub(super) read: Option<f64>,
    pub(super) copy: Option<f64>,
    pub(super) kernel: Option<String>,
    pub(super) tensor_cores_per_second: Option<f64>,
}

/// The median, of one at least.
pub(super) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
