//! Compares searches with a check of each scale, and between instruction sets.

use half::bf16;
use microscale::cpu::Isa;
use microscale::{
    Error, Format, Numerics, QuantizedShape, QuantizedTensor, Search, Shape, Words, check_search,
};

use super::inputs::{COLS, FEWER_BLOCKS, FORMATS, SEARCHES, importance, matrices, quantize, recipe};

#[test]
fn check_search_accepts_only_the_best_scales() {
    let importance = importance();
    for format in FORMATS {
        let recipe = recipe(format, Numerics::default_for(format), Search::Full);
        for (name, values) in matrices(format.block(), FEWER_BLOCKS / 4) {
            let shape = Shape::new(values.len() / COLS, COLS);
            let blocks = (values.len() / format.block()) as u64;
            for importance in [None, Some(&importance[..])] {
                let tensor = quantize(Isa::best(), &values, &recipe, importance).tensor;
                let check =
                    |tensor: &QuantizedTensor| check_search(&values, shape, &recipe, importance, tensor);
                assert_eq!(check(&tensor).expect("the best scales"), blocks, "{format}, {name}");
                // A scale of a third or a quarter is far from the best, because it clips.
                let mut scales = tensor.scales().to_vec();
                let (row, block) = (shape.rows / 2, 7);
                let changed = &mut scales[row * COLS / format.block() + block];
                let chosen = *changed - if format == Format::Nvfp4 { 12 } else { 2 };
                *changed = chosen;
                let quantized = QuantizedShape::new(format, shape.rows, shape.cols);
                let mut worse = QuantizedTensor::from_parts(quantized, tensor.codes().to_vec(), scales)
                    .expect("a tensor");
                if let Some(scale) = tensor.global_scale() {
                    worse = worse.with_global_scale(scale).expect("a global scale");
                }
                let found = check(&worse);
                let here = matches!(found, Err(Error::SkippedScale { row: r, block: b, chosen: c, .. })
                    if (r, b, c) == (row, block, chosen));
                assert!(here, "{format}, {name}: {found:?}");
            }
        }
    }
}

#[test]
fn instruction_sets_agree_on_bytes_and_reports() {
    let importance = importance();
    for format in FORMATS {
        for (name, values) in matrices(format.block(), FEWER_BLOCKS / 4) {
            let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            for search in SEARCHES {
                let recipe = recipe(format, Numerics::default_for(format), search);
                for importance in [None, Some(&importance[..])] {
                    let what =
                        format!("{format}, {name}, {}, importance: {}", search.word(), importance.is_some());
                    let expected = quantize(Isa::Reference, &values, &recipe, importance);
                    let expected_narrow = quantize(Isa::Reference, &narrow, &recipe, importance);
                    for isa in Isa::available() {
                        assert!(quantize(isa, &values, &recipe, importance) == expected, "{what}, {isa:?}");
                        assert!(
                            quantize(isa, &narrow, &recipe, importance) == expected_narrow,
                            "{what}, {isa:?}, bf16"
                        );
                    }
                }
            }
        }
    }
}
