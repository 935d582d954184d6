//! Chooses a global scale by its squared error.
//!
//! The plain global scale maps a tensor's amax to 2688, 6 times E4M3's largest value. Mapping it to
//! a smaller number moves all block scales on E4M3's grid. It also leaves the search room above the
//! plain scale of the block that holds the amax.

use core::ops::Deref;

use super::{Arithmetic, FromAmax, GlobalScale, LARGEST};

/// The numbers that amax is mapped to, in the order of trial. The first is the plain 2688.
pub const TRIED: [f32; 5] = [LARGEST, 2304.0, 2048.0, 1792.0, 1536.0];

/// The global scales to try, the plain one first. Dereferences to a slice of at least one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidates {
    scales: [GlobalScale; TRIED.len()],
    count: usize,
}

impl Deref for Candidates {
    type Target = [GlobalScale];

    fn deref(&self) -> &[GlobalScale] {
        &self.scales[..self.count]
    }
}

/// Returns the global scales to try for a tensor with this finite amax.
///
/// For each n of [`TRIED`], the candidate is n / amax or amax / n, computed in the way of
/// `arithmetic`. Candidates that are not [in range](GlobalScale::in_range) are dropped. The first
/// is the plain scale, and it is the only one if amax is 0. Several tensors may share the scale.
/// `narrow` rounds to the dtype of the input.
pub fn global_scales(arithmetic: &Arithmetic, amax: f32, narrow: impl Fn(f32) -> f32) -> Candidates {
    let plain = arithmetic.global_scale(amax, &narrow);
    let mut candidates = Candidates { scales: [plain; TRIED.len()], count: 1 };
    for &n in TRIED[1..].iter().filter(|_| amax > 0.0) {
        let divisor = GlobalScale::Divisor((n / amax).min(f32::MAX));
        let scale = match arithmetic.from_amax {
            FromAmax::OverLargest => GlobalScale::Multiplier((amax / n).max(f32::MIN_POSITIVE)),
            FromAmax::LargestOver => divisor,
            FromAmax::NarrowInverse => {
                let narrowed = narrow(narrow(1.0 / amax) * n);
                if narrowed < f32::INFINITY { GlobalScale::Divisor(narrowed) } else { divisor }
            }
        };
        if scale.in_range() {
            candidates.scales[candidates.count] = scale;
            candidates.count += 1;
        }
    }
    candidates
}

/// Returns the global scale with the least error, or the first of equals.
///
/// `measure` quantizes every tensor that will share the scale, and returns the relative squared
/// error. It is not called if there is only one candidate. Errors are not weighted, even if the
/// search for block scales weights them.
///
/// # Errors
/// Returns the errors of `measure`.
pub fn choose<E>(
    scales: &Candidates,
    mut measure: impl FnMut(GlobalScale) -> Result<f64, E>,
) -> Result<GlobalScale, E> {
    let plain = scales.scales[0];
    let others = &scales[1..];
    if others.is_empty() {
        return Ok(plain);
    }
    let mut best = (plain, measure(plain)?);
    for &scale in others {
        let error = measure(scale)?;
        if error < best.1 {
            best = (scale, error);
        }
    }
    Ok(best.0)
}

#[cfg(test)]
mod tests {
    use core::convert::Infallible;

    use super::*;
    use crate::Bf16;

    #[test]
    fn all_numerics_try_their_plain_scale_first() {
        let narrow = |x: f32| if x < f32::MAX { Bf16::from_f32(x).to_f32() } else { x };
        let check = |arithmetic: Arithmetic, amax, expected: [f32; 5]| {
            let scales = global_scales(&arithmetic, amax, narrow);
            assert!(scales.iter().map(|scale| scale.value()).eq(expected), "{scales:?}");
        };
        check(Arithmetic::TRANSFORMER_ENGINE, 3.0, TRIED.map(|n| n / 3.0));
        check(Arithmetic::TORCHAO, 3.0, TRIED.map(|n| 3.0 / n));
        let inverse = narrow(1.0 / 3.0);
        check(Arithmetic::COMPRESSED_TENSORS, 3.0, TRIED.map(|n| narrow(inverse * n)));
        // Models an f16 amax beyond f16's range, where the global scale is divided in f32.
        let to_f16 = |x: f32| if x > 65504.0 { f32::INFINITY } else { x };
        let scales = global_scales(&Arithmetic::COMPRESSED_TENSORS, 2f32.powi(-14), to_f16);
        assert!(scales.iter().map(|scale| scale.value()).eq(TRIED.map(|n| n * 16384.0)));
        for arithmetic in
            [Arithmetic::MODELOPT, Arithmetic::TRANSFORMER_ENGINE, Arithmetic::COMPRESSED_TENSORS]
        {
            let scales = global_scales(&arithmetic, 0.0, narrow);
            assert!(scales.iter().map(|scale| scale.value()).eq([1.0]));
        }
        for amax in [f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX] {
            assert!(!global_scales(&Arithmetic::MODELOPT, amax, narrow).is_empty());
        }
    }

    #[test]
    fn the_least_error_wins_and_the_first_of_equals() {
        let scales = global_scales(&Arithmetic::TRANSFORMER_ENGINE, 64.0, |x| x);
        assert_eq!(scales.len(), TRIED.len());
        let errors = [4.0, 2.0, 3.0, 2.0, 5.0];
        let error = |scale| Ok::<_, Infallible>(errors[scales.iter().position(|own| *own == scale).unwrap()]);
        assert_eq!(choose(&scales, error), Ok(scales[1]));
        assert_eq!(choose(&scales, |_| Ok::<_, Infallible>(0.0)), Ok(scales[0]));
    }
}
