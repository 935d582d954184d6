//! Layers from checkpoints by name.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Module, Result, Tensor};
use microscale::{Format, Numerics};
use microscale_candle::{Linear, QLinear, Weights};
use microscale_checkpoint::CheckpointFormat;

mod samples;

const CPU: &Device = &Device::Cpu;

const SAMPLE: &str = "tiny-llama";

/// Quantizes the sample into a directory.
fn quantized(out: &Path, format: Format, numerics: Numerics, files: CheckpointFormat) {
    samples::quantized(SAMPLE, out, format, numerics, files);
}

fn largest(x: &Tensor) -> f32 {
    x.to_dtype(DType::F32).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

fn input(shape: &[usize]) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_vec(values, shape, CPU).unwrap()
}

/// Asserts that a layer multiplies with its dequantized weights.
#[track_caller]
fn assert_layer(layer: &impl Module, weight: &Tensor, bias: Option<&Tensor>) {
    let x = input(&[6, weight.dim(1).unwrap()]);
    let plain = candle_nn::Linear::new(weight.clone(), bias.cloned());
    let (y, expected) = (layer.forward(&x).unwrap(), plain.forward(&x).unwrap());
    let off = largest(&(y - &expected).unwrap());
    assert!(largest(&expected) > 0.0 && off < 1e-5 * largest(&expected), "{off} of {}", largest(&expected));
}

#[test]
fn layers_of_every_numerics_are_found_by_the_models_names() -> Result<()> {
    let cases = [
        (Format::Mxfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::Modelopt, CheckpointFormat::Modelopt),
    ];
    let original = Weights::open(&samples::sample(SAMPLE), DType::F32, CPU)?;
    for (format, numerics, files) in cases {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        quantized(&out, format, numerics, files);
        let weights = Weights::open(&out, DType::F32, CPU)?;
        let mlp = weights.pp("model.layers").pp(1).pp("mlp");
        let name = "down_proj.weight";
        let (dequantized, before) =
            (mlp.get((128, 352), name)?, original.pp("model.layers.1.mlp").get((128, 352), name)?);
        let off = largest(&(&dequantized - &before)?);
        assert!(off > 0.0 && off < 0.2 * largest(&before), "{files}: {off} of {}", largest(&before));
        let layer = mlp.pp("down_proj").linear(352, 128, false)?;
        assert!(matches!(layer, Linear::Quantized(_)), "{files}");
        // The file is deleted, but still mapped by the layer.
        drop((weights, mlp));
        directory.close().unwrap();
        assert_layer(&layer, &dequantized, None);
    }
    Ok(())
}

#[test]
fn weights_are_multiplied_where_the_file_is_mapped() -> Result<()> {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    quantized(&out, Format::Nvfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors);
    let weights = Weights::open(&out, DType::F32, CPU)?;
    let Linear::Quantized(layer) = weights.pp("model.layers.0.self_attn.q_proj").linear(128, 128, false)?
    else {
        panic!("it is quantized");
    };
    let stored =
        |part| weights.checkpoint().tensor(&format!("model.layers.0.self_attn.q_proj.weight{part}")).unwrap();
    assert_eq!(layer.weight().view().codes().as_ptr(), stored("_packed").data.as_ptr());
    assert_eq!(layer.weight().view().scales().as_ptr(), stored("_scale").data.as_ptr());
    Ok(())
}

#[test]
fn layers_that_are_not_quantized_come_out_in_the_dtype() -> Result<()> {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    quantized(&out, Format::Nvfp4, Numerics::Modelopt, CheckpointFormat::Modelopt);
    for dtype in [DType::F32, DType::BF16] {
        let weights = Weights::open(&out, dtype, CPU)?;
        let Linear::Plain(head) = weights.pp("lm_head").linear(128, 1024, false)? else {
            panic!("heads are left out");
        };
        assert_eq!((head.weight().dims(), head.weight().dtype()), (&[1024, 128][..], dtype));
        assert_eq!(weights.get(128, "model.norm.weight")?.dtype(), dtype);
    }
    // MXFP8 has no products.
    let out = directory.path().join("mxfp8");
    quantized(&out, Format::Mxfp8E4m3, Numerics::Ocp, CheckpointFormat::CompressedTensors);
    let weights = Weights::open(&out, DType::F32, CPU)?.pp("model.layers.0.mlp.up_proj");
    let layer = weights.linear(128, 352, false)?;
    assert!(matches!(layer, Linear::Plain(_)));
    assert_layer(&layer, &weights.get((352, 128), "weight")?, None);
    Ok(())
}

/// Writes a checkpoint with these tensors.
fn written(path: &Path, tensors: Vec<(String, Tensor)>) {
    candle_core::safetensors::save(&tensors.into_iter().collect::<HashMap<_, _>>(), path).unwrap();
}

