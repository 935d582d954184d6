//! Barriers in shared memory on which threads and asynchronous copies arrive (`mbarrier`), since
//! compute capability 9.0.
//!
//! A barrier expects a number of arrivals and of bytes. When all have arrived, its phase completes
//! and the next one begins. The parity of phases alternates, from 0 on. Arriving releases;
//! observing a completed phase acquires. None of this is convergent: each thread arrives and waits
//! for itself.

use core::arch::asm;

/// Initializes a barrier that expects `arrivals` arrivals per phase.
///
/// # Safety
/// `barrier` is the address of 8 bytes of the launch's shared memory, a multiple of 8. They are
/// used as a barrier only.
#[inline(always)]
pub(crate) unsafe fn init(barrier: u32, arrivals: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("mbarrier.init.shared.b64 [{}], {};", in(reg32) barrier, in(reg32) arrivals, options(nostack, preserves_flags));
    }
}

/// Makes the thread's initialized barriers visible to copies. A barrier of the thread block makes
/// them visible to other threads.
#[inline(always)]
pub(crate) fn fence_init() {
    // SAFETY: has no operands.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack, preserves_flags)) };
}

/// Arrives on a barrier.
///
/// # Safety
/// `barrier` is initialized, and expects this arrival in its phase.
#[inline(always)]
pub(crate) unsafe fn arrive(barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("mbarrier.arrive.shared.b64 _, [{}];", in(reg32) barrier, options(nostack, preserves_flags))
    };
}

/// [`arrive`] on a barrier of any thread block of the cluster, by its
/// [address](super::cluster::address_of).
///
/// It releases to the own thread block only, as CUTLASS does: the other one then writes by copies,
/// or multiplies by `tcgen05`, which the barrier itself orders. Releasing to the cluster takes up
/// to 40 % of a kernel's time.
///
/// # Safety
/// As for [`arrive`]. The thread block has not ended.
#[cfg(any(microscale_tcgen05, microscale_wgmma))]
#[inline(always)]
pub(crate) unsafe fn arrive_in_cluster(barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("mbarrier.arrive.shared::cluster.b64 _, [{}];", in(reg32) barrier,
            options(nostack, preserves_flags));
    }
}

/// [`arrive`]; the phase also expects `bytes` bytes of copies.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
pub(crate) unsafe fn arrive_expecting(barrier: u32, bytes: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared.b64 _, [{}], {};", in(reg32) barrier, in(reg32) bytes,
            options(nostack, preserves_flags));
    }
}

/// Arrives when all copies that the lane has started ([`crate::hardware::shared::copy_16`]) have
/// completed.
///
/// # Safety
/// As for [`arrive`].
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn arrive_with_copies(barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("cp.async.mbarrier.arrive.noinc.shared.b64 [{}];", in(reg32) barrier, options(nostack, preserves_flags));
    }
}

/// Waits until the phase of parity `parity` is complete. The phase before the first counts as
/// complete.
#[inline(always)]
pub(crate) fn wait(barrier: u32, parity: u32) {
    loop {
        let over: u32;
        // SAFETY: reads the barrier only.
        unsafe {
            asm!(
                "{{ .reg .pred over; mbarrier.try_wait.parity.shared.b64 over, [{1}], {2}; selp.b32 {0}, 1, 0, over; }}",
                out(reg32) over, in(reg32) barrier, in(reg32) parity, options(nostack, preserves_flags)
            );
        }
        if over != 0 {
            return;
        }
    }
}

/// Starts to copy `bytes` bytes from global to shared memory. They arrive on a barrier that expects
/// them.
///
/// # Safety
/// `to` is the address of `bytes` writable bytes, and `from` points to `bytes` readable bytes of
/// global memory that nothing writes until the copy completes. All three are multiples of 16. No
/// thread uses the bytes at `to` before the barrier's phase is complete.
#[inline(always)]
pub(crate) unsafe fn copy(to: u32, from: *const u8, bytes: u32, barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) to, in(reg64) from, in(reg32) bytes, in(reg32) barrier, options(nostack, preserves_flags)
        );
    }
}

/// [`copy`] to the same address in each thread block of the cluster that `blocks` has a bit for.
/// The bytes arrive on the barrier at the same address in each of them.
///
/// # Safety
/// As for [`copy`], in each of the thread blocks. None of them ends before the copy completes.
#[cfg(any(microscale_tcgen05, microscale_wgmma))]
#[inline(always)]
pub(crate) unsafe fn copy_multicast(to: u32, from: *const u8, bytes: u32, barrier: u32, blocks: u16) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{}], [{}], {}, [{}], {};",
            in(reg32) to, in(reg64) from, in(reg32) bytes, in(reg32) barrier, in(reg16) blocks,
            options(nostack, preserves_flags)
        );
    }
}

/// Starts to copy the box of a tensor map at the coordinates, the innermost first, from global to
/// shared memory. Elements outside the tensor become zeros. All bytes of the box arrive on a
/// barrier that expects them.
///
/// # Safety
/// `map` is the generic address of a tensor map of three dimensions, in the kernel's parameters.
/// Its tensor is readable memory that nothing writes until the copy completes. `to` is the address
/// of writable memory of the box's size, a multiple of the bytes of the map's swizzle pattern, and
/// `barrier` is a multiple of 8. No thread uses the bytes at `to` before the barrier's phase is
/// complete.
#[cfg(microscale_tcgen05)]
#[inline(always)]
pub(crate) unsafe fn copy_box(to: u32, map: u64, [x, y, z]: [u32; 3], barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}}}], [{}];",
            in(reg32) to, in(reg64) map, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) barrier,
            options(nostack, preserves_flags)
        );
    }
}
