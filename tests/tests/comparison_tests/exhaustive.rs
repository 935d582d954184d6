//! Tests every 16-bit value, as the largest magnitude of its block and below a larger one.

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::{NonFinite, Recipe, Shape};
use microscale_test_support::cases::quantize;
use microscale_test_support::oracle::Exact;

use super::oracle::{self, FORMATS, recipe, taken_apart};

fn check<T: Exact>(word: &str, length: usize, policy: NonFinite) {
    // The largest magnitude next to a smaller value: 1, 0, and an odd number.
    for (place, beside) in [(1, 1.0), (length - 1, 0.0), (3, -1.7734375)] {
        let mut values = vec![T::round_f64(0.0); length << 16];
        for (bits, block) in (0..1 << 16).zip(values.chunks_mut(length)) {
            block[0] = T::of_bits(bits);
            block[place] = T::round_f64(beside);
            block[2] = T::round_f64(block[0].to_f64() / 2.0);
        }
        let shape = Shape::new(1 << 10, length << 6);
        let expected = oracle::quantize(word, &values, shape, policy);
        let recipe = Recipe { non_finite: policy, ..recipe(word) };
        let (tensor, report) = quantize(Isa::best(), &values, shape, &recipe).expect("a policy that goes on");
        let (scales, codes) = taken_apart(&tensor);
        assert_eq!(report, expected.report, "{word}, {}", T::DTYPE as u8);
        assert!(scales == expected.scales && codes == expected.codes, "{word} differs");
    }
}

#[test]
fn every_16_bit_value_quantizes_like_the_reference() {
    for (word, length) in FORMATS {
        for policy in [NonFinite::Propagate, NonFinite::Saturate] {
            check::<bf16>(word, length, policy);
            check::<f16>(word, length, policy);
        }
    }
}

/// Every code under every scale.
#[test]
fn every_block_dequantizes_like_the_reference() {
    for (word, length) in FORMATS {
        let format = oracle::format(word);
        let bytes = format.scale_bytes();
        // Signed scales are refused.
        let all: Vec<u16> = if bytes == 1 { (0..=255).collect() } else { (0..0x8000).collect() };
        let scales = all.iter().flat_map(|scale| scale.to_le_bytes()[..bytes].to_vec()).collect();
        let codes: Vec<u8> = (0..length / 2).map(|i| (i % 8 * 2 * 17 + 16) as u8).collect();
        let shape = microscale::QuantizedShape::new(format, all.len(), length);
        let tensor = microscale::QuantizedTensor::from_parts(shape, codes.repeat(all.len()), scales).unwrap();
        let (_, unpacked) = taken_apart(&tensor);
        fn same<T: Exact>(found: &[T], right: impl Iterator<Item = f64>) {
            let right = right.map(T::round_f64);
            assert!(found.iter().zip(right).all(|(found, right)| found.bits() == right.bits()));
        }
        let right = || {
            unpacked
                .chunks(length)
                .zip(&all)
                .flat_map(|(codes, scale)| codes.iter().map(move |code| oracle::value(word, *code, *scale)))
        };
        same::<f32>(&microscale::dequantize(&tensor), right());
        same::<f16>(&microscale::dequantize(&tensor), right());
        same::<bf16>(&microscale::dequantize(&tensor), right());
    }
}
