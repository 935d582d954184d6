//! GPTQ: quantizes the rows of a layer's weights with error feedback. `host/src/cpu/gptq.rs` is the
//! definition, down to the order of every f32 operation.
//!
//! | file | contents |
//! |---|---|
//! | `load` | rows to f32, in the order of positions |
//! | `columns` | a batch of 128 positions: sixteen lanes per row, two rows per warp |
//! | `row_search`, `descent` | the search for a block's scale; the recursion under one scale |
//! | `update` | the residuals of a batch, applied to all later columns |
//! | `encode` | codes of all blocks |
//! | `norms` | the error of a quantized matrix in the outputs of its layer |
//! | `factor` | addresses of the factor |
//!
//! Rows are independent. The batches of a pass are launched one after the other, `columns` and then
//! `update`.

mod columns;
mod descent;
mod encode;
mod factor;
mod load;
mod norms;
mod row_search;
mod update;

use microscale_formats::{E2m1, Ties};
use microscale_kernels_abi::gptq::{BatchParams, BlockBounds, LoadParams, ScaleTable};
use microscale_kernels_abi::{MxOptions, NvOptions, ReportSlot};

use self::columns::Operands;
use self::encode::Target;
use self::load::Matrices;
use crate::dtype::{Bf16, F16, F32};
use crate::format::{ANY, Mx, Nv};

/// The entry points that load: `name<dtype>`.
macro_rules! load_entries {
    ($($name:ident<$dtype:ty>)+) => {$(
        /// Loads rows to f32, in the order of positions.
        ///
        /// # Safety
        /// `values` points to the pass' rows, aligned to their dtype. `position_of` has a position
        /// below `positions` for each column, with padding, and no position twice. `weights` and
        /// `updated` are `[rows, pitch]`, and `report` points to a report slot. All in global
        /// memory, and none overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            position_of: *const u32,
            weights: *mut f32,
            updated: *mut f32,
            report: *mut ReportSlot,
            params: LoadParams,
        ) {
            // SAFETY: the same contract.
            unsafe { load::load::<$dtype>(values, position_of, Matrices { weights, updated }, report, &params) }
        }
    )+};
}

load_entries! {
    gptq_load_f32<F32>
    gptq_load_f16<F16>
    gptq_load_bf16<Bf16>
}

/// The entry points that quantize a batch: `name<options>(|options| format and ties)`.
macro_rules! columns_entries {
    ($($name:ident<$options:ty, $block:literal>(|$given:ident| $format:expr, $ties:expr))+) => {$(
        /// Quantizes a batch of positions of all rows. Weights become residuals, updated weights
        /// become the weights that were rounded. Applies residuals within the batch, and adds to
        /// errors and to the report.
        ///
        /// # Safety
        /// `weights` and `updated` are `[rows, pitch]`, on 16 bytes, with rows up to the next
        /// multiple of 128. `feedback` is the factor, on 16 bytes, and `pivots` its diagonal.
        /// `bounds` has a row block's bounds, and `block_at` the block of the column at each
        /// position. `scales` is `[rows, row_blocks]`; with `fixed`, the scales are there. `errors`
        /// has a sum for each row, and `report` points to `REPORT_SLOTS` slots. All in global
        /// memory, and none overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            weights: *mut f32,
            updated: *mut f32,
            feedback: *const f32,
            pivots: *const f32,
            bounds: *const BlockBounds,
            table: *const ScaleTable,
            block_at: *const u32,
            scales: *mut u8,
            errors: *mut f64,
            report: *mut ReportSlot,
            params: BatchParams,
            $given: $options,
        ) {
            let operands = Operands { feedback, pivots, bounds, table, block_at, scales, errors };
            let (format, ties) = ($format, $ties);
            // SAFETY: the same contract.
            unsafe {
                columns::columns::<_, $block>(
                    &format, ties, Matrices { weights, updated }, &operands, report, &params,
                );
            }
        }
    )+};
}

columns_entries! {
    gptq_columns_mxfp4<MxOptions, 32>(|options| Mx::<E2m1, ANY>::new(options), Mx::<E2m1, ANY>::new(options).ties())
    gptq_columns_nvfp4<NvOptions, 16>(|options| Nv::new(options.plan, options.saturate_non_finite), Ties::Even)
}

/// Applies the residuals of a batch to all later columns.
///
/// # Safety
/// `weights` and `updated` are `[rows, pitch]`, on 16 bytes, with `row_tiles` whole tiles of rows
/// and whole tiles of columns. `feedback` is the factor, on 16 bytes. All in global memory, and
/// none overlap. The batch is whole. There is a thread block for each tile of later columns and of
/// rows, of the shape that the ABI gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn gptq_update(
    weights: *mut f32,
    updated: *mut f32,
    feedback: *const f32,
    params: BatchParams,
) {
    // SAFETY: the same contract.
    unsafe { update::update(Matrices { weights, updated }, feedback, &params) }
}

/// The entry points that encode: `name<options>(|options| format)`.
macro_rules! encode_entries {
    ($($name:ident<$options:ty>(|$given:ident| $format:expr))+) => {$(
        /// Encodes the weights that were rounded, and adds to the report.
        ///
        /// # Safety
        /// `rounded_from` is `[rows, pitch]`. `position_of` has a position below `positions` for
        /// each column, with padding. `codes` has room for `rows` rows of blocks, and `scales` has
        /// their scales. `report` points to `REPORT_SLOTS` slots. All in global memory, and none
        /// overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            rounded_from: *const f32,
            position_of: *const u32,
            codes: *mut u8,
            scales: *const u8,
            report: *mut ReportSlot,
            params: LoadParams,
            $given: $options,
        ) {
            let target = Target { position_of, codes, scales, report };
            // SAFETY: the same contract.
            unsafe { encode::encode(&$format, rounded_from, target, &params) }
        }
    )+};
}

encode_entries! {
    gptq_encode_mxfp4<MxOptions>(|options| Mx::<E2m1, ANY>::new(options))
    gptq_encode_nvfp4<NvOptions>(|options| Nv::new(options.plan, options.saturate_non_finite))
}

/// Adds a batch's part of the squared norm of each row times the factor to `norms`.
///
/// # Safety
/// `values` and `sums` are `[rows, pitch]`, as the loading kernel left them and the update changed
/// them. `feedback` is the factor, `pivots` its diagonal, and `norms` has a number for each row.
/// All in global memory, and none overlap. The launch has the shape that the ABI gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn gptq_norms(
    values: *mut f32,
    sums: *mut f32,
    feedback: *const f32,
    pivots: *const f32,
    norms: *mut f64,
    params: BatchParams,
) {
    let matrices = Matrices { weights: values, updated: sums };
    // SAFETY: the same contract.
    unsafe { norms::norms(matrices, feedback, pivots, norms, &params) }
}
