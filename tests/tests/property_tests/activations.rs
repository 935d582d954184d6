//! Tests quantizing activations: row operations, formats, layouts and experts.

use half::{bf16, f16};
use microscale::formats::ScaleRule;
use microscale::formats::activations::RmsNorm;
use microscale::formats::nvfp4::Direction;
use microscale::{
    ActivationExperts, ActivationFormat, ActivationLayout, ActivationRecipe, ActivationScale, Fp8Scale, Gate,
    Glu, GluOrder, QuantizedActivations, RowOperation, Shape, Words, quantize,
};
use microscale_test_support::activations::{
    PER_GROUP, Parts, U, Within, assert_within, fp8, gate_error, gelu_error, norm_error, normal_cdf,
    quantized, sum_roundings,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::inputs::patterns;
use microscale_test_support::oracle::activations as oracle;
use microscale_test_support::oracle::{Exact, e4m3_value, power_of_two};
use proptest::prelude::*;

use super::inputs::{any_of, runs};

const LAYOUTS: [ActivationLayout; 3] =
    [ActivationLayout::Linear, ActivationLayout::Swizzled128x4, ActivationLayout::Swizzled8x4];

/// FP8 with a scale per tensor, which experts do not have.
pub(super) const PER_TENSOR: ActivationFormat = ActivationFormat::Fp8(Fp8Scale::PerTensor);

fn operation() -> impl Strategy<Value = RowOperation> {
    let gates = prop::sample::select(vec![Glu::SILU, Glu::Sigmoid(Gate::GPT_OSS), Glu::GeluTanh, Glu::Gelu]);
    let orders = prop::sample::select(vec![GluOrder::Halves, GluOrder::Interleaved]);
    let norms: [fn(f32) -> RmsNorm; 3] = [RmsNorm::llama, RmsNorm::gemma, RmsNorm::flashinfer];
    let norms = (prop::sample::select(norms.to_vec()), prop::sample::select(vec![1e-6, 1e-3, 1e-30]));
    prop_oneof![
        Just(RowOperation::None),
        (gates, orders).prop_map(|(glu, order)| RowOperation::Glu(glu, order)),
        norms.prop_map(|(norm, epsilon)| RowOperation::RmsNorm(norm(epsilon))),
    ]
}

fn format() -> impl Strategy<Value = ActivationFormat> {
    prop_oneof![
        Just(ActivationFormat::Fp8(Fp8Scale::Given)),
        Just(ActivationFormat::Fp8(Fp8Scale::PerToken)),
        Just(PER_TENSOR),
        any::<bool>().prop_map(|power_of_two| ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two })),
        any_of::<ScaleRule>().prop_map(ActivationFormat::Mxfp8),
        any_of::<ScaleRule>().prop_map(ActivationFormat::Mxfp4),
        Just(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor))),
        Just(ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier))),
        Just(ActivationFormat::Nvfp4(ActivationScale::PerToken)),
    ]
}

pub(super) fn recipe() -> impl Strategy<Value = ActivationRecipe> {
    let layout = prop::sample::select(LAYOUTS.to_vec());
    (operation(), format(), layout).prop_map(|(operation, format, layout)| ActivationRecipe {
        operation,
        format,
        layout,
    })
}

/// Returns a scale that suits values of ordinary size, if the format takes one.
pub(super) fn given(format: ActivationFormat, rng: &mut fastrand::Rng) -> Option<f32> {
    let factor = 0.25 + rng.f32();
    match format {
        ActivationFormat::Fp8(Fp8Scale::Given) => Some(0.02 * factor),
        ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)) => Some(700.0 * factor),
        ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier)) => Some(0.002 * factor),
        _ => None,
    }
}

