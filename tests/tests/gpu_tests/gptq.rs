//! Tests GPTQ.

use half::bf16;
use microscale::gpu::Gpu;
use microscale::{
    Device, DeviceChoice, Element, Error, Format, GptqFactor, GptqFault, GptqOptions, GptqOrder, GptqScales,
    NonFinite, Recipe, ScaleLayout, Search, Shape, Words, quantize_gptq,
};
use microscale_test_support::hessians::{ALL_INPUTS, Inputs, hessian, matrix, recipes};
use microscale_test_support::inputs::Numbers;

const REQUESTS: [(GptqOrder, GptqScales); 4] = [
    (GptqOrder::Activation, GptqScales::InLoop),
    (GptqOrder::ActivationColumns, GptqScales::Static),
    (GptqOrder::Natural, GptqScales::InLoop),
    (GptqOrder::Activation, GptqScales::Static),
];

/// Compares one matrix.
fn check<T: Element>(
    gpu: &Gpu,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    factor: &GptqFactor,
    scales: GptqScales,
) {
    let expected = quantize_gptq(values, shape, recipe, factor, scales).expect("the CPU quantizes");
    let found = gpu.quantize_gptq(values, shape, recipe, factor, scales).expect("the GPU quantizes");
    let what = format!("{} {shape:?} {scales:?} {recipe:?}", T::DTYPE.word());
    assert_eq!(found.report, expected.report, "{what}");
    assert!(found.tensor == expected.tensor, "{what}");
    assert_eq!(found.output_error.to_bits(), expected.output_error.to_bits(), "{what}");
}

pub(crate) fn equals_the_cpu(gpu: &Gpu) {
    let mut numbers = Numbers::new(1);
    let mut i = 0;
    for shape in [Shape::new(37, 301), Shape::new(3, 21), Shape::new(1, 1), Shape::new(130, 640)] {
        for inputs in ALL_INPUTS {
            let entries = hessian(inputs, shape.cols, &mut numbers);
            for search in [Search::None, Search::FourSix, Search::Window, Search::Full] {
                for recipe in recipes(search) {
                    i += 1;
                    let (order, scales) = REQUESTS[i % 4];
                    let options = GptqOptions::new().order(order);
                    let factor =
                        GptqFactor::new(&entries, shape.cols, recipe.format(), options).expect("a factor");
                    let scale_layout = [ScaleLayout::Linear, ScaleLayout::Swizzled][i % 2];
                    let non_finite = [NonFinite::Propagate, NonFinite::Saturate][i / 2 % 2];
                    let recipe = Recipe { scale_layout, non_finite, ..recipe };
                    if i.is_multiple_of(2) {
                        let values: Vec<f32> = matrix(shape.elements(), i % 5, &mut numbers);
                        check(gpu, &values, shape, &recipe, &factor, scales);
                    } else {
                        let mut values: Vec<bf16> = matrix(shape.elements(), i % 5, &mut numbers);
                        if i.is_multiple_of(3) {
                            let last = values.len() - 1;
                            (values[last / 2], values[last]) = (bf16::NAN, bf16::NEG_INFINITY);
                        }
                        check(gpu, &values, shape, &recipe, &factor, scales);
                    }
                }
            }
        }
    }
}

/// A layer of a size as models have, and gaps between rows.
pub(crate) fn equals_the_cpu_on_a_layer(gpu: &Gpu) {
    let mut numbers = Numbers::new(2);
    let shape = Shape::new(1000, 2048).with_row_stride(2056);
    let entries = hessian(Inputs::Shared, 256, &mut numbers);
    // Copies of one Hessian along the diagonal.
    let large: Vec<f32> = (0..shape.cols * shape.cols)
        .map(|at| {
            let (row, col) = (at / shape.cols, at % shape.cols);
            if row / 256 == col / 256 { entries[row % 256 * 256 + col % 256] } else { 0.0 }
        })
        .collect();
    let values: Vec<bf16> = matrix(shape.span().expect("a small matrix"), 0, &mut numbers);
    for recipe in [recipes(Search::Full)[4], recipes(Search::Full)[0]] {
        let factor = GptqFactor::new(&large, shape.cols, recipe.format(), GptqOptions::new());
        let factor = factor.expect("a factor");
        for scales in [GptqScales::InLoop, GptqScales::Static] {
            check(gpu, &values, shape, &recipe, &factor, scales);
        }
    }
}

pub(crate) fn losses_equal_the_cpus(_: &Gpu) {
    let device = Device::choose(DeviceChoice::Cuda(0)).expect("a GPU");
    let mut numbers = Numbers::new(3);
    for shape in [Shape::new(133, 301), Shape::new(2, 40), Shape::new(0, 64)] {
        let entries = hessian(Inputs::Following, shape.cols, &mut numbers);
        for recipe in recipes(Search::Full).into_iter().step_by(4) {
            let values: Vec<bf16> = matrix(shape.elements(), 1, &mut numbers);
            let factor = GptqFactor::new(&entries, shape.cols, recipe.format(), GptqOptions::new());
            let factor = factor.expect("a factor");
            let loaded = device.load(&values, shape, None).expect("a copy");
            let (quantized, _) =
                loaded.quantize_gptq(&recipe, &factor, GptqScales::InLoop).expect("quantized");
            let found = loaded.output_loss(&quantized, &factor).expect("a loss");
            let tensor = quantized.into_host().expect("a copy");
            let expected = factor.output_loss(&values, shape, &tensor).expect("a loss");
            assert_eq!(found, expected, "{shape:?} {recipe:?}");
        }
    }
}

pub(crate) fn refuses_what_the_cpu_refuses(gpu: &Gpu) {
    let entries: Vec<f32> = (0..64 * 64).map(|i| f32::from(u8::from(i % 65 == 0))).collect();
    let columns = GptqOptions::new().order(GptqOrder::ActivationColumns);
    let factor = GptqFactor::new(&entries, 64, Format::Nvfp4, columns).expect("a factor");
    let (values, shape) = ([1f32; 2 * 64], Shape::new(2, 64));
    let quantize =
        |shape, recipe: &Recipe, scales| gpu.quantize_gptq(&values, shape, recipe, &factor, scales);
    let nvfp4 = recipes(Search::Full)[4];
    let refused = quantize(shape, &nvfp4, GptqScales::InLoop).unwrap_err();
    assert!(matches!(refused, Error::Gptq(GptqFault::ColumnOrder)), "{refused:?}");
    let refused = quantize(shape, &recipes(Search::Full)[0], GptqScales::Static).unwrap_err();
    assert!(matches!(refused, Error::Gptq(GptqFault::Factor { .. })), "{refused:?}");
    let refused = quantize(Shape::new(2, 32), &nvfp4, GptqScales::Static).unwrap_err();
    assert!(matches!(refused, Error::Gptq(GptqFault::Factor { .. })), "{refused:?}");
    let mut wrong = values;
    wrong[70] = f32::NAN;
    let recipe = Recipe { non_finite: NonFinite::Error, ..nvfp4 };
    let found = gpu.quantize_gptq(&wrong, shape, &recipe, &factor, GptqScales::Static).unwrap_err();
    let expected = quantize_gptq(&wrong, shape, &recipe, &factor, GptqScales::Static).unwrap_err();
    assert_eq!(found.to_string(), expected.to_string());
}
