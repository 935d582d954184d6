//! The result of a measurement: median times, and rates and ratios derived from them.

use microscale::{ActivationRounding, Dtype, Recipe};

use super::op::Op;
use super::size::Size;

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Measurement {
    /// The operation.
    pub op: Op,
    /// The recipe, whose format is reported.
    pub recipe: Recipe,
    /// The dtype of the unquantized values.
    pub dtype: Dtype,
    /// How activations are rounded.
    pub activations: ActivationRounding,
    /// The matrix.
    pub size: Size,
    /// The device, in words.
    pub device: String,
    /// CPU threads; 0 on a GPU.
    pub threads: usize,
    /// Bytes that the operation must move: values, codes and scales once each. For a product, only
    /// the codes and scales of the matrices.
    pub bytes: u64,
    /// The measured kernel, if the operation chooses among kernels.
    pub kernel: Option<String>,
    /// Maximum operations per second of the GPU's tensor cores, if known.
    pub tensor_cores_per_second: Option<f64>,
    /// The median time of one operation.
    pub median_seconds: f64,
    /// The median time of reading `bytes`, for products on a CPU.
    pub read_seconds: Option<f64>,
    /// The median time of a copy that reads and writes `bytes` in total; `None` for the empty
    /// kernel.
    pub copy_seconds: Option<f64>,
}

impl Measurement {
    /// Returns the moved bytes per second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.median_seconds
    }

    /// Returns multiplications and additions per second, for products of weights and tokens.
    pub(crate) fn operations_per_second(&self) -> Option<f64> {
        let Size { rows, cols, tokens, top_k, .. } = self.size;
        let counts = [rows, cols, tokens?.get(), top_k.max(1)].map(|count| count as f64);
        Some(2.0 * counts.iter().product::<f64>() / self.median_seconds)
    }

    /// Returns [`Self::operations_per_second`] as a share of the tensor cores' maximum.
    pub(crate) fn tensor_core_ratio(&self) -> Option<f64> {
        Some(self.operations_per_second()? / self.tensor_cores_per_second?)
    }

    /// Returns the bytes that the copy of the same run read and wrote per second.
    pub(crate) fn copy_bytes_per_second(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// Returns the bytes per second of reading in the same run.
    pub(crate) fn read_bytes_per_second(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// Returns the time of reading divided by the operation's.
    pub(crate) fn read_ratio(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| seconds / self.median_seconds)
    }

    /// Returns the copy's time divided by the operation's.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| seconds / self.median_seconds)
    }
}

/// Median times in seconds, the measured kernel and the rate of the tensor cores.
#[derive(Default)]
pub(super) struct Times {
    pub(super) operation: f64,
    pub(super) read: Option<f64>,
    pub(super) copy: Option<f64>,
    pub(super) kernel: Option<String>,
    pub(super) tensor_cores_per_second: Option<f64>,
}

/// Returns the median of one or more values.
pub(super) fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