/// Values of ordinary size with some zeros, or any bits.
fn values<T: Exact>(count: usize, kind: u8, rng: &mut fastrand::Rng) -> Vec<T> {
    match kind {
        0 => patterns(count, true, rng.u64(..)),
        1 => patterns(count, false, rng.u64(..)),
        _ => (0..count)
            .map(|_| {
                let size = power_of_two(rng.i32(-4..4)) * (rng.f64() - 0.5) * 4.0;
                T::round_f64(if rng.u8(..16) == 0 { 0.0 * size } else { size })
            })
            .collect(),
    }
}

/// Rows and everything that an operation needs.
struct Rows<T> {
    values: Vec<T>,
    shape: Shape,
    columns: usize,
    residual: Option<Vec<T>>,
    weights: Option<Vec<T>>,
}

impl<T: Exact> Rows<T> {
    fn new(operation: RowOperation, [rows, columns]: [usize; 2], kind: u8, rng: &mut fastrand::Rng) -> Self {
        let gated = matches!(operation, RowOperation::Glu(..));
        let normalizes = matches!(operation, RowOperation::RmsNorm(_));
        let input = if gated { 2 * columns } else { columns };
        let shape = Shape::new(rows, input).with_row_stride(input + [0, 0, 1, 8][rng.usize(..4)]);
        Self {
            values: values(rows * shape.row_stride, kind, rng),
            shape,
            columns,
            residual: (normalizes && rng.bool()).then(|| values(rows * columns, kind, rng)),
            weights: (normalizes && rng.u8(..3) != 0).then(|| values(columns, kind.max(1), rng)),
        }
    }

    fn row(&self, row: usize) -> &[T] {
        &self.values[row * self.shape.row_stride..][..self.shape.cols]
    }

    /// Returns x + residual, rounded.
    fn sums(&self) -> Option<Vec<T>> {
        let residual = self.residual.as_deref()?;
        let x: Vec<T> = (0..self.shape.rows).flat_map(|row| self.row(row).to_vec()).collect();
        Some(oracle::sums(&x, residual))
    }

    /// Computes the operation: gates by their definition, RMSNorm by the oracle.
    fn computed(&self, operation: RowOperation) -> Vec<T> {
        let columns = self.columns;
        let sums = self.sums();
        let of_row = |row: usize| -> Vec<T> {
            let x = self.row(row);
            match operation {
                RowOperation::None => x.to_vec(),
                RowOperation::Glu(glu, order) => (0..columns)
                    .map(|column| {
                        let (gate, up) = match order {
                            GluOrder::Halves => (x[column], x[columns + column]),
                            GluOrder::Interleaved => (x[2 * column], x[2 * column + 1]),
                        };
                        let (gate, up) = (gate.to_f64() as f32, up.to_f64() as f32);
                        T::round_f64(glu.of::<Scalars>(gate, up).into())
                    })
                    .collect(),
                RowOperation::RmsNorm(norm) => {
                    let x = sums.as_ref().map_or(x, |sums| &sums[row * columns..][..columns]);
                    oracle::normalized(x, self.weights.as_deref(), norm)
                }
            }
        };
        (0..self.shape.rows).flat_map(of_row).collect()
    }

    fn parts<'a>(&'a self, scales: &'a [f32]) -> Parts<'a, T> {
        Parts { residual: self.residual.as_deref(), weights: self.weights.as_deref(), scales, experts: None }
    }
}

fn f32_bits(scales: &[f32]) -> Vec<u32> {
    scales.iter().map(|scale| scale.to_bits()).collect()
}

/// Asserts that values are the same bits, or NaN.
fn assert_same<T: Exact>(found: &[T], right: &[T], what: &str) {
    assert_eq!(found.len(), right.len(), "{what}");
    for (i, (found, right)) in found.iter().zip(right).enumerate() {
        let same = found.bits() == right.bits() || found.to_f64().is_nan() && right.to_f64().is_nan();
        assert!(same, "{what}, {i}: {:e}, not {:e}", found.to_f64(), right.to_f64());
    }
}

