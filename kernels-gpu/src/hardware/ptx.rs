//! Lane-local PTX instructions that Rust does not have.
//!
//! rustc does not mark inline assembly as convergent, so LLVM may duplicate it into both sides of a
//! branch or move it into one. That is harmless for lane-local instructions and fatal for shuffles
//! and barriers, which are in [`crate::hardware::warp`].

use core::arch::asm;

/// Ends the kernel with an error that the host sees.
pub(crate) fn trap() -> ! {
    // SAFETY: has no operands; execution does not continue after it.
    unsafe { core::arch::nvptx::trap() }
}

/// A load of 16 bytes with a hint and options: `readonly` because it has no other effect.
macro_rules! load_16 {
    ($hint:literal, $address:ident $(, $option:ident)?) => {{
        let (a, b, c, d);
        asm!(
            concat!("ld.global.nc", $hint, ".v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];"),
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            address = in(reg64) $address,
            options($($option,)? readonly, nostack, preserves_flags)
        );
        [a, b, c, d]
    }};
}

/// Loads 16 bytes through the read-only path, without a cache hint.
///
/// On an H200, `L1::no_allocate`, `L1::evict_first`, `.cs` and a prefetch size of 256 bytes each
/// cost the quantizer 6 to 9 % of its bandwidth.
///
/// # Safety
/// `address` points to 16 readable bytes of global memory, on 16 bytes, and nothing writes there
/// during the kernel.
#[inline(always)]
pub(crate) unsafe fn load_16(address: *const u8) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { load_16!("", address, pure) }
}

/// [`load_16`] of data that is used once. It bypasses the L1 cache.
///
/// # Safety
/// As for [`load_16`].
#[inline(always)]
pub(crate) unsafe fn load_16_once(address: *const u8) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { load_16!(".L1::no_allocate", address, pure) }
}

/// Stores 16 bytes that are not read soon.
///
/// # Safety
/// `address` points to 16 writable bytes of global memory, on 16 bytes, that no other thread uses.
#[inline(always)]
pub(crate) unsafe fn store_16_streaming(address: *mut u8, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "st.global.cs.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};",
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            address = in(reg64) address,
            options(nostack, preserves_flags)
        );
    }
}

/// The address `rows` rows after `address`: one instruction, in the multiplier's pipe.
#[inline(always)]
pub(crate) fn offset_by(address: *const u8, rows: u32, row_bytes: u32) -> *const u8 {
    let offset;
    // SAFETY: computes a number.
    unsafe {
        asm!("mad.wide.u32 {}, {}, {}, {};", out(reg64) offset, in(reg32) rows, in(reg32) row_bytes, in(reg64) address,
            options(pure, nomem, nostack, preserves_flags));
    }
    offset
}

/// Stores 16 bytes.
///
/// # Safety
/// As for [`store_16_streaming`].
#[inline(always)]
pub(crate) unsafe fn store_16(address: *mut u8, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "st.global.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}};",
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            address = in(reg64) address,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores 16 bytes if `exists`, without a branch.
///
/// # Safety
/// If `exists`, as for [`store_16`].
#[cfg(microscale_wgmma)]
#[inline(always)]
pub(crate) unsafe fn store_16_if(exists: bool, address: *mut u8, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .pred there; setp.ne.u32 there, {there}, 0; @there st.global.v4.b32 [{address}], {{{a}, {b}, {c}, {d}}}; }}",
            there = in(reg32) u32::from(exists), address = in(reg64) address,
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores 8 bytes if `exists`, without a branch.
///
/// # Safety
/// If `exists`, as for [`store_16`] with 8 bytes.
#[inline(always)]
pub(crate) unsafe fn store_8_if(exists: bool, address: *mut u8, [a, b]: [u32; 2]) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .pred there; setp.ne.u32 there, {there}, 0; @there st.global.v2.b32 [{address}], {{{a}, {b}}}; }}",
            there = in(reg32) u32::from(exists), a = in(reg32) a, b = in(reg32) b, address = in(reg64) address,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores the low 2 bytes of a word if `exists`, without a branch.
