//! Compares layers on a GPU with the same on the CPU.
//!
//! With `MICROSCALE_REQUIRE_GPU=1` the tests fail on a machine without a GPU.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Module, Result, Tensor};
use microscale::formats::weights::gemm_gamma;
use microscale::{Format, Fp8Options, Numerics, Recipe};
use microscale_candle::{QExperts, QLinear, QMatrix, RoundedInputs};

/// Dtypes of activations, and half the distance from 1 to the next larger number.
const DTYPES: [(DType, f64); 3] = [
    (DType::F32, 1.0 / (1 << 24) as f64),
    (DType::BF16, 1.0 / (1 << 8) as f64),
    (DType::F16, 1.0 / (1 << 11) as f64),
];

fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("MICROSCALE_REQUIRE_GPU").is_ok() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn values(shape: &[usize], seed: u64) -> Tensor {
    let mut rng = fastrand::Rng::with_seed(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.f32() - 0.5).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for (format, numerics) in [(Format::Nvfp4, Numerics::CompressedTensors), (Format::Mxfp4, Numerics::Ocp)] {
        for (rows, cols) in [(256, 512), (96, 4096), (33, 80)] {
            let recipe = Recipe::of(format, numerics).unwrap();
            let layer = QLinear::quantize(&values(&[rows, cols], 1), None, &recipe)?;
            let there = layer.to_device(&device)?;
            let weight: &QMatrix = layer.weight();
            let weight = microscale::dequantize::<f32>(weight.view());
            let weight = Tensor::from_vec(weight, (rows, cols), &Device::Cpu)?;
            for shape in [&[cols][..], &[1, cols], &[2, 4, cols], &[9, cols], &[3, 50, cols], &[0, cols]] {
                for (dtype, unit) in DTYPES {
                    let x = values(shape, 2).to_dtype(dtype)?;
                    let y = there.forward(&x.to_device(&device)?)?;
                    assert_eq!((y.dtype(), y.device().is_cuda()), (dtype, true));
                    assert_eq!(y.dims(), [&shape[..shape.len() - 1], &[rows]].concat());
                    let expected = layer.forward(&x)?;
                    let magnitude =
                        x.to_dtype(DType::F32)?.abs()?.reshape(((), cols))?.matmul(&weight.abs()?.t()?)?;
                    assert_near(&y, &expected, &magnitude, cols, unit);
                }
            }
        }
    }
    Ok(())
}

/// Activations that need more bits than a bf16 has.
#[test]
fn nothing_of_f32_is_rounded_away() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let recipe = Recipe::of(Format::Mxfp4, Numerics::Ocp).unwrap();
    let one = Tensor::from_vec([vec![1f32; 32], vec![0.0; 32 * 7]].concat(), (8, 32), &Device::Cpu)?;
    let layer = QLinear::quantize(&one, None, &recipe)?;
    let experts = QExperts::new(vec![layer.weight().clone()], None)?.to_device(&device)?;
    let layer = layer.to_device(&device)?;
    for tokens in [1, 9, 300] {
        // One nonzero activation per token.
        let mut x = vec![0f32; tokens * 32];
        let mut rng = fastrand::Rng::with_seed(tokens as u64);
        let expected: Vec<f32> = (0..tokens).map(|_| rng.f32() - 0.5).collect();
        for (token, value) in expected.iter().enumerate() {
            x[token * 32 + token % 32] = *value;
        }
        let x = Tensor::from_vec(x, (tokens, 32), &device)?;
        let y = layer.forward(&x)?.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(y, expected);
        let ids = Tensor::zeros((tokens, 1), DType::U32, &device)?;
        let y = experts.forward(&x, &ids)?.narrow(2, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(y, expected);
    }
    Ok(())
}

/// Asserts that results are close to the product. `magnitude` is the sum of its terms' magnitudes.
///
/// Both results are rounded once, and add in different orders.
#[track_caller]
fn assert_near(found: &Tensor, expected: &Tensor, magnitude: &Tensor, cols: usize, unit: f64) {
    let found =
        flat(&found.to_device(&Device::Cpu).unwrap()).into_iter().zip(flat(expected)).zip(flat(magnitude));
    for (i, ((y, expected), magnitude)) in found.enumerate() {
        let bound = 2.0 * gemm_gamma(cols) * f64::from(magnitude) + 2.0 * unit * f64::from(expected.abs());
        let off = f64::from((y - expected).abs());
        assert!(off <= bound, "{i}: {y}, and not {expected}: off by {off}, more than {bound}");
    }
}

