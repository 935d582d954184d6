//! Hostile tensors from a caller: codes, scales, values and shapes with wrong lengths and strides.

use microscale::formats::nvfp4::Direction;
use microscale::formats::{GlobalScale, ScaleLayout};
use microscale::{
    Element, ErrorStats, Format, NonFinite, Numerics, QuantizeOptions, QuantizedShape, QuantizedTensor,
    Recipe, Search, Shape, Strided, Words, WorstBlocks, amax, check_search, dequantize, dequantize_into,
    quantize, quantize_with,
};

use super::draw::Draw;

/// Maximum number of elements. More would only take longer.
const MOST: usize = 1 << 11;

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    match draw.below(3) {
        0 => reading(&mut draw),
        1 => writing::<f32>(&mut draw, f32::from_bits),
        _ => writing::<half::bf16>(&mut draw, |bits| half::bf16::from_bits(bits as u16)),
    }
}

fn any_word<T: Words>(draw: &mut Draw<'_>) -> T {
    T::WORDS[draw.below(T::WORDS.len())].1
}

fn size(draw: &mut Draw<'_>) -> usize {
    draw.size() as usize
}

/// Returns the needed length, or sometimes a wrong one.
fn length(draw: &mut Draw<'_>, needed: usize) -> usize {
    let length = if draw.once_in(6) { size(draw) } else { needed };
    length.min(MOST)
}

/// Makes a tensor from codes and scales, and dequantizes it.
fn reading(draw: &mut Draw<'_>) {
    let format: Format = any_word(draw);
    let layout: ScaleLayout = any_word(draw);
    let shape = QuantizedShape::new(format, size(draw), size(draw)).with_scale_layout(layout);
    let (codes, scales) = shape.bytes().unwrap_or((3, 5));
    let (codes, scales) = (length(draw, codes), length(draw, scales));
    let (codes, scales) = (draw.fill(codes), draw.fill(scales));
    let Ok(mut tensor) = QuantizedTensor::from_parts(shape, codes, scales) else { return };
    if draw.once_in(2) {
        let direction: Direction = any_word(draw);
        let given = GlobalScale::of(direction, f32::from_bits(draw.size() as u32));
        match tensor.clone().with_global_scale(given) {
            Ok(with) => tensor = with,
            Err(error) => drop(error.to_string()),
        }
    }
    let values: Vec<f32> = dequantize(&tensor);
    assert_eq!(values.len(), tensor.rows() * tensor.cols());
    let linear = tensor.convert_layout(any_word(draw));
    let converted: Vec<f32> = dequantize(&linear);
    assert!(values.iter().map(|value| value.to_bits()).eq(converted.iter().map(|value| value.to_bits())));
    let stride = size(draw);
    let mut out = vec![half::f16::default(); length(draw, tensor.rows().saturating_mul(stride))];
    let _ = dequantize_into(&tensor, &mut out, stride);
    let shape = Shape::new(tensor.rows(), tensor.cols());
    let _ = ErrorStats::of_quantized(&values, shape, &tensor).unwrap();
    let _ = WorstBlocks::of(&values, shape, &tensor, 3).unwrap();
}

/// Quantizes values of a shape.
fn writing<T: Element>(draw: &mut Draw<'_>, value: impl Fn(u32) -> T) {
    let (format, numerics): (Format, Numerics) = (any_word(draw), any_word(draw));
    let Ok(recipe) = Recipe::of(format, numerics) else { return };
    let (search, scale_layout): (Search, ScaleLayout) = (any_word(draw), any_word(draw));
    let non_finite: NonFinite = any_word(draw);
    let recipe = Recipe { search, scale_layout, non_finite, ..recipe };
    let shape = Shape { rows: size(draw), cols: size(draw), row_stride: size(draw) };
    let shape = if draw.once_in(4) { shape } else { Shape::new(shape.rows, shape.cols) };
    let found = length(draw, shape.span().unwrap_or(7));
    let words = draw.fill(found * 4);
    let values: Vec<T> = words.as_chunks().0.iter().map(|word| value(u32::from_le_bytes(*word))).collect();

    let _ = amax(&values, shape);
    if let Ok(quantized) = quantize(&values, shape, &recipe) {
        let _ = check_search(&values, shape, &recipe, None, &quantized.tensor);
        let _ = WorstBlocks::of(&values, shape, &quantized.tensor, 3).unwrap();
        let back: Vec<T> = dequantize(&quantized.tensor);
        let _ = ErrorStats::between(&back, &back);
    }
    let weights = length(draw, shape.cols);
    let importance: Vec<f32> = (0..weights).map(|_| f32::from_bits(u32::from(draw.byte()) << 23)).collect();
    let _ = quantize_with(&values, shape, &recipe, QuantizeOptions::new().importance(&importance));

    let dims: Vec<usize> = (0..draw.below(5)).map(|_| size(draw)).collect();
    let strides: Vec<usize> = (0..dims.len()).map(|_| size(draw)).collect();
    let axis = draw.below(5);
    for strided in
        [Strided::along(&dims, axis), Strided::from_strides(&dims, &strides, axis)].into_iter().flatten()
    {
        let _ = quantize(&values, strided, &recipe);
    }
}
