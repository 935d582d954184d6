//! Linear layers and experts against candle's own products with dequantized weights.

use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use microscale::formats::nvfp4::Direction;
use microscale::formats::weights::segments_gamma;
use microscale::{
    Format, Fp8Options, Fp8Rows, Global, GlobalScale, HadamardWidth, Numerics, Recipe, ScaleLayout, Scheme,
    Shape, Words, dequantize, gemm_fp4, gemm_weights_fp8, gemm_weights_int8, quantize,
};
use microscale_candle::{QExperts, QLinear, QMatrix, RoundedInputs, hadamard};

const CPU: &Device = &Device::Cpu;

/// Random values with occasional outliers.
fn values(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = fastrand::Rng::with_seed(seed);
    let count = shape.iter().product();
    let values: Vec<f32> =
        (0..count).map(|_| (rng.f32() - 0.5) * if rng.u8(..) == 0 { 40.0 } else { 1.0 }).collect();
    Tensor::from_vec(values, shape, CPU).unwrap()
}

fn recipes() -> [Recipe; 3] {
    [
        Recipe::of(Format::Mxfp4, Numerics::Ocp).unwrap(),
        Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap(),
        Recipe::of(Format::Nvfp4, Numerics::Modelopt).unwrap(),
    ]
}

fn matrix(weight: &Tensor, recipe: &Recipe) -> QMatrix {
    let (rows, cols) = weight.dims2().unwrap();
    let values: Vec<f32> = weight.flatten_all().unwrap().to_vec1().unwrap();
    QMatrix::new(quantize(&values, Shape::new(rows, cols), recipe).unwrap().tensor).unwrap()
}

fn dequantized(matrix: &QMatrix) -> Tensor {
    let view = matrix.view();
    Tensor::from_vec(dequantize::<f32>(view), (view.rows(), view.cols()), CPU).unwrap()
}

