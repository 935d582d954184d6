//! Tests products with experts' weights: each expert's own product, in any order of rows.

use half::{bf16, f16};
use microscale::cpu::{Isa, gemm_experts_with, gemm_weights_int8_with, gemm_weights_with};
use microscale::{
    Activation, ActivationRounding, Error, ExpertRows, Format, OperandFault, QuantizedShape, QuantizedTensor,
    ScaleLayout, Words, gemm_experts,
};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::oracle::{self, Exact};
use microscale_test_support::weights::{Activations, activations};
use proptest::prelude::*;

use super::inputs::{instruction_sets, runs};

const ORDERS: [ExpertRows; 5] = [
    ExpertRows::Gathered,
    ExpertRows::Sorted,
    ExpertRows::Scattered,
    ExpertRows::Indexed,
    ExpertRows::Paired,
];

/// Marks results that were not written.
const UNTOUCHED: u32 = 0x1234;

/// Returns experts of one shape, each with its own global scale, if any, in either direction.
fn experts(
    format: Format,
    count: usize,
    [rows, cols]: [usize; 2],
    scales: Scales,
    seed: u64,
) -> Vec<QuantizedTensor> {
    (0..count as u64).map(|expert| tensor(format, rows, cols, scales, seed + expert)).collect()
}

/// Multiplies by definition: the pairs of each expert, in order, are the tokens of one product.
fn by_expert<T: Exact + Activation>(
    (isa, rounding): (Isa, ActivationRounding),
    experts: &[QuantizedTensor],
    x: &[T],
    (chosen, top_k): (&[u32], usize),
    order: ExpertRows,
) -> Vec<u32> {
    let [rows, cols] = [experts[0].rows(), experts[0].cols()];
    let mut expected = vec![UNTOUCHED; chosen.len() * rows];
    let mut sorted = 0;
    for (expert, weights) in (0..).zip(experts) {
        let pairs: Vec<_> = (0..chosen.len()).filter(|pair| chosen[*pair] == expert).collect();
        let (mut of_expert, mut places) = (Vec::new(), Vec::new());
        for pair in pairs {
            let (row, place) = match order {
                ExpertRows::Gathered => (pair / top_k, sorted),
                ExpertRows::Sorted => (sorted, sorted),
                ExpertRows::Scattered => (sorted, pair),
                ExpertRows::Indexed => (pair / top_k, pair),
                ExpertRows::Paired => (pair, pair),
            };
            of_expert.extend_from_slice(&x[row * cols..][..cols]);
            places.push(place);
            sorted += 1;
        }
        let mut out = vec![T::default(); places.len() * rows];
        let done = match rounding {
            ActivationRounding::Int8 => {
                gemm_weights_int8_with(isa, weights, &of_expert, places.len(), &mut out)
            }
            _ => gemm_weights_with(isa, weights, &of_expert, places.len(), &mut out),
        };
        done.expect("operands that fit");
        for (i, place) in places.into_iter().enumerate() {
            let results = out[i * rows..][..rows].iter().map(|y| y.bits());
            expected[place * rows..][..rows].iter_mut().zip(results).for_each(|(to, y)| *to = y);
        }
    }
    expected
}

/// Checks a product in every order on every instruction set. Some pairs may have no expert.
fn check<T: Exact + Activation>(
    experts: &[QuantizedTensor],
    (chosen, top_k): (&[u32], usize),
    kind: Activations,
    random: &mut fastrand::Rng,
) {
    let (rows, cols) = (experts[0].rows(), experts[0].cols());
    for order in ORDERS {
        let of_tokens = matches!(order, ExpertRows::Gathered | ExpertRows::Indexed);
        let count = if of_tokens { chosen.len() / top_k } else { chosen.len() };
        let x: Vec<T> = activations(count * cols, kind, random);
        let roundings = ActivationRounding::values();
        for how in roundings.flat_map(|rounding| instruction_sets().map(move |isa| (isa, rounding))) {
            // One element more, which must not be written.
            let mut found = vec![T::of_bits(UNTOUCHED); chosen.len() * rows + 1];
            gemm_experts_with(how, experts, &x, chosen, top_k, order, &mut found).expect("operands that fit");
            let found: Vec<_> = found.iter().map(|y| y.bits()).collect();
            let mut expected = by_expert(how, experts, &x, (chosen, top_k), order);
            expected.push(UNTOUCHED);
            assert_eq!(found, expected, "{how:?}, {order:?}, {:?}, {chosen:?}", experts[0].shape());
        }
    }
}

