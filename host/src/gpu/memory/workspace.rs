//! The workspace of products of many tokens, in owned or foreign memory.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, SyncOnDrop};
use microscale_kernels_abi::gemm::params::SEMAPHORES;

use crate::error::{Error, OperandFault, Result};
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::runtime::driver::doing;

pub(in crate::gpu) const SEMAPHORE_BYTES: usize = SEMAPHORES as usize * size_of::<u32>();
/// Alignment of the memory after the semaphores, in bytes.
const ALIGNMENT: usize = 16;
const WORKSPACE: &str = "the workspace";

/// Bytes of the results of `rows` rows before they are quantized, a multiple of 16.
pub(in crate::gpu) fn results_bytes(rows: usize, results: usize) -> u64 {
    (rows as u64).saturating_mul(results as u64).saturating_mul(2).next_multiple_of(16)
}

/// Device memory for products of many tokens: semaphores, packed activations, partial sums.
///
/// Consecutive products on one stream share a workspace; products on several streams need one each.
/// Foreign memory serves as well: [`GemmWorkspaceMut`].
#[derive(Debug)]
pub struct GemmWorkspace {
    semaphores: CudaSlice<u32>,
    memory: CudaSlice<u8>,
}

impl GemmWorkspace {
    /// Bytes of a workspace for products whose results are quantized
    /// ([`Linear::quantize_results`](crate::gpu::Linear::quantize_results)): `[rows, results]` of
    /// them, after the `bytes` bytes of the same products without that.
    pub fn bytes_with_results(bytes: usize, rows: usize, results: usize) -> usize {
        let results = usize::try_from(results_bytes(rows, results)).unwrap_or(usize::MAX);
        let product = bytes.max(SEMAPHORE_BYTES).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        if results == 0 { bytes } else { product.saturating_add(results) }
    }

    /// Allocates a workspace of `bytes` bytes.
    ///
    /// [`Plan::workspace_bytes`](crate::gpu::Plan::workspace_bytes) returns the size that a plan
    /// needs.
    ///
    /// # Errors
    /// [`Error::Gpu`] when memory is short.
    pub fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let allocating = doing("allocating a workspace");
        let rest = bytes.saturating_sub(SEMAPHORE_BYTES);
        Ok(Self {
            semaphores: stream.alloc_zeros(SEMAPHORES as usize).map_err(&allocating)?,
            memory: stream.alloc_zeros(rest.max(1)).map_err(&allocating)?,
        })
    }
}

/// A borrowed workspace: of a `&mut `[`GemmWorkspace`], of foreign memory, or [none](Self::none).
pub struct GemmWorkspaceMut<'a>(Option<Parts<'a>>);

struct Parts<'a> {
    semaphores: DeviceViewMut<'a, u32>,
    memory: DeviceViewMut<'a, u8>,
}

/// Shows the bytes after the semaphores.
impl fmt::Debug for GemmWorkspaceMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.as_ref().map_or(0, |parts| parts.memory.len());
        f.debug_struct("GemmWorkspaceMut").field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl GemmWorkspaceMut<'_> {
    /// Bytes of the semaphores, which come first in foreign memory.
    ///
    /// Only they must be zeros before a product.
    pub const COUNTER_BYTES: usize = SEMAPHORE_BYTES;

    /// No workspace, for plans that need none.
    pub const fn none() -> Self {
        Self(None)
    }

    /// A workspace of `bytes` bytes at an address in device memory, a multiple of 16.
    ///
    /// [`Plan::workspace_bytes`](crate::gpu::Plan::workspace_bytes) returns the size that a plan
    /// needs. With 0 bytes, [none](Self::none).
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if the semaphores do not fit.
    ///
    /// # Safety
    /// As for [`DeviceViewMut::from_raw_parts`]. The first [`Self::COUNTER_BYTES`] are zeros before
    /// the first product; products that run to their end leave zeros there. The other bytes may
    /// have any values.
    pub unsafe fn from_raw_parts(address: CUdeviceptr, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self::none());
        }
        let Some(rest) = bytes.checked_sub(SEMAPHORE_BYTES) else {
            let (needed, found) = (SEMAPHORE_BYTES as u64, bytes as u64);
            return Err(Error::Operands(OperandFault::Workspace { needed, found }));
        };
        // SAFETY: by the caller's contract the `bytes` bytes are exclusive and outlive the view;
        // the two parts do not overlap.
        unsafe {
            Ok(Self(Some(Parts {
                semaphores: DeviceViewMut::from_raw_parts(address, SEMAPHORES as usize),
                memory: DeviceViewMut::from_raw_parts(address.wrapping_add(SEMAPHORE_BYTES as u64), rest),
            })))
        }
    }

    /// The addresses of the semaphores and of the memory after them.
    ///
    /// The caller enqueues the work on `stream` that writes there before it drops the guards. Zeros
    /// if nothing is needed and there is no workspace.
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if there are fewer than `needed` bytes after the semaphores,
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    pub(in crate::gpu) fn write<'b>(
        &'b mut self,
        stream: &'b CudaStream,
        needed: u64,
    ) -> Result<([CUdeviceptr; 2], [Option<SyncOnDrop<'b>>; 2])> {
        let found = self.0.as_ref().map_or(0, |parts| parts.memory.len() as u64);
        if needed > found {
            return Err(Error::Operands(OperandFault::Workspace { needed, found }));
        }
        match &mut self.0 {
            Some(Parts { semaphores, memory }) if needed > 0 => {
                let (semaphores, counting) = semaphores.write(stream, WORKSPACE, 1)?;
                let (memory, used) = memory.write(stream, WORKSPACE, ALIGNMENT)?;
                Ok(([semaphores, memory], [Some(counting), Some(used)]))
            }
            _ => Ok(([0; 2], [None, None])),
        }
    }
}

impl<'a> From<&'a mut GemmWorkspace> for GemmWorkspaceMut<'a> {
    fn from(workspace: &'a mut GemmWorkspace) -> Self {
        let GemmWorkspace { semaphores, memory } = workspace;
        Self(Some(Parts { semaphores: semaphores.into(), memory: memory.into() }))
    }
}

impl<'a> From<&'a mut GemmWorkspaceMut<'_>> for GemmWorkspaceMut<'a> {
    fn from(workspace: &'a mut GemmWorkspaceMut<'_>) -> Self {
        Self(workspace.0.as_mut().map(|Parts { semaphores, memory }| Parts {
            semaphores: semaphores.reborrow(),
            memory: memory.reborrow(),
        }))
    }
}

const _: () = assert!(SEMAPHORE_BYTES.is_multiple_of(ALIGNMENT));
