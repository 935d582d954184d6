//! Launching products of weights and activations of many tokens.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::result::launch_kernel;
use cudarc::driver::sys::{
    CUlaunchAttribute_st, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDimension, CUlaunchConfig_st, cuLaunchKernelEx,
};
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, DriverError, LaunchConfig};
use microscale_formats::Format;
use microscale_kernels_abi::gemm::{Edition, arrange};
use microscale_kernels_abi::gemm_grids::{ArrangeGrid, GemmGrid, left_bytes};
use microscale_kernels_abi::weights::{PIPELINED_COLUMN_LIMIT, TILE_COLUMNS, TOKEN_LIMIT};
use microscale_kernels_abi::{Kernel, KernelId};

use super::{parts, weights};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gemv::{Activation, ProductOf};
use crate::gpu::arguments::{
    Argument, Operands, Routed, Steps, apply_global, config, kernel_dtype, limited, not_one_launch,
    weights_format,
};
use crate::gpu::driver::doing;
use crate::gpu::epilogue::DeviceEpilogue;
use crate::gpu::gemm_weights_kernel::GemmWeightsKernel;
use crate::gpu::gemm_workspace::GemmWorkspaceMut;
use crate::gpu::gemv_weights_kernel::{GemvWeightsKernel, weights_shape};
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::{DeviceView, DeviceViewMut};
use crate::gpu::tensor_view::DeviceTensorView;
use crate::shape::QuantizedShape;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<ArrangeGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<GemmGrid> {}

/// Returns whether the kernels take weights of a shape: they copy 16 bytes of codes, and words of scales of whole rows.
pub(in crate::gpu) fn takes(shape: QuantizedShape) -> bool {
    let words = shape.format != Format::Nvfp4 || shape.blocks_per_row().is_multiple_of(4);
    words && shape.cols > 0 && (shape.cols as u64) < PIPELINED_COLUMN_LIMIT
}

/// Returns whether a product may work in a workspace: all but those of few tokens, if a kernel takes the weights.
pub(in crate::gpu) fn may_need_workspace(weights: QuantizedShape, tokens: usize) -> bool {
    tokens > FEW && takes(weights)
}

/// The grid of a kernel that multiplies; none if there is nothing to multiply, or more than a launch can count, or if the GPU has too
/// little shared memory.
fn gemm_grid(
    kernels: &Kernels,
    kernel: GemmWeightsKernel,
    weights: QuantizedShape,
    tokens: usize,
) -> Option<GemmGrid> {
    // Thread blocks take all of a multiprocessor's shared memory.
    let at_once = kernels.multiprocessors();
    let shape = weights_shape(weights);
    let shared = kernel.edition.shared_bytes(kernel.tile, kernels.most_shared());
    GemmGrid::new((kernel.edition, kernel.tile), shape, tokens as u64, at_once, shared)
}

/// The grids of both kernels, and the thread blocks of the second.
pub(super) struct Grids {
    arrange: ArrangeGrid,
    gemm: GemmGrid,
    thread_blocks: u32,
}

impl Grids {
    fn new(
        kernels: &Kernels,
        kernel: GemmWeightsKernel,
        weights: QuantizedShape,
        tokens: usize,
        aligned: bool,
    ) -> Result<Self> {
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        let GemmWeightsKernel { edition, tile } = kernel;
        let arrange = ArrangeGrid::new(
            (edition, tile),
            weights.cols as u64,
            tokens as u64,
            aligned,
            kernels.multiprocessors(),
        );
        match (arrange, gemm_grid(kernels, kernel, weights, tokens)) {
            (Some(arrange), Some(gemm)) => {
                Ok(Self { arrange, gemm, thread_blocks: gemm.schedule.thread_blocks })
            }
            _ => Err(not_one_launch(format_args!("{} rows times {tokens} of activations", weights.rows))),
        }
    }

    /// The grids with thread blocks in pairs, where that should take less.
    fn in_pairs_if_faster(self, kernels: &Kernels, kernel: GemmWeightsKernel) -> Self {
        let gemm = kernel.in_pairs_if_faster(self.gemm, kernels.multiprocessors());
        Self { gemm, thread_blocks: gemm.schedule.thread_blocks, ..self }
    }