/// Asserts that an operation and quantization give the bytes of one after the other, and that
/// quantization gives the oracle's bytes.
fn check_fused<T: Exact>(recipe: &ActivationRecipe, size: [usize; 2], kind: u8, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rows = Rows::<T>::new(recipe.operation, size, kind, &mut rng);
    let scale = given(recipe.format, &mut rng);
    let scales: Vec<f32> = scale.into_iter().collect();
    let what = format!("{} {recipe:?}, {:?}, kind {kind}, seed {seed}", T::DTYPE.word(), rows.shape);
    let (found, sums) =
        quantized(&rows.values, rows.shape, recipe, &rows.parts(&scales)).expect("the CPU quantizes");
    if let (Some(found), Some(right)) = (sums, rows.sums()) {
        assert_same(&found, &right, &format!("{what}: residual"));
    }

    let computed = rows.computed(recipe.operation);
    let shape = Shape::new(size[0], size[1]);
    let plain = ActivationRecipe { operation: RowOperation::None, ..*recipe };
    let parts = Parts { scales: &scales, ..Parts::default() };
    let (unfused, _) = quantized(&computed, shape, &plain, &parts).expect("the CPU quantizes");
    assert_equal(&found, &unfused, &what);

    let [codes, block_scales, f32_scales] = recipe.lengths(size[0], size[0], size[1]).expect("small");
    assert_eq!(
        [found.codes.len(), found.scales.len(), found.f32_scales.len()],
        [codes, block_scales, f32_scales]
    );
    let expected = oracle::quantize(&computed, size[1], recipe.format, recipe.layout, scale);
    assert_eq!(f32_bits(&found.f32_scales), expected.f32_scales, "{what}: f32 scales");
    assert_eq!(found.scales, expected.scales, "{what}: scales");
    assert_eq!(found.codes, expected.codes, "{what}: codes");
}

fn assert_equal(found: &QuantizedActivations, right: &QuantizedActivations, what: &str) {
    assert_eq!(f32_bits(&found.f32_scales), f32_bits(&right.f32_scales), "{what}: f32 scales");
    assert_eq!(found.scales, right.scales, "{what}: scales");
    assert_eq!(found.codes, right.codes, "{what}: codes");
}

fn size() -> impl Strategy<Value = [usize; 2]> {
    let whole = prop::sample::select(vec![16, 32, 128, 256]);
    let columns = prop_oneof![8 => 1..300usize, 1 => 1000..2100usize, 1 => whole];
    (prop_oneof![8 => 1..12usize, 1 => 126..131usize], columns).prop_map(|(rows, columns)| [rows, columns])
}

proptest! {
    #![proptest_config(runs(600))]

    #[test]
    fn fused_f32_equals_the_operation_and_the_oracle(
        recipe in recipe(),
        size in size(),
        kind in 0..4u8,
        seed in any::<u64>(),
    ) {
        check_fused::<f32>(&recipe, size, kind, seed);
    }

    #[test]
    fn fused_f16_equals_the_operation_and_the_oracle(
        recipe in recipe(),
        size in size(),
        kind in 0..4u8,
        seed in any::<u64>(),
    ) {
        check_fused::<f16>(&recipe, size, kind, seed);
    }

    #[test]
    fn fused_bf16_equals_the_operation_and_the_oracle(
        recipe in recipe(),
        size in size(),
        kind in 0..4u8,
        seed in any::<u64>(),
    ) {
        check_fused::<bf16>(&recipe, size, kind, seed);
    }
}

