//! Dequantized checkpoints, compared with codes decoded by the oracle.

use std::path::Path;

use half::{bf16, f16};
use microscale::{Device, Dtype, Format, GlobalScale, NonFinite, Position};
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Convert, Dequantize, Dequantized};
use microscale_test_support::Scratch;
use microscale_test_support::oracle::{self, e4m3_value};
use safetensors::tensor::Dtype as InFile;

use crate::input::{Stored, Tensor, noise, write_file, write_model};
use crate::{BAND, Tensors, files, going_on, quantize, request, request_all, tensors};

pub(crate) fn dequantize(input: &Path, out: &Path, dtype: Option<Dtype>) -> Dequantized {
    let checkpoint = Checkpoint::open(input).unwrap();
    let request = Dequantize { dtype, non_finite: NonFinite::Error };
    request.run(&checkpoint, out, &Device::Cpu, going_on()).unwrap()
}

/// Decodes a quantized tensor as compressed-tensors stores it.
pub(crate) fn decoded(tensors: &Tensors, name: &str, format: Format) -> Vec<f64> {
    let codes = match format {
        Format::Mxfp8E4m3 => &tensors[name].2,
        _ => &tensors[&format!("{name}_packed")].2,
    };
    let scales = &tensors[&format!("{name}_scale")].2;
    let divisor = tensors.get(&format!("{name}_global_scale"));
    let global =
        divisor.map(|(.., bytes)| GlobalScale::Divisor(f32::from_le_bytes(bytes[..].try_into().unwrap())));
    let codes = oracle::unpack(format, codes);
    let value = |(i, code): (usize, &u8)| oracle::value(format, *code, scales[i / format.block()], global);
    codes.iter().enumerate().map(value).collect()
}

fn as_bytes<T: Stored>(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    let values: Vec<T> = values.into_iter().map(T::round_f64).collect();
    bytemuck::cast_slice(&values).to_vec()
}

#[test]
fn values_are_codes_times_scales_in_every_format_and_dtype() {
    let scratch = Scratch::new();
    let shapes: [&[usize]; 4] = [&[3, 64], &[BAND / 512, 512], &[1000, 544], &[3, BAND / 512, 256]];
    let fc = |(i, shape): (u64, &&[usize])| Tensor::noise::<bf16>(format!("a.{i}.fc.weight"), shape, i);
    let mut input: Vec<_> = (0..).zip(&shapes).map(fc).collect();
    input.push(Tensor::noise::<f32>("a.norm.weight", &[64], 9));
    let original = write_file(&scratch, "in.safetensors", &input);
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        let packed = scratch.path(format!("{format:?}.safetensors"));
        quantize(&request_all(format), &original, &packed).unwrap();
        let stored = tensors(&packed);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let out = scratch.path(format!("{format:?}.{dtype:?}.safetensors"));
            let done = dequantize(&packed, &out, Some(dtype));
            let back = tensors(&out);
            assert_eq!(back.len(), input.len());
            assert_eq!(back["a.norm.weight"].2, input[4].bytes);
            for tensor in &input[..4] {
                let values = decoded(&stored, &tensor.name, format);
                let (in_file, expected) = match dtype {
                    Dtype::F32 => (InFile::F32, as_bytes::<f32>(values)),
                    Dtype::F16 => (InFile::F16, as_bytes::<f16>(values)),
                    Dtype::Bf16 => (InFile::BF16, as_bytes::<bf16>(values)),
                };
                let (dtype, shape, bytes) = &back[&tensor.name];
                assert_eq!((dtype, shape), (&in_file, &tensor.shape), "{}", tensor.name);
                assert!(*bytes == expected, "{format}: {}", tensor.name);
            }
            let elements: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
            let bytes = stored.iter().filter(|(name, _)| !name.contains("norm")).map(|(_, t)| t.2.len());
            let sums = done.dequantized;
            assert_eq!((sums.tensors, sums.elements), (4, elements as u64));
            assert_eq!(sums.bytes_before, bytes.sum::<usize>() as u64, "{format}");
            assert_eq!(sums.bytes_after, sums.elements * if dtype == Dtype::F32 { 4 } else { 2 });
            assert_eq!((done.copied.tensors, done.copied.elements), (1, 64));
            assert_eq!((done.copied.bytes_before, done.copied.bytes_after), (256, 256));
            assert_eq!((done.nan_scales, done.report), (0, microscale::Report::default()));
        }
    }
}

