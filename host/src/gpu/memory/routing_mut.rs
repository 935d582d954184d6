//! A routing in foreign device memory.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream};

use crate::gpu::memory::experts::{DeviceRouting, SORTED_WORDS};

/// A [`DeviceRouting`] in foreign device memory.
///
/// It derefs to the routing, and does not free the memory.
pub struct DeviceRoutingMut<'a> {
    routing: ManuallyDrop<DeviceRouting>,
    memory: PhantomData<&'a mut [u32]>,
}

/// Shows the routing.
impl fmt::Debug for DeviceRoutingMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl DeviceRoutingMut<'_> {
    /// Words of 32 bits that `pairs` pairs of `experts` experts need.
    pub const fn words(experts: usize, pairs: usize) -> usize {
        SORTED_WORDS.saturating_add(experts).saturating_add(pairs.saturating_mul(2))
    }

    /// A routing for up to `pairs` pairs and `experts` experts, at an address in device memory.
    ///
    /// The address is a multiple of 4. The routing has no pairs yet.
    ///
    /// # Safety
    /// As for [`DeviceViewMut::from_raw_parts`](crate::gpu::DeviceViewMut::from_raw_parts), for
    /// [`Self::words`] words. They are zeros, unless [`Gpu::route_on`](crate::gpu::Gpu::route_on)
    /// is enqueued, rather than captured elsewhere, before each first product that uses them.
    pub unsafe fn from_raw_parts(
        stream: &Arc<CudaStream>,
        experts: usize,
        pairs: usize,
        address: CUdeviceptr,
    ) -> Self {
        let mut next = address;
        let mut part = |words: usize| {
            // SAFETY: the caller provides `Self::words` words for the view's lifetime, and the
            // parts follow each other in them. Every bit pattern is a valid u32. `drop` leaks the
            // slice, so that the memory is not freed.
            let part: CudaSlice<u32> = unsafe { stream.upgrade_device_ptr(next, words) };
            next = next.wrapping_add((words * size_of::<u32>()) as u64);
            part
        };
        let [sorted, ends, tokens, order] = [part(SORTED_WORDS), part(experts), part(pairs), part(pairs)];
        let routing = DeviceRouting { experts, room: pairs, pairs: 0, top_k: 1, ends, tokens, order, sorted };
        Self { routing: ManuallyDrop::new(routing), memory: PhantomData }
    }
}

impl Deref for DeviceRoutingMut<'_> {
    type Target = DeviceRouting;

    fn deref(&self) -> &DeviceRouting {
        &self.routing
    }
}

impl DerefMut for DeviceRoutingMut<'_> {
    fn deref_mut(&mut self) -> &mut DeviceRouting {
        &mut self.routing
    }
}

impl Drop for DeviceRoutingMut<'_> {
    fn drop(&mut self) {
        // SAFETY: the routing is taken once, here, and `self` is not used afterwards.
        let DeviceRouting { ends, tokens, order, sorted, .. } =
            unsafe { ManuallyDrop::take(&mut self.routing) };
        // The owner frees the memory.
        for list in [ends, tokens, order, sorted] {
            let _ = list.leak();
        }
    }
}