#[test]
fn experts_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    for (format, numerics) in [
        (Format::Nvfp4, Numerics::CompressedTensors),
        (Format::Nvfp4, Numerics::Modelopt),
        (Format::Mxfp4, Numerics::Ocp),
    ] {
        let recipe = Recipe::of(format, numerics).unwrap();
        let (count, rows, cols) = (6, 96, 512);
        let weight = |expert: usize| {
            // Global scales differ.
            let weight = (values(&[rows, cols], expert as u64) * 4f64.powi(expert as i32 - 2))?;
            Ok(QLinear::quantize(&weight, None, &recipe)?.weight().clone())
        };
        let weights = (0..count).map(weight).collect::<Result<Vec<_>>>()?;
        // Magnitudes of the weights: `[count, M, K]`.
        let magnitudes = weights.iter().map(|weight| {
            Tensor::from_vec(microscale::dequantize::<f32>(weight.view()), (rows, cols), &Device::Cpu)?.abs()
        });
        let magnitudes = magnitudes.collect::<Result<Vec<_>>>()?;
        let layer = QExperts::new(weights, None)?;
        let there = layer.to_device(&device)?;
        for (tokens, k) in [(1, 4), (7, 1), (90, 2), (0, 2)] {
            let ids: Vec<u32> =
                (0..tokens * k).map(|pair| (pair * 7 + pair / 5) as u32 % count as u32).collect();
            let ids = Tensor::from_vec(ids, (tokens, k), &Device::Cpu)?;
            for (dtype, unit) in DTYPES {
                for shape in [&[tokens, cols][..], &[tokens, k, cols]] {
                    let x = values(shape, 2).to_dtype(dtype)?;
                    let y = there.forward(&x.to_device(&device)?, &ids.to_device(&device)?)?;
                    assert_eq!((y.dtype(), y.dims()), (dtype, &[tokens, k, rows][..]));
                    let expected = layer.forward(&x, &ids)?;
                    let of_pairs =
                        if shape.len() == 2 { x.unsqueeze(1)?.broadcast_as((tokens, k, cols))? } else { x };
                    let of_pairs = of_pairs.to_dtype(DType::F32)?.abs()?.reshape((tokens * k, cols))?;
                    for (pair, expert) in ids.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
                        let magnitude =
                            of_pairs.narrow(0, pair, 1)?.matmul(&magnitudes[expert as usize].t()?)?;
                        let [y, expected] = [&y, &expected]
                            .map(|y| y.reshape(((), rows)).unwrap().narrow(0, pair, 1).unwrap());
                        assert_near(&y, &expected, &magnitude, cols, unit);
                    }
                }
            }
        }
        let x = values(&[2, cols], 2).to_device(&device)?;
        let ids = Tensor::zeros((2, 1), DType::U32, &device)?;
        assert!(layer.forward(&x, &ids).unwrap_err().to_string().contains("to_device"));
        let doubles = x.to_dtype(DType::F64)?;
        assert!(there.forward(&doubles, &ids).unwrap_err().to_string().contains("f16 or bf16"));
    }
    Ok(())
}

#[test]
fn experts_round_activations_as_on_the_cpu() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let (count, rows, cols, tokens, k) = (6, 96, 512, 40, 2);
    for (format, numerics) in [(Format::Nvfp4, Numerics::CompressedTensors), (Format::Mxfp4, Numerics::Ocp)] {
        let recipe = Recipe::of(format, numerics).unwrap();
        let weight = |expert: usize| {
            Ok(QLinear::quantize(&values(&[rows, cols], expert as u64), None, &recipe)?.weight().clone())
        };
        let exact = QExperts::new((0..count).map(weight).collect::<Result<Vec<_>>>()?, None)?;
        let ids: Vec<u32> = (0..tokens * k).map(|pair| (pair * 7 + pair / 5) as u32 % count as u32).collect();
        let ids = Tensor::from_vec(ids, (tokens, k), &Device::Cpu)?;
        let mut choices = vec![RoundedInputs::Fp4(recipe)];
        choices.extend([false, true].map(|per_group| {
            RoundedInputs::Fp8(Fp8Options {
                per_group,
                round_weights: format == Format::Nvfp4,
                ..Fp8Options::default()
            })
        }));
        for rounded in choices {
            let here = exact.clone().with_activations(rounded)?;
            let there = here.to_device(&device)?;
            for shape in [&[tokens, cols][..], &[tokens, k, cols]] {
                let x = values(shape, 2).to_dtype(DType::BF16)?;
                let y = match there.forward(&x.to_device(&device)?, &ids.to_device(&device)?) {
                    Err(error) if error.to_string().contains("compute capability 9.0") => continue,
                    y => y?,
                };
                // Parts of K are added in another order, and kernels for few tokens add sums of 32
                // columns.
                let expected = here.forward(&x, &ids)?;
                let largest = flat(&expected).into_iter().fold(0f32, |most, y| most.max(y.abs()));
                for (y, expected) in flat(&y.to_device(&Device::Cpu)?).into_iter().zip(flat(&expected)) {
                    let bound = expected.abs() * 2f32.powi(-7) + largest * 2f32.powi(-12);
                    assert!((y - expected).abs() <= bound, "{rounded:?}: {y}, and not {expected}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn inputs_begin_anywhere_in_their_memory() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let recipe = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap();
    let layer = QLinear::quantize(&values(&[64, 128], 1), None, &recipe)?.to_device(&device)?;
    let x = values(&[40, 128], 2).to_dtype(DType::BF16)?.to_device(&device)?;
    for (first, count) in [(0, 40), (3, 1), (7, 20)] {
        let part = x.narrow(0, first, count)?;
        let alone = part.to_device(&Device::Cpu)?.to_device(&device)?;
        let [found, expected] =
            [&part, &alone].map(|x| flat(&layer.forward(x).unwrap().to_device(&Device::Cpu).unwrap()));
        assert_eq!(found, expected);
    }
    Ok(())
}

#[test]
fn errors_say_where_things_are() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let recipe = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap();
    let layer = QLinear::quantize(&values(&[64, 128], 1), None, &recipe)?;
    let x = values(&[2, 128], 2).to_device(&device)?;
    assert!(layer.forward(&x).unwrap_err().to_string().contains("to_device"));
    let doubles = x.to_dtype(DType::F64)?;
    assert!(layer.to_device(&device)?.forward(&doubles).unwrap_err().to_string().contains("f16 or bf16"));
    Ok(())
}
