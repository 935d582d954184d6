//! `convert --requantize`: tensors without an exact cast are quantized again, or rounded to FP8 or
//! bf16, with a report.

use std::path::{Path, PathBuf};

use microscale::formats::{E2m1, E4m3, E8m0};
use microscale_test_support::{Scratch, run};
use safetensors::tensor::Dtype;

use super::{floats, noise, quantize, tensors};

const ROWS: usize = 160;
const COLS: usize = 256;

/// Dequantizes a checkpoint to f32 and quantizes it to `out`.
fn quantized_anew(scratch: &Scratch, input: &Path, out: &str, options: &[&str]) -> PathBuf {
    let values = format!("{out}.f32.safetensors");
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path(&values)]).ok();
    quantize(scratch, &scratch.path(&values), out, options).ok();
    scratch.path(out)
}

fn same_tensors(ours: &Path, expected: &Path) {
    let (ours, expected) = (tensors(ours), tensors(expected));
    assert!(ours.keys().eq(expected.keys()), "{:?} and {:?}", ours.keys(), expected.keys());
    for (name, tensor) in &ours {
        assert_eq!((tensor.0, &tensor.1), (expected[name].0, &expected[name].1), "{name}");
        assert!(tensor.2 == expected[name].2, "{name}");
    }
}

/// Writes noise in NVFP4.
fn nvfp4(scratch: &Scratch) -> PathBuf {
    let weight = ("a.weight", Dtype::F32, vec![ROWS, COLS], floats(&noise(ROWS * COLS)));
    let input = scratch.write_tensors("x.safetensors", &[weight]);
    quantize(scratch, &input, "nvfp4.safetensors", &["--format", "nvfp4"]).ok();
    scratch.path("nvfp4.safetensors")
}

#[test]
fn inexact_tensors_are_quantized_from_their_values() {
    let scratch = Scratch::new();
    let input = nvfp4(&scratch);
    for format in ["mxfp8-e4m3", "mxfp4"] {
        let out = scratch.path(format!("{format}.safetensors"));
        let command: [&dyn AsRef<std::ffi::OsStr>; 8] =
            [&"convert", &input, &"--to", &"compressed-tensors", &"--format", &format, &"--out", &out];
        run(&command).fails_with(&["a.weight", "as --requantize does"]);
        assert!(!out.exists());
        let text = run(&[&command[..], &[&"--requantize"]].concat()).ok();
        let line = text.lines().find(|line| line.starts_with("a.weight")).unwrap_or_default().to_string();
        assert!(line.contains("nvfp4") && line.contains(format) && line.contains("of 40,960"), "{text}");
        assert!(text.contains("\n0 tensors have the same values"), "{text}");
        let expected =
            quantized_anew(&scratch, &input, &format!("{format}.anew.safetensors"), &["--format", format]);
        same_tensors(&out, &expected);
    }
}

/// Returns codes and scales of MXFP4. The scales include both ends of the range.
fn mxfp4(powers: std::ops::RangeInclusive<u8>, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let codes = (0..ROWS * COLS / 2).map(|_| random.u8(..)).collect();
    let mut scales: Vec<u8> = (0..ROWS * COLS / 32).map(|_| random.u8(powers.clone())).collect();
    (scales[0], scales[1]) = (*powers.start(), *powers.end());
    (codes, scales)
}

#[test]
fn a_fused_layer_is_quantized_again_as_a_whole_and_others_stay_exact() {
    let scratch = Scratch::new();
    let names = [
        ("model.layers.0.self_attn.q_proj.weight_packed", "model.layers.0.self_attn.q_proj.weight_scale"),
        ("model.layers.0.self_attn.k_proj.weight_packed", "model.layers.0.self_attn.k_proj.weight_scale"),
        ("model.layers.0.self_attn.v_proj.weight_packed", "model.layers.0.self_attn.v_proj.weight_scale"),
        ("model.layers.0.self_attn.o_proj.weight_packed", "model.layers.0.self_attn.o_proj.weight_scale"),
    ];
    let of = [100..=120, 110..=112, 111..=115, 100..=110].into_iter().zip(1..);
    let made: Vec<_> = of.map(|(powers, seed)| mxfp4(powers, seed)).collect();
    let stored: Vec<_> = names
        .into_iter()
        .zip(&made)
        .flat_map(|((codes, scales), made)| {
            [
                (codes, Dtype::U8, vec![ROWS, COLS / 2], made.0.clone()),
                (scales, Dtype::U8, vec![ROWS, COLS / 32], made.1.clone()),
            ]
        })
        .collect();
    let input = scratch.write_tensors("x.safetensors", &stored);
    for to in ["compressed-tensors", "modelopt"] {
        let out = scratch.path(format!("{to}.safetensors"));
        let command: [&dyn AsRef<std::ffi::OsStr>; 8] =
            [&"convert", &input, &"--to", &to, &"--format", &"nvfp4", &"--out", &out];
        run(&command).fails_with(&["self_attn.", "21 powers of two", "--requantize"]);
        let text = run(&[&command[..], &[&"--requantize"]].concat()).ok();
        assert!(
            text.contains("\n1 tensors have the same values") && text.contains("\n1 of them were cast"),
            "{text}"
        );
        assert!(text.contains("blocks flushed to zero"), "{text}");
        let options = ["--format", "nvfp4", "--to", to];
        let expected =
            tensors(&quantized_anew(&scratch, &input, &format!("{to}.anew.safetensors"), &options));
        let ours = tensors(&out);
        assert!(ours.keys().eq(expected.keys()));
        for (name, tensor) in ours.iter().filter(|(name, _)| !name.contains("o_proj")) {
            assert!(tensor.2 == expected[name].2, "{to}: {name}");
        }
        // Exact: the codes are unchanged.
        let codes = ours.iter().find(|(name, _)| name.contains("o_proj.weight") && !name.contains("scale"));
        assert!(codes.unwrap().1.2 == made[3].0);
    }
}