/// Chooses experts of tokens. `count` means no expert.
fn choose(tokens: usize, top_k: usize, count: usize, random: &mut fastrand::Rng) -> Vec<u32> {
    let mut of_token = || random.choose_multiple(0..=count as u32, top_k);
    std::iter::repeat_with(&mut of_token).take(tokens).flatten().collect()
}

#[test]
fn results_equal_each_experts_own_product() {
    let mut random = fastrand::Rng::with_seed(3);
    for (seed, format) in [(0, Format::Nvfp4), (40, Format::Mxfp4)] {
        // Rows with ragged ends, tokens whose experts have one, few or many rows, and more experts
        // than pairs.
        for (count, [rows, cols], tokens, top_k) in [
            (5, [40, 256], 1, 4),
            (3, [33, 100], 21, 2),
            (2, [5, 48], 60, 1),
            (17, [49, 1040], 7, 4),
            (300, [2, 16], 9, 3),
        ] {
            let experts = experts(format, count, [rows, cols], Scales::Common, seed);
            let chosen = choose(tokens, top_k, count, &mut random);
            check::<f32>(&experts, (&chosen, top_k), Activations::Common, &mut random);
            check::<f16>(&experts, (&chosen, top_k), Activations::Numbers, &mut random);
            check::<bf16>(&experts, (&chosen, top_k), Activations::Any, &mut random);
        }
    }
}

#[test]
fn out_of_range_experts_do_not_write_results() {
    let mut random = fastrand::Rng::with_seed(4);
    let experts = experts(Format::Nvfp4, 2, [3, 32], Scales::Common, 1);
    for chosen in [[2, 7, u32::MAX, 2], [0, u32::MAX, 5, 1], [1, 1, 1, u32::MAX]] {
        check::<f32>(&experts, (&chosen, 2), Activations::Common, &mut random);
    }
}

