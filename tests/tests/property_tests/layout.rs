//! Tests scale layouts: the offset of each byte, and the functions that move it there.

use half::bf16;
use microscale::cpu::Isa;
use microscale::{
    ErrorStats, Format, NonFinite, QuantizedShape, QuantizedTensor, Recipe, ScaleLayout, Shape, dequantize,
};
use microscale_test_support::cases::quantize;
use microscale_test_support::oracle;
use proptest::prelude::*;

use super::inputs::{any_of, any_tensor_of_any_format, case, runs};

proptest! {
    #![proptest_config(runs(1000))]

    #[test]
    fn quantizing_swizzled_equals_converting_linear(case in case::<bf16>()) {
        let under = |scale_layout| Recipe { scale_layout, non_finite: NonFinite::Propagate, ..case.recipe };
        for isa in Isa::available() {
            let made = |scale_layout| {
                quantize(isa, &case.matrix.values, case.matrix.shape, &under(scale_layout)).expect("nothing is refused")
            };
            let (linear, swizzled) = (made(ScaleLayout::Linear), made(ScaleLayout::Swizzled));
            prop_assert_eq!(&linear.0.convert_layout(ScaleLayout::Swizzled), &swizzled.0, "{:?}", isa);
            prop_assert_eq!(&swizzled.0.convert_layout(ScaleLayout::Linear), &linear.0, "{:?}", isa);
            prop_assert_eq!(linear.1, swizzled.1, "{:?}", isa);
        }
    }

    #[test]
    fn layouts_round_trip(tensor in any_tensor_of_any_format(), to in any_of::<ScaleLayout>()) {
        let there = tensor.convert_layout(to);
        prop_assert_eq!(there.shape(), tensor.shape().with_scale_layout(to));
        prop_assert_eq!(there.codes(), tensor.codes());
        prop_assert_eq!(there.global_scale(), tensor.global_scale());
        prop_assert_eq!(&there.convert_layout(tensor.shape().scale_layout), &tensor);
        let bits = |tensor| dequantize::<f32>(tensor).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&there), bits(&tensor));
    }

    #[test]
    fn a_layout_does_not_change_the_loss(case in case::<f32>()) {
        let recipe = Recipe { non_finite: NonFinite::Propagate, ..case.recipe };
        let (values, shape) = (&case.matrix.values, case.matrix.shape);
        let tensor = microscale::quantize(values, shape, &recipe).expect("nothing is refused").tensor;
        let of = |layout| ErrorStats::of_quantized(values, shape, &tensor.convert_layout(layout)).expect("its shape");
        prop_assert_eq!(of(ScaleLayout::Linear), of(ScaleLayout::Swizzled));
    }
}

/// Sizes at which rows and blocks fill tiles, and one more or less.
const ROWS: [usize; 11] = [1, 2, 31, 32, 33, 127, 128, 129, 160, 256, 300];
const BLOCKS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 9, 17];

/// Compares with the oracle's walk. Skipped bytes are padding and must be zero.
#[test]
fn every_scale_is_at_its_offset_and_padding_is_zero() {
    let mut rng = fastrand::Rng::with_seed(36);
    for rows in ROWS {
        for blocks in BLOCKS {
            for (format, cols) in [(Format::Nvfp4, blocks * 16), (Format::Mxfp8E4m3, blocks * 32 - 31)] {
                let shape = QuantizedShape::new(format, rows, cols);
                assert_eq!(shape.blocks_per_row(), blocks);
                let scales: Vec<u8> = (0..rows * blocks).map(|_| rng.u8(1..127)).collect();
                let codes = vec![0x13; rows * blocks * format.block_bytes()];
                let linear = QuantizedTensor::from_parts(shape, codes, scales.clone()).expect("parts");
                let right = oracle::layout::swizzle(&scales, rows, blocks);
                let swizzled = linear.convert_layout(ScaleLayout::Swizzled);
                assert_eq!(swizzled.scales(), right, "{shape:?}");
                let padded = rows.next_multiple_of(128) * blocks.next_multiple_of(4);
                assert_eq!(right.len(), padded);
                assert_eq!(right.iter().filter(|byte| **byte != 0).count(), rows * blocks);
                assert_eq!(ScaleLayout::Swizzled.bytes(rows, blocks), Some(padded));
                assert_eq!(ScaleLayout::Linear.bytes(rows, blocks), Some(rows * blocks));
                for row in 0..rows {
                    for block in 0..blocks {
                        let byte = scales[row * blocks + block];
                        let swizzled = right[ScaleLayout::Swizzled.offset(row, block, blocks)];
                        let linear = scales[ScaleLayout::Linear.offset(row, block, blocks)];
                        assert_eq!((swizzled, linear), (byte, byte), "{row}, {block} of {rows}x{blocks}");
                    }
                }
                assert_eq!(oracle::layout::unswizzle(&right, rows, blocks), scales);
            }
        }
    }
}

