//! Tests the block scale of every amax in all numerics.
//!
//! Each step is a monotone function with monotone rounding, so the scale byte is a step function of
//! amax. The oracle finds the steps, and the library must have no others.

use half::{bf16, f16};
use microscale::Numerics;
use microscale::formats::NegativeZero;
use microscale::formats::nvfp4::Quantizer;
use microscale_test_support::cases::{NVFP4_NUMERICS, given_for, nvfp4_arithmetic};
use microscale_test_support::oracle::Exact;
use microscale_test_support::oracle::nvfp4::Rule;

use super::walk::{INFINITY, Walk, assert_everywhere, walks};

/// Returns the oracle's scale byte for the bits of an amax, in an order that follows amax.
///
/// A ModelOpt scale that underflows to zero becomes 1, so it comes first.
fn expected<T: Exact>(rule: Rule, bits: u32) -> u8 {
    rule.byte(rule.wanted::<T>(f32::from_bits(bits)))
}

/// Returns the first bits from `start` on with another byte, or infinity's bits.
fn end_of_step<T: Exact>(rule: Rule, start: u32) -> u32 {
    let byte = expected::<T>(rule, start);
    let (mut same, mut other) = (start, INFINITY);
    if expected::<T>(rule, INFINITY - 1) == byte {
        return INFINITY;
    }
    while other - same > 1 {
        let middle = same + (other - same) / 2;
        if expected::<T>(rule, middle) == byte {
            same = middle;
        } else {
            other = middle;
        }
    }
    other
}

fn check<T: Exact>(walk: Walk, numerics: Numerics, amax: f32) {
    let arithmetic = nvfp4_arithmetic(numerics);
    let global = given_for(arithmetic.direction, amax).value();
    let rule = Rule { numerics, global, negative_zero: NegativeZero::Keep };
    let quantizer = Quantizer::new(arithmetic, global);
    let found = |bits| {
        let wanted = quantizer.wanted_scale(f32::from_bits(bits), |x| T::from_f32(x).to_f32());
        quantizer.rounded_scale(wanted).to_bits().into()
    };
    let what = format!("the {numerics:?} scale byte under {global:e} in {:?}", T::DTYPE);
    let (mut start, mut steps) = (0, 0);
    while start < INFINITY {
        let end = end_of_step::<T>(rule, start);
        assert_everywhere(walk, start..end, expected::<T>(rule, start).into(), found, &what);
        (start, steps) = (end, steps + 1);
    }
    assert!((1..=128).contains(&steps), "{what}: {steps} steps");
}

walks! {
    fn the_torchao_scale(walk: Walk) {
        check::<f32>(walk, Numerics::Torchao, 1.7);
    }

    /// Only compressed-tensors rounds amax / 6 to the input's type, so its result depends on the
    /// type.
    fn the_compressed_tensors_scale(walk: Walk) {
        check::<f32>(walk, Numerics::CompressedTensors, 1.7);
        check::<bf16>(walk, Numerics::CompressedTensors, 1.7);
    }

    fn the_modelopt_scale(walk: Walk) {
        check::<f32>(walk, Numerics::Modelopt, 1.7);
    }

    fn the_transformer_engine_scale(walk: Walk) {
        check::<f32>(walk, Numerics::TransformerEngine, 1.7);
    }
}

/// Tests other global scales, at the steps and next to them.
#[test]
fn scale_bytes_change_at_the_right_amax_under_any_global_scale() {
    fn check<T: Exact>(rng: &mut fastrand::Rng) {
        for numerics in NVFP4_NUMERICS {
            for _ in 0..100 {
                let arithmetic = nvfp4_arithmetic(numerics);
                let global = given_for(arithmetic.direction, f32::from_bits(rng.u32(1..INFINITY))).value();
                let rule = Rule { numerics, global, negative_zero: NegativeZero::Keep };
                let quantizer = Quantizer::new(arithmetic, global);
                let mut start = 0;
                while start < INFINITY {
                    for bits in [start, start + 1, start.saturating_sub(1)] {
                        let amax = f32::from_bits(bits.min(INFINITY - 1));
                        let wanted = quantizer.wanted_scale(amax, |x| T::from_f32(x).to_f32());
                        let byte = quantizer.rounded_scale(wanted).to_bits();
                        let right = expected::<T>(rule, amax.to_bits());
                        assert_eq!(byte, right, "{numerics:?}, {:?}, {global:e}, {amax:e}", T::DTYPE);
                    }
                    start = end_of_step::<T>(rule, start);
                }
            }
        }
    }
    let mut rng = fastrand::Rng::with_seed(40);
    check::<f32>(&mut rng);
    check::<f16>(&mut rng);
    check::<bf16>(&mut rng);
}