#[test]
fn a_nan_scale_affects_only_its_row_of_its_expert() {
    for format in Format::MULTIPLIED {
        let mut experts = experts(format, 3, [6, 64], Scales::Common, 2);
        let shape = experts[1].shape();
        let (codes, mut scales) = experts[1].clone().into_parts();
        scales[4 * shape.blocks_per_row()] = oracle::nan_scale(format);
        experts[1] = QuantizedTensor::from_parts(shape, codes, scales).expect("parts that fit");
        let x = vec![bf16::ONE; 64 * 10];
        for chosen in [vec![0, 1, 2], [0, 1, 2].repeat(10)] {
            let tokens = chosen.len() / 3;
            let mut out = vec![bf16::ZERO; chosen.len() * 6];
            gemm_experts(&experts, &x[..tokens * 64], &chosen, 3, ExpertRows::Indexed, &mut out)
                .expect("operands that fit");
            for (i, y) in out.iter().enumerate() {
                assert_eq!(y.is_nan(), i / 6 % 3 == 1 && i % 6 == 4, "{format}, {i}: {y}");
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut random = fastrand::Rng::with_seed(5);
    let experts = experts(Format::Mxfp4, 8, [200, 640], Scales::Common, 3);
    let (tokens, top_k) = (50, 4);
    let chosen = choose(tokens, top_k, 7, &mut random);
    let x: Vec<f32> = activations(tokens * 640, Activations::Common, &mut random);
    let by = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        let mut out = vec![0.0; chosen.len() * 200];
        pool.install(|| gemm_experts(&experts, &x, &chosen, top_k, ExpertRows::Gathered, &mut out))
            .expect("operands that fit");
        out.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
    };
    let one = by(1);
    for threads in [2, 3, 7] {
        assert_eq!(by(threads), one, "{threads} threads");
    }
}

#[test]
fn mismatched_operands_are_refused() {
    let of = |format, rows, cols| tensor(format, rows, cols, Scales::Common, 2);
    let two = || vec![of(Format::Nvfp4, 6, 64), of(Format::Nvfp4, 6, 64)];
    let multiply = |experts: &[QuantizedTensor], chosen: usize, top_k: usize, order, [x, out]: [usize; 2]| {
        let (chosen, x) = (vec![0; chosen], vec![1f32; x]);
        gemm_experts(experts, &x, &chosen, top_k, order, &mut vec![0.0; out])
    };
    assert!(multiply(&two(), 4, 2, ExpertRows::Indexed, [2 * 64, 24]).is_ok());
    for (order, x) in
        [(ExpertRows::Gathered, 2 * 64), (ExpertRows::Scattered, 4 * 64), (ExpertRows::Paired, 4 * 64)]
    {
        assert!(multiply(&two(), 4, 2, order, [x, 24]).is_ok());
        let short = multiply(&two(), 4, 2, order, [x - 1, 24]);
        assert!(matches!(short, Err(Error::Length { what: "the activations", .. })), "{short:?}");
        let short = multiply(&two(), 4, 2, order, [x, 23]);
        assert!(matches!(short, Err(Error::Length { what: "the output", .. })), "{short:?}");
    }
    for (chosen, top_k) in [(5, 2), (4, 0), (0, 0)] {
        let refused = multiply(&two(), chosen, top_k, ExpertRows::Paired, [4 * 64, 24]);
        assert!(matches!(refused, Err(Error::Operands(OperandFault::TopK { .. }))), "{refused:?}");
    }
    let wide = QuantizedTensor::zeros(QuantizedShape::new(Format::Mxfp8E4m3, 6, 64)).expect("a small tensor");
    for (experts, said) in [
        (vec![], "one or more"),
        (vec![of(Format::Nvfp4, 6, 64), of(Format::Nvfp4, 6, 48)], "of one format and shape"),
        (vec![of(Format::Nvfp4, 6, 64), of(Format::Mxfp4, 6, 64)], "of one format and shape"),
        (vec![two()[0].convert_layout(ScaleLayout::Swizzled)], "convert_layout"),
        (vec![wide], "quantize them to nvfp4 or mxfp4"),
    ] {
        let refused = multiply(&experts, 1, 1, ExpertRows::Paired, [64, 6]).expect_err("refused").to_string();
        assert!(refused.contains(said), "{refused}");
    }
}

proptest! {
    #![proptest_config(runs(40))]

    #[test]
    fn any_choice_is_multiplied(
        mxfp4 in any::<bool>(),
        (count, rows, cols) in (1..9usize, 1..60usize, 1..400usize),
        (tokens, top_k) in (0..30usize, 1..5usize),
        (kind, seed) in (0..Activations::ALL.len(), any::<u32>()),
    ) {
        let format = if mxfp4 { Format::Mxfp4 } else { Format::Nvfp4 };
        let experts = experts(format, count, [rows, cols], Scales::Any, seed.into());
        let mut random = fastrand::Rng::with_seed(seed.into());
        let chosen: Vec<_> = std::iter::repeat_with(|| random.u32(..=count as u32)).take(tokens * top_k).collect();
        check::<f32>(&experts, (&chosen, top_k), Activations::ALL[kind], &mut random);
        check::<bf16>(&experts, (&chosen, top_k), Activations::ALL[kind], &mut random);
    }
}
