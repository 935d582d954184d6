//! Tests the loss of quantization.

use half::{bf16, f16};
use microscale::gpu::Gpu;
use microscale::{
    Element, Error, ErrorStats, Format, NonFinite, Numerics, Recipe, ScaleLayout, Shape, Words, quantize,
};

use super::support::{SHAPES, patterns};

fn recipes() -> impl Iterator<Item = Recipe> {
    Format::WITH_KERNELS.iter().enumerate().map(|(i, format)| {
        let recipe = Recipe::of(*format, Numerics::default_for(*format)).unwrap();
        let scale_layout = [ScaleLayout::Linear, ScaleLayout::Swizzled][i % 2];
        Recipe { non_finite: NonFinite::Propagate, scale_layout, ..recipe }
    })
}

pub(crate) fn equal_the_cpu(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        for (i, shape) in SHAPES.into_iter().chain([Shape::new(600, 5003), Shape::new(3, 0)]).enumerate() {
            for recipe in recipes() {
                for non_finite in [false, true] {
                    let values = patterns::<T>(shape.span().unwrap(), non_finite, 80 + i as u64);
                    let tensor = quantize(&values, shape, &recipe).unwrap().tensor;
                    let expected = ErrorStats::of_quantized(&values, shape, &tensor).unwrap();
                    let found = gpu.errors(&values, shape, &tensor).unwrap();
                    assert_eq!(found, expected, "{} {shape:?} {recipe:?}", T::DTYPE.word());
                }
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn of_another_shape_are_refused(gpu: &Gpu) {
    let tensor = quantize(&[1.0f32; 128], Shape::new(2, 64), &Recipe::default()).unwrap().tensor;
    let refused = gpu.errors(&[1.0f32; 128], Shape::new(4, 32), &tensor);
    assert!(matches!(refused, Err(Error::QuantizedShape { .. })), "{refused:?}");
}

/// Formats for comparison are for CPUs only.
pub(crate) fn of_formats_without_kernels_are_refused(gpu: &Gpu) {
    let (values, shape) = ([1.0f32; 128], Shape::new(2, 64));
    for format in Format::ALL.into_iter().filter(|format| !Format::WITH_KERNELS.contains(format)) {
        let recipe = Recipe::of(format, Numerics::default_for(format)).unwrap();
        let tensor = quantize(&values, shape, &recipe).unwrap().tensor;
        let refused = [
            gpu.quantize(&values, shape, &recipe).map(drop),
            gpu.dequantize::<f32>(&tensor).map(drop),
            gpu.errors(&values, shape, &tensor).map(drop),
            gpu.convert_layout(&tensor, ScaleLayout::Swizzled).map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(Error::NoKernel { format: of }) if of == format), "{refused:?}");
        }
    }
}
