//! Launches of products of 4-bit weights and FP8 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::gemm::decoding::Decoding;
use microscale_kernels_abi::gemm::fp8::quantize;
use microscale_kernels_abi::gemm::quantizing::Quantizing;
use microscale_kernels_abi::{Kernel, ScaleGrid};

use crate::element::Dtype;
use crate::error::{ActivationFault, Error, Result};
use crate::gpu::launch::arguments::{Operands, Routed};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing};
use crate::gpu::plan::product::ProductPlan;
use crate::gpu::runtime::kernels::Kernels;

/// Codes of activations and their scales, in device memory.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct Fp8Operand {
    pub(in crate::gpu) codes: u64,
    pub(in crate::gpu) scales: u64,
    /// Scales per token.
    pub(in crate::gpu) token_scales: usize,
}

/// FP8 activations of a product.
#[derive(Clone, Copy)]
pub(in crate::gpu) enum Fp8Source {
    /// Codes and scales.
    Quantized(Fp8Operand),
    /// Values in 16 bits, which are quantized when they are packed. Not for experts' weights.
    Values {
        address: u64,
        dtype: Dtype,
        /// A scale per group of columns, instead of one per token.
        per_group: bool,
    },
    /// Rows of whole blocks in MXFP4, which are decoded when they are packed. Not for experts'
    /// weights.
    Mxfp4 {
        codes: u64,
        scales: u64,
        /// Positions of the scales.
        grid: ScaleGrid,
        /// Factor of the results.
        alpha: f32,
    },
}

/// Enqueues the kernels of a product. The activations in `operands` are ignored. `row_bases` has
/// room for the bases of rows of weights, if the plan has any. `workspace` has the addresses of
/// semaphores and of the product's memory.
///
/// # Safety
/// Weights, activations and results satisfy the kernels' contracts for the shapes that `plan` was
/// made for; a `routed` plan was made for its token tiles. The semaphores are zeros, as each launch
/// leaves them. The memory has [`ProductPlan::workspace_bytes`] bytes, at a multiple of 16.
pub(in crate::gpu) unsafe fn product_fp8(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &ProductPlan,
    (activations, row_bases): (Fp8Source, u64),
    operands: &Operands,
    routed: Routed,
    workspace: [u64; 2],
) -> Result<()> {
    // Kernels get the bases of rows in place of activations.
    let operands = Operands { activations: row_bases, ..*operands };
    let [_, packed] = workspace;
    let Some((launch, pack_params)) = packing(kernels, plan) else {
        // Weights without columns.
        // SAFETY: the kernel reads no activations. The caller guarantees the rest.
        return unsafe { multiply(kernels, stream, plan, &operands, routed, workspace) };
    };
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes packed activations to the workspace, and the second waits for it. A
    // kernel that quantizes starts when all earlier work has ended. The caller guarantees the rest.
    unsafe {
        match activations {
            Fp8Source::Quantized(Fp8Operand { codes, scales, token_scales }) => {
                let token_scales = token_scales as u32;
                let arguments = &mut [
                    argument(&codes),
                    argument(&scales),
                    argument(&packed),
                    argument(&routed.plan),
                    argument(&routed.from),
                    argument(pack_params),
                    argument(&token_scales),
                    argument(&operands.scales),
                    argument(&row_bases),
                ];
                enqueue(kernels, stream, &launch, arguments, "packing activations")?;
            }
            Fp8Source::Values { address, dtype, per_group } => {
                let aligned = pack_params.aligned != 0 && address.is_multiple_of(16);
                let Quantizing { pack, params, launch } = Quantizing::new(*pack_params, aligned, per_group);
                let launch = Launch {
                    kernel: quantize(dtype).ok_or(Error::Activations(ActivationFault::Dtype))?,
                    thread_blocks: u64::from(launch.thread_blocks),
                    threads: launch.threads,
                    shared: launch.shared,
                    cluster: 1,
                    // The product relies on it: when this kernel starts, all earlier work has
                    // ended.
                    programmatic: false,
                };
                let arguments = &mut [
                    argument(&address),
                    argument(&packed),
                    argument(&pack),
                    argument(&params),
                    argument(&operands.scales),
                    argument(&row_bases),
                ];
                enqueue(kernels, stream, &launch, arguments, "quantizing activations")?;
            }
            Fp8Source::Mxfp4 { codes, scales, grid, alpha } => {
                let Decoding { pack, params, thread_blocks } = Decoding::new(*pack_params, grid, alpha);
                let Kernel { threads, shared, .. } = *launch.kernel.kernel();
                let thread_blocks = u64::from(thread_blocks);
                let launch = Launch { thread_blocks, threads, shared, ..launch };
                let arguments = &mut [
                    argument(&codes),
                    argument(&scales),
                    argument(&packed),
                    argument(&pack),
                    argument(&params),
                    argument(&operands.scales),
                    argument(&row_bases),
                ];
                enqueue(kernels, stream, &launch, arguments, "decoding and packing activations")?;
            }
        }
        multiply(kernels, stream, plan, &operands, routed, workspace)
    }
}