/// Asserts that block formats equal `quantize` with the same scheme.
fn check_weights<T: Exact>(format: ActivationFormat, size: [usize; 2], kind: u8, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let [rows, columns] = size;
    let rows_of: Vec<T> = values(rows * columns, kind, &mut rng);
    let scale = given(format, &mut rng);
    let scales: Vec<f32> = scale.into_iter().collect();
    let parts = Parts { scales: &scales, ..Parts::default() };
    let recipe = ActivationRecipe::new(format);
    let what = format!("{} {format:?}, {size:?}, kind {kind}, seed {seed}", T::DTYPE.word());
    let (found, _) = quantized(&rows_of, Shape::new(rows, columns), &recipe, &parts).expect("it quantizes");
    let per_token = format == ActivationFormat::Nvfp4(ActivationScale::PerToken);
    let (count, step) = if per_token { (1, columns) } else { (rows, rows * columns) };
    let mut right = QuantizedActivations::default();
    for part in rows_of.chunks(step) {
        let tensor = quantize(part, Shape::new(count, columns), &oracle::recipe(format, scale))
            .expect("it quantizes")
            .tensor;
        right.codes.extend(tensor.codes());
        right.scales.extend(tensor.scales());
        if per_token {
            let global = tensor.global_scale().expect("a global scale");
            assert_eq!(global.direction(), Direction::Divisor);
            right.f32_scales.push(1.0 / global.value());
        }
    }
    assert_equal(&found, &right, &what);
}

proptest! {
    #![proptest_config(runs(500))]

    #[test]
    fn block_formats_equal_quantized_weights(
        format in format(),
        size in size(),
        kind in 0..4u8,
        seed in any::<u64>(),
    ) {
        if !matches!(format, ActivationFormat::Fp8(_)) {
            check_weights::<f32>(format, size, kind, seed);
            check_weights::<f16>(format, size, kind, seed);
            check_weights::<bf16>(format, size, kind, seed);
        }
    }
}

/// A gate whose result is one column, so that FP8's scale tells its magnitude.
///
/// Returns the result's bounds, or `None` beyond f32 and below the least scale.
fn gated(glu: Glu, gate: f32, up: f32) -> Option<Within> {
    let recipe = ActivationRecipe { operation: RowOperation::Glu(glu, GluOrder::Halves), ..fp8(PER_GROUP) };
    let (found, _) = quantized(&[gate, up], Shape::new(1, 2), &recipe, &Parts::default()).expect("a pair");
    let magnitude = f64::from(found.f32_scales[0]) * 448.0;
    if magnitude < 1.01e-10 {
        return None;
    }
    let value = magnitude * e4m3_value(found.codes[0]).signum();
    Some(Within::around(value, 2.0 * U * magnitude))
}

/// Returns a gate's value in f64 and its error in f32.
fn gate_in_f64(glu: Glu, gate: f64, up: f64) -> (f64, f64) {
    let sigmoid = |y: f64| 1.0 / (1.0 + (-y).exp());
    match glu {
        Glu::Sigmoid(limits) => {
            let (limit, alpha) = (f64::from(limits.limit), f64::from(limits.alpha));
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit) + f64::from(limits.offset));
            let value = up * gate * sigmoid(alpha * gate);
            (value, gate_error(value, gate, up, alpha * gate, 1.0))
        }
        Glu::GeluTanh => {
            // 1 + tanh(y) is 2 · sigmoid(2y), which does not cancel.
            let argument = (8.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            let value = up * gate * sigmoid(argument);
            (value, gate_error(value, gate, up, argument, 9.0))
        }
        Glu::Gelu => (up * gate * normal_cdf(gate), gelu_error(gate, up)),
    }
}

/// Returns gates of any size, near the limits, and where sigmoids end.
fn gate_value() -> impl Strategy<Value = f32> {
    let special =
        vec![0.0f32, 7.0, 86.0, 86.9, 87.0, 87.1, 51.1, 51.2, 10.0, 5.5, 12.9, 13.0, 1e-3, 1e4, 1e15, 1e30];
    let special =
        (prop::sample::select(special), -3..=3i32, any::<bool>()).prop_map(|(x, ulps, negative)| {
            let x = f32::from_bits(x.to_bits().saturating_add_signed(ulps).min(f32::MAX.to_bits()));
            if negative { -x } else { x }
        });
    let any_size = (-1.0..1.0f32, -100..100i32).prop_map(|(x, exponent)| x * power_of_two(exponent) as f32);
    prop_oneof![4 => -12.0..12.0f32, 2 => -100.0..100.0f32, 2 => special, 1 => any_size]
}