#[test]
fn mxfp4_that_is_dequantized_and_quantized_again_stays_as_it_is() {
    let scratch = Scratch::new();
    let input = [Tensor::noise::<bf16>("a.fc.weight", &[BAND / 256 + 7, 512], 1)];
    let input = write_model(&scratch, "IN", &[("a.safetensors", input.to_vec())]);
    let [first, values, second] = ["FIRST", "VALUES", "SECOND"].map(|name| scratch.path(name));
    quantize(&request(Format::Mxfp4), &input, &first).unwrap();
    dequantize(&first, &values, None);
    assert_eq!(tensors(&values)["a.fc.weight"].0, InFile::BF16);
    quantize(&request(Format::Mxfp4), &values, &second).unwrap();
    assert!(files(&first) == files(&second));
}

#[test]
fn fp8_is_decoded_under_the_scales_of_blocks_or_rows() {
    let scratch = Scratch::new();
    // Three bands and a ragged last block in both directions.
    let (rows, cols) = (3 * BAND / 1000, 1000);
    let mut random = fastrand::Rng::with_seed(1);
    let codes: Vec<_> = (0..rows * cols).map(|_| random.u8(..0x7F) | random.u8(..2) << 7).collect();
    let (down, across) = (rows.div_ceil(128), cols.div_ceil(128));
    let scale = |value: &f32| value.abs() / 1000.0;
    let of_blocks: Vec<f32> = noise(down * across, 2).iter().map(scale).collect();
    let of_rows: Vec<f32> = noise(rows, 3).iter().map(scale).collect();
    let weight = |name: &str| Tensor::of_bytes(name, InFile::F8_E4M3, &[rows, cols], &codes);
    let shards = [
        ("a.safetensors", vec![weight("a.fc.weight"), weight("b.fc.weight")]),
        (
            "b.safetensors",
            vec![
                Tensor::of("a.fc.weight_scale_inv", &[down, across], &of_blocks),
                Tensor::of("b.fc.weight_scale", &[rows, 1], &of_rows),
            ],
        ),
    ];
    let config = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
    scratch.write("IN/config.json", config);
    let input = write_model(&scratch, "IN", &shards);
    let done = dequantize(&input, &scratch.path("OUT"), Some(Dtype::F32));
    let back = tensors(&scratch.path("OUT"));
    assert_eq!(back.len(), 2);
    let number = |i: usize| {
        let magnitude = e4m3_value(codes[i] & 0x7F) as f32;
        if codes[i] >= 0x80 { -magnitude } else { magnitude }
    };
    for (name, scale) in [
        (
            "a.fc.weight",
            &(|i: usize| of_blocks[i / cols / 128 * across + i % cols / 128]) as &dyn Fn(usize) -> f32,
        ),
        ("b.fc.weight", &|i: usize| of_rows[i / cols]),
    ] {
        let expected: Vec<f32> = (0..rows * cols).map(|i| number(i) * scale(i)).collect();
        assert!(back[name].2 == bytemuck::cast_slice::<f32, u8>(&expected), "{name}");
    }
    let bytes = 2 * codes.len() + 4 * (of_blocks.len() + of_rows.len());
    assert_eq!((done.dequantized.tensors, done.dequantized.bytes_before), (2, bytes as u64));
    assert_eq!(done.dequantized.bytes_after, 8 * codes.len() as u64);
}

#[test]
fn blocks_under_nan_scales_are_nan_and_counted_in_all_bands() {
    let scratch = Scratch::new();
    let (rows, wrong) = (2 * BAND / 512 + 3, [5, BAND / 32 - 1, BAND / 32, 2 * BAND / 32 + 40]);
    let codes = [0x21; 256];
    let mut scales = vec![127; rows * 16];
    wrong.iter().for_each(|block| scales[*block] = 255);
    let stored = [
        Tensor::of_bytes("a.weight_packed", InFile::U8, &[rows, 256], &codes.repeat(rows)),
        Tensor::of_bytes("a.weight_scale", InFile::U8, &[rows, 16], &scales),
    ];
    let input = write_file(&scratch, "in.safetensors", &stored);
    let out = scratch.path("out.safetensors");
    let done = dequantize(&input, &out, Some(Dtype::F32));
    assert_eq!((done.nan_scales, done.report.nan, done.report.infinite), (4, 4 * 32, 0));
    assert_eq!(done.report.first_non_finite, Some(Position { row: 0, col: 5 * 32 }));
    let values: Vec<f32> = bytemuck::pod_collect_to_vec(&tensors(&out)["a.weight"].2);
    for (block, values) in values.chunks(32).enumerate() {
        let right = |value: &f32| if wrong.contains(&block) { value.is_nan() } else { *value > 0.0 };
        assert!(values.iter().all(right), "block {block}");
    }
    // Converting keeps these scales as well.
    let checkpoint = Checkpoint::open(&input).unwrap();
    let again = scratch.path("again.safetensors");
    Convert::new(CheckpointFormat::CompressedTensors)
        .run(&checkpoint, &again, &Device::Cpu, going_on())
        .unwrap();
    assert!(tensors(&again) == tensors(&input));
}
