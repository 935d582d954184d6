//! Launches of matrix–vector products.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, PushKernelArg};
use microscale_formats::{Format, dot, nvfp4};
use microscale_kernels_abi::gemv::GemvGrid;
use microscale_kernels_abi::{ApplyGlobal, Divider, Gemv};

use crate::element::{Dtype, Element};
use crate::error::{Error, Result};
use crate::gemv::Batch;
use crate::gpu::launch::arguments::{Argument, apply_global, config, limited_columns, not_one_launch};
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

/// The kernel for a format and 1, 2 or 4 rows per warp.
///
/// `ragged`: rows are not a whole number of chunks. MXFP4's rows always are.
fn kind(format: Format, rows_per_warp: u32, ragged: bool) -> Result<Gemv> {
    Ok(match (format, rows_per_warp) {
        (Format::Nvfp4, _) if ragged => Gemv::Nvfp4Ragged,
        (Format::Nvfp4, 1) => Gemv::Nvfp4Rows1,
        (Format::Nvfp4, 2) => Gemv::Nvfp4Rows2,
        (Format::Nvfp4, _) => Gemv::Nvfp4Rows4,
        (Format::Mxfp4, 1) => Gemv::Mxfp4Rows1,
        (Format::Mxfp4, 2) => Gemv::Mxfp4Rows2,
        (Format::Mxfp4, _) => Gemv::Mxfp4Rows4,
        _ => return Err(Error::NoKernel { format }),
    })
}

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<GemvGrid> {}
// SAFETY: a 32-bit enumeration; host and kernel share its definition.
unsafe impl DeviceRepr for Argument<Dtype> {}

/// Enqueues a product of matrices of `rows` rows and vectors.
///
/// The caller has checked that the operands match, and that `out` has room.
#[expect(clippy::too_many_arguments, reason = "those of `Gpu::gemv_on`, and what was worked out of them")]
pub(in crate::gpu) fn gemv<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    rows_per_warp: u32,
    matrix: DeviceTensorView<'_>,
    vectors: DeviceTensorView<'_>,
    batch: Batch,
    rows: usize,
    mut out: DeviceViewMut<'_, T>,
) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    let blocks = matrix.shape().blocks_per_row();
    // Rows that end in half a chunk are not multiples of 16 bytes.
    let ragged = matrix.format() == Format::Nvfp4 && !(blocks * nvfp4::BLOCK).is_multiple_of(dot::CHUNK);
    let ready = kernels.ready(kind(matrix.format(), rows_per_warp, ragged)?.id())?;
    let rows_a_warp = ready.kernel.elements_per_warp() as usize;
    let groups = rows.div_ceil(rows_a_warp);
    limited_columns(matrix.shape())?;
    let counts = groups.checked_mul(batch.count).filter(|groups| *groups < 1 << 31);
    let rows_in_all = format_args!("{} matrices of {rows} rows", batch.count);
    let all_groups = counts.ok_or_else(|| not_one_launch(rows_in_all))?;
    let grid = Argument(GemvGrid {
        rows: rows as u64,
        batches: batch.count as u64,
        blocks: blocks as u64,
        vector_stride: batch.vector_stride as u64,
        groups: Divider::new(groups as u64),
    });
    let dtype = Argument(T::DTYPE);
    let [apply, vector_apply]: [Argument<ApplyGlobal>; 2] = [matrix, vectors].map(apply_global);
    let (out, _written) = out.write(stream, "the output", 1)?;
    let ([codes, scales, global], _read) = matrix.read(stream)?;
    let ([vector_codes, vector_scales, vector_global], _vectors_read) = vectors.read(stream)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&codes).arg(&scales).arg(&global);
    launch.arg(&vector_codes).arg(&vector_scales).arg(&vector_global);
    launch.arg(&out).arg(&grid).arg(&apply).arg(&vector_apply).arg(&dtype);
    // SAFETY: the arguments are the kernel's, in order. The caller checked that matrices and
    // vectors have the rows and blocks of `grid`, with linear scales, and that `out` has one result
    // per row. Codes and scales start on 16 bytes, and rows of whole chunks are multiples of 16
    // bytes. The borrows, held past the launch, keep the buffers from overlapping.
    unsafe { launch.launch(config(&ready.kernel, (all_groups * rows_a_warp) as u64)?) }
        .map_err(doing("launching a product"))?;
    Ok(())
}