    /// The grids of experts' rows, so many whole token tiles at most. Their schedule is made on the device.
    pub(super) fn of_experts(
        kernels: &Kernels,
        kernel: GemmWeightsKernel,
        weights: QuantizedShape,
        token_tiles: u64,
        aligned: bool,
    ) -> Result<Self> {
        let tokens = token_tiles * u64::from(kernel.tile.tokens());
        let grids = Self::new(kernels, kernel, weights, tokens as usize, aligned)?;
        Ok(Self { thread_blocks: kernels.multiprocessors(), ..grids })
    }

    /// Returns whether thread blocks are in pairs.
    fn paired(&self) -> bool {
        self.gemm.schedule.paired != 0
    }

    /// Work tiles of a token tile, and k-iterations of each, for a schedule.
    pub(super) fn row_tiles_and_k_iterations(&self, kernel: GemmWeightsKernel) -> [u32; 2] {
        let row_tiles = self.gemm.shape.rows.div_ceil(u64::from(kernel.tile.rows()));
        [row_tiles as u32, self.gemm.k_iterations.divisor as u32]
    }

    /// Bytes of memory that both work in: arranged activations, and behind them sums. Both are multiples of 16.
    pub(super) fn bytes(&self, kernel: GemmWeightsKernel) -> u64 {
        self.arrange.bytes() + left_bytes(self.thread_blocks, kernel.tile)
    }
}

/// Bytes that a product with so many tokens' activations of a dtype, or fewer, works in.
pub(in crate::gpu) fn gemm_workspace(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
    dtype: Dtype,
) -> Result<usize> {
    if dtype == Dtype::F32 {
        let [parts, sums] = parts::bytes(tokens, weights.rows, weights.cols);
        let rest = gemm_workspace(kernels, weights, tokens.saturating_mul(parts::ROWS), Dtype::Bf16)?;
        return Ok(usize::try_from(parts.saturating_add(sums)).unwrap_or(usize::MAX).saturating_add(rest));
    }
    if weights.rows == 0 || tokens == 0 || !takes(weights) {
        return Ok(0);
    }
    let mut most = 0;
    for kernel in GemmWeightsKernel::of(kernels.target()) {
        // A GPU may have too little shared memory for a kernel.
        if gemm_grid(kernels, kernel, weights, tokens).is_none() {
            continue;
        }
        // With fewer tokens there may be more thread blocks, which have fewer sums each.
        let grids = Grids::new(kernels, kernel, weights, tokens, true)?;
        let sums = left_bytes(kernels.multiprocessors(), kernel.tile);
        most = most.max(grids.bytes(kernel)).max(grids.arrange.bytes() + sums);
    }
    Ok(most as usize)
}

/// The most tokens for which no kernel for many is faster.
const FEW: usize = TILE_COLUMNS as usize;

/// Enqueues a product, by a given kernel or by the one that should take the shortest, which may be one for few tokens. The caller has
/// checked that there are so many tokens' activations, the operands of the epilogue, and that `out` has room.
#[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
pub(in crate::gpu) fn gemm_weights<T: Activation, O: ProductOf<T>>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: Option<GemmWeightsKernel>,
    weights: DeviceTensorView<'_>,
    activations: DeviceView<'_, T>,
    tokens: usize,
    epilogue: DeviceEpilogue<'_, T, O>,
    mut workspace: GemmWorkspaceMut<'_>,
    mut out: DeviceViewMut<'_, O>,
) -> Result<()> {
    let shape = weights.shape();
    let QuantizedShape { rows, cols, .. } = shape;
    if rows == 0 || tokens == 0 {
        return Ok(());
    }
    limited("rows of activations", tokens, TOKEN_LIMIT)?;
    let (activations, _activations_read) = activations.read(stream, "the activations", 1)?;
    let ([codes, scales, slot], _weights_read) = weights.read(stream)?;
    let (out, _written) = out.write(stream, "the output", 1)?;
    let (steps, _steps_read) = epilogue.read(stream)?;
    let operands = Operands { codes, scales, slot, activations, out, apply: apply_global(weights), steps };
    if T::DTYPE != Dtype::F32 {
        let by = Way::of(kernels, kernel, shape, (T::DTYPE, tokens), activations)?;
        let (memory, _used) = workspace.write(stream, by.bytes())?;
        // SAFETY: the caller checked layout and lengths, and `Way::of` the shape; codes and scales start on 16 bytes. The borrows
        // keep the buffers from overlapping, and until the launches are enqueued.
        return unsafe { by.enqueue(kernels, stream, (shape, T::DTYPE), &operands, tokens, memory) };
    }
    let parts_of_all = tokens * parts::ROWS;
    let [parts_bytes, sums_bytes] = parts::bytes(tokens, rows, cols);
    // The parts lie on 16 bytes.
    let by = Way::of(kernels, kernel, shape, (Dtype::Bf16, parts_of_all), 0)?;
    let ([counters, parts], _used) = workspace.write(stream, parts_bytes + sums_bytes + by.bytes())?;
    let sums = parts + parts_bytes;
    let products = Operands { activations: parts, out: sums, steps: Steps::SUMS, ..operands };
    let routed = Routed::default();
    let memory = [counters, sums + sums_bytes];
    // SAFETY: as above; parts, sums and what the product works in lie behind each other, with the room that was asked for, and each
    // kernel reads what the one before has written.
    unsafe {
        parts::split(kernels, stream, activations, parts, routed, [tokens, cols])?;
        by.enqueue(kernels, stream, (shape, Dtype::Bf16), &products, parts_of_all, memory)?;
        parts::merge(kernels, stream, sums, out, steps, routed, [tokens, rows])
    }
}

