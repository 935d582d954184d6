//! Quantizing activations: rows that are computed, rounded and quantized in one kernel.

use microscale_formats::activations::{RmsNorm, SUM_PIECE};
use microscale_formats::kv::KvShape;
use microscale_formats::layout::TILE_COLS;
use microscale_formats::{ActivationLayout, Dtype, Gate};

use crate::grid::Divider32;
use crate::launch::{Converts, Family, Kernel, KernelId, Targets, WARP};

/// The operation that computes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOperation {
    /// None: rows of the input.
    Plain,
    /// A [`Glu`](microscale_formats::Glu).
    Glu,
    /// An [`RmsNorm`], perhaps after adding a residual.
    Norm,
}

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// E4M3 under f32 scales.
    Fp8,
    /// MXFP8 with E4M3 elements.
    Mxfp8,
    /// MXFP4.
    Mxfp4,
    /// NVFP4.
    Nvfp4,
}

impl Output {
    /// Columns that share a scale, or that the output is padded to.
    pub const fn block(self) -> u32 {
        match self {
            Self::Fp8 => 1,
            Self::Mxfp8 | Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }
}

/// The kernel for an operation, an output and a dtype; `None` for f32.
pub const fn kernel(operation: RowOperation, output: Output, dtype: Dtype) -> Option<KernelId> {
    let dtype = match dtype {
        Dtype::F32 => return None,
        Dtype::F16 => 0,
        Dtype::Bf16 => 1,
    };
    let index = (operation as usize * 4 + output as usize) * 2 + dtype;
    Some(KernelId::new(Family::Activations, index))
}

/// Maximum number of warps in a thread block. With 56 registers, two such thread blocks fit on a
/// multiprocessor, so that one loads while the other one computes.
pub const MOST_WARPS: u32 = 18;
/// The first number of columns that is too large for the shared memory of a launch.
pub const COLUMN_LIMIT: u64 = 1 << 23;
/// Bytes of shared memory of a launch, at most.
pub(crate) const MOST_SHARED: u32 = shared_bytes(1, (COLUMN_LIMIT / SUM_PIECE as u64) as u32, MOST_WARPS);

/// Bytes of shared memory of a thread block: the sum of squares of each piece of its rows, then the
/// amax of each warp.
const fn shared_bytes(rows: u32, pieces: u32, warps: u32) -> u32 {
    (rows * pieces + warps) * 4
}

/// The table: each operation with its outputs, for f16 and bf16.
macro_rules! table {
    ($($operation:literal: $($output:literal $converts:ident),+;)+) => {
        &[$($(
            row(concat!($operation, "_", $output, "_f16"), Dtype::F16, Converts::$converts),
            row(concat!($operation, "_", $output, "_bf16"), Dtype::Bf16, Converts::$converts),
        )+)+]
    };
}

const fn row(name: &'static str, dtype: Dtype, converts: Converts) -> Kernel {
    Kernel {
        name,
        dtype: Some(dtype),
        threads: MOST_WARPS * WARP,
        elements: 0,
        shared: MOST_SHARED,
        converts,
        resident: 0,
        targets: Targets::All,
    }
}

pub(crate) const KERNELS: &[Kernel] = table! {
    "activations_plain": "fp8" E4m3, "mxfp8" E4m3, "mxfp4" E2m1, "nvfp4" E2m1;
    "activations_glu": "fp8" E4m3, "mxfp8" E4m3, "mxfp4" E2m1, "nvfp4" E2m1;
    "activations_norm": "fp8" E4m3, "mxfp8" E4m3, "mxfp4" E2m1, "nvfp4" E2m1;
    "kv_append": "fp8" E4m3, "nvfp4" E2m1;
    "kv_gather": "fp8" E4m3, "nvfp4" E2m1;
};

/// The action of a kernel on a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvAction {
    /// Quantizes rows of K and V, and puts them into slots.
    Append,
    /// Dequantizes slots to rows.
    Gather,
}

/// The kernel for an action on a KV cache in FP8 or NVFP4; `None` for other outputs and for f32.
pub const fn kv_kernel(action: KvAction, output: Output, dtype: Dtype) -> Option<KernelId> {
    const FIRST: usize = 24;
    let output = match output {
        Output::Fp8 => 0,
        Output::Nvfp4 => 1,
        Output::Mxfp8 | Output::Mxfp4 => return None,
    };
    let dtype = match dtype {
        Dtype::F32 => return None,
        Dtype::F16 => 0,
        Dtype::Bf16 => 1,
    };
    let index = FIRST + (action as usize * 2 + output) * 2 + dtype;
    Some(KernelId::new(Family::Activations, index))
}

/// Threads of a thread block of the KV cache's kernels.
pub const KV_THREADS: u32 = 4 * WARP;

