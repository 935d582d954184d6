//! Dequantizing is exact but for one rounding to the output's type, and writes nothing else.

use half::{bf16, f16};
use microscale::cpu::{Isa, dequantize_with};
use microscale::{Format, QuantizedTensor, Words, dequantize, dequantize_into};
use microscale_tests::oracle::{self, BLOCK, Exact, unpack};
use proptest::prelude::*;

use super::inputs::runs;

/// Asserts that every element is right and everything else as before, on every instruction set.
fn check<T: Exact>(tensor: &QuantizedTensor, row_stride: usize, behind: usize) {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let codes = unpack(tensor.codes());
    let untouched = T::of_bits(0xA5A5);
    let in_row = tensor.blocks_per_row();
    for isa in Isa::available() {
        let mut out = vec![untouched; rows * row_stride + behind];
        dequantize_with(isa, tensor, &mut out, row_stride).expect("room for all");
        for (index, found) in out.iter().enumerate() {
            let (row, col) = (index / row_stride.max(1), index % row_stride.max(1));
            let what = || format!("{isa:?}, {}, {rows}x{cols}/{row_stride}, {row}, {col}", T::DTYPE.word());
            if row >= rows || col >= cols {
                assert_eq!(found.bits(), untouched.bits(), "written: {}", what());
                continue;
            }
            let block = row * in_row + col / BLOCK;
            let exact = oracle::value(codes[block * BLOCK + col % BLOCK], tensor.scales()[block]);
            assert_eq!(found.bits(), T::round_f64(exact).bits(), "{exact:e}: {}", what());
        }
    }
}

fn tensor(rows: usize, cols: usize, codes: Vec<u8>, scales: Vec<u8>) -> QuantizedTensor {
    QuantizedTensor::from_parts(Format::Mxfp4, rows, cols, codes, scales).expect("parts of the right length")
}

/// A row a scale byte, with every pair of codes in it; in whole blocks and with the last one cut.
#[test]
fn every_code_at_every_scale_is_exact() {
    let codes: Vec<u8> = (0..256 * 256).map(|index| (index % 256) as u8).collect();
    let scales: Vec<u8> = (0..256 * 16).map(|index| (index / 16) as u8).collect();
    for cols in [512, 511, 500, 481] {
        let tensor = tensor(256, cols, codes.clone(), scales.clone());
        check::<f32>(&tensor, cols, 0);
        check::<f16>(&tensor, cols, 0);
        check::<bf16>(&tensor, cols, 0);
    }
}

/// The narrowing conversion of the oracle, checked against its definition: no neighbour is nearer, and of two equally
/// near ones the even is taken.
#[test]
fn the_oracle_rounds_to_nearest_even() {
    fn check<T: Exact>() {
        for byte in 0..255 {
            for code in 1..8 {
                let exact = oracle::value(code, byte);
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
                        assert!(
                            distance < other || (distance == other && rounded.bits() % 2 == 0),
                            "{exact:e}"
                        );
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn nan_is_canonical() {
    let tensor = tensor(1, BLOCK, (0..16).map(|i| i * 16 + 8).collect(), vec![255]);
    assert!(dequantize::<f32>(&tensor).iter().all(|v| v.to_bits() == 0x7FC0_0000));
    assert!(dequantize::<f16>(&tensor).iter().all(|v| v.to_bits() == 0x7E00));
    assert!(dequantize::<bf16>(&tensor).iter().all(|v| v.to_bits() == 0x7FC0));
}

fn any_tensor() -> impl Strategy<Value = QuantizedTensor> {
    (0..=9usize, 0..=200usize).prop_flat_map(|(rows, cols)| {
        let blocks = rows * cols.div_ceil(BLOCK);
        let codes = prop::collection::vec(any::<u8>(), blocks * BLOCK / 2);
        let scales = prop::collection::vec(prop_oneof![any::<u8>(), 100..140u8], blocks);
        (codes, scales).prop_map(move |(codes, scales)| tensor(rows, cols, codes, scales))
    })
}

proptest! {
    #![proptest_config(runs(1000))]

    #[test]
    fn any_tensor_is_exact_and_gaps_are_left_alone(tensor in any_tensor(), gap in 0..40usize, behind in 0..3usize) {
        let row_stride = tensor.cols() + gap;
        check::<f32>(&tensor, row_stride, behind);
        check::<f16>(&tensor, row_stride, behind);
        check::<bf16>(&tensor, row_stride, behind);
    }

    #[test]
    fn the_short_forms_are_the_same(tensor in any_tensor(), gap in 0..40usize) {
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
