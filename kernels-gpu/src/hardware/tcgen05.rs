//! The tensor cores of compute capability 10.0 (`tcgen05`): one thread issues products of matrices
//! in shared memory. Sums and scales are in tensor memory.
//!
//! Tensor memory has 128 lanes of 512 columns, each a word. An address has the lane in its upper
//! half and the column in its lower one. A product's rows are lanes, and its tokens are columns.
//! Warp `w` of a warp group can load lanes 32`w` to 32`w` + 31.
//!
//! Instructions of a [`Group`] of two are for both thread blocks of a cluster. A thread of the
//! first one issues products and copies. Addresses and descriptors are the same in both: each
//! thread block has its own rows, half of the tokens, and the scales of its rows and of all tokens.
//! Each gets the sums of its rows.
//!
//! Allocation and loads are convergent assembly: see [`crate::hardware`]. The others are for one
//! thread.

use core::arch::asm;

/// The thread blocks whose tensor cores multiply together (`cta_group`).
pub(crate) trait Group {
    /// Their number: 1 or 2.
    const BLOCKS: u32;
}

/// Columns of tensor memory.
pub(crate) const COLUMNS: u32 = 512;
/// Columns that [`load`] loads.
pub(crate) const LOADED: u32 = 32;
/// Rows of a product, in each thread block.
pub(crate) const ROWS: u32 = 128;

/// Allocates all of tensor memory, and stores its address at `to`. Waits until a previous thread
/// block on the multiprocessor has deallocated its own, and for the other thread block of a pair.
///
/// # Safety
/// `to` is the address of 4 bytes of the launch's shared memory that no other thread uses
/// meanwhile. All lanes of one warp per thread block call it, once per launch, and [`deallocate`]
/// before the end. Both thread blocks of a pair have started.
#[inline(always)]
pub(crate) unsafe fn allocate<G: Group>(to: u32) {
    // SAFETY: convergent; all lanes of the warp are here. The caller promises the rest.
    unsafe {
        asm!("tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [{}], {};",
            const G::BLOCKS, in(reg32) to, const COLUMNS, options(nostack, preserves_flags));
        asm!("tcgen05.relinquish_alloc_permit.cta_group::{}.sync.aligned;", const G::BLOCKS,
            options(nostack, preserves_flags));
    }
}

/// Deallocates what [`allocate`] allocated at `address`.
///
/// # Safety
/// All lanes of the warps that allocated it call it. No thread uses it, and all products have
/// completed, in both thread blocks of a pair.
#[inline(always)]
pub(crate) unsafe fn deallocate<G: Group>(address: u32) {
    // SAFETY: convergent; all lanes of the warp are here. The caller promises the rest.
    unsafe {
        asm!("tcgen05.dealloc.cta_group::{}.sync.aligned.b32 {}, {};", const G::BLOCKS, in(reg32) address,
            const COLUMNS, options(nostack, preserves_flags));
    }
}

/// Orders the thread's accesses of tensor memory before its next arrival on a barrier.
#[inline(always)]
pub(crate) fn fence_before_arrival() {
    // SAFETY: has no operands.
    unsafe { asm!("tcgen05.fence::before_thread_sync;", options(nostack, preserves_flags)) };
}

/// Orders the thread's accesses of tensor memory after the barrier that it has waited for.
#[inline(always)]
pub(crate) fn fence_after_wait() {
    // SAFETY: has no operands.
    unsafe { asm!("tcgen05.fence::after_thread_sync;", options(nostack, preserves_flags)) };
}

/// The bits of descriptors of shared memory that say their version.
const VERSION: u64 = 1 << 46;

/// The descriptor of a matrix in shared memory, whose rows have 128 bytes with swizzled chunks:
/// chunk `c` of row `r` lies in place `c ^ r % 8`. `address` is a multiple of 1024.
#[inline(always)]
pub(crate) fn swizzled_rows(address: u32) -> u64 {
    /// From eight rows to the next.
    const STRIDE: u64 = 1024 / 16;
    const SWIZZLED: u64 = 2 << 61;
    u64::from(address >> 4) | 1 << 16 | STRIDE << 32 | VERSION | SWIZZLED
}

/// The descriptor of the columns that start `bytes` bytes after the columns of `rows`.
#[inline(always)]
pub(crate) fn columns_of(rows: u64, bytes: u32) -> u64 {
    rows + u64::from(bytes / 16)
}

/// Starts to copy an atom of scales of 512 bytes from shared memory to four columns of tensor
/// memory, at `to`. Its 32 rows go to lanes 0 to 31, 32 to 63, and so on. Products that the thread
/// issues later see them.
///
/// # Safety
/// `from` is the address of the atom, a multiple of 16. Its bytes are visible to asynchronous
/// copies, and stay until a commit. The columns are allocated, and nothing uses them meanwhile.
#[inline(always)]
pub(crate) unsafe fn copy_scales<G: Group>(to: u32, from: u32) {
    /// From eight rows of 16 bytes to the next.
    const STRIDE: u64 = 128 / 16;
    let atom = u64::from(from >> 4) | STRIDE << 32 | VERSION;
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("tcgen05.cp.cta_group::{}.32x128b.warpx4 [{}], {};", const G::BLOCKS, in(reg32) to,
            in(reg64) atom, options(nostack, preserves_flags));
    }
}

