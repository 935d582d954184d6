//! Tests products of experts' weights and activations, both in FP4.
//!
//! Results must have the bits of each row's own product with its expert.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_experts_fp4_gated_with, gemm_experts_fp4_with};
use microscale::formats::Gate;
use microscale::{
    Activation, Error, ExpertRows, Format, Fp4Rows, Fp4Weights, GlobalScale, QuantizedShape, QuantizedTensor,
    QuantizedView, ScaleLayout, gemm_experts_fp4, gemm_fp4, gemm_fp4_gated,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::Exact;

const ORDERS: [ExpertRows; 5] = [
    ExpertRows::Gathered,
    ExpertRows::Sorted,
    ExpertRows::Scattered,
    ExpertRows::Indexed,
    ExpertRows::Paired,
];

/// Marks results that were not written.
const UNTOUCHED: u32 = 0x1234;

/// The row of activations and of results, and the expert, of each pair that has one.
fn places(chosen: &[u32], top_k: usize, experts: usize, order: ExpertRows) -> Vec<[usize; 3]> {
    let mut pairs: Vec<_> = (0..chosen.len()).filter(|pair| (chosen[*pair] as usize) < experts).collect();
    pairs.sort_by_key(|pair| chosen[*pair]);
    let place = |(sorted, pair): (usize, &usize)| {
        let [from, to] = match order {
            ExpertRows::Gathered => [pair / top_k, sorted],
            ExpertRows::Sorted => [sorted, sorted],
            ExpertRows::Scattered => [sorted, *pair],
            ExpertRows::Indexed => [pair / top_k, *pair],
            ExpertRows::Paired => [*pair, *pair],
        };
        [from, to, chosen[*pair] as usize]
    };
    pairs.iter().enumerate().map(place).collect()
}

/// One row of a tensor with linear scales, under a global scale.
fn row(x: &QuantizedTensor, row: usize, global: Option<GlobalScale>) -> QuantizedView<'_> {
    let (blocks, bytes) = (x.blocks_per_row(), x.blocks_per_row() * x.format().block_bytes());
    let shape = QuantizedShape::new(x.format(), 1, x.cols());
    let (codes, scales) = (&x.codes()[row * bytes..][..bytes], &x.scales()[row * blocks..][..blocks]);
    let view = QuantizedView::from_parts(shape, codes, scales).expect("parts that fit");
    global.map_or(view, |global| view.with_global_scale(global).expect("a global scale in range"))
}

