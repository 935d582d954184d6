//! Launch parameters of one configuration for one product.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::fp8::PACK_FP8;
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams, TokenTiles};
use microscale_kernels_abi::gemm::packing::pack;
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams, partial_sum_bytes};
use microscale_kernels_abi::gemm::{TILE_COLUMNS, TOKEN_LIMIT};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{GemmConfig, KernelId, Mainloop};

use crate::error::{Error, Result};
use crate::gpu::launch::arguments::{limited, limited_columns, not_one_launch};
use crate::gpu::plan::choose::{rows_are_aligned, takes};
use crate::gpu::plan::request::weights_shape;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// A configuration's kernels and their parameters for one product.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct ProductPlan {
    pub(in crate::gpu) config: GemmConfig,
    /// The kernel that multiplies.
    pub(in crate::gpu) kernel: KernelId,
    pub(in crate::gpu) params: ProductParams,
    pub(in crate::gpu) thread_blocks: u64,
    /// Threads per thread block, and its bytes of dynamic shared memory.
    pub(in crate::gpu) threads: u32,
    pub(in crate::gpu) shared: u32,
}

/// A packing kernel and its parameters.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Packing {
    pub(in crate::gpu) kernel: KernelId,
    pub(in crate::gpu) params: PackParams,
}

/// The parameters of a product's kernels.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) enum ProductParams {
    /// A kernel of the GEMM, after one that packs activations unless it packs them itself.
    Gemm { packing: Option<Packing>, gemm_params: GemmParams },
    /// A GEMV that copies ahead.
    Gemv(GemvParams),
    /// A GEMV that does not.
    Plain(PlainParams),
}

/// Token tiles of experts' rows, which are known on the GPU only.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct ExpertTokenTiles {
    /// Token tiles, at most.
    pub(in crate::gpu) most: u64,
    /// Rows per token tile, at most; for the GEMV, a power of two.
    pub(in crate::gpu) rows: u32,
}

impl ProductPlan {
    /// The plan of a configuration for weights and tokens, whose activations start on 16 bytes if
    /// `aligned`; with `experts`, of experts' rows in token tiles. Compiles the GEMV's kernels, to
    /// ask how many thread blocks the GPU has room for.
    ///
    /// # Errors
    /// [`Error::Operands`] beyond the kernels' limits, [`Error::NoKernel`] if the configuration
    /// does not take the weights or is not for the GPU's target, and [`Error::Gpu`] for more than a
    /// launch covers.
    pub(in crate::gpu) fn new(
        kernels: &Kernels,
        config: GemmConfig,
        weights: QuantizedShape,
        tokens: usize,
        aligned: bool,
        experts: Option<ExpertTokenTiles>,
    ) -> Result<Self> {
        let no_kernel = Error::NoKernel { format: weights.format };
        let usable =
            config.mainloop.traits().targets.contain(kernels.target()) && takes(config, weights, aligned);
        let kernel = config.id().filter(|_| usable).ok_or(no_kernel)?;
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        limited_columns(weights)?;
        let too_large =
            || not_one_launch(format_args!("{} rows times {tokens} of activations", weights.rows));
        match config.mainloop {
            mainloop if !mainloop.is_gemv() => {
                Self::gemm(kernels, config, kernel, weights, tokens, aligned, experts).ok_or_else(too_large)
            }
            Mainloop::Gemv => {
                let ready = kernels.ready(kernel)?;
                let warps = ready.kernel.threads / WARP;
                let config = config.with_slices(config.slices.min(warps));
                let (tiles, thread_blocks) = match experts {
                    // The thread blocks of all token tiles run together, if there is room.
                    Some(ExpertTokenTiles { most, rows }) => {
                        let each = (u64::from(ready.thread_blocks) / most.max(1)).max(1);
                        (TokenTiles { count: most, bits: rows.ilog2() }, each as u32)
                    }
                    None => (TokenTiles::of(tokens as u64, config.tile_n), ready.thread_blocks),
                };
                let shape = weights_shape(weights);
                let params = GemvParams::new(config, shape, tokens as u64, tiles, warps, thread_blocks)
                    .ok_or_else(too_large)?;
                let (threads, shared) = params.threads_and_shared(config);
                let thread_blocks = params.thread_blocks();
                let params = ProductParams::Gemv(params);
                Ok(Self { config, kernel, params, thread_blocks, threads, shared })
            }
            _ => {
                let launched = kernel.kernel().within(kernels.most_shared());
                let tiles = match experts {
                    Some(ExpertTokenTiles { most, rows }) => TokenTiles { count: most, bits: rows.ilog2() },
                    None => TokenTiles::of(tokens as u64, TILE_COLUMNS),
                };
                let shape = weights_shape(weights);
                let params = PlainParams::new(config, shape, tokens as u64, tiles).ok_or_else(too_large)?;
                let thread_blocks = match config.mainloop {
                    Mainloop::GemvRagged => shape.rows.div_ceil(u64::from(launched.elements)),
                    _ => params.thread_blocks(),
                };
                let (threads, shared) = (launched.threads, launched.shared);
                let params = ProductParams::Plain(params);
                Ok(Self { config, kernel, params, thread_blocks, threads, shared })
            }
        }
    }

