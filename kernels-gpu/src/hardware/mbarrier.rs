//! Barriers in shared memory, on which copies arrive by themselves (mbarrier), for targets of compute capability 9.0.
//!
//! A barrier expects a number of arrivals, and bytes. When all have come, its phase is over and the next one begins. Phases
//! alternate in parity, beginning with 0. None of this is convergent: each thread arrives and waits by itself.

use core::arch::asm;

/// Makes a barrier that expects so many arrivals in each phase.
///
/// # Safety
/// `barrier` is the address of 8 bytes of shared memory, a multiple of 8, which nobody uses otherwise.
#[inline(always)]
pub(crate) unsafe fn init(barrier: u32, arrivals: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("mbarrier.init.shared.b64 [{}], {};", in(reg32) barrier, in(reg32) arrivals, options(nostack, preserves_flags));
    }
}

/// Makes the barriers that this thread has made known to copies. A barrier of the thread block makes them known to threads.
#[inline(always)]
pub(crate) fn fence_init() {
    // SAFETY: has no operands.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack, preserves_flags)) };
}

/// Arrives on a barrier.
///
/// # Safety
/// `barrier` is one, and expects this arrival in its phase.
#[inline(always)]
pub(crate) unsafe fn arrive(barrier: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("mbarrier.arrive.shared.b64 _, [{}];", in(reg32) barrier, options(nostack, preserves_flags))
    };
}

/// [`arrive`], and tells the barrier to expect bytes, too.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
pub(crate) unsafe fn arrive_expecting(barrier: u32, bytes: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared.b64 _, [{}], {};", in(reg32) barrier, in(reg32) bytes,
            options(nostack, preserves_flags));
    }
}

/// Has the lane's copies so far ([`crate::shared::copy_16`]) arrive on a barrier together, when the last of them has.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
pub(crate) unsafe fn arrive_with_copies(barrier: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("cp.async.mbarrier.arrive.noinc.shared.b64 [{}];", in(reg32) barrier, options(nostack, preserves_flags));
    }
}

/// Waits until a barrier's phase of a parity is over. The phase before the first one counts as over.
#[inline(always)]
pub(crate) fn wait(barrier: u32, parity: u32) {
    loop {
        let over: u32;
        // SAFETY: changes nothing; what it orders is what the threads that arrived have done.
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

/// Starts to copy bytes from global to shared memory. They arrive on a barrier that expects them.
///
/// # Safety
/// `to` is writable and the bytes at `from` are readable; both are multiples of 16, and so is their number. Nothing writes at
/// `from` during the kernel, and nobody uses what is at `to` until the barrier's phase is over.
#[inline(always)]
pub(crate) unsafe fn copy(to: u32, from: *const u8, bytes: u32, barrier: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) to, in(reg64) from, in(reg32) bytes, in(reg32) barrier, options(nostack, preserves_flags)
        );
    }
}
