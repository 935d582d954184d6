//! The memory that products of many tokens work in, which may be somebody else's.

use std::fmt;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_kernels_abi::gemm::COUNTERS;

use super::gemm_weights_kernel::GemmWorkspace;
use super::memory::DeviceViewMut;
use crate::error::{Error, OperandFault, Result};

pub(super) const COUNTER_BYTES: usize = COUNTERS as usize * size_of::<u32>();
/// The number, in bytes, of which the address of the memory behind the counters is a multiple.
const ALIGNMENT: usize = 16;

/// Device memory for products of many tokens to work in: a `&mut `[`GemmWorkspace`], or memory that is somebody else's.
pub struct GemmWorkspaceMut<'a> {
    counters: DeviceViewMut<'a, u32>,
    memory: DeviceViewMut<'a, u8>,
}

/// Shows the bytes that products may work in.
impl fmt::Debug for GemmWorkspaceMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmWorkspaceMut").field("bytes", &self.memory.len()).finish_non_exhaustive()
    }
}

impl GemmWorkspaceMut<'_> {
    /// Bytes of the counters, with which memory begins that is somebody else's. They alone must be zeros before a product.
    pub const COUNTER_BYTES: usize = COUNTER_BYTES;

    /// A workspace of so many bytes ([`Gpu::gemm_workspace_bytes`](super::Gpu::gemm_workspace_bytes)) at an address in device memory, a multiple of 16.
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if there are fewer bytes than for any product.
    ///
    /// # Safety
    /// As of [`DeviceViewMut::from_raw_parts`]. The first [`Self::COUNTER_BYTES`] are zeros before the first product, and products that
    /// run to their end leave zeros there; of the others it does not matter what they are.
    pub unsafe fn from_raw_parts(address: CUdeviceptr, bytes: usize) -> Result<Self> {
        let Some(rest) = bytes.checked_sub(COUNTER_BYTES) else {
            let (needed, found) = (COUNTER_BYTES as u64, bytes as u64);
            return Err(Error::Operands(OperandFault::Workspace { needed, found }));
        };
        // SAFETY: the caller's promise, about two parts that do not overlap.
        unsafe {
            Ok(Self {
                counters: DeviceViewMut::from_raw_parts(address, COUNTERS as usize),
                memory: DeviceViewMut::from_raw_parts(address.wrapping_add(COUNTER_BYTES as u64), rest),
            })
        }
    }

    /// The addresses of the counters and of the memory behind them, for work on a stream that writes there, which is enqueued
    /// before the guards are dropped.
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if there are fewer bytes behind the counters than needed, [`Error::Alignment`] and
    /// [`Error::OtherContext`].
    pub(super) fn write<'b>(
        &'b mut self,
        stream: &'b CudaStream,
        needed: u64,
    ) -> Result<([CUdeviceptr; 2], [SyncOnDrop<'b>; 2])> {
        let found = self.memory.len() as u64;
        if needed > found {
            return Err(Error::Operands(OperandFault::Workspace { needed, found }));
        }
        let (counters, counting) = self.counters.write(stream, WORKSPACE, 1)?;
        let (memory, used) = self.memory.write(stream, WORKSPACE, ALIGNMENT)?;
        Ok(([counters, memory], [counting, used]))
    }
}

const WORKSPACE: &str = "the workspace";

impl<'a> From<&'a mut GemmWorkspace> for GemmWorkspaceMut<'a> {
    fn from(workspace: &'a mut GemmWorkspace) -> Self {
        let GemmWorkspace { counters, memory } = workspace;
        Self { counters: counters.into(), memory: memory.into() }
    }
}

impl<'a> From<&'a mut GemmWorkspaceMut<'_>> for GemmWorkspaceMut<'a> {
    fn from(workspace: &'a mut GemmWorkspaceMut<'_>) -> Self {
        Self { counters: workspace.counters.reborrow(), memory: workspace.memory.reborrow() }
    }
}

const _: () = assert!(COUNTER_BYTES.is_multiple_of(ALIGNMENT));