proptest! {
    #![proptest_config(runs(20_000))]

    #[test]
    fn gates_are_within_their_bounds_of_f64(
        gate in gate_value(),
        up in gate_value(),
        shift in -60..60i32,
    ) {
        // A large `up` brings small gates into the range of scales.
        let up = up * power_of_two(shift) as f32;
        prop_assume!(up.is_finite());
        for glu in [Glu::SILU, Glu::Sigmoid(Gate::GPT_OSS), Glu::GeluTanh, Glu::Gelu] {
            let (right, error) = gate_in_f64(glu, gate.into(), up.into());
            if right.abs() > 1e38 {
                continue;
            }
            match gated(glu, gate, up) {
                Some(found) => prop_assert!(
                    found.low <= right + error && right - error <= found.high,
                    "{glu:?} of {gate:e}, {up:e}: {found:?}, not {right:e} ± {error:e}"
                ),
                None => prop_assert!(right.abs() - error < 1.02e-10, "{glu:?} of {gate:e}, {up:e}: 0, not {right:e}"),
            }
        }
    }
}

/// Returns a row: ordinary, with magnitudes of its own, or with a few values far above the rest.
fn norm_row(columns: usize, kind: u8, rng: &mut fastrand::Rng) -> Vec<f32> {
    let size = power_of_two(rng.i32(-40..50));
    let mut row: Vec<f32> = (0..columns)
        .map(|_| {
            let own = if kind == 1 { power_of_two(rng.i32(-20..5)) } else { 1.0 };
            ((rng.f64() - 0.5) * size * own) as f32
        })
        .collect();
    match kind {
        2 => row[rng.usize(..columns)] = (size * 1e4) as f32,
        3 => row.fill(size as f32),
        4 => row.fill(0.0),
        _ => {}
    }
    row
}

/// Returns RMSNorm's factor in f64.
fn inverse_rms(row: &[f32], epsilon: f32) -> f64 {
    let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
    1.0 / (mean + f64::from(epsilon)).sqrt()
}