///
/// # Safety
/// If `exists`, as for [`store_16`] with 2 bytes.
#[inline(always)]
pub(crate) unsafe fn store_2_if(exists: bool, address: *mut u8, word: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .pred there; .reg .b16 low, high; setp.ne.u32 there, {there}, 0; mov.b32 {{low, high}}, {word}; @there st.global.b16 [{address}], low; }}",
            there = in(reg32) u32::from(exists), word = in(reg32) word, address = in(reg64) address,
            options(nostack, preserves_flags)
        );
    }
}

/// Loads 16 bytes that other thread blocks wrote during the kernel.
///
/// # Safety
/// `address` points to 16 readable bytes of global memory, on 16 bytes. The writes happened before.
#[inline(always)]
pub(crate) unsafe fn load_16_written(address: *const u8) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.global.cg.v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];", a = out(reg32) a, b = out(reg32) b,
            c = out(reg32) c, d = out(reg32) d, address = in(reg64) address,
            options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

/// Adds to a counter and returns its previous value, with acquire and release.
///
/// # Safety
/// As for [`read_counter`].
#[inline(always)]
pub(crate) unsafe fn fetch_add(address: *mut u32, amount: u32) -> u32 {
    let value;
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("atom.acq_rel.gpu.global.add.u32 {value}, [{address}], {amount};", value = out(reg32) value,
            address = in(reg64) address, amount = in(reg32) amount, options(nostack, preserves_flags));
    }
    value
}

/// Lets the next kernel start. It waits for this one before it reads its results.
#[cfg(microscale_sm90)]
#[inline(always)]
pub(crate) fn start_next_kernel() {
    // SAFETY: has no operands.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack, preserves_flags)) };
}

/// Waits until the previous kernel has ended, if this one started before that.
#[cfg(microscale_sm90)]
#[inline(always)]
pub(crate) fn wait_for_previous_kernel() {
    // SAFETY: has no operands.
    unsafe { asm!("griddepcontrol.wait;", options(nostack, preserves_flags)) };
}

/// Reads a counter that other threads may raise meanwhile. The value may be an older one.
///
/// # Safety
/// `address` points to a u32 of global memory, on 4 bytes, that only atomic operations use during
/// the kernel.
#[inline(always)]
pub(crate) unsafe fn read_counter(address: *const u32) -> u32 {
    let value;
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("ld.relaxed.gpu.global.u32 {value}, [{address}];", value = out(reg32) value, address = in(reg64) address,
            options(nostack, preserves_flags, readonly));
    }
    value
}

/// Raises a 32-bit counter to at least `value`. Returns nothing, so nothing waits.
///
/// # Safety
/// As for [`read_counter`], with a writable u32.
#[inline(always)]
pub(crate) unsafe fn raise_counter_32(address: *mut u32, value: u32) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("red.global.max.u32 [{address}], {value};", address = in(reg64) address, value = in(reg32) value,
            options(nostack, preserves_flags));
    }
}

/// Adds to a counter. Returns nothing, so nothing waits.
///
/// # Safety
/// `address` points to a writable u64 of global memory, on 8 bytes, that only atomic operations use
/// during the kernel.
#[inline(always)]
pub(crate) unsafe fn add_to_counter(address: *mut u64, amount: u64) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("red.global.add.u64 [{address}], {amount};", address = in(reg64) address, amount = in(reg64) amount,
            options(nostack, preserves_flags));
    }
}

/// Raises a counter to at least `value`. Returns nothing, so nothing waits.
///
/// # Safety
/// As for [`add_to_counter`].
#[inline(always)]
pub(crate) unsafe fn raise_counter(address: *mut u64, value: u64) {
    // SAFETY: the instruction needs exactly the caller's promise.
    unsafe {
        asm!("red.global.max.u64 [{address}], {value};", address = in(reg64) address, value = in(reg64) value,
            options(nostack, preserves_flags));
    }
}

/// [`load_16`] that LLVM does not move out of a loop.
///
/// # Safety
/// As for [`load_16`].
#[inline(always)]
pub(crate) unsafe fn load_16_here(address: *const u8) -> [u32; 4] {
    // SAFETY: the caller's promise. It is not `pure`, so that it is not moved.
    unsafe { load_16!("", address) }
}

/// [`load_16_once`] that LLVM does not move out of a loop.
///
/// # Safety
/// As for [`load_16`].
#[inline(always)]
pub(crate) unsafe fn load_16_once_here(address: *const u8) -> [u32; 4] {
    // SAFETY: the caller's promise. It is not `pure`, so that it is not moved.
    unsafe { load_16!(".L1::no_allocate", address) }
}

