//! ModelOpt's FP8_PB_WO as input.

use std::path::PathBuf;

use microscale_test_support::{Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::scaled::{SHAPE, bf16s, codes, dequantized, scales};
use super::{floats, quantize, tensors};

/// Writes ModelOpt's FP8_PB_WO export, with scales of [⌈N/128⌉, 1, ⌈K/128⌉, 1].
fn fp8_pb_wo(scratch: &Scratch, config_file: &str) -> PathBuf {
    let scale: TensorData =
        ("model.layers.0.mlp.up_proj.weight_scale", Dtype::F32, vec![2, 1, 3, 1], floats(&scales(2)));
    let stored: [TensorData; 3] = [
        ("lm_head.weight", Dtype::BF16, vec![64, 320], bf16s(64 * 320)),
        ("model.layers.0.mlp.up_proj.weight", Dtype::F8_E4M3, SHAPE.to_vec(), codes(1)),
        scale,
    ];
    scratch.write_tensors("IN/model.safetensors", &stored);
    let details = json!({ "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"] });
    let (mut config, producer) = (json!({ "model_type": "qwen3" }), json!({ "name": "modelopt" }));
    if config_file == "config.json" {
        config["quantization_config"] =
            json!({ "quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"] });
    } else {
        let own = json!({ "producer": producer, "quantization": details });
        scratch.write(format!("IN/{config_file}"), own.to_string());
    }
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

#[test]
fn fp8_pb_wo_has_a_scale_for_each_block_in_four_dimensions() {
    let name = "model.layers.0.mlp.up_proj.weight";
    for config_file in ["config.json", "hf_quant_config.json"] {
        let scratch = Scratch::new();
        let input = fp8_pb_wo(&scratch, config_file);
        let (codes, scales) = (codes(1), scales(2));
        let mut expected = Vec::new();
        for row in 0..SHAPE[0] {
            for col in 0..SHAPE[1] {
                let code = codes[row * SHAPE[1] + col];
                let (exponent, fraction) = (i32::from(code >> 3 & 0xF), f32::from(code & 7));
                let magnitude = match exponent {
                    0 => fraction * 2f32.powi(-9),
                    _ => (8.0 + fraction) * 2f32.powi(exponent - 10),
                };
                let number = if code & 0x80 == 0 { magnitude } else { -magnitude };
                expected.push(number * scales[row / 128 * 3 + col / 128]);
            }
        }
        let back = dequantized(&scratch, "f32");
        assert!(back.keys().eq(["lm_head.weight", name]), "{:?}", back.keys());
        assert_eq!((&back[name].0, &back[name].1[..]), (&Dtype::F32, &SHAPE[..]));
        assert_eq!(back[name].2, floats(&expected), "{config_file}");
        let text = run(&[&"inspect", &input]).ok();
        assert!(text.contains("F32 for 128×128") && text.contains("2 tensors in 1 file"), "{text}");
        run(&[&"doctor", &input]).ok();
        for options in [&["--format", "nvfp4"][..], &["--format", "mxfp4"]] {
            let (out, other) = (format!("Q{}", options[1]), format!("F{}", options[1]));
            quantize(&scratch, &input, &out, options).ok();
            quantize(&scratch, &scratch.path("f32"), &other, options).ok();
            let (ours, expected) = (tensors(&scratch.path(&out)), tensors(&scratch.path(&other)));
            let quantized: Vec<_> = ours.iter().filter(|(found, _)| found.starts_with(name)).collect();
            assert!(quantized.len() >= 2, "{:?}", ours.keys());
            for (found, (_, shape, bytes, _)) in quantized {
                assert_eq!((shape, bytes), (&expected[found].1, &expected[found].2), "{found}");
            }
            run(&[&"doctor", &scratch.path(&out), &"--against", &input]).ok();
        }
    }
}

#[test]
fn fp8_pb_wo_without_fitting_scales_is_refused_by_name() {
    let scratch = Scratch::new();
    fp8_pb_wo(&scratch, "hf_quant_config.json");
    let weight: TensorData = ("a.weight", Dtype::F8_E4M3, SHAPE.to_vec(), codes(1));
    let few: TensorData = ("a.weight_scale", Dtype::F32, vec![2, 1, 2, 1], floats(&[0.5; 4]));
    for (stored, parts) in [
        (vec![weight.clone(), few], ["[200, 320]", "[2, 1, 2, 1]"]),
        (vec![weight], ["its scales, a.weight_scale, are missing", "a.weight"]),
    ] {
        scratch.write_tensors("IN/model.safetensors", &stored);
        quantize(&scratch, &scratch.path("IN"), "OUT", &[]).fails_with(&parts);
    }
}
