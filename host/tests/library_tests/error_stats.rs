//! Tests the sums of `ErrorStats`.

use approx::assert_relative_eq;
use microscale::{
    ErrorStats, Format, QuantizedShape, QuantizedTensor, Recipe, Shape, WorstBlocks, dequantize, quantize,
};

#[test]
fn figures_of_a_known_pair() {
    let stats = ErrorStats::between(&[3.0f32, 4.0, f32::NAN], &[3.0f32, 3.0, 1.0]);
    assert_eq!((stats.elements(), stats.non_finite()), (2, 1));
    assert_relative_eq!(stats.relative_squared_error(), 1.0 / 25.0);
    assert_relative_eq!(stats.sqnr_db(), 13.979400086720377, max_relative = 1e-12);
    assert_relative_eq!(stats.cosine(), 21.0 / (5.0 * 18f64.sqrt()), max_relative = 1e-12);
    assert_relative_eq!(stats.max_abs_error(), 1.0);
}

#[test]
fn of_quantized_equals_between_original_and_dequantized() {
    let (rows, cols, stride) = (7, 1100, 1111);
    let values: Vec<f32> = (0..rows * stride).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let shape = Shape::new(rows, cols).with_row_stride(stride);
    let tensor = quantize(&values, shape, &Recipe::default()).unwrap().tensor;
    let dense: Vec<f32> = values.chunks(stride).flat_map(|row| &row[..cols]).copied().collect();
    let whole = ErrorStats::between(&dense, &dequantize::<f32>(&tensor));
    let parts = ErrorStats::of_quantized(&values, shape, &tensor).unwrap();
    assert_relative_eq!(parts.relative_squared_error(), whole.relative_squared_error(), max_relative = 1e-12);
    assert_eq!(parts.max_abs_error(), whole.max_abs_error());
}

#[test]
fn without_rows_nothing_is_compared() {
    let columns = usize::MAX / 2;
    for format in Format::ALL {
        let tensor = QuantizedTensor::zeros(QuantizedShape::new(format, 0, columns)).unwrap();
        let stats = ErrorStats::of_quantized(&[0.0f32; 0], Shape::new(0, columns), &tensor).unwrap();
        assert_eq!((stats.elements(), stats.non_finite()), (0, 0));
        let worst = WorstBlocks::of(&[0.0f32; 0], Shape::new(0, columns), &tensor, 3).unwrap();
        assert!(worst.relative.is_empty() && worst.absolute.is_empty());
    }
}