/// Loads of 8 and 16 bits that LLVM does not move: one line each.
macro_rules! narrow_loads {
    ($($(#[$doc:meta])* $name:ident($class:ident $type:ty) = $text:literal;)+) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) unsafe fn $name(address: $type) -> u32 {
            let value;
            // SAFETY: the instruction needs exactly the caller's promise.
            unsafe {
                asm!(concat!($text, " {value}, [{address}];"), value = out(reg32) value,
                    address = in($class) address, options(readonly, nostack, preserves_flags));
            }
            value
        }
    )+};
}

pub(crate) use narrow_loads;

narrow_loads! {
    /// Loads a byte.
    ///
    /// # Safety
    /// `address` points to a readable byte of global memory, and nothing writes there during the
    /// kernel.
    load_u8_here(reg64 *const u8) = "ld.global.nc.u8";
    /// [`load_u8_here`] of 16 bits.
    ///
    /// # Safety
    /// As for [`load_u8_here`], for two bytes; `address` is a multiple of 2.
    load_u16_here(reg64 *const u8) = "ld.global.nc.u16";
}

/// Instructions on registers only: one line each.
macro_rules! register_instructions {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $class:ident $type:ty),+) -> $out_class:ident $out:ty = $text:literal;)+) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name($($arg: $type),+) -> $out {
            let result;
            // SAFETY: reads and writes registers only.
            unsafe {
                asm!($text, out($out_class) result, $(in($class) $arg),+, options(pure, nomem, nostack, preserves_flags));
            }
            result
        }
    )+};
}

register_instructions! {
    /// |a| · b, rounded toward zero.
    mul_magnitude_toward_zero(a: reg32 f32, b: reg32 f32) -> reg32 f32 =
        "{{ .reg .f32 x; abs.f32 x, {1}; mul.rz.f32 {0}, x, {2}; }}";
    /// a + b, rounded up.
    add_upward(a: reg32 f32, b: reg32 f32) -> reg32 f32 = "add.rp.f32 {}, {}, {};";
    /// The larger of |a| and |b|; NaN if either is.
    max_magnitude_f32(a: reg32 f32, b: reg32 f32) -> reg32 f32 =
        "{{ .reg .f32 x, y; abs.f32 x, {1}; abs.f32 y, {2}; max.NaN.f32 {0}, x, y; }}";
    /// The same number. LLVM does not know its value.
    opaque(number: reg32 u32) -> reg32 u32 = "mov.b32 {}, {};";
    /// a · b + c, rounded once.
    fma_f32(a: reg32 f32, b: reg32 f32, c: reg32 f32) -> reg32 f32 = "fma.rn.f32 {}, {}, {}, {};";
    /// a · b + c in both halves, rounded once; f16.
    fma_f16x2(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "fma.rn.f16x2 {}, {}, {}, {};";
    /// Bytes picked from the eight of `b:a`, one a nibble of the selector; bit 3 of a nibble asks
    /// for eight copies of the byte's sign instead.
    permute(a: reg32 u32, b: reg32 u32, selector: reg32 u32) -> reg32 u32 = "prmt.b32 {}, {}, {}, {};";
    /// a · b in both halves, rounded once; f16.
    multiply_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "mul.rn.f16x2 {}, {}, {};";
    /// a · b in both halves, rounded once; bf16. (A product as such needs sm_90; adding −0 changes
    /// nothing.)
    multiply_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .b32 minus_zero; mov.b32 minus_zero, 0x80008000; fma.rn.bf16x2 {0}, {1}, {2}, minus_zero; }}";
    /// The square root, rounded once.
    square_root(a: reg32 f32) -> reg32 f32 = "sqrt.rn.f32 {}, {};";
    /// 1 / b, off by about one unit in the last place; for normal b and 1 / b.
    approximate_reciprocal(b: reg32 f32) -> reg32 f32 = "rcp.approx.ftz.f32 {}, {};";
    /// The f16 in the low half, widened.
    f16_low_to_f32(word: reg32 u32) -> reg32 f32 =
        "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {1}; cvt.f32.f16 {0}, low; }}";
    /// The f16 in the high half, widened.
    f16_high_to_f32(word: reg32 u32) -> reg32 f32 =
        "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {1}; cvt.f32.f16 {0}, high; }}";
    /// Two values rounded to f16, ties to even: the first argument goes to the high half.
    f16x2(high: reg32 f32, low: reg32 f32) -> reg32 u32 = "cvt.rn.f16x2.f32 {}, {}, {};";
    /// Two values rounded to bf16, ties to even: the first argument goes to the high half.
    bf16x2(high: reg32 f32, low: reg32 f32) -> reg32 u32 = "cvt.rn.bf16x2.f32 {}, {}, {};";
}

