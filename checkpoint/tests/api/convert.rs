//! Converted checkpoints: bytes that stay, values that stay, and the counts of the others.

use std::path::Path;

use half::bf16;
use microscale::{Device, ErrorStats, Format, GlobalScale, Recipe, Shape};
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Convert, Converted};
use microscale_test_support::Scratch;
use microscale_test_support::oracle::{self, e4m3_value};
use safetensors::tensor::Dtype;

use crate::dequantize::decoded;
use crate::input::{Tensor, noise, write_file, write_model};
use crate::{BAND, Tensors, files, going_on, quantize, request, tensors};

const OURS: CheckpointFormat = CheckpointFormat::CompressedTensors;

fn convert(request: Convert, input: &Path, out: &Path) -> Converted {
    request.run(&Checkpoint::open(input).unwrap(), out, &Device::Cpu, going_on()).unwrap()
}

/// Returns values of bf16 in f32 with this amax, which is in the last element.
fn with_amax(elements: usize, amax: f32) -> Vec<f32> {
    let mut values: Vec<bf16> = noise(elements, 5);
    values[elements - 1] = bf16::from_f32(amax);
    values.iter().map(|value| value.to_f32().clamp(-amax, amax)).collect()
}

fn in_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Returns the number in a tensor of one F32.
fn number(tensors: &Tensors, name: &str) -> f32 {
    f32::from_le_bytes(tensors[name].2[..].try_into().unwrap())
}

#[test]
fn compressed_tensors_to_modelopt_and_back_keeps_every_byte_under_powers_of_two() {
    let scratch = Scratch::new();
    let rows = BAND / 512 + 40;
    // 2688 / 5.25 is 512, whose inverse is exact.
    let weight = |layer: u32| {
        Tensor::of(
            format!("model.layers.{layer}.mlp.down_proj.weight"),
            &[rows, 512],
            &with_amax(rows * 512, 5.25),
        )
    };
    let norm = Tensor::noise::<bf16>("model.norm.weight", &[512], 1);
    let shards = [("a.safetensors", vec![weight(0), norm]), ("b.safetensors", vec![weight(1)])];
    scratch.write("IN/config.json", r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}"#);
    let input = write_model(&scratch, "IN", &shards);
    let [ours, modelopt, back] = ["OURS", "MODELOPT", "BACK"].map(|name| scratch.path(name));
    quantize(&request(Format::Nvfp4), &input, &ours).unwrap();
    let there = convert(Convert::new(CheckpointFormat::Modelopt), &ours, &modelopt);
    let again = convert(Convert::new(OURS), &modelopt, &back);
    assert!(files(&back).keys().eq(files(&ours).keys()));
    assert!(tensors(&back) == tensors(&ours));
    let elements = 2 * rows as u64 * 512;
    for done in [&there, &again] {
        assert_eq!((done.converted.tensors, done.converted.elements), (2, elements));
        // Codes, scales and two global scales, on both sides.
        let bytes = elements / 2 + elements / 16 + 8;
        assert_eq!((done.converted.bytes_before, done.converted.bytes_after), (bytes, bytes));
        assert_eq!((done.copied.tensors, done.copied.bytes_before, done.copied.bytes_after), (1, 1024, 1024));
        assert_eq!((done.cast, done.rounded.len(), done.requantized.len()), (0, 0, 0));
    }
    let (from, to) = (tensors(&ours), tensors(&modelopt));
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.mlp.down_proj.weight");
        assert!(to[&name].2 == from[&format!("{name}_packed")].2);
        assert!(to[&format!("{name}_scale")].2 == from[&format!("{name}_scale")].2);
        assert_eq!(number(&from, &format!("{name}_global_scale")), 512.0);
        assert_eq!(number(&to, &format!("{name}_scale_2")), 1.0 / 512.0);
    }
}

#[test]
fn an_inverted_global_scale_is_reported_with_the_values_that_it_changes() {
    let scratch = Scratch::new();
    let rows = BAND / 512 + 40;
    let weight = Tensor::of("a.fc.weight", &[rows, 512], &with_amax(rows * 512, 5.78125));
    let input = write_file(&scratch, "in.safetensors", &[weight]);
    let [ours, modelopt] = ["ours", "modelopt"].map(|name| scratch.path(format!("{name}.safetensors")));
    quantize(&request(Format::Nvfp4), &input, &ours).unwrap();
    let done = convert(Convert::new(CheckpointFormat::Modelopt), &ours, &modelopt);
    let (from, to) = (tensors(&ours), tensors(&modelopt));
    let divisor = number(&from, "a.fc.weight_global_scale");
    let multiplier = number(&to, "a.fc.weight_scale_2");
    assert_eq!(multiplier, 1.0 / divisor);
    let before = in_f32(&decoded(&from, "a.fc.weight", Format::Nvfp4));
    let (codes, scales) = (&from["a.fc.weight_packed"].2, &from["a.fc.weight_scale"].2);
    let global = Some(GlobalScale::Multiplier(multiplier));
    let after = oracle::unpack(Format::Nvfp4, codes);
    let after = after
        .iter()
        .enumerate()
        .map(|(i, code)| oracle::value(Format::Nvfp4, *code, scales[i / 16], global) as f32);
    let after: Vec<f32> = after.collect();
    let differing = before.iter().zip(&after).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert_ne!(differing, 0, "the scale was to be rounded");
    let [rounding] = &done.rounded[..] else { panic!("{:?}", done.rounded) };
    assert_eq!((rounding.differing, rounding.values), (differing as u64, before.len() as u64));
    assert_eq!(rounding.errors, ErrorStats::between(&before, &after));
    assert_eq!(rounding.before, GlobalScale::Divisor(divisor));
    assert_eq!(rounding.after, GlobalScale::Multiplier(multiplier));
}

