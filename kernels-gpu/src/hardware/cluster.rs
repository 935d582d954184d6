//! Thread blocks of a cluster, of compute capability 9.0: barriers, and loads from each other's
//! shared memory.
//!
//! The barriers are convergent assembly: see [`crate::hardware`].

use core::arch::asm;

/// The thread block's number in its cluster.
#[inline(always)]
pub(crate) fn rank() -> u32 {
    let rank;
    // SAFETY: reads a special register.
    unsafe {
        asm!("mov.u32 {}, %cluster_ctarank;", out(reg32) rank, options(pure, nomem, nostack, preserves_flags))
    };
    rank
}

/// Arrives at the cluster's barrier. Threads that [`wait`] for it see this thread's earlier writes.
///
/// # Safety
/// All lanes of the warp call it, and wait before they arrive again.
#[inline(always)]
pub(crate) unsafe fn arrive() {
    // SAFETY: convergent; all lanes of the warp are here.
    unsafe { asm!("barrier.cluster.arrive.release.aligned;", options(nostack, preserves_flags)) };
}

/// Waits until all threads of the cluster that have not ended have arrived at its barrier.
///
/// # Safety
/// All lanes of the warp call it, and have [arrived](arrive).
#[inline(always)]
pub(crate) unsafe fn wait() {
    // SAFETY: convergent; all lanes of the warp are here.
    unsafe { asm!("barrier.cluster.wait.acquire.aligned;", options(nostack, preserves_flags)) };
}

/// The address, in the shared memory of thread block `rank` of the cluster, of this block's
/// `address`.
#[inline(always)]
pub(crate) fn address_of(address: u32, rank: u32) -> u32 {
    let there;
    // SAFETY: computes an address.
    unsafe {
        asm!("mapa.shared::cluster.u32 {}, {}, {};", out(reg32) there, in(reg32) address, in(reg32) rank,
            options(pure, nomem, nostack, preserves_flags));
    }
    there
}

/// Loads 16 bytes from each of four addresses.
///
/// # Safety
/// They are [addresses](address_of) of 16 initialized bytes, multiples of 16. Their thread block
/// does not end before the loads.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn load_four(addresses: [u32; 4]) -> [[u32; 4]; 4] {
    let [a, b, c, d] = addresses;
    let (a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3);
    // SAFETY: the instructions need exactly the caller's promise.
    unsafe {
        asm!("ld.shared::cluster.v4.b32 {{{a0}, {a1}, {a2}, {a3}}}, [{a}];",
            "ld.shared::cluster.v4.b32 {{{b0}, {b1}, {b2}, {b3}}}, [{b}];",
            "ld.shared::cluster.v4.b32 {{{c0}, {c1}, {c2}, {c3}}}, [{c}];",
            "ld.shared::cluster.v4.b32 {{{d0}, {d1}, {d2}, {d3}}}, [{d}];",
            a0 = out(reg32) a0, a1 = out(reg32) a1, a2 = out(reg32) a2, a3 = out(reg32) a3,
            b0 = out(reg32) b0, b1 = out(reg32) b1, b2 = out(reg32) b2, b3 = out(reg32) b3,
            c0 = out(reg32) c0, c1 = out(reg32) c1, c2 = out(reg32) c2, c3 = out(reg32) c3,
            d0 = out(reg32) d0, d1 = out(reg32) d1, d2 = out(reg32) d2, d3 = out(reg32) d3,
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            options(readonly, nostack, preserves_flags));
    }
    [[a0, a1, a2, a3], [b0, b1, b2, b3], [c0, c1, c2, c3], [d0, d1, d2, d3]]
}

/// [`load_four`] from two addresses.
///
/// # Safety
/// As for [`load_four`].
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn load_two([a, b]: [u32; 2]) -> [[u32; 4]; 2] {
    let (a0, a1, a2, a3, b0, b1, b2, b3);
    // SAFETY: the instructions need exactly the caller's promise.
    unsafe {
        asm!("ld.shared::cluster.v4.b32 {{{a0}, {a1}, {a2}, {a3}}}, [{a}];",
            "ld.shared::cluster.v4.b32 {{{b0}, {b1}, {b2}, {b3}}}, [{b}];",
            a0 = out(reg32) a0, a1 = out(reg32) a1, a2 = out(reg32) a2, a3 = out(reg32) a3,
            b0 = out(reg32) b0, b1 = out(reg32) b1, b2 = out(reg32) b2, b3 = out(reg32) b3,
            a = in(reg32) a, b = in(reg32) b, options(readonly, nostack, preserves_flags));
    }
    [[a0, a1, a2, a3], [b0, b1, b2, b3]]
}

/// Loads a word.
///
/// # Safety
/// As for [`load_four`], with 4 bytes.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn load(address: u32) -> u32 {
    let value;
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.shared::cluster.b32 {value}, [{address}];", value = out(reg32) value, address = in(reg32) address,
            options(readonly, nostack, preserves_flags));
    }
    value
}