#[cfg(not(microscale_fp4))]
register_instructions! {
    /// c plus the four products of the signed bytes of a and b, wrapping.
    dot_bytes(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "dp4a.s32.s32 {}, {}, {}, {};";
    /// |a| · b + c, rounded once.
    fma_magnitude_f32(a: reg32 f32, b: reg32 f32, c: reg32 f32) -> reg32 f32 =
        "{{ .reg .f32 x; abs.f32 x, {1}; fma.rn.f32 {0}, x, {2}, {3}; }}";
    /// a · b + c, the low 32 bits.
    multiply_add(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "mad.lo.u32 {}, {}, {}, {};";
    /// a · b + c in both halves, rounded once; bf16.
    fma_bf16x2(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "fma.rn.bf16x2 {}, {}, {}, {};";
    /// Two values cut to f16, toward zero: the first argument goes to the high half.
    f16x2_toward_zero(high: reg32 f32, low: reg32 f32) -> reg32 u32 = "cvt.rz.f16x2.f32 {}, {}, {};";
    /// |a| · b in both halves, rounded once; bf16. A plain product needs sm_90; adding −0 keeps it.
    scale_magnitude_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .b32 x, minus_zero; abs.bf16x2 x, {1}; mov.b32 minus_zero, 0x80008000;
        fma.rn.bf16x2 {0}, x, {2}, minus_zero; }}";
    /// |a| · b in both halves, rounded once; f16.
    scale_magnitude_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .b32 x; abs.f16x2 x, {1}; mul.rn.f16x2 {0}, x, {2}; }}";
}

#[cfg(microscale_sm90)]
register_instructions! {
    /// The smaller of each half, for positive numbers: their bits order as they do.
    min_positive_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "min.u16x2 {}, {}, {};";
    /// The smaller of each half, for positive numbers: their bits order as they do.
    min_positive_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "min.u16x2 {}, {}, {};";
}

#[cfg(microscale_sm90)]
register_instructions! {
    /// The smaller of each half as signed integers.
    min_signed_16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "min.s16x2 {}, {}, {};";
    /// The larger of |a| and |b| in both halves, with some sign; NaN where either is; bf16.
    max_magnitude_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "max.NaN.xorsign.abs.bf16x2 {}, {}, {};";
    /// The larger of |a| and |b| in both halves, with some sign; NaN where either is; f16.
    max_magnitude_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "max.NaN.xorsign.abs.f16x2 {}, {}, {};";
}

#[cfg(microscale_wgmma)]
register_instructions! {
    /// a | (b & mask).
    or_masked(a: reg32 u32, b: reg32 u32, mask: reg32 u32) -> reg32 u32 = "lop3.b32 {}, {}, {}, {}, 0xF8;";
    /// Two values in f16 rounded to E4M3, ties to even, saturating.
    f16x2_to_e4m3x2(pair: reg32 u32) -> reg32 u32 =
        "{{ .reg .b16 codes; cvt.rn.satfinite.e4m3x2.f16x2 codes, {1}; cvt.u32.u16 {0}, codes; }}";
}