/// The kernels of a product: those for many tokens, or one for few at a time.
enum Way {
    Many { kernel: GemmWeightsKernel, ids: [KernelId; 2], grids: Box<Grids> },
    Few(GemvWeightsKernel),
}

impl Way {
    /// The kernels for so many tokens' activations of a dtype, which begin at an address, with a given one for many if there is one.
    fn of(
        kernels: &Kernels,
        given: Option<GemmWeightsKernel>,
        weights: QuantizedShape,
        (dtype, tokens): (Dtype, usize),
        activations: u64,
    ) -> Result<Self> {
        let aligned = activations.is_multiple_of(16) && weights.cols.is_multiple_of(8);
        let Some(kernel) = given.or_else(|| gemm_kernel(kernels, weights, tokens, aligned)) else {
            return Ok(Self::Few(GemvWeightsKernel::choose(weights, tokens)));
        };
        let grids = Grids::new(kernels, kernel, weights, tokens, aligned)?;
        let grids = Box::new(grids.in_pairs_if_faster(kernels, kernel));
        let ids = ids((kernel, grids.paired()), weights, dtype)?;
        Ok(Self::Many { kernel, ids, grids })
    }

    /// Bytes of memory that they work in.
    fn bytes(&self) -> u64 {
        match self {
            Self::Many { kernel, grids, .. } => grids.bytes(*kernel),
            Self::Few(_) => 0,
        }
    }

    /// Enqueues them.
    ///
    /// # Safety
    /// The operands are as the kernels' contracts say. The counters are zeros, and there is as much memory as they work in.
    unsafe fn enqueue(
        &self,
        kernels: &Kernels,
        stream: &Arc<CudaStream>,
        of: (QuantizedShape, Dtype),
        operands: &Operands,
        tokens: usize,
        memory: [u64; 2],
    ) -> Result<()> {
        let routed = Routed::default();
        // SAFETY: the caller's promise; there is no plan.
        unsafe {
            match self {
                Self::Many { kernel, ids, grids } => {
                    enqueue(kernels, stream, (*kernel, *ids), operands, routed, grids, memory)
                }
                Self::Few(kernel) => {
                    weights::enqueue(kernels, stream, *kernel, of, operands, routed, (tokens, None))
                }
            }
        }
    }
}

/// The kernel for many tokens that [`gemm_weights`] chooses; none if one for few tokens is faster, or no other takes the weights. Those for
/// few are fast for tokens whose activations start on 16 bytes only.
pub(in crate::gpu) fn gemm_kernel(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
    aligned: bool,
) -> Option<GemmWeightsKernel> {
    if !may_need_workspace(weights, tokens) {
        return None;
    }
    let grid = |kernel| gemm_grid(kernels, kernel, weights, tokens);
    let few = GemvWeightsKernel::for_more_than_eight(weights, tokens).filter(|_| aligned);
    GemmWeightsKernel::choose((kernels.target(), kernels.multiprocessors()), grid, few)
}

/// The kernels that arrange and multiply.
pub(super) fn ids(
    (kernel, paired): (GemmWeightsKernel, bool),
    weights: QuantizedShape,
    dtype: Dtype,
) -> Result<[KernelId; 2]> {
    let no_kernel = Error::NoKernel { format: weights.format };
    let Some(format) = weights_format(weights.format).filter(|_| takes(weights)) else {
        return Err(no_kernel);
    };
    let dtype = kernel_dtype(dtype);
    let ids = arrange(dtype).zip(kernel.tile.kernel(kernel.edition, paired, format, dtype));
    ids.map(|(arrange, gemm)| [arrange, gemm]).ok_or(no_kernel)
}

