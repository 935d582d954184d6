//! GPTQ's factor, and the matrices of a pass over some rows, in device memory.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use microscale_kernels_abi::gptq::{BlockBounds, ScaleTable, UPDATE_TILE};

use crate::cpu::{GptqFactor, ScaleFactors};
use crate::error::{Error, GptqFault, OUT_OF_MEMORY, Result};
use crate::gpu::launch::arguments::Argument;
use crate::gpu::runtime::driver::doing;
use crate::shape::Shape;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<BlockBounds> {}

/// Most bytes of the two matrices of a pass, unless 128 rows need more.
const PASS_BYTES: usize = 1 << 30;

/// A factor in device memory.
pub(in crate::gpu) struct DeviceGptqFactor {
    context: Arc<CudaContext>,
    pub(in crate::gpu) positions: usize,
    pub(in crate::gpu) feedback: CudaSlice<f32>,
    pub(in crate::gpu) pivots: CudaSlice<f32>,
    pub(in crate::gpu) bounds: CudaSlice<Argument<BlockBounds>>,
    pub(in crate::gpu) block_at: CudaSlice<u32>,
    pub(in crate::gpu) position_of: CudaSlice<u32>,
}

impl fmt::Debug for DeviceGptqFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceGptqFactor").field("positions", &self.positions).finish_non_exhaustive()
    }
}

impl DeviceGptqFactor {
    /// The factor's copy in the memory of the stream's GPU. It lives as long as the factor.
    ///
    /// # Errors
    /// [`Error::Gpu`], and [`GptqFault::GpuMemory`] when memory is short.
    pub(in crate::gpu) fn of(stream: &Arc<CudaStream>, factor: &GptqFactor) -> Result<Arc<Self>> {
        let context = stream.context();
        factor
            .copies()
            .get_or_make(|copy: &Self| Arc::ptr_eq(&copy.context, context), || Self::new(stream, factor))
    }

    fn new(stream: &Arc<CudaStream>, factor: &GptqFactor) -> Result<Self> {
        let operands = factor.operands();
        let copying = doing("copying a factor to it");
        let short = |error| gpu_memory(copying(error), size_of_val(&operands.feedback[..]));
        let bounds: Vec<_> = operands.bounds.iter().copied().map(Argument).collect();
        let copy = Self {
            context: stream.context().clone(),
            positions: operands.pivots.len(),
            feedback: stream.clone_htod(&operands.feedback).map_err(short)?,
            pivots: stream.clone_htod(&operands.pivots).map_err(&copying)?,
            bounds: stream.clone_htod(&bounds).map_err(&copying)?,
            block_at: stream.clone_htod(&operands.block_at).map_err(&copying)?,
            position_of: stream.clone_htod(&operands.position_of).map_err(&copying)?,
        };
        // Other streams use it, and their order may not be tracked.
        stream.synchronize().map_err(&copying)?;
        Ok(copy)
    }
}

/// The matrices of a pass over some rows, `[rows, pitch]` in f32.
pub(in crate::gpu) struct GptqPass {
    pub(in crate::gpu) pitch: usize,
    /// The most rows, a multiple of the update's tile.
    pub(in crate::gpu) rows: usize,
    pub(in crate::gpu) weights: CudaSlice<f32>,
    pub(in crate::gpu) updated: CudaSlice<f32>,
    /// A sum for each row.
    pub(in crate::gpu) errors: CudaSlice<f64>,
}

impl GptqPass {
    /// Allocates a pass over rows of a matrix: all of them, or the most within the limit of memory.
    ///
    /// # Errors
    /// [`Error::Gpu`], and [`GptqFault::GpuMemory`] when memory is short.
    pub(in crate::gpu) fn new(stream: &Arc<CudaStream>, shape: Shape, positions: usize) -> Result<Self> {
        let tile = UPDATE_TILE as usize;
        let pitch = positions.next_multiple_of(tile);
        let most = (PASS_BYTES / (2 * pitch * size_of::<f32>()) / tile * tile).max(tile);
        let rows = shape.rows.next_multiple_of(tile).min(most);
        let allocating = doing("allocating GPTQ's matrices");
        let short = |error| gpu_memory(allocating(error), 2 * rows * pitch * size_of::<f32>());
        Ok(Self {
            pitch,
            rows,
            weights: stream.alloc_zeros(rows * pitch).map_err(short)?,
            updated: stream.alloc_zeros(rows * pitch).map_err(short)?,
            errors: stream.alloc_zeros(rows).map_err(&allocating)?,
        })
    }

    /// Clears the matrices and the sums.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub(in crate::gpu) fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        let clearing = doing("clearing GPTQ's matrices");
        stream.memset_zeros(&mut self.weights).map_err(&clearing)?;
        stream.memset_zeros(&mut self.updated).map_err(&clearing)?;
        stream.memset_zeros(&mut self.errors).map_err(&clearing)
    }
}

/// Copies a table of scales to device memory.
///
/// # Errors
/// [`Error::Gpu`].
pub(in crate::gpu) fn scale_table(stream: &Arc<CudaStream>, scales: &ScaleFactors) -> Result<CudaSlice<f32>> {
    const _: () = assert!(size_of::<ScaleTable>() == 2 * 256 * size_of::<f32>());
    let both = [scales.factors, scales.scalings].concat();
    stream.clone_htod(&both).map_err(doing("copying a table of scales to it"))
}

/// Names what to change where memory for GPTQ is short.
fn gpu_memory(error: Error, needed: usize) -> Error {
    match error {
        Error::Gpu { code: Some(OUT_OF_MEMORY), .. } => Error::Gptq(GptqFault::GpuMemory { needed }),
        error => error,
    }
}