/// Parameters of the KV cache's kernels. K and V have one shape.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KvParams {
    /// The cache.
    pub shape: KvShape,
    /// Elements from a row of K or V to the next. A row has `heads` · `head_dim` elements.
    pub row_stride: u64,
    /// `page_size`, to divide by.
    pub page_size: Divider32,
    /// `head_dim` in chunks of eight, to divide by.
    pub head_chunks: Divider32,
    /// Pieces of 1024 elements in a row, to divide by.
    pub pieces: Divider32,
    /// Rows of a sequence, to divide by, if slots are found by page tables; otherwise `rows`.
    pub sequence: Divider32,
    /// Rows of each of K and V.
    pub rows: u32,
    /// Entries of a sequence's page table.
    pub table_pages: u32,
    /// 1 if slots and page tables have entries of 64 bits, 0 for 32.
    pub wide: u32,
    /// 1 if rows start on 16 bytes.
    pub aligned: u32,
    /// Scales of K and V, which multiply codes; used if there are none in memory.
    pub given: [f32; 2],
}

impl KvParams {
    /// Parameters for rows without gaps, one slot each.
    pub const fn new(shape: KvShape, rows: u32) -> Self {
        let elements = shape.heads * shape.head_dim;
        Self {
            shape,
            row_stride: elements as u64,
            page_size: Divider32::new(shape.page_size),
            head_chunks: Divider32::new(shape.head_dim / 8),
            pieces: Divider32::new(elements.div_ceil(SUM_PIECE as u32)),
            sequence: Divider32::new(rows),
            rows,
            table_pages: 0,
            wide: 1,
            aligned: 0,
            given: [1.0; 2],
        }
    }

    /// Thread blocks that cover the rows of K and V.
    pub const fn thread_blocks(&self) -> u64 {
        (2 * self.rows as u64 * self.pieces.divisor as u64).div_ceil((KV_THREADS / WARP) as u64)
    }
}

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RowOrder {
    /// Rows in order.
    Dense = 0,
    /// Rows sorted by expert. `offsets` has an expert's first row, and the number of rows at its
    /// end; `scale_offsets` the same for rows of scales, which may be padded.
    Sorted = 1,
    /// `[experts, rows of an expert, columns]`. `offsets` has the number of an expert's rows that
    /// exist.
    Masked = 2,
}

/// The source of a scale for whole rows: FP8's scales, and the global scales of NVFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RowScale {
    /// `given` in the parameters.
    Given = 0,
    /// Element 0 in memory, or an expert's.
    InMemory = 1,
    /// From the row's amax. It is written to memory, as a factor of codes.
    PerToken = 2,
    /// FP8 only: raises element 0 in memory to the row's scale, and stores no codes. Another launch
    /// stores them, with [`Self::InMemory`].
    AmaxOfTensor = 3,
    /// FP8 only: one per group of columns.
    PerGroup = 4,
    /// FP8 only: one per group of columns, rounded up to a power of two.
    PowerOfTwoPerGroup = 5,
}

/// Parameters of all kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ActivationParams {
    /// Elements from a row's start to the next's, in the input.
    pub input_stride: u64,
    /// The same in the residual.
    pub residual_stride: u64,
    /// Bytes from a row's codes to the next's.
    pub code_stride: u64,
    /// FP8 with scales per group: elements from a row's first scale to the next's.
    pub scale_stride: u64,
    /// FP8 with scales per group: elements from a group's scale to the next's.
    pub group_stride: u64,
    /// Rows of values, of an expert for [`RowOrder::Masked`].
    pub rows: u32,
    /// Rows of scales, padding included.
    pub scale_rows: u32,
    /// Columns of the output.
    pub cols: u32,
    /// Blocks per row, without padding.
    pub blocks: u32,
    /// Blocks per row of scales, padding included.
    pub padded_blocks: u32,
    /// Rows of a tile of scales: [`ActivationLayout`] as a number.
    pub tile_rows: u32,
    /// Warps that share a row.
    pub warps: Divider32,
    /// Rows of a thread block; 0 if rows are [spread](Self::spread_rows).
    pub block_rows: u32,
    /// Warps of a thread block if rows are spread, otherwise 0.
    pub spread_warps: u32,
    /// Pieces of 1024 columns in a row.
    pub pieces: u32,
    /// 1 if all rows of inputs start on 16 bytes, of codes on 8, and columns are a multiple of 8.
    pub aligned: u32,
    /// [`RowOrder`] as a number.
    pub order: u32,
    /// Rows of scales of an expert, for [`RowOrder::Masked`].
    pub expert_rows: Divider32,
    /// Experts; 1 for [`RowOrder::Dense`].
    pub experts: u32,
    /// [`RowScale`] as a number.
    pub row_scale: u32,
    /// The scale for [`RowScale::Given`].
    pub given: f32,
    /// NVFP4: 1 if given scales multiply codes, 0 if they divide.
    pub multiplies: u32,
    /// MX formats: `ScaleRule::mantissa_addend`.
    pub mantissa_addend: u32,
    /// 1 / `cols`, rounded.
    pub inverse_cols: f32,
    /// [`RowOperation::Glu`]: [`Self::GELU_TANH`] or [`Self::GELU`] in place of `gate`, or 0.
    pub gelu: u32,
    /// [`RowOperation::Glu`]: 1 if gate and up alternate, 0 if a row has all gates first.
    pub interleaved: u32,
    /// [`RowOperation::Glu`].
    pub gate: Gate,
    /// [`RowOperation::Norm`].
    pub norm: RmsNorm,
}