/// Arrives on a barrier when all products and copies that the thread has issued have completed, in
/// each thread block of a pair.
///
/// # Safety
/// `barrier` is initialized, and expects this arrival in its phase. No thread block of the pair
/// ends before it.
#[inline(always)]
pub(crate) unsafe fn commit<G: Group>(barrier: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        if G::BLOCKS == 1 {
            asm!("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];",
                in(reg32) barrier, options(nostack, preserves_flags));
        } else {
            const BOTH: u16 = 0b11;
            asm!(
                "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{}], {};",
                in(reg32) barrier, in(reg16) BOTH, options(nostack, preserves_flags)
            );
        }
    }
}

/// The scales of a product.
#[derive(Clone, Copy)]
pub(crate) struct ScalesOf {
    /// The address of the rows' scales in tensor memory. A lane has the scales of four rows, a word
    /// of each, in four columns.
    pub(crate) rows: u32,
    /// The address of the tokens' scales.
    pub(crate) tokens: u32,
    /// The first byte in a word: 0, or 2 where words have two products' scales.
    pub(crate) byte: u32,
}

/// The descriptor of a product of [`ROWS`] rows of E2M1 in each of `blocks` thread blocks, and
/// `tokens` tokens of E2M1, with scales in E4M3 or E8M0 from byte `byte` of their words on.
const fn instruction(blocks: u32, tokens: u32, e8m0: bool, byte: u32) -> u32 {
    const E2M1: u32 = 1;
    byte << 4
        | E2M1 << 7
        | E2M1 << 10
        | (tokens / 8) << 17
        | (e8m0 as u32) << 23
        | (blocks * ROWS / 128) << 27
        | byte << 29
}

/// Starts to add the product of 64 columns to the sums in tensor memory at `sums`, or to store it
/// there unless `add`.
macro_rules! multiply {
    ($($name:ident = $kind:literal, $e8m0:literal;)+) => {$(
        #[doc = concat!("Issues a product (`", $kind, "`) of the 64 columns that the descriptors of rows")]
        /// and tokens start with. It is added to the sums in tensor memory at `sums`, or stored
        /// there unless `add`. A thread's products with the same sums follow each other.
        ///
        /// # Safety
        /// `rows` and `tokens` describe [`ROWS`] rows and `TOKENS / G::BLOCKS` tokens in the shared
        /// memory of each thread block. They are visible to asynchronous copies, and stay until a
        /// commit. Sums and scales are in allocated columns. Nothing else uses them before a
        /// commit.
        #[inline(always)]
        pub(crate) unsafe fn $name<G: Group, const TOKENS: u32>(
            sums: u32,
            rows: u64,
            tokens: u64,
            scales: ScalesOf,
            add: bool,
        ) {
            let instruction = if scales.byte == 0 {
                const { instruction(G::BLOCKS, TOKENS, $e8m0, 0) }
            } else {
                const { instruction(G::BLOCKS, TOKENS, $e8m0, 2) }
            };
            // SAFETY: the instruction needs exactly the caller's promise.
            unsafe {
                asm!(
                    concat!("{{ .reg .pred add; setp.ne.u32 add, {add}, 0; ",
                        "tcgen05.mma.cta_group::{blocks}.", $kind,
                        " [{sums}], {rows}, {tokens}, {instruction}, [{row_scales}], [{token_scales}], add; }}"),
                    blocks = const G::BLOCKS, add = in(reg32) u32::from(add),
                    sums = in(reg32) sums, rows = in(reg64) rows,
                    tokens = in(reg64) tokens, instruction = in(reg32) instruction,
                    row_scales = in(reg32) scales.rows, token_scales = in(reg32) scales.tokens,
                    options(nostack, preserves_flags)
                );
            }
        }
    )+};
}
multiply! {
    multiply_nvfp4 = "kind::mxf4nvf4.block_scale.block16", false;
    multiply_mxfp4 = "kind::mxf4.block_scale.block32", true;
}

/// Loads sums of 16 rows and 32 tokens. Lane 4g + t gets rows g and g + 8 of tokens 2t and 2t + 1
/// of each eight tokens, as in [`crate::hardware::warp::multiply_f16`].
///
/// # Safety
/// `address` is the first of the 16 lanes, one of the two halves of the lanes that the warp can
/// load, and the first of the allocated columns. The sums have been waited for, and nothing
/// writes them meanwhile. All lanes of the warp call it.
#[inline(always)]
pub(crate) unsafe fn load(address: u32) -> [f32; 16] {
    let (a, b, c, d, e, f, g, h);
    let (i, j, k, l, m, n, o, p);
    // SAFETY: convergent; all lanes of the warp are here. Nothing reads the registers before the
    // wait.
    unsafe {
        asm!(
            "tcgen05.ld.sync.aligned.16x256b.x4.b32 {{{a}, {b}, {c}, {d}, {e}, {f}, {g}, {h}, {i}, {j}, {k}, {l}, {m}, {n}, {o}, {p}}}, [{address}];",
            "tcgen05.wait::ld.sync.aligned;",
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            e = out(reg32) e, f = out(reg32) f, g = out(reg32) g, h = out(reg32) h,
            i = out(reg32) i, j = out(reg32) j, k = out(reg32) k, l = out(reg32) l,
            m = out(reg32) m, n = out(reg32) n, o = out(reg32) o, p = out(reg32) p,
            address = in(reg32) address, options(nostack, preserves_flags)
        );
    }
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}