    /// The plan of a configuration of the GEMM; `None` for more than a launch covers.
    fn gemm(
        kernels: &Kernels,
        config: GemmConfig,
        kernel: KernelId,
        weights: QuantizedShape,
        tokens: usize,
        aligned: bool,
        experts: Option<ExpertTokenTiles>,
    ) -> Option<Self> {
        let sm_count = kernels.sm_count();
        let tokens = match experts {
            Some(ExpertTokenTiles { most, .. }) => most.checked_mul(u64::from(config.tile_n))?,
            None => tokens as u64,
        };
        let shared = config.shared_bytes(kernels.most_shared());
        let packing = if config.packs_activations() {
            None
        } else {
            let aligned = rows_are_aligned(weights, aligned);
            let mut params = PackParams::new(config, weights.cols as u64, tokens, aligned)?;
            if config.has_row_bases() {
                params = params.with_rows(weights_shape(weights));
            }
            let kernel = match config.mainloop {
                mainloop if mainloop.takes_fp4() => config.fp4_pack()?,
                mainloop if mainloop.takes_fp8() => PACK_FP8,
                _ => pack(config.activations)?,
            };
            Some(Packing { kernel, params })
        };
        // Thread blocks take all of a multiprocessor's shared memory.
        let gemm_params = GemmParams::new(config, weights_shape(weights), tokens, sm_count, shared)?;
        // The schedule of experts' rows is made on the GPU, for all whole clusters.
        let thread_blocks = match experts {
            Some(_) => sm_count / config.cluster * config.cluster,
            None => gemm_params.thread_blocks(config),
        };
        Some(Self {
            config,
            kernel,
            params: ProductParams::Gemm { packing, gemm_params },
            thread_blocks: u64::from(thread_blocks),
            threads: config.threads(),
            shared,
        })
    }

    /// Bytes of workspace: packed activations and partial sums, both multiples of 16.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        match &self.params {
            ProductParams::Gemm { .. } => {
                self.packed_bytes() + partial_sum_bytes(self.thread_blocks as u32, self.config)
            }
            ProductParams::Gemv(_) | ProductParams::Plain(_) => 0,
        }
    }

    /// Bytes of the packed activations in the workspace.
    pub(in crate::gpu) fn packed_bytes(&self) -> u64 {
        match &self.params {
            ProductParams::Gemm { packing: Some(packing), .. } => packing.params.bytes(),
            _ => 0,
        }
    }

    /// Row tiles of a token tile, and K-iterations of each, for the schedule of experts' rows;
    /// `None` for the GEMV, which has none.
    pub(in crate::gpu) fn row_tiles_and_k_iterations(&self) -> Option<[u32; 2]> {
        let ProductParams::Gemm { gemm_params, .. } = &self.params else { return None };
        let row_tiles = gemm_params.shape.rows.div_ceil(u64::from(self.config.tile_m));
        Some([row_tiles as u32, gemm_params.k_iterations.divisor as u32])
    }

    /// The packing kernel, if there is one, and the kernel that multiplies.
    pub(in crate::gpu) fn kernels(&self) -> [Option<KernelId>; 2] {
        match self.params {
            ProductParams::Gemm { packing: Some(packing), .. } => [Some(packing.kernel), Some(self.kernel)],
            _ => [None, Some(self.kernel)],
        }
    }
}

/// Bytes of workspace, semaphores not counted, that serve any number of tokens up to `tokens`,
/// whichever of these configurations they get; 0 if the GPU has none of them.
///
/// # Errors
/// The errors of [`ProductPlan::new`] for the limits of sizes.
pub(in crate::gpu) fn most_product_bytes(
    kernels: &Kernels,
    configs: impl Iterator<Item = GemmConfig>,
    weights: QuantizedShape,
    tokens: usize,
) -> Result<u64> {
    let mut most = 0;
    for config in configs {
        // With fewer tokens there may be more thread blocks, each with fewer partial sums.
        let plan = match ProductPlan::new(kernels, config, weights, tokens, true, None) {
            Ok(plan) => plan,
            Err(error @ Error::Operands(_)) => return Err(error),
            // Another target, or too little shared memory.
            Err(_) => continue,
        };
        if let ProductParams::Gemm { .. } = plan.params {
            let sums = partial_sum_bytes(kernels.sm_count(), plan.config);
            most = most.max(plan.workspace_bytes()).max(plan.packed_bytes() + sums);
        }
    }
    Ok(most)
}

/// Chunks of whole rows start on 16 bytes where codes do.
const _: () = assert!((CHUNK / 2).is_multiple_of(16));
