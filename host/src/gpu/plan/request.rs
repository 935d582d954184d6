//! A dense product to plan, and the GPU that it is planned for.

use microscale_formats::Dtype;
use microscale_kernels_abi::Target;
use microscale_kernels_abi::gemm::WeightsShape;

use crate::shape::QuantizedShape;

/// The parts of a GPU that counts depend on.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Multiprocessors {
    pub(in crate::gpu) count: u32,
    /// Bytes of shared memory per thread block, at most.
    pub(in crate::gpu) most_shared: u32,
}

/// A GPU, as far as it decides which configuration is fastest.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct GpuFacts {
    pub(in crate::gpu) target: &'static Target,
    pub(in crate::gpu) sm_count: u32,
    /// Bytes of shared memory per thread block, at most.
    pub(in crate::gpu) most_shared: u32,
}

impl GpuFacts {
    /// The parts that counts of products depend on.
    pub(in crate::gpu) fn multiprocessors(&self) -> Multiprocessors {
        Multiprocessors { count: self.sm_count, most_shared: self.most_shared }
    }
}

/// A dense product to plan, or to choose a configuration for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gpu) struct Request {
    pub(in crate::gpu) weights: QuantizedShape,
    pub(in crate::gpu) tokens: usize,
    /// For a plan, any dtype. To choose a configuration, f16 or bf16: parts of f32 are bf16.
    pub(in crate::gpu) activations: Dtype,
    /// Every token's activations start on 16 bytes.
    pub(in crate::gpu) aligned: bool,
    /// Only kernels that need no workspace.
    pub(in crate::gpu) gemv_only: bool,
}

/// The weights' shape as kernels take it.
pub(in crate::gpu) fn weights_shape(weights: QuantizedShape) -> WeightsShape {
    let [rows, cols, blocks] =
        [weights.rows, weights.cols, weights.blocks_per_row()].map(|count| count as u64);
    WeightsShape { rows, cols, blocks }
}