#[cfg(microscale_sm90)]
register_instructions! {
    /// Two values rounded to E4M3, ties to even, saturating: the first argument goes to the high
    /// byte.
    e4m3x2(high: reg32 f32, low: reg32 f32) -> reg32 u32 =
        "{{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {1}, {2}; cvt.u32.u16 {0}, pair; }}";
    /// Four values rounded to E4M3, ties to even, saturating: the first argument goes to the lowest
    /// byte.
    e4m3x4(a: reg32 f32, b: reg32 f32, c: reg32 f32, d: reg32 f32) -> reg32 u32 =
        "{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {2}, {1};
        cvt.rn.satfinite.e4m3x2.f32 high, {4}, {3}; mov.b32 {0}, {{low, high}}; }}";
    /// Two values rounded to E5M2, ties to even, saturating: the first argument goes to the high
    /// byte.
    e5m2x2(high: reg32 f32, low: reg32 f32) -> reg32 u32 =
        "{{ .reg .b16 pair; cvt.rn.satfinite.e5m2x2.f32 pair, {1}, {2}; cvt.u32.u16 {0}, pair; }}";
    /// Two E4M3 numbers in the low half, widened to f16 exactly: the low byte goes to the low half.
    e4m3x2_to_f16x2(codes: reg32 u32) -> reg32 u32 =
        "{{ .reg .b16 pair, rest; mov.b32 {{pair, rest}}, {1}; cvt.rn.f16x2.e4m3x2 {0}, pair; }}";
    /// Two E5M2 numbers in the low half, widened to f16 exactly: the low byte goes to the low half.
    e5m2x2_to_f16x2(codes: reg32 u32) -> reg32 u32 =
        "{{ .reg .b16 pair, rest; mov.b32 {{pair, rest}}, {1}; cvt.rn.f16x2.e5m2x2 {0}, pair; }}";
}

#[cfg(not(microscale_sm90))]
register_instructions! {
    /// The smaller of each half as signed integers.
    min_signed_16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .s16 a0, a1, b0, b1; mov.b32 {{a0, a1}}, {1}; mov.b32 {{b0, b1}}, {2};
        min.s16 a0, a0, b0; min.s16 a1, a1, b1; mov.b32 {0}, {{a0, a1}}; }}";
    /// The larger of |a| and |b| in both halves; NaN where either is; bf16.
    max_magnitude_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .b32 x, y; abs.bf16x2 x, {1}; abs.bf16x2 y, {2}; max.NaN.bf16x2 {0}, x, y; }}";
    /// The larger of |a| and |b| in both halves; NaN where either is; f16.
    max_magnitude_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 =
        "{{ .reg .b32 x, y; abs.f16x2 x, {1}; abs.f16x2 y, {2}; max.NaN.f16x2 {0}, x, y; }}";
    /// The smaller of each half, for positive numbers; bf16.
    min_positive_bf16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "min.bf16x2 {}, {}, {};";
    /// The smaller of each half, for positive numbers; f16.
    min_positive_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "min.f16x2 {}, {}, {};";
}

#[cfg(microscale_fp4)]
register_instructions! {
    /// Eight values rounded to E2M1, ties to even, saturating: the first argument goes to the
    /// lowest nibble.
    e2m1x8(v0: reg32 f32, v1: reg32 f32, v2: reg32 f32, v3: reg32 f32, v4: reg32 f32, v5: reg32 f32, v6: reg32 f32, v7: reg32 f32)
        -> reg32 u32 =
        "{{ .reg .b8 b0, b1, b2, b3;
        cvt.rn.satfinite.e2m1x2.f32 b0, {2}, {1};
        cvt.rn.satfinite.e2m1x2.f32 b1, {4}, {3};
        cvt.rn.satfinite.e2m1x2.f32 b2, {6}, {5};
        cvt.rn.satfinite.e2m1x2.f32 b3, {8}, {7};
        mov.b32 {0}, {{b0, b1, b2, b3}}; }}";
    /// Four values rounded to E2M1, in the low half.
    e2m1x4(v0: reg32 f32, v1: reg32 f32, v2: reg32 f32, v3: reg32 f32) -> reg32 u32 =
        "{{ .reg .b8 b0, b1, zero;
        cvt.rn.satfinite.e2m1x2.f32 b0, {2}, {1};
        cvt.rn.satfinite.e2m1x2.f32 b1, {4}, {3};
        mov.b16 {{zero, _}}, 0;
        mov.b32 {0}, {{b0, b1, zero, zero}}; }}";
    /// Two E2M1 codes in the low byte, widened to f16 exactly: the low nibble goes to the low half.
    e2m1x2_to_f16x2(codes: reg32 u32) -> reg32 u32 =
        "{{ .reg .b8 pair, rest1, rest2, rest3;
        mov.b32 {{pair, rest1, rest2, rest3}}, {1};
        cvt.rn.f16x2.e2m1x2 {0}, pair; }}";
}
