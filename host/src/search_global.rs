//! Choosing NVFP4's global scale by the squared error that it makes.
//!
//! The convention brings a tensor's amax to 2688, 6 times E4M3's largest value. A smaller number moves all block scales
//! on E4M3's grid, and leaves a search room above the plain scale of the block with the amax.

use microscale_formats::GlobalScale;
use microscale_formats::nvfp4::{Arithmetic, FromAmax, LARGEST};

use crate::ErrorStats;

/// What amax is brought to, in the order in which it is tried: the convention's 2688 first.
pub const TRIED: [f32; 5] = [LARGEST, 2304.0, 2048.0, 1792.0, 1536.0];

/// The global scales that are tried for a tensor, or several that share one, with this finite amax: n / amax or amax /
/// n for each n of [`TRIED`], computed as the convention computes it, without those that
/// [cannot be a global scale](GlobalScale::in_range). The first is the convention's own, and the only one if amax is 0.
/// `narrow` rounds to the dtype of the input.
pub fn global_scales(arithmetic: &Arithmetic, amax: f32, narrow: impl Fn(f32) -> f32) -> Vec<GlobalScale> {
    let plain = arithmetic.global_scale(amax, &narrow);
    let others = TRIED[1..].iter().filter(|_| amax > 0.0).map(|&n| {
        let divisor = GlobalScale::Divisor((n / amax).min(f32::MAX));
        match arithmetic.from_amax {
            FromAmax::OverLargest => GlobalScale::Multiplier((amax / n).max(f32::MIN_POSITIVE)),
            FromAmax::LargestOver => divisor,
            FromAmax::NarrowInverse => {
                let narrowed = narrow(narrow(1.0 / amax) * n);
                if narrowed < f32::INFINITY { GlobalScale::Divisor(narrowed) } else { divisor }
            }
        }
    });
    std::iter::once(plain).chain(others.filter(|scale| scale.in_range())).collect()
}

/// The global scale, of those given, with the least squared error; the first of equals. `measure` quantizes everything
/// that is to share it. Nothing is measured where there is one alone. Errors are not weighted, also where the search
/// for block scales weights them.
///
/// # Errors
/// Those of `measure`.
///
/// # Panics
/// If no global scale is given.
pub fn choose<E>(
    scales: &[GlobalScale],
    mut measure: impl FnMut(GlobalScale) -> Result<ErrorStats, E>,
) -> Result<GlobalScale, E> {
    let (&plain, others) = scales.split_first().expect("the convention's own global scale is always there");
    if others.is_empty() {
        return Ok(plain);
    }
    let mut best = (plain, measure(plain)?.relative_squared_error());
    for &scale in others {
        let error = measure(scale)?.relative_squared_error();
        if error < best.1 {
            best = (scale, error);
        }
    }
    Ok(best.0)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::Convention;

    #[test]
    fn every_convention_tries_its_own_first() {
        let scales = |convention: Convention, amax| {
            let narrow = |x| f16::from_f32(x).to_f32();
            let scales = global_scales(&convention.nvfp4().unwrap(), amax, narrow);
            scales.iter().map(|scale| scale.value()).collect::<Vec<_>>()
        };
        assert_eq!(scales(Convention::TransformerEngine, 3.0), TRIED.map(|n| n / 3.0));
        assert_eq!(scales(Convention::Torchao, 3.0), TRIED.map(|n| 3.0 / n));
        let inverse = f16::from_f32(1.0 / 3.0).to_f32();
        let narrowed = TRIED.map(|n| f16::from_f32(inverse * n).to_f32());
        assert_eq!(scales(Convention::CompressedTensors, 3.0), narrowed);
        // Beyond the largest f16, where the convention divides in f32.
        assert_eq!(
            scales(Convention::CompressedTensors, 2f32.powi(-14)),
            TRIED.map(|n| {
                if n * 16384.0 > 65504.0 { n * 16384.0 } else { f16::from_f32(16384.0 * n).to_f32() }
            })
        );
        for convention in [Convention::Modelopt, Convention::TransformerEngine, Convention::CompressedTensors]
        {
            assert_eq!(scales(convention, 0.0), [1.0]);
        }
        for amax in [f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX] {
            assert!(!scales(Convention::Modelopt, amax).is_empty());
        }
    }
}
