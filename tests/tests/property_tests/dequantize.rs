//! Tests that dequantization is exact except for one rounding to the output type.
//!
//! It must write nothing else.

use half::{bf16, f16};
use microscale::cpu::{Isa, dequantize_with};
use microscale::formats::GlobalScale;
use microscale::{Format, QuantizedShape, QuantizedTensor, ScaleLayout, Words, dequantize, dequantize_into};
use microscale_test_support::oracle::{self, Exact};
use proptest::prelude::*;

use super::inputs::{any_tensor_of_any_format, runs};

/// Asserts that every element is right and other memory is unchanged, on every instruction set.
fn check<T: Exact>(tensor: &QuantizedTensor, row_stride: usize, behind: usize) {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let untouched = T::of_bits(0xA5A5);
    let exact = oracle::dequantize(tensor);
    for isa in Isa::available() {
        let mut out = vec![untouched; rows * row_stride + behind];
        dequantize_with(isa, tensor, &mut out, row_stride).expect("room for all");
        for (index, found) in out.iter().enumerate() {
            let (row, col) = (index / row_stride.max(1), index % row_stride.max(1));
            let what = || {
                let (shape, global) = (tensor.shape(), tensor.global_scale());
                format!("{isa:?}, {}, {shape:?}/{row_stride}, {global:?}, {row}, {col}", T::DTYPE.word())
            };
            if row >= rows || col >= cols {
                assert_eq!(found.bits(), untouched.bits(), "written: {}", what());
                continue;
            }
            let exact = exact[row * cols + col];
            assert_eq!(found.bits(), T::round_f64(exact).bits(), "{exact:e}: {}", what());
        }
    }
}

/// [`check`] for every type, in rows without gaps.
fn check_every_type(tensor: &QuantizedTensor) {
    check::<f32>(tensor, tensor.cols(), 0);
    check::<f16>(tensor, tensor.cols(), 0);
    check::<bf16>(tensor, tensor.cols(), 0);
}

fn tensor(format: Format, rows: usize, cols: usize, codes: Vec<u8>, scales: Vec<u8>) -> QuantizedTensor {
    let shape = QuantizedShape::new(format, rows, cols);
    QuantizedTensor::from_parts(shape, codes, scales).expect("parts of the right length")
}

/// Tests one row per scale byte with every pair of codes, or with every 8-bit code.
///
/// Rows have whole blocks, or end with a partial one.
#[test]
fn every_code_at_every_scale_is_exact() {
    for format in [Format::Mxfp4, Format::Mxfp8E4m3, Format::Mxfp8E5m2] {
        let in_row = 256 / format.block_bytes();
        let codes: Vec<u8> = (0..256 * 256).map(|index| (index % 256) as u8).collect();
        let scales: Vec<u8> = (0..256 * in_row).map(|index| (index / in_row) as u8).collect();
        let whole = in_row * format.block();
        for cols in [whole, whole - 1, whole - 12, whole - 31] {
            check_every_type(&tensor(format, 256, cols, codes.clone(), scales.clone()));
        }
    }
}

/// Tests NVFP4 under global scales of both directions and every size, including their limits.
///
/// 448 times the largest multiplier is finite.
#[test]
fn every_nvfp4_code_at_every_scale_is_rounded_as_specified() {
    let codes: Vec<u8> = (0..128 * 256).map(|index| (index % 256) as u8).collect();
    let scales: Vec<u8> = (0..128 * 32).map(|index| (index / 32) as u8).collect();
    let mut globals = vec![None];
    let mut rng = fastrand::Rng::with_seed(33);
    let ends = [1.0, f32::MIN_POSITIVE, f32::MAX, f32::MAX / 448.0, 448.0 / f32::MAX];
    let near = ends.into_iter().flat_map(|end: f32| [end.next_down(), end, end.next_up()]);
    let any = std::iter::repeat_with(|| f32::from_bits(rng.u32(0x0080_0000..0x7F80_0000))).take(60);
    for value in near.chain([2.0, 2688.0, 1581.1765, 0.000_632_440_44]).chain(any) {
        for global in [GlobalScale::Divisor(value), GlobalScale::Multiplier(value)] {
            globals.extend(global.in_range().then_some(Some(global)));
        }
    }
    assert!(globals.len() > 60, "only {} global scales are in range", globals.len());
    for (index, global) in globals.into_iter().enumerate() {
        let cols = [512, 511, 497][index % 3];
        let tensor = tensor(Format::Nvfp4, 128, cols, codes.clone(), scales.clone());
        let tensor = match global {
            Some(global) => tensor.with_global_scale(global).expect("in range"),
            None => tensor,
        };
        check_every_type(&tensor);
        check_every_type(&tensor.convert_layout(ScaleLayout::Swizzled));
    }
}

/// Zero elements stay zeros of their sign under every scale except NaN, for any global scale.
#[test]
fn zero_elements_stay_zero() {
    let codes: Vec<u8> = [0x80u8; 127 * 8].to_vec();
    let zeros = tensor(Format::Nvfp4, 127, 16, codes, (0..127).collect());
    for global in [
        GlobalScale::Multiplier((f32::MAX / 448.0).next_down()),
        GlobalScale::Multiplier(f32::MIN_POSITIVE),
        GlobalScale::Divisor((448.0 / f32::MAX).next_up()),
        GlobalScale::Divisor(f32::MAX),
    ] {
        let tensor = zeros.clone().with_global_scale(global).expect("in range");
        for (index, value) in dequantize::<f32>(&tensor).iter().enumerate() {
            let right = if index % 2 == 0 { 0 } else { 0x8000_0000 };
            assert_eq!(value.to_bits(), right, "{global:?}, scale byte {}", index / 16);
        }
    }
}