/// Checks a product, and one with a gate, in every order and on every instruction set.
fn check<T: Exact + Activation>(format: Format, [rows, cols]: [usize; 2], (chosen, top_k): (&[u32], usize)) {
    let experts = 4;
    let matrix = |seed| tensor(format, rows, cols, Scales::Common, seed);
    let matrices: Vec<_> = (0..experts as u64).map(|expert| [expert, expert + 10].map(matrix)).collect();
    let bias: Vec<f32> = (0..rows).map(|row| row as f32 - 3.0).collect();
    let gate = |expert: usize| Fp4Weights::from(&matrices[expert][0]).alpha(0.5 + expert as f32).bias(&bias);
    let both = |expert: usize| [gate(expert), Fp4Weights::from(&matrices[expert][1])];
    let own_scales: Vec<_> = (0..experts).map(|expert| GlobalScale::Divisor(3.0 + expert as f32)).collect();
    for order in ORDERS {
        let shared = matches!(order, ExpertRows::Gathered | ExpertRows::Indexed);
        let count = if shared { chosen.len() / top_k } else { chosen.len() };
        let x = tensor(format, count, cols, Scales::Common, 21);
        // A global scale per expert, or one for all.
        let by_expert = format == Format::Nvfp4 && !shared;
        let mut expected =
            [vec![UNTOUCHED; chosen.len() * rows + 1], vec![UNTOUCHED; chosen.len() * rows + 1]];
        for [from, to, expert] in places(chosen, top_k, experts, order) {
            let x = row(&x, from, if by_expert { Some(own_scales[expert]) } else { x.global_scale() });
            let mut found = [vec![T::default(); rows], vec![T::default(); rows]];
            gemm_fp4(x, gate(expert), &mut found[0]).expect("operands that fit");
            let [gate, up] = both(expert);
            gemm_fp4_gated(x, gate, up, Gate::SILU, &mut found[1]).expect("operands that fit");
            for (expected, found) in expected.iter_mut().zip(&found) {
                let bits = found.iter().map(|y| y.bits());
                expected[to * rows..][..rows].iter_mut().zip(bits).for_each(|(to, y)| *to = y);
            }
        }
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let x = x.convert_layout(layout);
            let x = if by_expert { Fp4Rows::from(&x).global_scales(&own_scales) } else { Fp4Rows::from(&x) };
            for isa in Isa::available() {
                let mut found = [0, 1].map(|_| vec![T::of_bits(UNTOUCHED); chosen.len() * rows + 1]);
                let [plain, gated] = &mut found;
                gemm_experts_fp4_with(isa, (0..experts).map(gate), x, chosen, top_k, order, plain)
                    .expect("operands that fit");
                let how = (isa, Gate::SILU);
                gemm_experts_fp4_gated_with(how, (0..experts).map(both), x, chosen, top_k, order, gated)
                    .expect("operands that fit");
                let found = found.map(|found| found.iter().map(|y| y.bits()).collect::<Vec<_>>());
                assert_eq!(found, expected, "{isa:?}, {format}, {order:?}, {layout:?}, {rows}x{cols}");
            }
        }
    }
}

/// One expert has no rows, another one many, and one pair no expert.
#[test]
fn results_equal_each_rows_own_product() {
    let chosen = [3, 0, 0, 3, 1, 0, 4, 3, 0, 1, 3, 0];
    for format in Format::MULTIPLIED {
        check::<f32>(format, [5, 64], (&chosen, 2));
        check::<bf16>(format, [17, 208], (&chosen, 3));
        check::<f16>(format, [33, 80], (&chosen, 1));
    }
}

/// A global scale per token, dense and by expert: each row has the bits of its own product.
#[test]
fn global_scales_per_token_are_those_of_each_row() {
    let (cols, rows, chosen) = (96, 7, [2, 0, 0, 5, 1, 2, 1, 0]);
    let weights: Vec<_> =
        (0..3).map(|seed| tensor(Format::Nvfp4, rows, cols, Scales::Common, seed)).collect();
    let matrices: Vec<_> = weights.iter().map(|weights| Fp4Weights::from(weights).alpha(0.75)).collect();
    // More tokens than one task has.
    let x = tensor(Format::Nvfp4, 300, cols, Scales::Common, 8);
    let scales: Vec<f32> = (0..300).map(|token| 1.0 / (1 + token) as f32).collect();
    let own = |token: usize| row(&x, token, Some(GlobalScale::Multiplier(scales[token])));
    for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        let x = x.convert_layout(layout);
        let x = Fp4Rows::from(&x).token_scales(&scales);
        let mut found = [0, 1].map(|_| vec![0f32; 300 * rows]);
        gemm_fp4(x, matrices[0], &mut found[0]).unwrap();
        gemm_fp4_gated(x, matrices[0], matrices[1], Gate::SILU, &mut found[1]).unwrap();
        for token in 0..300 {
            let mut expected = [0, 1].map(|_| vec![0f32; rows]);
            gemm_fp4(own(token), matrices[0], &mut expected[0]).unwrap();
            gemm_fp4_gated(own(token), matrices[0], matrices[1], Gate::SILU, &mut expected[1]).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found[token * rows..][..rows], expected[..], "token {token}, {layout:?}");
            }
        }
        for order in ORDERS {
            let mut found = vec![f32::of_bits(UNTOUCHED); chosen.len() * rows];
            let mut expected = found.clone();
            gemm_experts_fp4(matrices.iter().copied(), x, &chosen, 2, order, &mut found).unwrap();
            for [from, to, expert] in places(&chosen, 2, matrices.len(), order) {
                gemm_fp4(own(from), matrices[expert], &mut expected[to * rows..][..rows]).unwrap();
            }
            assert_eq!(found, expected, "{order:?}, {layout:?}");
        }
    }
    let few = Fp4Rows::from(&x).token_scales(&scales[1..]);
    let error = gemm_fp4(few, matrices[0], &mut vec![0f32; 300 * rows]).unwrap_err();
    assert!(matches!(error, Error::Length { .. }), "{error}");
    let mxfp4 = tensor(Format::Mxfp4, 2, cols, Scales::Common, 1);
    let x = Fp4Rows::from(&mxfp4).token_scales(&scales);
    let error = gemm_fp4(x, &mxfp4, &mut [0f32; 4]).unwrap_err();
    assert!(matches!(error, Error::NoGlobalScale { format: Format::Mxfp4 }), "{error}");
}

