//! Matrix tiles of Intel AMX with BF16, where Linux permits them.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::{Tile, TileUnit};
use crate::cpu::products::panels::{Lines, ROWS};
use crate::cpu::simd::LANES;

/// The tiles of this thread, configured to sixteen rows of 64 bytes while this value lives.
///
/// Invariant: [`Self::is_permitted`] holds, and this is the only value of its thread.
pub(in crate::cpu) struct Amx {
    /// The configuration belongs to the thread, so the value must not leave it.
    _thread: PhantomData<*const ()>,
}

/// The operand of LDTILECFG.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Amx {
    /// Returns whether this process may use tiles. Asks the CPU and Linux once.
    pub(in crate::cpu) fn is_permitted() -> bool {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        *PERMITTED.get_or_init(|| is_there() && permit())
    }

    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// [`Self::is_permitted`] returned true, and this thread has no other value of this type.
    pub(in crate::cpu) unsafe fn configure() -> Self {
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].fill(size_of::<[u16; 32]>() as u16);
        configuration.rows[..8].fill(LANES as u8);
        // SAFETY: the caller promises that Linux permits tiles, so the CPU has the instruction. It
        // reads the 64 bytes of `configuration`, which names eight tiles of palette 1 within the
        // limits that `is_there` checked. Compiled code uses no tiles outside this file.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly, preserves_flags))
        };
        Self { _thread: PhantomData }
    }
}

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: `configure` made this value, so the CPU has tiles. The thread has no other value
        // that needs the configuration.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Returns whether CPU and system have tiles of sixteen rows of 64 bytes, with BF16.
fn is_there() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // The state components of the tile configuration and of tile data.
    const STATES: u32 = 1 << 17 | 1 << 18;
    let has = |bits: u32, wanted: u32| bits & wanted == wanted;
    // SAFETY: every x86-64 CPU has CPUID.
    #[allow(unused_unsafe, reason = "newer compilers take it for safe")]
    let leaf = |leaf: u32, subleaf: u32| unsafe { __cpuid_count(leaf, subleaf) };
    let last = leaf(0, 0).eax;
    if last < 0x1D || !has(leaf(1, 0).ecx, OSXSAVE) || !has(leaf(7, 0).edx, AMX_BF16 | AMX_TILE) {
        return false;
    }
    let states: u32;
    // SAFETY: OSXSAVE is set, so programs may execute XGETBV, and register 0 exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nostack, nomem, preserves_flags));
    }
    let palette = leaf(0x1D, 1);
    let [row_bytes, names] = [palette.ebx & 0xFFFF, palette.ebx >> 16];
    has(states, STATES) && row_bytes >= 64 && names >= 8 && palette.ecx & 0xFFFF >= 16
}

/// Asks Linux for permission: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
fn permit() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: this system call takes only numbers and touches no memory of the process. Kernels
    // that do not know it return an error. The registers that it overwrites are declared.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST, in("rsi") TILE_DATA, out("rcx") _, out("r11") _,
            options(nostack));
    }
    result == 0
}

/// The loop over a segment, for a number of parts.
///
/// Sums are in tmm0 to tmm2, weights in tmm3 to tmm5, and each part of the activations in the given
/// tile.
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
        // SAFETY: `self` proves that the tiles of this thread are configured to sixteen rows of 64
        // bytes. There is at least one step. Each step reads `parts` tiles of 1 KiB from `x`, and
        // one line of 48 rows from `weights`, which are three tiles of 1 KiB. The assertion checked
        // that both have `steps` of them. In the end the loop writes 3 KiB to `sums`, which is a
        // mutable borrow of that size. Compiled code uses no tiles outside this file.
        unsafe {
            match parts {
                1 => steps!(x, weights, steps, sums; "1024": "0" "tmm6"),
                2 => steps!(x, weights, steps, sums; "2048": "0" "tmm6", "1024" "tmm7"),
                3 => steps!(x, weights, steps, sums; "3072": "0" "tmm6", "1024" "tmm7", "2048" "tmm6"),
                _ => unreachable!("an activation is one to three bf16"),
            }
        }
    }

    /// Multiplies unused tiles. After half a microsecond without work, the next tiles take about
    /// 0.4 µs longer.
    #[inline(always)]
    fn keep_awake(&self) {
        // SAFETY: `self` proves that the tiles of this thread are configured. The instruction
        // accesses only tmm0, tmm3 and tmm6, which `multiply` overwrites before it reads them.
        // Compiled code uses no tiles outside this file.
        unsafe { asm!("tdpbf16ps tmm0, tmm3, tmm6", options(nostack, nomem, preserves_flags)) };
    }
}

// The assembly has these sizes as literals.
const _: () = assert!(size_of::<Tile>() == 1024 && size_of::<Lines>() == 3072 && ROWS == 48);