/// Tests the oracle's narrowing against its definition.
///
/// No neighbour may be nearer, and of two equally near ones the even one is taken.
#[test]
fn the_oracle_rounds_to_nearest_even() {
    fn check<T: Exact>() {
        let every_mxfp4 = (0..255).flat_map(|byte| (1..8).map(move |code| (code, byte)));
        let mut rng = fastrand::Rng::with_seed(38);
        let any = std::iter::repeat_with(|| f64::from(f32::from_bits(rng.u32(..0x7F80_0000)))).take(100_000);
        let near_ties = (0..0x7F80).flat_map(|half| [0x7FFFu32, 0x8000, 0x8001].map(|low| half << 16 | low));
        let near_f16_ties = (0x3300..0x4780).flat_map(|half| {
            (0..8u32).flat_map(move |part| [0xFFF, 0x1000, 0x1001].map(|low| half << 16 | part << 13 | low))
        });
        let near = near_ties.chain(near_f16_ties).map(|bits| f64::from(f32::from_bits(bits)));
        let exact = every_mxfp4.map(|(code, byte)| oracle::value(Format::Mxfp4, code, byte, None));
        for exact in exact.chain(any).chain(near) {
            let rounded = T::round_f64(exact);
            let infinity = T::round_f64(f64::INFINITY).bits();
            if rounded.bits() == infinity {
                // Half a step beyond the largest value.
                let below = T::of_bits(infinity - 2).to_f64();
                assert!(exact >= T::LARGEST + (T::LARGEST - below) / 2.0);
                continue;
            }
            let distance = (rounded.to_f64() - exact).abs();
            for neighbour in [rounded.bits().wrapping_sub(1), rounded.bits() + 1] {
                if neighbour < infinity {
                    let other = (T::of_bits(neighbour).to_f64() - exact).abs();
                    let even = rounded.bits() % 2 == 0;
                    assert!(distance < other || (distance == other && even), "{exact:e}");
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// NaN scales give NaN for all codes, and MXFP8's NaN codes of either sign do too. E5M2 has
/// infinities.
#[test]
fn nan_is_canonical() {
    fn assert_nan(tensor: &QuantizedTensor) {
        let what = tensor.format();
        assert!(dequantize::<f32>(tensor).iter().all(|v| v.to_bits() == 0x7FC0_0000), "{what}, f32");
        assert!(dequantize::<f16>(tensor).iter().all(|v| v.to_bits() == 0x7E00), "{what}, f16");
        assert!(dequantize::<bf16>(tensor).iter().all(|v| v.to_bits() == 0x7FC0), "{what}, bf16");
    }
    for format in Format::WITH_KERNELS {
        let codes = (0..format.block_bytes()).map(|i| (i * 16 + 8) as u8).collect();
        let nan = tensor(format, 1, format.block(), codes, vec![oracle::nan_scale(format)]);
        assert!(format.is_nan_scale(oracle::nan_scale(format)), "{format}");
        assert_nan(&nan);
        if format == Format::Nvfp4 {
            assert_nan(&nan.with_global_scale(GlobalScale::Divisor(3.0)).expect("in range"));
        }
    }
    let repeated = |codes: &[u8]| codes.iter().copied().cycle().take(32).collect::<Vec<u8>>();
    assert_nan(&tensor(Format::Mxfp8E4m3, 1, 32, repeated(&[0x7F, 0xFF]), vec![127]));
    assert_nan(&tensor(Format::Mxfp8E5m2, 1, 32, repeated(&[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]), vec![127]));
    let infinite = tensor(Format::Mxfp8E5m2, 1, 32, repeated(&[0x7C, 0xFC]), vec![0]);
    let right = [f32::INFINITY, f32::NEG_INFINITY].repeat(16);
    assert_eq!(dequantize::<f32>(&infinite), right);
}

proptest! {
    #![proptest_config(runs(1000))]

    #[test]
    fn any_tensor_is_exact_and_gaps_are_not_written(tensor in any_tensor_of_any_format(), gap in 0..40usize, behind in 0..3usize) {
        let row_stride = tensor.cols() + gap;
        check::<f32>(&tensor, row_stride, behind);
        check::<f16>(&tensor, row_stride, behind);
        check::<bf16>(&tensor, row_stride, behind);
    }

    #[test]
    fn short_forms_equal_the_long_forms(tensor in any_tensor_of_any_format(), gap in 0..40usize) {
        let mut dense = vec![0.0f32; tensor.rows() * tensor.cols()];
        dequantize_with(Isa::Reference, &tensor, &mut dense, tensor.cols()).expect("room for all");
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&dequantize::<f32>(&tensor)), bits(&dense));

        let row_stride = tensor.cols() + gap;
        let mut apart = vec![0.0f32; tensor.rows() * row_stride];
        dequantize_into(&tensor, &mut apart, row_stride).expect("room for all");
        for (row, values) in apart.chunks(row_stride.max(1)).enumerate() {
            prop_assert_eq!(bits(&values[..tensor.cols()]), bits(&dense[row * tensor.cols()..][..tensor.cols()]));
        }
    }
}