/// Random bytes from `least` to `most`: arbitrary codes, or scales around 2⁰.
fn bytes(shape: &[usize], least: u8, most: u8) -> Tensor {
    let mut rng = fastrand::Rng::with_seed(shape.len() as u64);
    let bytes: Vec<u8> = (0..shape.iter().product::<usize>()).map(|_| rng.u8(least..=most)).collect();
    Tensor::from_vec(bytes, shape, CPU).unwrap()
}

#[test]
fn experts_are_found_in_one_tensor_and_one_by_one() -> Result<()> {
    let directory = tempfile::tempdir().unwrap();
    let (experts, inputs, outputs) = (4, 64, 48);
    // As gpt-oss stores them.
    let together = directory.path().join("together.safetensors");
    let codes = bytes(&[experts, outputs, inputs / 32, 16], 0, 255);
    let scales = bytes(&[experts, outputs, inputs / 32], 120, 130);
    let biases = input(&[experts, outputs]);
    let name = |end: &str| format!("mlp.experts.gate_up_proj{end}");
    let parts = [("_blocks", &codes), ("_scales", &scales), ("_bias", &biases)];
    written(&together, parts.map(|(end, part)| (name(end), part.clone())).into());
    // The same experts as compressed-tensors stores linear layers.
    let apart = directory.path().join("apart.safetensors");
    let each = (0..experts).flat_map(|expert| {
        let name = |end: &str| format!("mlp.experts.{expert}.gate_up_proj.{end}");
        let codes = codes.get(expert).unwrap().reshape((outputs, inputs / 2)).unwrap();
        let parts = [
            ("weight_packed", codes),
            ("weight_scale", scales.get(expert).unwrap()),
            ("bias", biases.get(expert).unwrap()),
        ];
        parts.map(|(end, part)| (name(end), part))
    });
    written(&apart, each.collect());

    let ids = Tensor::new(&[[0u32, 3], [2, 0], [3, 1]], CPU)?;
    let x = input(&[3, inputs]);
    let layer_of = |path: &Path| -> Result<_> {
        let weights = Weights::open(path, DType::F32, CPU)?.pp("mlp.experts");
        let layer = weights.experts(experts, inputs, outputs, "gate_up_proj", true)?;
        assert!(weights.experts(experts, inputs, outputs, "down_proj", true).is_err());
        assert!(weights.experts(experts, inputs, outputs + 1, "gate_up_proj", true).is_err());
        Ok(layer)
    };
    let (together_layer, apart_layer) = (layer_of(&together)?, layer_of(&apart)?);
    let y = together_layer.forward(&x, &ids)?;
    assert_eq!(y.to_vec3::<f32>()?, apart_layer.forward(&x, &ids)?.to_vec3::<f32>()?);
    // The model's parameter has inputs before outputs.
    let values = Weights::open(&together, DType::F32, CPU)?
        .get((experts, inputs, outputs), "mlp.experts.gate_up_proj")?;
    for expert in 0..experts {
        let layer = QLinear::new(together_layer.weights()[expert].clone(), Some(biases.get(expert)?))?;
        assert_layer(&layer, &values.get(expert)?.t()?.contiguous()?, Some(&biases.get(expert)?));
        let pair = ids.flatten_all()?.to_vec1::<u32>()?.iter().position(|id| *id as usize == expert).unwrap();
        let expected = layer.forward(&x.narrow(0, pair / 2, 1)?)?.squeeze(0)?.to_vec1::<f32>()?;
        assert_eq!(y.get(pair / 2)?.get(pair % 2)?.to_vec1::<f32>()?, expected);
    }
    Ok(())
}

#[test]
fn errors_name_the_tensor() -> Result<()> {
    let weights = Weights::open(&samples::sample(SAMPLE), DType::F32, CPU)?.pp("model.layers.0.mlp");
    assert!(weights.contains_tensor("up_proj.weight") && !weights.contains_tensor("weight"));
    let assert_error = |error: candle_core::Error, parts: &[&str]| {
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let name = "model.layers.0.mlp.up_proj";
    assert_error(
        weights.pp("up_proj").linear(128, 353, false).unwrap_err(),
        &[name, "[352, 128]", "[353, 128]"],
    );
    assert_error(weights.pp("up_proj").linear(128, 352, true).unwrap_err(), &[name, "bias"]);
    assert_error(weights.pp("up").linear(128, 352, false).unwrap_err(), &["model.layers.0.mlp.up.weight"]);
    assert_error(weights.get((352, 127), "up_proj.weight").unwrap_err(), &[name, "[352, 128]", "[352, 127]"]);
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    quantized(&out, Format::Mxfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors);
    let weights = Weights::open(&out, DType::F32, CPU)?.pp("model.layers.0.mlp");
    assert_error(
        weights.pp("up_proj").linear(256, 352, false).unwrap_err(),
        &[name, "[352, 128]", "[352, 256]"],
    );
    assert!(
        Weights::open(&out.join("missing"), DType::F32, CPU).unwrap_err().to_string().contains("missing")
    );
    Ok(())
}
