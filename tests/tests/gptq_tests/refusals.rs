//! Refused requests.

use microscale::{
    Error, Format, GptqFactor, GptqFault, GptqOptions, GptqOrder, GptqScales, Numerics, Recipe, Result,
    Search, Shape, quantize, quantize_gptq,
};

fn unit(columns: usize) -> Vec<f32> {
    (0..columns * columns).map(|at| if at % (columns + 1) == 0 { 1.0 } else { 0.0 }).collect()
}

fn fault<T>(result: Result<T>) -> GptqFault {
    match result {
        Err(Error::Gptq(fault)) => fault,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}

fn factor(entries: &[f32], damping: f64) -> Result<GptqFactor> {
    GptqFactor::new(entries, 32, Format::Nvfp4, GptqOptions::new().damping(damping))
}

#[test]
fn hessians_that_cannot_be_factored_are_refused() {
    let entries = unit(32);
    let expected = 32 * 32;
    assert!(
        fault(factor(&entries[1..], 0.01))
            == GptqFault::HessianLength { columns: 32, expected, found: expected - 1 }
    );
    let with = |at: usize, value: f32| {
        let mut entries = entries.clone();
        entries[at] = value;
        entries
    };
    for value in [f32::NAN, f32::INFINITY] {
        let fault = fault(factor(&with(2 * 32 + 5, value), 0.01));
        assert!(matches!(fault, GptqFault::HessianEntry { row: 2, col: 5, .. }), "{fault}");
    }
    assert!(fault(factor(&with(33, -1.0), 0.01)) == GptqFault::HessianEntry { row: 1, col: 1, value: -1.0 });
    assert!(fault(factor(&with(5 * 32 + 2, 0.5), 0.01)) == GptqFault::NotSymmetric { row: 5, col: 2 });
    // Two identical columns.
    let mut same = with(1, 1.0);
    same[32] = 1.0;
    let error = fault(factor(&same, 0.0));
    assert!(matches!(error, GptqFault::NotPositiveDefinite { column: 0 | 1, .. }), "{error}");
    assert!(error.to_string().ends_with("raise the damping"), "{error}");
    assert!(factor(&same, 0.01).is_ok());
    for damping in [-0.1, f64::NAN, f64::INFINITY] {
        assert!(matches!(fault(factor(&entries, damping)), GptqFault::Damping { .. }));
    }
    // Columns that are never active need no damping.
    assert!(factor(&vec![0.0; expected], 0.0).is_ok());
}

#[test]
fn formats_and_shapes_must_match_the_factor() {
    let entries = unit(32);
    let format = Format::Mxfp8E4m3;
    assert!(fault(GptqFactor::new(&entries, 32, format, GptqOptions::new())) == GptqFault::Format { format });
    let factor = factor(&entries, 0.01).expect("a factor");
    let values = [1.0f32; 2 * 48];
    let nvfp4 = Recipe::of(Format::Nvfp4, Numerics::Modelopt).expect("a recipe");
    let run = |shape: Shape, recipe: &Recipe| {
        fault(quantize_gptq(&values, shape, recipe, &factor, GptqScales::InLoop))
    };
    assert!(matches!(run(Shape::new(2, 48), &nvfp4), GptqFault::Factor { columns: 32, found: 48, .. }));
    assert!(matches!(run(Shape::new(2, 32), &Recipe::default()), GptqFault::Factor { .. }));
    let mxfp8 = Recipe::of(format, Numerics::Ocp).expect("a recipe");
    assert!(run(Shape::new(2, 32), &mxfp8) == GptqFault::Format { format });
    let options = GptqOptions::new().order(GptqOrder::ActivationColumns);
    let single = GptqFactor::new(&entries, 32, Format::Nvfp4, options).expect("a factor");
    let shape = Shape::new(2, 32);
    let in_loop = quantize_gptq(&values, shape, &nvfp4, &single, GptqScales::InLoop);
    assert!(self::fault(in_loop) == GptqFault::ColumnOrder);
    assert!(quantize_gptq(&values, shape, &nvfp4, &single, GptqScales::Static).is_ok());
    let other = quantize(&values, Shape::new(3, 32), &nvfp4).expect("quantized").tensor;
    let rows = fault(factor.output_loss(&values, Shape::new(2, 32), &other));
    assert!(rows == GptqFault::Rows { expected: 2, found: 3 });
}

#[test]
fn values_are_checked_as_in_plain_quantization() {
    let factor = factor(&unit(32), 0.01).expect("a factor");
    let recipe = Recipe { search: Search::Full, ..Recipe::of(Format::Nvfp4, Numerics::Modelopt).unwrap() };
    let mut values = [1.0f32; 64];
    let short = quantize_gptq(&values, Shape::new(3, 32), &recipe, &factor, GptqScales::InLoop);
    assert!(matches!(short, Err(Error::Length { .. })));
    values[40] = f32::NAN;
    for scales in [GptqScales::InLoop, GptqScales::Static] {
        match quantize_gptq(&values, Shape::new(2, 32), &recipe, &factor, scales) {
            Err(Error::NonFinite { first, report }) => {
                assert_eq!((first.row, first.col, report.nan), (1, 8, 1));
            }
            other => panic!("{other:?}"),
        }
    }
    let empty = quantize_gptq(&values[..0], Shape::new(0, 32), &recipe, &factor, GptqScales::InLoop).unwrap();
    assert_eq!((empty.tensor.codes().len(), empty.output_error), (0, 0.0));
}
