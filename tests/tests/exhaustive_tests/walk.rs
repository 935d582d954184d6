//! Walking every f32. Expectations are step functions of a magnitude, so each test first finds the steps with exact f64
//! arithmetic and then walks every pattern of each step, comparing the library's answer with the step's one answer.

use std::ops::Range;

use microscale_test_support::oracle::power_of_two;
use rayon::prelude::*;

pub(super) const SIGN: u32 = 0x8000_0000;
pub(super) const INFINITY: u32 = 0x7F80_0000;

/// The value of a finite f32's magnitude bits, by the definition of binary32.
pub(super) fn value(magnitude: u32) -> f64 {
    let (exponent, mantissa) = (magnitude >> 23, f64::from(magnitude & 0x7F_FFFF));
    match exponent {
        0 => mantissa * power_of_two(-149),
        _ => (mantissa + power_of_two(23)) * power_of_two(exponent as i32 - 150),
    }
}

/// The first finite magnitude bits for which `passed` holds, which must not stop holding above; infinity's if none.
pub(super) fn first(passed: impl Fn(f64) -> bool) -> u32 {
    let (mut below, mut above) = (0, INFINITY);
    while below < above {
        let middle = below + (above - below) / 2;
        if passed(value(middle)) {
            above = middle;
        } else {
            below = middle + 1;
        }
    }
    above
}

/// Asserts that `found` is `expected` on every pattern of a range. `found` must be inlined to be fast.
#[inline(always)]
pub(super) fn assert_everywhere(
    range: Range<u32>,
    expected: u32,
    found: impl Fn(u32) -> u32 + Sync,
    what: &str,
) {
    const CHUNK: u32 = 1 << 18;
    let chunks = (range.end - range.start).div_ceil(CHUNK);
    (0..chunks).into_par_iter().for_each(|chunk| {
        let start = range.start + chunk * CHUNK;
        let end = range.end.min(start.saturating_add(CHUNK));
        // No early exit: the loop has to vectorise.
        let differences = (start..end).fold(0, |all, bits| all | (found(bits) ^ expected));
        if differences != 0 {
            let bits = (start..end).find(|bits| found(*bits) != expected).expect("one differs");
            panic!("{what} of {bits:#010x}: {:#x}, not {expected:#x}", found(bits));
        }
    });
}

/// What a magnitude gives and what its negative gives, to be compared at once.
#[inline(always)]
pub(super) fn both_signs(positive: u32, negative: u32) -> u32 {
    positive | negative << 16
}

/// [`assert_everywhere`] for every NaN.
#[inline(always)]
pub(super) fn assert_nan_codes(expected: u32, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    let every_nan = INFINITY + 1..SIGN;
    assert_everywhere(
        every_nan,
        both_signs(expected, expected),
        |b| both_signs(found(b), found(b | SIGN)),
        what,
    );
}