proptest! {
    #![proptest_config(runs(1500))]

    #[test]
    fn rms_norm_is_within_its_bound_of_f64(
        columns in prop_oneof![1..300usize, 1000..5000usize],
        kind in 0..5u8,
        cancels in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let x = norm_row(columns, kind, &mut rng);
        let weights: Vec<f32> = (0..columns).map(|_| rng.f32() * 4.0 - 2.0).collect();
        // The residual nearly cancels the row. Its sum is rounded to f32 before the norm.
        let residual: Option<Vec<f32>> = cancels.then(|| x.iter().map(|x| -x * (1.0 + rng.f32() * 1e-3)).collect());
        let epsilon = [1e-5, 1e-6, 1e-12][rng.usize(..3)];
        for norm in [RmsNorm::flashinfer(epsilon), RmsNorm::gemma(epsilon), RmsNorm::llama(epsilon)] {
            let recipe = ActivationRecipe { operation: RowOperation::RmsNorm(norm), ..fp8(PER_GROUP) };
            let parts = Parts { residual: residual.as_deref(), weights: Some(&weights), ..Parts::default() };
            let (found, sums) = quantized(&x, Shape::new(1, columns), &recipe, &parts).expect("a row");
            let sums = sums.unwrap_or_else(|| x.clone());
            let right: Vec<f32> = match &residual {
                Some(residual) => x.iter().zip(residual).map(|(x, r)| x + r).collect(),
                None => x.clone(),
            };
            prop_assert_eq!(&sums, &right);
            let inverse = inverse_rms(&sums, epsilon);
            let bound = norm_error(sum_roundings(columns));
            let of = |(x, weight): (&f32, &f32)| {
                let value = f64::from(*x) * inverse * (f64::from(*weight) + f64::from(norm.offset));
                Within::around(value, value.abs() * bound + power_of_two(-149))
            };
            let within: Vec<Within> = sums.iter().zip(&weights).map(of).collect();
            let loose = assert_within(&found, &within, columns, &format!("{norm:?}, {columns} columns, kind {kind}, seed {seed}"));
            // Equal values have a few quotients only, which may be ties.
            prop_assert!(loose < 0.02 || columns < 500, "{} of the codes are uncertain", loose);
        }
    }

    /// With one weight that is not 0, FP8's scale tells the magnitude of one element.
    #[test]
    fn elements_of_rms_norm_are_within_their_bound_of_f64(
        columns in 1..2100usize,
        kind in 0..4u8,
        seed in any::<u64>(),
    ) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (x, column) = (norm_row(columns, kind, &mut rng), rng.usize(..columns));
        let mut weights = vec![0.0f32; columns];
        weights[column] = 0.5 + rng.f32();
        let recipe = ActivationRecipe { operation: RowOperation::RmsNorm(RmsNorm::flashinfer(1e-6)), ..fp8(PER_GROUP) };
        let parts = Parts { weights: Some(&weights), ..Parts::default() };
        let (found, _) = quantized(&x, Shape::new(1, columns), &recipe, &parts).expect("a row");
        let value = f64::from(x[column]) * inverse_rms(&x, 1e-6) * f64::from(weights[column]);
        let right = value.abs().max(1e-10);
        let found = f64::from(found.f32_scales[column / 128]) * 448.0;
        let bound = norm_error(sum_roundings(columns)) + 3.0 * U;
        prop_assert!((found - right).abs() <= right * bound, "{found:e}, not {right:e}, of {columns} columns");
    }
}

/// TensorRT-LLM's offset of a scale in tiles of 8×4: `[rows / 8, blocks / 4, 8, 4]`.
fn offset_8x4(row: usize, block: usize, blocks: usize) -> usize {
    let (tile_row, tile_block) = (row / 8, block / 4);
    let (inner_row, inner_block) = (row % 8, block % 4);
    tile_row * blocks.div_ceil(4) * 32 + tile_block * 32 + inner_row * 4 + inner_block
}

proptest! {
    #![proptest_config(runs(300))]

    #[test]
    fn scales_have_unique_offsets_and_padding_is_zero(
        size in size(),
        format in format(),
        seed in any::<u64>(),
    ) {
        prop_assume!(!matches!(format, ActivationFormat::Fp8(_)));
        let [rows, columns] = size;
        let mut rng = fastrand::Rng::with_seed(seed);
        // No scale of values from 1 to 2 is 0.
        let values: Vec<bf16> = (0..rows * columns).map(|_| bf16::from_f32(1.0 + rng.f32())).collect();
        let scales: Vec<f32> = given(format, &mut rng).into_iter().collect();
        let parts = Parts { scales: &scales, ..Parts::default() };
        let quantized = |layout| {
            let recipe = ActivationRecipe { layout, ..ActivationRecipe::new(format) };
            quantized(&values, Shape::new(rows, columns), &recipe, &parts).expect("rows").0
        };
        let (linear, blocks) = (quantized(ActivationLayout::Linear), columns.div_ceil(format.block()));
        prop_assert!(linear.scales.len() == rows * blocks && !linear.scales.contains(&0));
        for layout in [ActivationLayout::Swizzled128x4, ActivationLayout::Swizzled8x4] {
            let mut found = quantized(layout);
            prop_assert_eq!(&found.codes, &linear.codes);
            let tile = layout.tile_rows();
            let padded = rows.next_multiple_of(tile) * blocks.next_multiple_of(4);
            prop_assert_eq!(found.scales.len(), padded);
            let mut taken = vec![false; padded];
            for row in 0..rows.next_multiple_of(tile) {
                for block in 0..blocks.next_multiple_of(4) {
                    let offset = layout.offset(row, block, blocks);
                    prop_assert!(!std::mem::replace(&mut taken[offset], true), "{:?}: {}, {}", layout, row, block);
                    if layout == ActivationLayout::Swizzled8x4 {
                        prop_assert_eq!(offset, offset_8x4(row, block, blocks));
                    }
                    let exists = row < rows && block < blocks;
                    let right = if exists { linear.scales[row * blocks + block] } else { 0 };
                    prop_assert_eq!(std::mem::take(&mut found.scales[offset]), right, "{:?}: {}, {}", layout, row, block);
                }
            }
            prop_assert!(taken.iter().all(|taken| *taken) && found.scales.iter().all(|scale| *scale == 0));
        }
    }
}