/// Asserts that `y` is the product of `x` and `weight`, both `[…, ·]`, within three bounds.
///
/// They are the documented bound, the bound of candle's own f32 sums, and the bound of roundings to
/// the dtype: of the product and, with a bias, of the sum.
#[track_caller]
fn assert_product(y: &Tensor, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) {
    let cols = weight.dim(1).unwrap();
    let unit = match y.dtype() {
        DType::F32 => 2f64.powi(-24),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    };
    assert_eq!(y.dtype(), x.dtype());
    let flat = |t: &Tensor| -> Vec<f32> {
        t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let rows =
        |t: &Tensor| t.to_dtype(DType::F32).unwrap().contiguous().unwrap().reshape(((), cols)).unwrap();
    let product = rows(x).matmul(&weight.t().unwrap()).unwrap();
    let magnitude = rows(x).abs().unwrap().matmul(&weight.abs().unwrap().t().unwrap()).unwrap();
    let bias: Vec<f32> = bias.map_or_else(|| vec![0.0; weight.dim(0).unwrap()], flat);
    let gamma = segments_gamma(cols) + cols as f64 * 2f64.powi(-24);
    let (y, product, magnitude) = (flat(y), flat(&product), flat(&magnitude));
    assert_eq!(y.len(), product.len());
    for (i, ((y, product), magnitude)) in y.iter().zip(product).zip(magnitude).enumerate() {
        let (product, bias) = (f64::from(product), f64::from(bias[i % bias.len()]));
        let error = (f64::from(*y) - (product + bias)).abs();
        let bound =
            gamma * f64::from(magnitude) + 2.0 * unit * (product.abs() + (product + bias).abs()) + 1e-7;
        assert!(
            error <= bound,
            "element {i}: {y}, and not {product} + {bias}: off by {error}, more than {bound}"
        );
    }
}

#[test]
fn products_are_those_of_dequantized_weights() -> Result<()> {
    for (seed, recipe) in recipes().iter().enumerate() {
        // Includes rows that end within a block.
        for (rows, cols) in [(96, 256), (33, 80), (1, 32)] {
            let weight = matrix(&values(&[rows, cols], seed as u64), recipe);
            let layer = QLinear::new(weight.clone(), None)?;
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for shape in
                    [&[cols][..], &[1, cols], &[3, cols], &[2, 9, cols], &[2, 2, 3, cols], &[0, cols]]
                {
                    let x = values(shape, 7).to_dtype(dtype)?;
                    let y = layer.forward(&x)?;
                    let expected = [&shape[..shape.len() - 1], &[rows]].concat();
                    assert_eq!(y.dims(), expected);
                    assert_product(&y, &x, &dequantized(&weight), None);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn products_come_under_their_bias_and_out_of_tensors_with_gaps() -> Result<()> {
    let weight = matrix(&values(&[64, 96], 1), &recipes()[1]);
    let bias = values(&[64], 2);
    let layer = QLinear::new(weight.clone(), Some(bias.clone()))?;
    let whole = values(&[6, 5, 96], 3);
    for x in [whole.transpose(0, 1)?, whole.narrow(0, 2, 3)?, whole.narrow(1, 1, 2)?, whole.i(4)?] {
        assert_product(&layer.forward(&x)?, &x, &dequantized(&weight), Some(&bias));
    }
    // A bias whose dtype differs from the input's.
    let x = whole.to_dtype(DType::BF16)?;
    assert_product(&layer.forward(&x)?, &x, &dequantized(&weight), Some(&bias));
    Ok(())
}

#[test]
fn layers_are_quantized_in_memory_from_every_dtype() -> Result<()> {
    let weight = values(&[32, 64], 4);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let weight = weight.to_dtype(dtype)?;
        let layer = QLinear::quantize(&weight, None, &recipes()[0])?;
        let expected = matrix(&weight.to_dtype(DType::F32)?, &recipes()[0]);
        assert_eq!(layer.weight().view(), expected.view());
    }
    Ok(())
}

/// Experts whose global scales differ, because their weights have different magnitudes.
fn experts(count: usize, rows: usize, cols: usize) -> Vec<QMatrix> {
    let of = |expert: usize| (values(&[rows, cols], expert as u64) * 4f64.powi(expert as i32 - 2)).unwrap();
    (0..count).map(|expert| matrix(&of(expert), &recipes()[1])).collect()
}

#[test]
fn experts_multiply_the_tokens_that_were_sent_to_them() -> Result<()> {
    let (count, rows, cols) = (5, 48, 64);
    let weights = experts(count, rows, cols);
    let scales: Vec<_> = weights.iter().map(|weight| weight.view().global_scale().unwrap().value()).collect();
    assert!(scales.windows(2).all(|pair| pair[0] > pair[1]), "divisors: {scales:?}");
    let biases = values(&[count, rows], 9);
    let layer = QExperts::new(weights.clone(), Some(biases.clone()))?;
    for (tokens, k) in [(1, 1), (1, 4), (40, 2)] {
        // Uses experts 0 to 3 of five.
        let sent: Vec<u32> = (0..tokens * k).map(|pair| (pair as u32 * 7 + pair as u32 / 5) % 4).collect();
        let ids = Tensor::from_vec(sent.clone(), (tokens, k), CPU)?;
        for dtype in [DType::F32, DType::BF16] {
            let shared = values(&[tokens, cols], 5).to_dtype(dtype)?;
            let own = values(&[tokens, k, cols], 6).to_dtype(dtype)?;
            let (of_shared, of_own) = (layer.forward(&shared, &ids)?, layer.forward(&own, &ids)?);
            for (pair, expert) in sent.iter().enumerate() {
                let (token, i) = (pair / k, pair % k);
                let expert = *expert as usize;
                let (weight, bias) = (dequantized(&weights[expert]), biases.i(expert)?);
                assert_product(&of_shared.i((token, i))?, &shared.i(token)?, &weight, Some(&bias));
                assert_product(&of_own.i((token, i))?, &own.i((token, i))?, &weight, Some(&bias));
            }
        }
        let x = values(&[tokens, cols], 5);
        let share = values(&[tokens, k], 8).abs()?;
        let each = layer.forward(&x, &ids)?;
        let weighted = layer.forward_weighted(&x, &ids, &share)?;
        assert_eq!(weighted.dims(), [tokens, rows]);
        for token in 0..tokens {
            let expected = share.i(token)?.reshape((1, k))?.matmul(&each.i(token)?)?.i(0)?;
            let off = (weighted.i(token)? - &expected)?.abs()?.max(0)?.to_scalar::<f32>()?;
            assert!(
                off <= 1e-5 * (1.0 + expected.abs()?.max(0)?.to_scalar::<f32>()?),
                "token {token}: {off}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_matrix_is_split_into_experts() -> Result<()> {
    for recipe in recipes() {
        let whole = matrix(&values(&[6 * 16, 64], 3), &recipe);
        let parts = whole.split(6)?;
        let together: Vec<f32> = parts.iter().flat_map(|part| dequantize::<f32>(part.view())).collect();
        assert_eq!(together, dequantize::<f32>(whole.view()));
        assert!(parts.iter().all(|part| part.view().global_scale() == whole.view().global_scale()));
    }
    Ok(())
}

#[track_caller]
fn assert_error<T: std::fmt::Debug>(result: Result<T>, parts: &[&str]) {
    let error = result.unwrap_err().to_string();
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn errors_name_what_does_not_fit() -> Result<()> {
    let weight = matrix(&values(&[16, 64], 1), &recipes()[0]);
    let layer = QLinear::new(weight.clone(), None)?;
    assert_error(layer.forward(&values(&[2, 63], 1)), &["[2, 63]", "[16, 64]"]);
    assert_error(layer.forward(&values(&[], 1)), &["[]", "[16, 64]"]);
    assert_error(layer.forward(&Tensor::zeros((2, 64), DType::F64, CPU)?), &["f32, f16 or bf16"]);
    assert_error(QLinear::new(weight.clone(), Some(values(&[64], 1))), &["[64]", "16 rows"]);
    assert_error(QLinear::quantize(&Tensor::zeros((2, 64), DType::U8, CPU)?, None, &recipes()[0]), &["U8"]);
    assert_error(weight.split(3), &["16 rows", "3"]);
    assert_error(weight.split(0), &["16 rows", "0"]);

    let numbers = vec![1.0f32; 32 * 128];
    let eight_bits = Recipe::of(Format::Mxfp8E4m3, Numerics::Ocp).unwrap();
    let eight_bits = quantize(&numbers, Shape::new(32, 128), &eight_bits).unwrap().tensor;
    assert_error(QMatrix::new(eight_bits), &["mxfp8"]);
    let linear = quantize(&numbers, Shape::new(32, 128), &recipes()[1]).unwrap().tensor;
    assert_error(QMatrix::new(linear.convert_layout(ScaleLayout::Swizzled)), &["swizzled", "convert_layout"]);

    let other = matrix(&values(&[16, 32], 1), &recipes()[0]);
    assert_error(QExperts::new(vec![weight.clone(), other], None), &["expert 1", "[16, 32]", "[16, 64]"]);
    assert_error(QExperts::new(Vec::new(), None), &["no experts"]);
    assert_error(
        QExperts::new(vec![weight.clone()], Some(values(&[16], 1))),
        &["[16]", "1 experts of 16 rows"],
    );
    let layer = QExperts::new(vec![weight.clone(), weight], None)?;
    let ids = |ids: &[u32], shape: &[usize]| Tensor::from_slice(ids, shape, CPU);
    assert_error(layer.forward(&values(&[1, 64], 1), &ids(&[2], &[1, 1])?), &["expert 2 of 2"]);
    assert_error(
        layer.forward(&values(&[2, 64], 1), &ids(&[0], &[1, 1])?),
        &["[2, 64]", "[1, 64]", "[1, 1, 64]"],
    );
    assert_error(layer.forward(&values(&[1, 64], 1), &ids(&[0], &[1])?), &["[tokens, k]"]);
    Ok(())
}

#[test]
fn layers_round_activations_if_they_are_told_to() -> Result<()> {
    let (weight, x) = (values(&[24, 96], 1), values(&[5, 96], 2));
    for recipe in recipes() {
        let matrix = matrix(&weight, &recipe);
        let exact = QLinear::new(matrix.clone(), None)?;
        let layer = exact.clone().with_activations(RoundedInputs::Int8)?.to_device(CPU)?;
        assert_eq!(layer.activations(), Some(RoundedInputs::Int8));
        let mut expected = vec![0f32; 5 * 24];
        let values: Vec<f32> = x.flatten_all()?.to_vec1()?;
        gemm_weights_int8(matrix.view(), &values, 5, &mut expected).unwrap();
        assert_eq!(layer.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);
        assert_ne!(exact.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);

        let experts = QExperts::new(vec![matrix], None)?.with_activations(RoundedInputs::Int8)?;
        let chosen = Tensor::zeros((5, 1), DType::U32, CPU)?;
        let y = experts.to_device(CPU)?.forward(&x, &chosen)?;
        assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, expected);
    }
    Ok(())
}

#[test]
fn layers_round_activations_to_fp8_and_nvfp4_weights_only_if_allowed() -> Result<()> {
    let (weight, x) = (values(&[24, 320], 1), values(&[5, 320], 2));
    for recipe in recipes() {
        let matrix = matrix(&weight, &recipe);
        let exact = QLinear::new(matrix.clone(), None)?;
        if recipe.scheme.format() == Format::Nvfp4 {
            let refused =
                exact.clone().with_activations(RoundedInputs::Fp8(Fp8Options::default())).unwrap_err();
            assert!(refused.to_string().contains("round_weights"), "{refused}");
        }
        for per_group in [false, true] {
            let options = Fp8Options { per_group, round_weights: true, ..Fp8Options::default() };
            let rounded = RoundedInputs::Fp8(options);
            let layer = exact.clone().with_activations(rounded)?.to_device(CPU)?;
            assert_eq!(layer.activations(), Some(rounded));
            let mut expected = vec![0f32; 5 * 24];
            let values: Vec<f32> = x.flatten_all()?.to_vec1()?;
            gemm_weights_fp8(matrix.view(), Fp8Rows::Values(&values), 5, options, &mut expected).unwrap();
            assert_eq!(layer.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);
            assert_ne!(exact.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);
            // The last call decides.
            let again = layer.with_activations(None::<RoundedInputs>)?;
            assert_eq!(again.activations(), None);
        }
    }
    Ok(())
}

#[test]
fn layers_quantize_activations_to_the_format_of_the_weights() -> Result<()> {
    let (weight, x) = (values(&[24, 320], 1), values(&[5, 320], 2));
    let of_values: Vec<f32> = x.flatten_all()?.to_vec1()?;
    for recipe in recipes() {
        let matrix = matrix(&weight, &recipe);
        let exact = QLinear::new(matrix.clone(), None)?;
        let layer = exact.clone().with_activations(RoundedInputs::Fp4(recipe))?.to_device(CPU)?;
        let quantized = quantize(&of_values, Shape::new(5, 320), &recipe).unwrap().tensor;
        let mut expected = vec![0f32; 5 * 24];
        gemm_fp4(&quantized, matrix.view(), &mut expected).unwrap();
        assert_eq!(layer.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);
        assert_ne!(exact.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, expected);
        for other in recipes().into_iter().filter(|other| other.format() != recipe.format()) {
            let refused = exact.clone().with_activations(RoundedInputs::Fp4(other)).unwrap_err();
            assert!(refused.to_string().contains("quantize both"), "{refused}");
        }
    }
    Ok(())
}

#[test]
fn experts_round_activations_as_a_layer_of_each_does() -> Result<()> {
    let (count, rows, cols, tokens, k) = (4, 24, 320, 6, 2);
    let sent: Vec<u32> = (0..tokens * k).map(|pair| (pair as u32 * 7 + pair as u32 / 5) % 3).collect();
    let ids = Tensor::from_vec(sent.clone(), (tokens, k), CPU)?;
    let (shared, own) = (values(&[tokens, cols], 5), values(&[tokens, k, cols], 6));
    for recipe in recipes() {
        let of = |expert: usize| matrix(&values(&[rows, cols], expert as u64), &recipe);
        let weights: Vec<_> = (0..count).map(of).collect();
        let exact = QExperts::new(weights.clone(), None)?;
        let mut choices: Vec<_> = [false, true]
            .map(|per_group| {
                RoundedInputs::Fp8(Fp8Options { per_group, round_weights: true, ..Fp8Options::default() })
            })
            .into();
        // A global scale that is given does not depend on other rows.
        let mut given = recipe;
        if let Scheme::Nvfp4(_, global) = &mut given.scheme {
            let direction = weights[0].view().global_scale().expect("a global scale").direction();
            let value = if direction == Direction::Divisor { 500.0 } else { 1.0 / 500.0 };
            *global = Global::Given(GlobalScale::of(direction, value));
        }
        choices.push(RoundedInputs::Fp4(given));
        for rounded in choices {
            let experts = exact.clone().with_activations(rounded)?.to_device(CPU)?;
            assert_eq!(experts.activations(), Some(rounded));
            for x in [&shared, &own] {
                let y = experts.forward(x, &ids)?;
                assert_ne!(
                    y.flatten_all()?.to_vec1::<f32>()?,
                    exact.forward(x, &ids)?.flatten_all()?.to_vec1::<f32>()?
                );
                for (pair, expert) in sent.iter().enumerate() {
                    let (token, i) = (pair / k, pair % k);
                    let row = if x.rank() == 2 { x.i(token)? } else { x.i((token, i))? };
                    let layer = QLinear::new(weights[*expert as usize].clone(), None)?;
                    let expected = layer.with_activations(rounded)?.forward(&row.unsqueeze(0)?)?.i(0)?;
                    assert_eq!(y.i((token, i))?.to_vec1::<f32>()?, expected.to_vec1::<f32>()?);
                }
            }
            assert_eq!(experts.with_activations(None::<RoundedInputs>)?.activations(), None);
        }
        for other in recipes().into_iter().filter(|other| other.format() != recipe.format()) {
            let refused = exact.clone().with_activations(RoundedInputs::Fp4(other)).unwrap_err();
            assert!(refused.to_string().contains("quantize both"), "{refused}");
        }
    }
    Ok(())
}

/// A layer of transformed weights transforms its inputs, and experts of such weights are refused.
#[test]
fn inputs_are_transformed_as_the_weights() -> Result<()> {
    for width in HadamardWidth::values() {
        let (weight, x) = (values(&[24, 256], 1), values(&[2, 5, 256], 2));
        let transformed = hadamard(&weight, width)?;
        for recipe in recipes() {
            let matrix = matrix(&transformed, &recipe).with_hadamard(Some(width))?;
            let own = hadamard(&dequantized(&matrix), width)?;
            let y = QLinear::new(matrix.clone(), None)?.forward(&x)?;
            let right = x.reshape((10, 256))?.matmul(&own.t()?)?.reshape((2, 5, 24))?;
            let error = (y - &right)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            let largest = right.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
            assert!(error < 1e-5 * largest, "{width}: {error} {largest}");
            assert!(QExperts::new(vec![matrix], None).is_err());
        }
        // Halves are transformed in f32 and rounded once.
        let half = hadamard(&x.to_dtype(DType::BF16)?, width)?;
        let right =
            hadamard(&x.to_dtype(DType::BF16)?.to_dtype(DType::F32)?, width)?.to_dtype(DType::BF16)?;
        assert_eq!(
            half.flatten_all()?.to_vec1::<half::bf16>()?,
            right.flatten_all()?.to_vec1::<half::bf16>()?
        );
    }
    assert!(hadamard(&values(&[2, 48], 3), HadamardWidth::W32).is_err());
    let narrow = matrix(&values(&[4, 96], 4), &recipes()[0]);
    assert!(narrow.with_hadamard(Some(HadamardWidth::W64)).is_err());
    Ok(())
}
