//! The driver's pool of device memory, kept while an operation allocates again and again.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

/// Keeps freed device memory in the pool of a GPU, until it is dropped.
///
/// By default the driver returns freed memory to the system whenever a stream is synchronized, and
/// maps it again for the next tensor.
pub(in crate::gpu) struct KeptPool {
    pool: sys::CUmemoryPool,
    /// The release threshold to restore.
    before: u64,
}

// SAFETY: the handle is of the driver's default pool, which exists as long as the process, and any
// thread may use it.
unsafe impl Send for KeptPool {}
// SAFETY: as above. The methods of the pool lock it.
unsafe impl Sync for KeptPool {}

const THRESHOLD: sys::CUmemPool_attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;

impl KeptPool {
    /// Keeps the pool of a context's GPU. Returns `None` if the GPU has no pool, or if another
    /// operation keeps it already.
    pub(in crate::gpu) fn new(context: &Arc<CudaContext>) -> Option<Self> {
        // SAFETY: the device of an open context is valid.
        let pool = unsafe { result::device::get_default_mem_pool(context.cu_device()) }.ok()?;
        let mut before = 0u64;
        // SAFETY: the pool is valid, and the attribute is a u64 that `before` has room for.
        unsafe { result::mem_pool::get_attribute(pool, THRESHOLD, (&raw mut before).cast::<c_void>()) }
            .ok()?;
        let kept = Self { pool, before };
        (before != u64::MAX && kept.set(u64::MAX)).then_some(kept)
    }

    /// Sets the bytes above which freed memory is returned to the system.
    fn set(&self, mut threshold: u64) -> bool {
        let value = (&raw mut threshold).cast::<c_void>();
        // SAFETY: the pool is valid, and the driver reads a u64 from `value` during the call.
        unsafe { result::mem_pool::set_attribute(self.pool, THRESHOLD, value) }.is_ok()
    }
}

impl Drop for KeptPool {
    fn drop(&mut self) {
        if self.before != u64::MAX && self.set(self.before) {
            // SAFETY: the pool is valid. Only unused memory is returned. If the driver refuses, the
            // memory stays in the pool, as it would at any time.
            let _ = unsafe { result::mem_pool::trim_to(self.pool, 0) };
        }
    }
}