/// Returns rows of one matrix quantized by themselves, with the rows of the residual after it.
fn dense<T: Exact>(
    rows: &Rows<T>,
    [first, count]: [usize; 2],
    recipe: &ActivationRecipe,
    scales: &[f32],
) -> (QuantizedActivations, Option<Vec<T>>) {
    let (stride, columns) = (rows.shape.row_stride, rows.columns);
    let shape = Shape::new(count, rows.shape.cols).with_row_stride(stride);
    let parts = Parts {
        residual: rows.residual.as_deref().map(|residual| &residual[first * columns..][..count * columns]),
        weights: rows.weights.as_deref(),
        scales,
        experts: None,
    };
    quantized(&rows.values[first * stride..][..count * stride], shape, recipe, &parts).expect("rows")
}

/// Takes `count` elements off the front.
fn front<'a, E>(from: &mut &'a [E], count: usize) -> &'a [E] {
    let (front, rest) = from.split_at(count);
    *from = rest;
    front
}

/// Asserts that each expert's rows are quantized as if by themselves.
fn check_experts<T: Exact>(recipe: &ActivationRecipe, counts: &[usize], columns: usize, kind: u8, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let what = format!("{} {recipe:?}, {counts:?}, {columns} columns, seed {seed}", T::DTYPE.word());
    let takes = given(recipe.format, &mut rng).is_some();
    let scales: Vec<f32> = counts
        .iter()
        .filter_map(|_| given(recipe.format, &mut rng))
        .take(if takes { counts.len() } else { 0 })
        .collect();
    let own = |expert: usize| if takes { &scales[expert..=expert] } else { &[] };
    let fp8 = matches!(recipe.format, ActivationFormat::Fp8(_));
    let tile = if fp8 { 1 } else { recipe.layout.tile_rows() };
    let [row_bytes, row_scales] = {
        let [codes, _, scales] = recipe.lengths(1, 1, columns).expect("small");
        [codes, scales]
    };

    // Sorted, with more room for scales than an expert needs here and there.
    let rows = Rows::<T>::new(recipe.operation, [counts.iter().sum(), columns], kind, &mut rng);
    let (mut offsets, mut scale_offsets) = (vec![0u32], vec![0u32]);
    for count in counts {
        let room = count.next_multiple_of(tile) + tile * usize::from(rng.u8(..4) == 0);
        offsets.push(offsets[offsets.len() - 1] + *count as u32);
        scale_offsets.push(scale_offsets[scale_offsets.len() - 1] + room as u32);
    }
    let experts = ActivationExperts::Sorted { offsets: &offsets, scale_offsets: &scale_offsets };
    let parts = Parts { experts: Some(experts), ..rows.parts(&scales) };
    let (found, sums) = quantized(&rows.values, rows.shape, recipe, &parts).expect("rows by expert");
    let (mut codes, mut block_scales) = (found.codes.as_slice(), found.scales.as_slice());
    let (mut f32_scales, mut sums) = (found.f32_scales.as_slice(), sums.as_deref());
    let blocks = recipe.lengths(0, tile, columns).expect("small")[1] / tile;
    for (expert, count) in counts.iter().enumerate() {
        let what = format!("{what}: sorted, expert {expert}");
        let first = offsets[expert] as usize;
        let (right, right_sums) = dense(&rows, [first, *count], recipe, own(expert));
        assert_eq!(front(&mut codes, count * row_bytes), right.codes, "{what}: codes");
        assert_eq!(
            f32_bits(front(&mut f32_scales, count * row_scales)),
            f32_bits(&right.f32_scales),
            "{what}"
        );
        let room = (scale_offsets[expert + 1] - scale_offsets[expert]) as usize;
        let own_scales = front(&mut block_scales, room * blocks);
        let (own_scales, rest) = own_scales.split_at(right.scales.len());
        assert_eq!(own_scales, right.scales, "{what}: scales");
        assert!(rest.iter().all(|scale| *scale == 0), "{what}: scales after the expert's");
        if let (Some(sums), Some(right)) = (&mut sums, right_sums) {
            assert_same(front(sums, count * columns), &right, &format!("{what}: residual"));
        }
    }
    assert!(codes.is_empty() && block_scales.is_empty() && f32_scales.is_empty(), "{what}");

    // Masked, with the same counts.
    let room = counts.iter().max().copied().unwrap_or(0) + rng.usize(..3);
    let rows = Rows::<T>::new(recipe.operation, [room * counts.len(), columns], kind, &mut rng);
    let words: Vec<u32> = counts.iter().map(|count| *count as u32).collect();
    let parts = Parts { experts: Some(ActivationExperts::Masked { counts: &words }), ..rows.parts(&scales) };
    let (found, sums) = quantized(&rows.values, rows.shape, recipe, &parts).expect("rows by expert");
    let (mut codes, mut block_scales) = (found.codes.as_slice(), found.scales.as_slice());
    let (mut f32_scales, mut sums) = (found.f32_scales.as_slice(), sums.as_deref());
    for (expert, count) in counts.iter().enumerate() {
        let what = format!("{what}: masked, expert {expert}");
        let (right, right_sums) = dense(&rows, [expert * room, *count], recipe, own(expert));
        let of_expert = front(&mut codes, room * row_bytes);
        assert_eq!(of_expert[..count * row_bytes], right.codes, "{what}: codes");
        let of_expert = front(&mut f32_scales, room * row_scales);
        assert_eq!(f32_bits(&of_expert[..count * row_scales]), f32_bits(&right.f32_scales), "{what}");
        // Tiles may have rows of the expert that do not exist.
        let of_expert = front(&mut block_scales, recipe.lengths(0, room, columns).expect("small")[1]);
        assert_eq!(of_expert[..right.scales.len()], right.scales, "{what}: scales");
        if let (Some(sums), Some(right)) = (&mut sums, right_sums) {
            assert_same(
                &front(sums, room * columns)[..count * columns],
                &right,
                &format!("{what}: residual"),
            );
        }
    }
    assert!(codes.is_empty() && block_scales.is_empty() && f32_scales.is_empty(), "{what}");
}

proptest! {
    #![proptest_config(runs(400))]

    #[test]
    fn experts_are_quantized_by_themselves(
        recipe in recipe(),
        counts in prop::collection::vec(prop_oneof![2 => Just(0), 4 => 1..12usize,
        1 => 120..140usize], 1..6), columns in 1..150usize, kind in 0..4u8, seed in any::<u64>(),
    ) {
        prop_assume!(recipe.format != PER_TENSOR);
        check_experts::<f32>(&recipe, &counts, columns, kind, seed);
        check_experts::<f16>(&recipe, &counts, columns, kind, seed);
        check_experts::<bf16>(&recipe, &counts, columns, kind, seed);
    }
}
