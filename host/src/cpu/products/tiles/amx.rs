//! Tiles by Intel AMX with BF16, where Linux permits them.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::{Tile, TileUnit};
use crate::cpu::products::panels::{Lines, ROWS};
use crate::cpu::simd::LANES;

/// A thread's tiles, configured as long as this lives: all of sixteen rows of 64 bytes.
pub(in crate::cpu) struct Amx {
    /// The configuration is the thread's.
    _thread: PhantomData<*const ()>,
}

/// The configuration that LDTILECFG reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Amx {
    /// Returns whether this process may use tiles: processor and system have them, and the system permits them. It is asked once.
    pub(in crate::cpu) fn is_permitted() -> bool {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        *PERMITTED.get_or_init(|| is_there() && permit())
    }

    /// Configures this thread's tiles.
    ///
    /// # Safety
    /// [`Self::is_permitted`], and no other value of this type on this thread.
    pub(in crate::cpu) unsafe fn configure() -> Self {
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].fill(size_of::<[u16; 32]>() as u16);
        configuration.rows[..8].fill(LANES as u8);
        // SAFETY: the instruction is there, and the system permits it. It reads the 64 bytes of the configuration, which names the
        // eight tiles of palette 1 within the sizes that `is_there` has found. Compiled code uses no tiles but this file's.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly, preserves_flags))
        };
        Self { _thread: PhantomData }
    }
}

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: there are tiles, as this value was made, and no other value counts on their configuration.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Returns whether processor and system have tiles of sixteen rows of 64 bytes, and BF16 for them.
fn is_there() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // The states of the configuration and of the tiles.
    const STATES: u32 = 1 << 17 | 1 << 18;
    let has = |bits: u32, wanted: u32| bits & wanted == wanted;
    // SAFETY: every x86-64 has CPUID.
    #[allow(unused_unsafe, reason = "newer compilers take it for safe")]
    let leaf = |leaf: u32, subleaf: u32| unsafe { __cpuid_count(leaf, subleaf) };
    let last = leaf(0, 0).eax;
    if last < 0x1D || !has(leaf(1, 0).ecx, OSXSAVE) || !has(leaf(7, 0).edx, AMX_BF16 | AMX_TILE) {
        return false;
    }
    let states: u32;
    // SAFETY: OSXSAVE says that the instruction is there for programs, and 0 is a register that it has.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nostack, nomem, preserves_flags));
    }
    let palette = leaf(0x1D, 1);
    let [row_bytes, names] = [palette.ebx & 0xFFFF, palette.ebx >> 16];
    has(states, STATES) && row_bytes >= 64 && names >= 8 && palette.ecx & 0xFFFF >= 16
}

/// Asks Linux to let this process use tiles: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
fn permit() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call that takes numbers, and touches no memory of this process. Kernels that do not know it refuse it. It
    // overwrites the registers that are named.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST, in("rsi") TILE_DATA, out("rcx") _, out("r11") _,
            options(nostack));
    }
    result == 0
}

/// The whole loop over a segment, for a number of parts: the sums are in tmm0 to tmm2, the weights in tmm3 to tmm5, and each part
/// of the activations in a tile that is given.
macro_rules! steps {
    ($x:ident, $weights:ident, $steps:ident, $sums:ident; $bytes:literal: $($offset:literal $tile:literal),*) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "2:",
            "tileloadd tmm3, [{weights} + {line}]",
            "tileloadd tmm4, [{weights} + {line} + 1024]",
            "tileloadd tmm5, [{weights} + {line} + 2048]",
            $(
                concat!("tileloadd ", $tile, ", [{x} + {line} + ", $offset, "]"),
                concat!("tdpbf16ps tmm0, tmm3, ", $tile),
                concat!("tdpbf16ps tmm1, tmm4, ", $tile),
                concat!("tdpbf16ps tmm2, tmm5, ", $tile),
            )*
            concat!("add {x}, ", $bytes),
            "add {weights}, 3072",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            x = inout(reg) $x => _,
            weights = inout(reg) $weights => _,
            steps = inout(reg) $steps => _,
            sums = in(reg) $sums,
            line = in(reg) size_of::<Tile>() / LANES,
            options(nostack),
        )
    };
}

impl TileUnit for Amx {
    #[inline(always)]
    fn multiply(&self, x: &[Tile], parts: usize, weights: &[Lines], sums: &mut Lines) {
        let steps = weights.len();
        assert!(steps > 0 && x.len() == steps * parts);
        let (x, weights, sums) = (x.as_ptr(), weights.as_ptr(), sums.as_mut_ptr());
        // SAFETY: `self` says that this thread's tiles are configured, to sixteen rows of 64 bytes. Each of `steps` steps, of which there
        // is one, reads `parts` tiles of activations, 1 KiB each, and a line of each of 48 rows of weights, three tiles side by side: in
        // all as much as was just asserted to be there. In the end the 3 KiB of the sums are written, which are borrowed mutably.
        // Compiled code uses no tiles but this file's.
        unsafe {
            match parts {
                1 => steps!(x, weights, steps, sums; "1024": "0" "tmm6"),
                2 => steps!(x, weights, steps, sums; "2048": "0" "tmm6", "1024" "tmm7"),
                3 => steps!(x, weights, steps, sums; "3072": "0" "tmm6", "1024" "tmm7", "2048" "tmm6"),
                _ => unreachable!("an activation is one to three bf16"),
            }
        }
    }
}

// Numbers that the loop's assembly has written out.
const _: () = assert!(size_of::<Tile>() == 1024 && size_of::<Lines>() == 3072 && ROWS == 48);
