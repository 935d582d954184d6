//! Every instruction set and number of threads gives the reference's bytes.

use half::bf16;
use microscale::cpu::{Isa, quantize_gptq_with};
use microscale::{
    Element, GptqFactor, GptqOptions, GptqOrder, GptqQuantized, GptqScales, NonFinite, Recipe, ScaleLayout,
    Search, Shape, Strided,
};

use microscale_test_support::hessians::{ALL_INPUTS, Inputs, hessian, matrix, recipes};
use microscale_test_support::inputs::Numbers;

const SEARCHES: [Search; 4] = [Search::None, Search::FourSix, Search::Window, Search::Full];

/// Quantizes with one instruction set, the factorization included.
fn quantize_by<T: Element>(
    isa: Isa,
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    entries: &[f32],
    (options, scales): (GptqOptions, GptqScales),
) -> GptqQuantized {
    let factor = GptqFactor::new_with(isa, entries, shape.cols, recipe.format(), options).expect("a factor");
    quantize_gptq_with(isa, values, shape, recipe, &factor, scales).expect("quantized")
}

fn check<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    entries: &[f32],
    request: (GptqOptions, GptqScales),
) {
    let reference = quantize_by(Isa::Reference, values, shape, recipe, entries, request);
    for isa in Isa::available() {
        let other = quantize_by(isa, values, shape, recipe, entries, request);
        let what = format!("{isa:?}, {shape:?}, {request:?}, {recipe:?}");
        assert_eq!(other.report, reference.report, "{what}");
        assert_eq!(other.output_error.to_bits(), reference.output_error.to_bits(), "{what}");
        assert!(other.tensor == reference.tensor, "{what}");
    }
}

#[test]
fn every_instruction_set_gives_the_bytes_of_the_reference() {
    let mut numbers = Numbers::new(1);
    let shape = Shape::new(19, 4 * 32 + 32 + 13);
    for (i, inputs) in ALL_INPUTS.into_iter().enumerate() {
        let entries = hessian(inputs, shape.cols, &mut numbers);
        for (j, search) in SEARCHES.into_iter().enumerate() {
            for (k, recipe) in recipes(search).into_iter().enumerate() {
                let values: Vec<f32> = matrix(shape.elements(), (i + j + k) % 5, &mut numbers);
                let request = [
                    (GptqOrder::Activation, GptqScales::InLoop),
                    (GptqOrder::ActivationColumns, GptqScales::Static),
                    (GptqOrder::Natural, GptqScales::InLoop),
                    (GptqOrder::Activation, GptqScales::Static),
                ];
                let (order, scales) = request[(i + j + k) % 4];
                check(&values, shape, &recipe, &entries, (GptqOptions::new().order(order), scales));
            }
        }
    }
}

/// Several panels of the factorization, chunks of products and batches of columns.
#[test]
fn many_columns_give_the_bytes_of_the_reference() {
    let mut numbers = Numbers::new(2);
    let shape = Shape::new(33, 2 * 256 + 96);
    let entries = hessian(Inputs::Following, shape.cols, &mut numbers);
    for recipe in recipes(Search::Window).into_iter().step_by(3) {
        let values: Vec<f32> = matrix(shape.elements(), 0, &mut numbers);
        check(&values, shape, &recipe, &entries, (GptqOptions::new(), GptqScales::InLoop));
    }
}

#[test]
fn values_that_are_not_finite_take_no_part() {
    let mut numbers = Numbers::new(3);
    let shape = Shape::new(18, 70);
    let entries = hessian(Inputs::Following, shape.cols, &mut numbers);
    let mut values: Vec<bf16> = matrix(shape.elements(), 0, &mut numbers);
    (values[75], values[200], values[201]) = (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY);
    for non_finite in [NonFinite::Propagate, NonFinite::Saturate] {
        for recipe in recipes(Search::Full) {
            let recipe = Recipe { non_finite, ..recipe };
            for (order, scales) in [
                (GptqOrder::Activation, GptqScales::InLoop),
                (GptqOrder::Activation, GptqScales::Static),
                (GptqOrder::ActivationColumns, GptqScales::Static),
            ] {
                check(&values, shape, &recipe, &entries, (GptqOptions::new().order(order), scales));
            }
        }
    }
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let mut numbers = Numbers::new(4);
    let shape = Shape::new(200, 300);
    let entries = hessian(Inputs::Shared, shape.cols, &mut numbers);
    let values: Vec<bf16> = matrix(shape.elements(), 0, &mut numbers);
    let recipe = recipes(Search::Full)[4];
    let request = (GptqOptions::new(), GptqScales::InLoop);
    let by = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| quantize_by(Isa::best(), &values, shape, &recipe, &entries, request))
    };
    let one = by(1);
    for threads in [2, 3, 7] {
        assert!(by(threads) == one, "{threads} threads");
    }
}

#[test]
fn strides_and_scale_layouts_do_not_change_the_result() {
    let mut numbers = Numbers::new(5);
    let shape = Shape::new(40, 96);
    let entries = hessian(Inputs::Following, shape.cols, &mut numbers);
    let values: Vec<f32> = matrix(shape.elements(), 1, &mut numbers);
    let transposed: Vec<f32> =
        (0..values.len()).map(|i| values[i % shape.rows * shape.cols + i / shape.rows]).collect();
    let strided = Strided::along(&[shape.cols, shape.rows], 0).expect("an axis");
    for recipe in [recipes(Search::Full)[0], recipes(Search::Full)[4]] {
        let swizzled = Recipe { scale_layout: ScaleLayout::Swizzled, ..recipe };
        let options = GptqOptions::new();
        let factor = GptqFactor::new(&entries, shape.cols, recipe.format(), options).expect("a factor");
        for scales in [GptqScales::InLoop, GptqScales::Static] {
            let plain = microscale::quantize_gptq(&values, shape, &recipe, &factor, scales).expect("rows");
            let other =
                microscale::quantize_gptq(&transposed, strided, &swizzled, &factor, scales).expect("strides");
            assert!(other.tensor.convert_layout(ScaleLayout::Linear) == plain.tensor);
            assert_eq!((other.report, other.output_error), (plain.report, plain.output_error));
        }
    }
}
