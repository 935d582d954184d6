//! Shared memory, by its addresses of 32 bits: loads, stores, and copies from global memory that go on by themselves.

use core::arch::asm;

use crate::ptx::narrow_loads;

/// A pointer into shared memory as an address of shared memory.
#[inline(always)]
pub(crate) fn address(pointer: *const u8) -> u32 {
    let address: u64;
    // SAFETY: reads and writes registers only.
    unsafe {
        asm!("cvta.to.shared.u64 {}, {};", out(reg64) address, in(reg64) pointer,
            options(pure, nomem, nostack, preserves_flags));
    }
    // The window of shared memory has fewer than 2^32 bytes.
    address as u32
}

/// Starts to copy from global to shared memory.
macro_rules! copy {
    ($cache:literal, $size:literal, $to:ident, $from:ident, $bytes:ident) => {
        asm!(concat!("cp.async.", $cache, ".shared.global [{}], [{}], ", $size, ", {};"), in(reg32) $to,
            in(reg64) $from, in(reg32) $bytes, options(nostack, preserves_flags))
    };
}

/// Starts to copy 16 bytes from global to shared memory, or to fill them with zeros if `bytes` is 0.
///
/// # Safety
/// `to` is writable, the bytes at `from`, if they are copied, are readable, and nothing writes there during the kernel.
/// Both are multiples of 16. Until the copy has been waited for nobody uses what is at `to`.
#[inline(always)]
pub(crate) unsafe fn copy_16(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe { copy!("ca", "16", to, from, bytes) };
}

/// [`copy_16`] of what is used once.
///
/// # Safety
/// As for [`copy_16`].
#[inline(always)]
pub(crate) unsafe fn copy_16_once(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("cg", "16", to, from, bytes) };
}

/// [`copy_16`] of eight bytes, those behind the first so many as zeros.
///
/// # Safety
/// As for [`copy_16`], with multiples of 8.
#[inline(always)]
pub(crate) unsafe fn copy_8(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("ca", "8", to, from, bytes) };
}

/// [`copy_16`] of four bytes.
///
/// # Safety
/// As for [`copy_16`], with multiples of 4.
#[inline(always)]
pub(crate) unsafe fn copy_4(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("ca", "4", to, from, bytes) };
}

/// Reads 16 bytes of shared memory.
///
/// # Safety
/// They are readable, and `address` is a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn load_16(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("ld.shared.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];", a = out(reg32) a, b = out(reg32) b,
            c = out(reg32) c, d = out(reg32) d, address = in(reg32) address,
            options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// Writes 16 bytes of shared memory.
///
/// # Safety
/// They are the lane's, and `address` is a multiple of 16.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn store_16(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("st.shared.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};", address = in(reg32) address, a = in(reg32) a,
            b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, options(nostack, preserves_flags));
    }
}

/// Writes a word of shared memory.
///
/// # Safety
/// It is the lane's, and `address` is a multiple of 4.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn store(address: u32, value: u32) {
    // SAFETY: the caller's promise is what the instruction needs.
    unsafe {
        asm!("st.shared.b32 [{address}], {value};", address = in(reg32) address, value = in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// Makes a group of the copies that this lane started since the last one.
#[inline(always)]
pub(crate) fn commit_copies() {
    // SAFETY: has no operands.
    unsafe { asm!("cp.async.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until at most `N` of this lane's groups of copies, the last ones, are on their way.
#[inline(always)]
pub(crate) fn wait_for_copies<const N: u32>() {
    // SAFETY: what the copies wrote is memory that nobody else uses, by their callers' promise.
    unsafe { asm!("cp.async.wait_group {};", const N, options(nostack, preserves_flags)) };
}

narrow_loads! {
    /// Reads a number of 8 bits of shared memory.
    ///
    /// # Safety
    /// It is readable.
    load_u8(reg32 u32) = "ld.shared.u8";
    /// [`load_u8`] of 16 bits.
    ///
    /// # Safety
    /// They are readable, and `address` is a multiple of 2.
    load_u16(reg32 u32) = "ld.shared.u16";
}