/// A batched product: each matrix has the same number of rows.
#[test]
fn matrices_of_a_batch_are_experts_of_equal_counts() {
    for format in Format::MULTIPLIED {
        let weights: Vec<_> = (0..3).map(|seed| tensor(format, 7, 96, Scales::Common, seed)).collect();
        let x = tensor(format, 3 * 5, 96, Scales::Common, 8);
        let matrices: Vec<u32> = (0..3).flat_map(|matrix| [matrix; 5]).collect();
        let mut found = vec![0f32; 3 * 5 * 7];
        gemm_experts_fp4(&weights, &x, &matrices, 1, ExpertRows::Sorted, &mut found).unwrap();
        let mut expected = vec![0f32; found.len()];
        for (token, expected) in expected.chunks_mut(7).enumerate() {
            gemm_fp4(row(&x, token, x.global_scale()), &weights[token / 5], expected).unwrap();
        }
        assert_eq!(found, expected, "{format}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let expert = |rows, cols| tensor(Format::Nvfp4, rows, cols, Scales::Common, 1);
    let (x, scales) = (expert(4, 64), [GlobalScale::Divisor(1.0)]);
    let refused = |experts: &[QuantizedTensor], x: Fp4Rows<'_>, chosen: &[u32], top_k, out: usize| {
        let order = ExpertRows::Indexed;
        let error = gemm_experts_fp4(experts, x, chosen, top_k, order, &mut vec![0f32; out]).unwrap_err();
        match error {
            Error::Length { what, .. } => what.to_string(),
            other => other.to_string(),
        }
    };
    let two = [expert(2, 64), expert(2, 64)];
    let starts = |found: String, expected: &str| assert!(found.starts_with(expected), "{found}");
    starts(refused(&[], (&x).into(), &[0; 4], 1, 8), "the experts are not one or more");
    let differ = [expert(2, 64), expert(3, 64)];
    starts(refused(&differ, (&x).into(), &[0; 4], 1, 8), "the experts are not of one format and shape");
    starts(refused(&[expert(2, 48)], (&x).into(), &[0; 4], 1, 8), "the activations have 64 columns");
    starts(refused(&two, (&x).into(), &[0; 3], 2, 8), "3 experts cannot be divided");
    starts(refused(&two, (&x).into(), &[0; 5], 1, 10), "the activations");
    starts(refused(&two, (&x).into(), &[0; 4], 1, 7), "the output");
    let one_scale = Fp4Rows::from(&x).global_scales(&scales);
    starts(refused(&two, one_scale, &[0; 4], 1, 8), "the global scales of the activations");
    let zero = [GlobalScale::Divisor(0.0); 2];
    let out_of_range = Fp4Rows::from(&x).global_scales(&zero);
    assert!(refused(&two, out_of_range, &[0; 4], 1, 8).contains("global scale"));
}