#[test]
fn blocks_that_fp8_cannot_hold_are_rounded_and_others_are_not() {
    let scratch = Scratch::new();
    // Scales are 2^20 apart in the first 128×128 block, and 2^3 in the others.
    let (codes, mut scales) = mxfp4(117..=120, 9);
    (scales[0], scales[COLS / 32]) = (100, 120);
    let stored = [
        ("a.weight_packed", Dtype::U8, vec![ROWS, COLS / 2], codes.clone()),
        ("a.weight_scale", Dtype::U8, vec![ROWS, COLS / 32], scales.clone()),
    ];
    let input = scratch.write_tensors("x.safetensors", &stored);
    let out = scratch.path("out.safetensors");
    let command: [&dyn AsRef<std::ffi::OsStr>; 6] =
        [&"convert", &input, &"--to", &"fp8-block", &"--out", &out];
    run(&command).fails_with(&["1 of 4 blocks of 128×128", "--requantize"]);
    let text = run(&[&command[..], &[&"--requantize"]].concat()).ok();
    assert!(text.contains("fp8-block") && text.contains("quantized again"), "{text}");
    let ours = tensors(&out);
    let number = |i: usize| {
        let code = codes[i / 2] >> (4 * (i % 2)) & 0xF;
        E2m1::from_bits(code).to_f32() * E8m0::from_bits(scales[i / 32]).to_f32()
    };
    let stored: Vec<f32> =
        ours["a.weight_scale_inv"].2.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let block = |i: usize| i / COLS / 128 * 2 + i % COLS / 128;
    let amax = (0..ROWS * COLS).filter(|i| block(*i) == 0).map(|i| number(i).abs()).fold(0.0, f32::max);
    // The factor and its inverse, computed as in transformers.
    assert_eq!(stored[0], 1.0 / (448.0 / amax));
    assert!(stored[1..].iter().all(|scale| scale.to_bits() & 0x007F_FFFF == 0), "{stored:?}");
    for (i, code) in ours["a.weight"].2.iter().enumerate() {
        let (number, block) = (number(i), block(i));
        if block == 0 {
            assert_eq!(*code, E4m3::from_f32(number * (448.0 / amax)).to_bits(), "{i}");
        } else {
            assert_eq!(E4m3::from_bits(*code).to_f32() * stored[block], number, "{i}");
        }
    }
}

#[test]
fn codes_under_scales_that_bf16_cannot_hold_are_rounded_to_it() {
    let scratch = Scratch::new();
    let (codes, scales) = mxfp4(110..=112, 4);
    let stored = [
        ("a.weight_packed", Dtype::U8, vec![ROWS, COLS / 2], codes),
        ("a.weight_scale", Dtype::U8, vec![ROWS, COLS / 32], scales),
        ("b.weight", Dtype::F8_E4M3, vec![130, 2], [0x38, 0x39, 0x3A, 0x00].repeat(65)),
        ("b.weight_scale_inv", Dtype::F32, vec![2, 1], floats(&[1.0 / 3.0; 2])),
    ];
    let input = scratch.write_tensors("x.safetensors", &stored);
    for to in ["compressed-tensors", "fp8-block"] {
        let out = scratch.path(format!("{to}.safetensors"));
        let command: [&dyn AsRef<std::ffi::OsStr>; 7] =
            [&"convert", &input, &"--to", &to, &"--out", &out, &"--requantize"];
        if to == "compressed-tensors" {
            run(&command[..6]).fails_with(&["b.weight", "--requantize"]);
            let text = run(&command).ok();
            assert!(text.contains("bf16") && text.contains("of 260"), "{text}");
            let expected: Vec<u8> = [1.0f32 / 3.0, 1.125 / 3.0, 1.25 / 3.0, 0.0]
                .iter()
                .flat_map(|value| half::bf16::from_f32(*value).to_le_bytes())
                .collect::<Vec<u8>>()
                .repeat(65);
            assert_eq!(tensors(&out)["b.weight"].2, expected);
        } else {
            // The input is block FP8 already.
            run(&command[..6]).ok();
        }
    }
}