/// The shape of a launch: thread blocks, threads, bytes of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationLaunch {
    /// Thread blocks.
    pub thread_blocks: u32,
    /// Threads per thread block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// Warps of a thread block that has more than one row.
const FEW_WARPS: u32 = 4;

/// Warps of a thread block if rows are spread.
const SPREAD_WARPS: u32 = 4;

/// The largest number of warps that are thread blocks of their own if rows are spread: some for
/// each scheduler of a large GPU.
const FEW_SPREAD_WARPS: u64 = 1024;

impl ActivationParams {
    /// GELU in its tanh approximation.
    pub const GELU_TANH: u32 = 1;
    /// GELU.
    pub const GELU: u32 = 2;

    /// Parameters for an output's geometry; everything about operations and scales is zero.
    ///
    /// `rows` are the rows of scales without padding, of an expert for [`RowOrder::Masked`]. The
    /// rows of values are the same, but for [`RowOrder::Sorted`].
    pub fn new(output: Output, rows: u32, cols: u32, layout: ActivationLayout) -> Self {
        let blocks = cols.div_ceil(output.block());
        let padded_blocks = layout.padded_blocks(blocks as usize) as u32;
        let pieces = (padded_blocks * output.block()).div_ceil(SUM_PIECE as u32);
        // The fewest pieces per warp, and the fewest warps for that.
        let warps = pieces.div_ceil(pieces.div_ceil(MOST_WARPS));
        let block_rows = if warps < FEW_WARPS { FEW_WARPS / warps } else { 1 };
        let expert_rows = layout.padded_rows(rows as usize) as u32;
        Self {
            input_stride: u64::from(cols),
            residual_stride: 0,
            code_stride: 0,
            scale_stride: 0,
            group_stride: 0,
            rows,
            scale_rows: expert_rows,
            cols,
            blocks,
            padded_blocks,
            tile_rows: layout.tile_rows() as u32,
            warps: Divider32::new(warps),
            block_rows,
            spread_warps: 0,
            pieces,
            aligned: 0,
            order: RowOrder::Dense as u32,
            expert_rows: Divider32::new(expert_rows),
            experts: 1,
            row_scale: RowScale::Given as u32,
            given: 1.0,
            multiplies: 0,
            mantissa_addend: 0,
            inverse_cols: 1.0 / cols as f32,
            gelu: 0,
            interleaved: 0,
            gate: Gate::SILU,
            norm: RmsNorm::llama(1e-6),
        }
    }

    /// Spreads rows over thread blocks, if the operation and the scale need no sum and no amax of
    /// a row: each warp has one piece of any row then. All other parameters are set.
    ///
    /// Few warps get a thread block each, so that they are spread over multiprocessors.
    pub fn spread_rows(&mut self, operation: RowOperation) {
        let warps = u64::from(self.scale_rows) * u64::from(self.pieces);
        let of_row = operation == RowOperation::Norm || self.row_scale == RowScale::PerToken as u32;
        if !of_row && warps < 1 << 31 {
            self.warps = Divider32::new(self.pieces);
            self.block_rows = 0;
            self.spread_warps = if warps > FEW_SPREAD_WARPS { SPREAD_WARPS } else { 1 };
        }
    }

    /// Warps of a thread block.
    #[inline(always)]
    pub const fn warps_of_block(&self) -> u32 {
        if self.spread_warps > 0 { self.spread_warps } else { self.warps.divisor * self.block_rows }
    }

    /// The launch that covers all rows of scales, for fewer columns than [`COLUMN_LIMIT`].
    pub const fn launch(&self) -> ActivationLaunch {
        let warps = self.warps_of_block();
        let threads = warps * WARP;
        if self.spread_warps > 0 {
            let thread_blocks = (self.scale_rows * self.pieces).div_ceil(warps);
            return ActivationLaunch { thread_blocks, threads, shared: 0 };
        }
        ActivationLaunch {
            thread_blocks: self.scale_rows.div_ceil(self.block_rows),
            threads,
            shared: shared_bytes(self.block_rows, self.pieces, warps),
        }
    }

    /// Tiles of scales side by side.
    #[inline(always)]
    pub const fn tiles_per_row(&self) -> u32 {
        self.padded_blocks / TILE_COLS as u32
    }
}
