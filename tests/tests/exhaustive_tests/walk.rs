//! Walks over every f32.
//!
//! Expectations are step functions of a magnitude. Each test first finds the steps with exact f64
//! arithmetic. It then compares the library's result with the step's value for every pattern of
//! each step.

use std::ops::Range;

use microscale_test_support::oracle::power_of_two;
use rayon::prelude::*;

/// Which patterns are tested.
#[derive(Clone, Copy)]
pub(super) enum Walk {
    /// Patterns next to the steps, and some in between.
    Sampled,
    /// All patterns.
    Every,
}

/// Defines two tests per walk.
///
/// One runs a sample of the patterns for every change, the other all of them in `.ci/long`.
macro_rules! walks {
    ($($(#[$attribute:meta])* fn $name:ident($walk:ident: Walk) $body:block)*) => {$(
        $(#[$attribute])*
        mod $name {
            use super::*;

            fn over($walk: Walk) $body

            #[test]
            fn sampled() {
                over(Walk::Sampled);
            }

            #[test]
            #[ignore = "takes seconds for every f32: .ci/long does it, or cargo test-all"]
            fn every() {
                over(Walk::Every);
            }
        }
    )*};
}

pub(super) use walks;

pub(super) const SIGN: u32 = 0x8000_0000;
pub(super) const INFINITY: u32 = 0x7F80_0000;

/// Returns the value of a finite f32's magnitude bits, by the definition of binary32.
pub(super) fn value(magnitude: u32) -> f64 {
    let (exponent, mantissa) = (magnitude >> 23, f64::from(magnitude & 0x7F_FFFF));
    match exponent {
        0 => mantissa * power_of_two(-149),
        _ => (mantissa + power_of_two(23)) * power_of_two(exponent as i32 - 150),
    }
}

/// Returns the first finite magnitude bits for which `passed` is true, or infinity's bits.
///
/// `passed` must stay true above them.
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

/// Asserts that `found` is `expected` for the patterns of a range. `found` must be inlined to be
/// fast.
#[inline(always)]
pub(super) fn assert_everywhere(
    walk: Walk,
    range: Range<u32>,
    expected: u32,
    found: impl Fn(u32) -> u32 + Sync,
    what: &str,
) {
    const CHUNK: u32 = 1 << 18;
    const EDGE: u32 = 1 << 10;
    // Coprime to powers of two, so that all bits of a mantissa vary.
    const STRIDE: usize = 61;
    let differs = |bits: &u32| found(*bits) != expected;
    let first_wrong = match walk {
        // No early exit: the loop must vectorize.
        Walk::Every => {
            let chunks = (range.end - range.start).div_ceil(CHUNK);
            (0..chunks).into_par_iter().find_map_first(|chunk| {
                let start = range.start + chunk * CHUNK;
                let end = range.end.min(start.saturating_add(CHUNK));
                let differences = (start..end).fold(0, |all, bits| all | (found(bits) ^ expected));
                (differences != 0).then(|| (start..end).find(differs).expect("one differs"))
            })
        }
        Walk::Sampled => {
            let edges = range.clone().take(EDGE as usize).chain(range.clone().rev().take(EDGE as usize));
            edges.chain(range.step_by(STRIDE)).find(differs)
        }
    };
    if let Some(bits) = first_wrong {
        panic!("{what} of {bits:#010x}: {:#x}, not {expected:#x}", found(bits));
    }
}

/// Combines the expected values for a magnitude and for its negative.
#[inline(always)]
pub(super) fn both_signs(positive: u32, negative: u32) -> u32 {
    positive | negative << 16
}

/// [`assert_everywhere`] for NaN.
#[inline(always)]
pub(super) fn assert_nan_codes(walk: Walk, expected: u32, found: impl Fn(u32) -> u32 + Sync, what: &str) {
    let every_nan = INFINITY + 1..SIGN;
    assert_everywhere(
        walk,
        every_nan,
        both_signs(expected, expected),
        |b| both_signs(found(b), found(b | SIGN)),
        what,
    );
}