/// Enqueues both kernels, which work in `memory` with `counters`.
///
/// # Safety
/// The operands are as the kernels' contracts say, and the plan is made for these grids. The counters are zeros, as each launch leaves
/// them, and `memory` has room for what the grids say.
pub(super) unsafe fn enqueue(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    (kernel, [arrange, gemm]): (GemmWeightsKernel, [KernelId; 2]),
    operands: &Operands,
    routed: Routed,
    grids: &Grids,
    [counters, memory]: [u64; 2],
) -> Result<()> {
    let Operands { codes, scales, slot, activations, out, apply, steps } = *operands;
    let Routed { plan, from, to } = routed;
    let left = memory + grids.arrange.bytes();
    let ready = kernels.ready(arrange)?;
    let grid = Argument(grids.arrange);
    let of_arrange = config(&ready.kernel, u64::from(grids.arrange.thread_blocks))?;
    let pointers = [activations, memory, plan, from];
    let mut arguments = pointing(&pointers);
    arguments.push(ptr::from_ref(&grid) as _);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The driver copies them. The rest is the caller's
    // promise. Kernels for warp groups wait for whatever is in front.
    unsafe {
        let how = (kernel.edition, false);
        launch_behind(stream, &ready.function, of_arrange, how, &mut arguments)
    }
    .map_err(doing("arranging activations"))?;

    let ready = kernels.ready(gemm)?;
    let launched = Kernel { shared: grids.gemm.shared, ..ready.kernel };
    let config = config(&launched, u64::from(grids.thread_blocks))?;
    let Steps { bias, residual, epilogue } = steps;
    let pointers =
        [codes, scales, slot, activations, memory, out, counters, left, plan, from, to, bias, residual];
    let grid = Argument(grids.gemm);
    let mut arguments = pointing(&pointers);
    arguments.extend([
        ptr::from_ref(&grid) as *mut c_void,
        ptr::from_ref(&apply) as _,
        ptr::from_ref(&epilogue) as _,
    ]);
    // SAFETY: as above. The kernel before has arranged the activations for this one, and kernels of warp groups wait for it. The driver
    // copies the arguments.
    unsafe {
        launch_behind(stream, &ready.function, config, (kernel.edition, grids.paired()), &mut arguments)
    }
    .map_err(doing("launching a product"))
}

/// Arguments that are addresses, as a launch takes them: where each of them lies. They must outlive it.
fn pointing(addresses: &[u64]) -> Vec<*mut c_void> {
    addresses.iter().map(|address| ptr::from_ref(address) as _).collect()
}

/// Launches a kernel behind another one, its thread blocks in pairs or each by itself. Those of warp groups may start before that one
/// is at its end; drivers for other GPUs may be too old to know how.
///
/// # Safety
/// As for [`cudarc::driver::LaunchArgs::launch`], with pointers to the arguments.
unsafe fn launch_behind(
    stream: &CudaStream,
    function: &CudaFunction,
    config: LaunchConfig,
    (edition, paired): (Edition, bool),
    arguments: &mut [*mut c_void],
) -> std::result::Result<(), DriverError> {
    let (function, on) = (function.cu_function(), stream.cu_stream());
    let LaunchConfig { grid_dim, block_dim, shared_mem_bytes } = config;
    stream.context().bind_to_thread()?;
    if edition == Edition::Mma {
        // SAFETY: the caller's promise.
        return unsafe { launch_kernel(function, grid_dim, block_dim, shared_mem_bytes, on, arguments) };
    }
    let behind = CUlaunchAttribute_st {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let pair = CUlaunchAttribute_st {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { clusterDim: ClusterDimension { x: 2, y: 1, z: 1 } },
    };
    let mut attributes = [behind, pair];
    let config = CUlaunchConfig_st {
        gridDimX: grid_dim.0,
        gridDimY: grid_dim.1,
        gridDimZ: grid_dim.2,
        blockDimX: block_dim.0,
        blockDimY: block_dim.1,
        blockDimZ: block_dim.2,
        sharedMemBytes: shared_mem_bytes,
        hStream: on,
        attrs: attributes.as_mut_ptr(),
        numAttrs: if paired { 2 } else { 1 },
    };
    // SAFETY: the configuration and the attributes live until the call returns; the rest is the caller's promise.
    unsafe { cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), ptr::null_mut()) }.result()
}