#[test]
fn mxfp4_is_cast_to_other_formats_with_the_same_values() {
    let scratch = Scratch::new();
    let shape = [BAND / 512 + 40, 512];
    let input =
        [Tensor::noise::<bf16>("a.fc.weight", &shape, 1), Tensor::noise::<bf16>("b.fc.weight", &shape, 2)];
    let input = write_file(&scratch, "in.safetensors", &input);
    let packed = scratch.path("packed.safetensors");
    quantize(&request(Format::Mxfp4), &input, &packed).unwrap();
    let before = tensors(&packed);
    for format in [Format::Nvfp4, Format::Mxfp8E4m3] {
        let out = scratch.path(format!("{format:?}.safetensors"));
        let done = convert(Convert { format: Some(format), ..Convert::new(OURS) }, &packed, &out);
        assert_eq!((done.cast, done.converted.tensors, done.requantized.len()), (2, 2, 0));
        let after = tensors(&out);
        for name in ["a.fc.weight", "b.fc.weight"] {
            assert!(decoded(&after, name, format) == decoded(&before, name, Format::Mxfp4), "{name}");
        }
    }
    // FP8 in tiles of 128×128, where the scale is a power of two.
    let out = scratch.path("fp8.safetensors");
    let done = convert(Convert::new(CheckpointFormat::Fp8Block), &packed, &out);
    assert_eq!((done.cast, done.converted.tensors), (2, 2));
    let after = tensors(&out);
    let [rows, cols] = shape;
    for name in ["a.fc.weight", "b.fc.weight"] {
        let (dtype, found, codes) = &after[name];
        assert_eq!((*dtype, &found[..]), (Dtype::F8_E4M3, &shape[..]));
        let (dtype, found, scales) = &after[&format!("{name}_scale_inv")];
        assert_eq!((*dtype, &found[..]), (Dtype::F32, &[rows.div_ceil(128), cols / 128][..]));
        let scales: Vec<f32> = bytemuck::pod_collect_to_vec(scales);
        let value = |(i, code): (usize, &u8)| {
            let magnitude =
                e4m3_value(code & 0x7F) * f64::from(scales[i / cols / 128 * (cols / 128) + i % cols / 128]);
            if *code >= 0x80 { -magnitude } else { magnitude }
        };
        let values: Vec<f64> = codes.iter().enumerate().map(value).collect();
        assert!(values == decoded(&before, name, Format::Mxfp4), "{name}");
    }
}

#[test]
fn requantizing_is_quantizing_the_values_and_reports_their_errors() {
    let scratch = Scratch::new();
    let shape = [BAND / 512 + 40, 512];
    let input = Tensor::noise::<bf16>("a.fc.weight", &shape, 1);
    let input = write_file(&scratch, "in.safetensors", &[input]);
    let [packed, out] = ["packed", "out"].map(|name| scratch.path(format!("{name}.safetensors")));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let request = Convert { format: Some(Format::Mxfp4), requantize: true, ..Convert::new(OURS) };
    let done = convert(request, &packed, &out);
    let before = in_f32(&decoded(&tensors(&packed), "a.fc.weight", Format::Nvfp4));
    let expected = microscale::quantize(&before, Shape::new(shape[0], shape[1]), &Recipe::default()).unwrap();
    let found = tensors(&out);
    assert!(found["a.fc.weight_packed"].2 == expected.tensor.codes());
    assert!(found["a.fc.weight_scale"].2 == expected.tensor.scales());
    let after = in_f32(&decoded(&found, "a.fc.weight", Format::Mxfp4));
    let differing = before.iter().zip(&after).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let [requantized] = &done.requantized[..] else { panic!("{:?}", done.requantized) };
    assert_eq!(requantized.tensor, "a.fc.weight");
    assert_eq!((requantized.differing, requantized.values), (differing as u64, before.len() as u64));
    assert_eq!(requantized.errors, ErrorStats::between(&before, &after));
    assert_eq!(requantized.report, expected.report);
    assert_eq!((done.cast, done.converted.tensors), (0, 1));
}
