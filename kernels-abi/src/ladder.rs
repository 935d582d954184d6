//! The ladder's baselines, and the kernel that does nothing: what `bench` measures beside the shipped kernels.

use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, WARP, kernel};

/// Threads in a thread block of the baselines.
pub const LADDER_THREADS: u32 = 256;

const THREAD_A_BLOCK: Launch = (LADDER_THREADS, LADDER_THREADS * 32, 0);
const WARP_A_BLOCK: Launch = (LADDER_THREADS, LADDER_THREADS, 0);
const NOTHING: Launch = (WARP, 0, 0);

/// The baselines: quantizers to MXFP4 as one would write them first and second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ladder {
    /// The kernel that does nothing: what a launch costs.
    Empty,
    /// A thread handles a block by itself.
    ThreadABlock(Dtype),
    /// A warp handles a block, a lane an element.
    WarpABlock(Dtype),
}

impl Ladder {
    /// The kernel.
    pub const fn id(self) -> KernelId {
        let index = match self {
            Self::Empty => 0,
            Self::ThreadABlock(dtype) => 1 + dtype as usize,
            Self::WarpABlock(dtype) => 4 + dtype as usize,
        };
        KernelId::new(Family::Ladder, index)
    }
}

pub(crate) const KERNELS: &[Kernel] = &[
    kernel("empty", None, NOTHING, Converts::Nothing),
    kernel("mxfp4_quantize_f32_thread_a_block", Some(Dtype::F32), THREAD_A_BLOCK, Converts::Nothing),
    kernel("mxfp4_quantize_f16_thread_a_block", Some(Dtype::F16), THREAD_A_BLOCK, Converts::Nothing),
    kernel("mxfp4_quantize_bf16_thread_a_block", Some(Dtype::Bf16), THREAD_A_BLOCK, Converts::Nothing),
    kernel("mxfp4_quantize_f32_warp_a_block", Some(Dtype::F32), WARP_A_BLOCK, Converts::Nothing),
    kernel("mxfp4_quantize_f16_warp_a_block", Some(Dtype::F16), WARP_A_BLOCK, Converts::Nothing),
    kernel("mxfp4_quantize_bf16_warp_a_block", Some(Dtype::Bf16), WARP_A_BLOCK, Converts::Nothing),
];
