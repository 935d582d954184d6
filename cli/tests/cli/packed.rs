//! Quantized tensors with invalid or mismatched parts: errors that name file and tensor, never a
//! panic.

use half::bf16;
use microscale::{Device, dequantize, gemv_weights};
use microscale_checkpoint::{Checkpoint, Logical, logical};
use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;

/// Returns 4 × 32 zeros in NVFP4, with these scales and this global scale.
fn nvfp4(scales: Vec<u8>, global_scale: (Dtype, &[usize], Vec<u8>)) -> Vec<TensorData> {
    let (dtype, shape, bytes) = global_scale;
    vec![
        ("a.weight_packed", Dtype::U8, vec![4, 16], vec![0; 64]),
        ("a.weight_scale", Dtype::F8_E4M3, vec![4, 2], scales),
        ("a.weight_global_scale", dtype, shape.to_vec(), bytes),
    ]
}

#[test]
fn invalid_global_scales_are_refused() {
    let number = |value: f32| (Dtype::F32, &[1][..], value.to_le_bytes().to_vec());
    for (global_scale, parts) in [
        (number(0.0), &["a global scale of 0 as a divisor is out of range"][..]),
        (number(-0.0), &["a global scale of -0"]),
        (number(-3.0), &["a global scale of -3"]),
        (number(f32::NAN), &["a global scale of NaN"]),
        (number(f32::INFINITY), &["a global scale of inf"]),
        (number(1e-40), &["out of range"]),
        ((Dtype::F32, &[2][..], vec![0; 8]), &["one F32", "F32 of shape [2]"]),
        ((Dtype::F32, &[0][..], vec![]), &["one F32", "F32 of shape [0]"]),
        ((Dtype::BF16, &[1][..], vec![0; 2]), &["one F32", "BF16 of shape [1]"]),
        ((Dtype::I32, &[1][..], vec![1; 4]), &["one F32", "I32"]),
    ] {
        let scratch = Scratch::new();
        let input = scratch.write_tensors("x.safetensors", &nvfp4(vec![0x38; 8], global_scale));
        let out = scratch.path("OUT");
        let parts = [&["x.safetensors", "a.weight_global_scale"], parts].concat();
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        run(&[&"compare", &input, &input]).fails_with(&parts);
        let text = run(&[&"inspect", &input]).ok();
        assert!(text.contains("cannot be read") && parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(!out.exists());
    }
    // A scalar is allowed, too.
    let scratch = Scratch::new();
    let scalar = (Dtype::F32, &[][..], 2f32.to_le_bytes().to_vec());
    let input = scratch.write_tensors("x.safetensors", &nvfp4(vec![0x38; 8], scalar));
    run(&[&"dequantize", &input, &"--out", &scratch.path("OUT")]).ok();
}

#[test]
fn negative_scales_are_refused() {
    let scratch = Scratch::new();
    let mut scales = vec![0x38; 8];
    (scales[5], scales[7]) = (0xB8, 0xFF);
    let global_scale = (Dtype::F32, &[1][..], 1f32.to_le_bytes().to_vec());
    let input = scratch.write_tensors("x.safetensors", &nvfp4(scales, global_scale));
    let out = scratch.path("OUT");
    let parts = ["x.safetensors", "tensor a.weight", "scale 5 is 0xb8", "sign bit"];
    run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
    run(&[&"compare", &input, &input]).fails_with(&parts);
    assert!(!out.exists());
    let text = run(&[&"inspect", &input]).ok();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let counted = |start: &[&str]| words.iter().any(|line| line.starts_with(start));
    assert!(text.contains("tensor a.weight: 2 of 8 scale bytes have the sign bit set"), "{text}");
    assert!(counted(&["1", "56", "6"]) && counted(&["signed", "184", "1"]), "{text}");
    assert!(counted(&["a.weight", "nvfp4", "4×32", "76", "B", "1", "…", "1", "0", "1", "/", "1"]), "{text}");
}

#[test]
fn mxfp8_with_mismatched_scales_is_refused() {
    let scratch = Scratch::new();
    let codes = ("a.weight", Dtype::F8_E4M3, vec![4, 64], vec![0x38; 256]);
    let scales = |shape: &[usize]| {
        ("a.weight_scale", Dtype::U8, shape.to_vec(), vec![127; shape.iter().product::<usize>()])
    };
    for shape in [&[4, 4][..], &[4, 1], &[4], &[8, 1], &[]] {
        let input = scratch.write_tensors("x.safetensors", &[codes.clone(), scales(shape)]);
        let parts = ["x.safetensors", "tensor a.weight", "are not mxfp8-e4m3 blocks of 32"];
        run(&[&"dequantize", &input, &"--out", &scratch.path("OUT")]).fails_with(&parts);
        run(&[&"compare", &input, &input]).fails_with(&parts);
        assert!(run(&[&"inspect", &input]).ok().contains("are not mxfp8-e4m3 blocks of 32"));
    }
}

/// A product reads the mapped checkpoint directly, without a copy.
#[test]
fn views_are_the_bytes_of_the_file() {
    let scratch = Scratch::new();
    let out = scratch.path("OUT");
    run(&[&"quantize", &sample(), &"--format", &"nvfp4", &"--out", &out]).ok();
    let checkpoint = Checkpoint::open(&out).unwrap();
    let mut views = 0;
    for tensor in logical(&checkpoint).unwrap() {
        let Logical::Packed(packed) = tensor else { continue };
        let view = packed.view().unwrap().expect("codes and scales apart");
        assert_eq!(view.codes().as_ptr_range(), packed.codes.data.as_ptr_range(), "{}", packed.name);
        let read = packed.read().unwrap();
        assert!(view == (&read).into() && view.global_scale().is_some(), "{}", packed.name);
        let values: Vec<f32> = packed.values(&Device::Cpu).unwrap();
        assert_eq!(dequantize::<f32>(view), values, "{}", packed.name);
        let (activations, mut products) = (vec![bf16::ONE; view.cols()], vec![bf16::ZERO; view.rows()]);
        gemv_weights(view, &activations, 1, &mut products).unwrap();
        assert!(products.iter().any(|product| *product != bf16::ZERO), "{}", packed.name);
        views += 1;
    }
    assert!(views > 0);
}
