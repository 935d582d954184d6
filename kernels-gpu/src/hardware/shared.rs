//! Shared memory, by 32-bit addresses: loads, stores, and asynchronous copies from global memory.

use core::arch::asm;

use crate::hardware::ptx::narrow_loads;

/// The 32-bit address of a pointer to shared memory.
#[inline(always)]
pub(crate) fn address(pointer: *const u8) -> u32 {
    let address: u64;
    // SAFETY: reads and writes registers only.
    unsafe {
        asm!("cvta.to.shared.u64 {}, {};", out(reg64) address, in(reg64) pointer,
            options(pure, nomem, nostack, preserves_flags));
    }
    // The window of shared memory is smaller than 2^32 bytes.
    address as u32
}

/// Starts to copy from global to shared memory.
macro_rules! copy {
    ($cache:literal, $size:literal, $to:ident, $from:ident, $bytes:ident) => {
        asm!(concat!("cp.async.", $cache, ".shared.global [{}], [{}], ", $size, ", {};"), in(reg32) $to,
            in(reg64) $from, in(reg32) $bytes, options(nostack, preserves_flags))
    };
}

/// Starts to copy `bytes` of 16 bytes from global to shared memory. The rest become zeros.
///
/// # Safety
/// `to` is the address of 16 writable bytes, and `from` points to `bytes` readable bytes that
/// nothing writes during the kernel. Both are multiples of 16. No thread uses the bytes at `to`
/// before the copy has been waited for.
#[inline(always)]
pub(crate) unsafe fn copy_16(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe { copy!("ca", "16", to, from, bytes) };
}

/// [`copy_16`] of data that is used once. It bypasses the L1 cache.
///
/// # Safety
/// As for [`copy_16`].
#[inline(always)]
pub(crate) unsafe fn copy_16_once(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("cg", "16", to, from, bytes) };
}

/// [`copy_16`] with 8 bytes.
///
/// # Safety
/// As for [`copy_16`], with multiples of 8.
#[inline(always)]
pub(crate) unsafe fn copy_8(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("ca", "8", to, from, bytes) };
}

/// [`copy_16`] with 4 bytes.
///
/// # Safety
/// As for [`copy_16`], with multiples of 4.
#[inline(always)]
pub(crate) unsafe fn copy_4(to: u32, from: *const u8, bytes: u32) {
    // SAFETY: as for [`copy_16`].
    unsafe { copy!("ca", "4", to, from, bytes) };
}

/// Loads 16 bytes.
///
/// # Safety
/// `address` refers to 16 initialized bytes of shared memory, a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn load_16(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.shared.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];", a = out(reg32) a, b = out(reg32) b,
            c = out(reg32) c, d = out(reg32) d, address = in(reg32) address,
            options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// Loads four matrices of eight rows of 16 bytes. Lane 8i + r has the address of row r of matrix i.
/// Lane 4g + t gets bytes 4t to 4t + 3 of row g of each. All lanes of the warp call it.
///
/// # Safety
/// As for [`load_16`].
#[cfg(any(microscale_block_scale, microscale_wgmma))]
#[inline(always)]
pub(crate) unsafe fn load_matrices(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the instruction needs exactly the caller's promise. Without `pure`, it stays in
    // uniform control flow.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{a}, {b}, {c}, {d}}}, [{address}];",
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            address = in(reg32) address, options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// Stores four matrices of eight rows and eight columns of 16 bits, transposed: lane 8i + c has the
/// address of column c of matrix i, 16 bytes. Lane 4g + t has columns 2t and 2t + 1 of row g of
/// each. All lanes of the warp call it.
///
/// # Safety
/// As for [`store_16`].
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn store_transposed(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{address}], {{{a}, {b}, {c}, {d}}};",
            address = in(reg32) address, a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            options(nostack, preserves_flags));
    }
}

/// Loads a word.
///
/// # Safety
/// `address` refers to four initialized bytes of shared memory, a multiple of 4.
#[cfg(any(microscale_block_scale, microscale_tcgen05, microscale_wgmma))]
#[inline(always)]
pub(crate) unsafe fn load(address: u32) -> u32 {
    let word;
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.shared.b32 {word}, [{address}];", word = out(reg32) word, address = in(reg32) address,
            options(readonly, nostack, preserves_flags));
    }
    word
}

/// Loads two words.
///
/// # Safety
/// `address` refers to eight initialized bytes of shared memory, a multiple of 8.
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn load_8(address: u32) -> [u32; 2] {
    let (a, b);
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.shared.v2.b32 {{{a}, {b}}}, [{address}];", a = out(reg32) a, b = out(reg32) b,
            address = in(reg32) address, options(readonly, nostack, preserves_flags));
    }
    [a, b]
}

/// Stores 16 bytes.
///
/// # Safety
/// `address` refers to 16 bytes of the launch's shared memory that no other thread uses meanwhile,
/// and is a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn store_16(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("st.shared.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};", address = in(reg32) address, a = in(reg32) a,
            b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, options(nostack, preserves_flags));
    }
}

/// Stores a word.
///
/// # Safety
/// As for [`store_16`], with 4 bytes.
#[inline(always)]
pub(crate) unsafe fn store(address: u32, value: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("st.shared.b32 [{address}], {value};", address = in(reg32) address, value = in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// Commits the lane's copies since the last commit as a group.
#[inline(always)]
pub(crate) fn commit_copies() {
    // SAFETY: has no operands.
    unsafe { asm!("cp.async.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until at most the last `N` of the lane's groups of copies are pending.
#[inline(always)]
pub(crate) fn wait_for_copies<const N: u32>() {
    // SAFETY: no other thread uses the destination of the copies, by the contract of `copy_16`.
    unsafe { asm!("cp.async.wait_group {};", const N, options(nostack, preserves_flags)) };
}

/// Makes the thread's writes to shared memory visible to products that start after a barrier.
#[cfg(any(microscale_tcgen05, microscale_wgmma))]
#[inline(always)]
pub(crate) fn fence_writes() {
    // SAFETY: has no operands.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack, preserves_flags)) };
}

narrow_loads! {
    /// Loads a byte of shared memory.
    ///
    /// # Safety
    /// `address` refers to an initialized byte.
    load_u8(reg32 u32) = "ld.shared.u8";
    /// [`load_u8`] of 16 bits.
    ///
    /// # Safety
    /// `address` refers to two initialized bytes, and is a multiple of 2.
    load_u16(reg32 u32) = "ld.shared.u16";
}