/// No offset occurs twice: the offsets of a matrix without padding are a permutation.
#[test]
fn offsets_of_whole_tiles_are_a_permutation() {
    for (rows, blocks) in [(128, 4), (256, 4), (128, 8), (384, 12)] {
        let places = (0..rows).flat_map(|row| (0..blocks).map(move |block| (row, block)));
        let mut offsets: Vec<usize> =
            places.map(|(row, block)| ScaleLayout::Swizzled.offset(row, block, blocks)).collect();
        offsets.sort_unstable();
        assert!(offsets.into_iter().eq(0..rows * blocks), "{rows}x{blocks}");
    }
}

#[test]
fn sizes_that_overflow_are_none() {
    for (rows, blocks) in [(usize::MAX, 1), (1, usize::MAX), (1 << 32, 1 << 32), (usize::MAX - 126, 4)] {
        assert_eq!(ScaleLayout::Swizzled.bytes(rows, blocks), None, "{rows}x{blocks}");
    }
    assert_eq!(ScaleLayout::Linear.bytes(1 << 32, 1 << 32), None);
}

/// Nonzero padding is not part of the matrix: it is never read, and conversions drop it.
#[test]
fn padding_bytes_do_not_matter() {
    let mut rng = fastrand::Rng::with_seed(37);
    for &(rows, cols) in &[(5, 100), (130, 33), (128, 64), (1, 1)] {
        let shape = QuantizedShape::new(Format::Nvfp4, rows, cols);
        let in_row = shape.blocks_per_row();
        let scales: Vec<u8> = (0..rows * in_row).map(|_| rng.u8(..127)).collect();
        let codes: Vec<u8> = (0..rows * in_row * 8).map(|_| rng.u8(..)).collect();
        let mut places = oracle::layout::swizzle(&vec![1; rows * in_row], rows, in_row);
        let clean = oracle::layout::swizzle(&scales, rows, in_row);
        for (place, byte) in places.iter_mut().zip(&clean) {
            *place = if *place == 1 { *byte } else { 0x7F };
        }
        let swizzled = shape.with_scale_layout(ScaleLayout::Swizzled);
        let dirty = QuantizedTensor::from_parts(swizzled, codes.clone(), places).expect("parts");
        let linear = QuantizedTensor::from_parts(shape, codes, scales).expect("parts");
        assert_eq!(dirty.convert_layout(ScaleLayout::Linear), linear, "{shape:?}");
        assert_eq!(dequantize::<f32>(&dirty), dequantize::<f32>(&linear), "{shape:?}");
        let values = vec![1.0f32; rows * cols];
        let recipe = Recipe::of(Format::Nvfp4, microscale::Numerics::Torchao).expect("torchao's");
        let recipe = Recipe { scale_layout: ScaleLayout::Swizzled, ..recipe };
        for isa in Isa::available() {
            // Into a tensor whose bytes are all set.
            let (tensor, _) = quantize(isa, &values, Shape::new(rows, cols), &recipe).expect("finite");
            let kept = oracle::layout::unswizzle(tensor.scales(), rows, in_row);
            let right = oracle::layout::swizzle(&kept, rows, in_row);
            assert_eq!(tensor.scales(), right, "padding is not zero: {isa:?}, {shape:?}");
        }
    }
}
