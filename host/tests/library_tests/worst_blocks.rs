//! Tests the blocks that `WorstBlocks` finds.

use approx::assert_relative_eq;
use microscale::{
    BlockError, ErrorStats, Format, NonFinite, Numerics, QuantizedTensor, Recipe, ScaleLayout, Shape,
    WorstBlocks, dequantize, quantize,
};

/// Returns every block without the code under test.
fn all(values: &[f32], shape: Shape, tensor: &QuantizedTensor) -> Vec<(usize, usize, f64, f64)> {
    let (back, length) = (dequantize::<f32>(tensor), tensor.format().block());
    let mut blocks = Vec::new();
    for row in 0..shape.rows {
        for start in (0..shape.cols).step_by(length) {
            let (mut energy, mut error) = (0.0, 0.0);
            for col in start..shape.cols.min(start + length) {
                let (a, b) = (values[row * shape.row_stride + col], back[row * shape.cols + col]);
                if a.is_finite() && b.is_finite() {
                    energy += f64::from(a).powi(2);
                    error += (f64::from(a) - f64::from(b)).powi(2);
                }
            }
            blocks.push((row, start / length, energy, error));
        }
    }
    blocks
}

#[test]
fn worst_blocks_are_the_head_of_all_blocks_sorted_by_error() {
    let mut random = fastrand::Rng::with_seed(7);
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        for (rows, cols, gap) in [(1, 1, 0), (37, 2085, 3), (200, 64, 0), (3, 40, 0), (0, 5, 0), (5, 0, 0)] {
            let shape = Shape::new(rows, cols).with_row_stride(cols + gap);
            let mut values: Vec<f32> = (0..rows * (cols + gap))
                .map(|_| (random.f32() - 0.5) * 2f32.powi(random.i32(-6..6)))
                .collect();
            if values.len() > 100 {
                (values[3], values[70], values[71]) = (f32::NAN, f32::INFINITY, 0.0);
                values[..2].copy_from_slice(&[0.0, -0.0]);
            }
            let numerics = Numerics::default_for(format);
            let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::of(format, numerics).unwrap() };
            let tensor = quantize(&values, shape, &recipe).unwrap().tensor;
            for (tensor, most) in
                [(tensor.convert_layout(ScaleLayout::Swizzled), 4), (tensor.clone(), 0), (tensor, 1000)]
            {
                let worst = WorstBlocks::of(&values, shape, &tensor, most).unwrap();
                let mut blocks = all(&values, shape, &tensor);
                blocks.retain(|(_, _, _, error)| *error > 0.0);
                // Sorting is stable, so blocks of equal loss keep their order.
                blocks.sort_by(|a, b| b.3.total_cmp(&a.3));
                same(&worst.absolute, &blocks, most);
                blocks.sort_by_key(|block| (block.0, block.1));
                blocks.sort_by(|a, b| (b.3 / b.2).total_cmp(&(a.3 / a.2)));
                same(&worst.relative, &blocks, most);
            }
        }
    }
}

fn same(found: &[BlockError], expected: &[(usize, usize, f64, f64)], most: usize) {
    assert_eq!(found.len(), expected.len().min(most));
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((found.row, found.block), (expected.0, expected.1));
        assert_eq!((found.energy, found.squared_error), (expected.2, expected.3));
    }
}

#[test]
fn amax_and_scales_belong_to_the_block() {
    let mut values = [1.0f32; 64];
    (values[40], values[50]) = (5.0, f32::INFINITY);
    let recipe = Recipe { non_finite: NonFinite::Saturate, ..Recipe::default() };
    let tensor = quantize(&values, Shape::new(1, 64), &recipe).unwrap().tensor;
    let worst = WorstBlocks::of(&values, Shape::new(1, 64), &tensor, 9).unwrap();
    let [block] = worst.absolute[..] else { panic!("the first block lost nothing: {worst:?}") };
    assert_eq!(
        (block.row, block.block, block.amax, block.scale_bits),
        (0, 1, 5.0, tensor.scales()[1].into())
    );
    assert_relative_eq!(f64::from(block.scale), 2f64.powi(i32::from(block.scale_bits) - 127));
    assert_relative_eq!(block.energy, 55.0);
    assert_relative_eq!(block.relative(), 1.0);
    assert_eq!(worst.relative, worst.absolute);
}

#[test]
fn bands_of_rows_add_up_to_all_rows() {
    let mut random = fastrand::Rng::with_seed(3);
    let shape = Shape::new(60, 1500);
    let values: Vec<f32> = (0..shape.elements()).map(|_| random.f32() - 0.5).collect();
    let recipe = Recipe::default();
    let whole = quantize(&values, shape, &recipe).unwrap().tensor;
    let expected = WorstBlocks::of(&values, shape, &whole, 7).unwrap();
    let mut worst = WorstBlocks { relative: Vec::new(), absolute: Vec::new() };
    let mut errors = ErrorStats::default();
    for first in (0..60).step_by(11) {
        let rows = 11.min(60 - first);
        let (values, shape) = (&values[first * 1500..][..rows * 1500], Shape::new(rows, 1500));
        let band = quantize(values, shape, &recipe).unwrap().tensor;
        worst.add(WorstBlocks::of(values, shape, &band, 7).unwrap(), first, 7);
        errors = errors.and_quantized(values, shape, &band).unwrap();
    }
    assert_eq!(worst, expected);
    assert_eq!(errors, ErrorStats::of_quantized(&values, shape, &whole).unwrap(), "to the bit");
    let back: Vec<f32> = dequantize(&whole);
    let (first, second) = (&values[..16384], &values[16384..]);
    let in_two = ErrorStats::between(first, &back[..16384]).and_between(second, &back[16384..]);
    assert_eq!(in_two, ErrorStats::between(&values, &back), "to the bit");
}
