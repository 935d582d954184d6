//! ComfyUI's files: NVFP4 with the first code of a byte in its high half, MXFP8, and tiled scales.

use std::fs;

use microscale::formats::E4m3;
use microscale_test_support::golden::folder;
use microscale_test_support::{Scratch, TensorData, run};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{floats, noise, quantize, tensors};

const ROWS: usize = 160;
const COLS: usize = 96;

fn said(format: &str) -> Vec<u8> {
    json!({ "format": format }).to_string().into_bytes()
}

/// Returns the offset of a scale in tiles of 128 rows and 4 blocks, which interleave rows 32 apart.
fn place(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / 128 * blocks.div_ceil(4) + block / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
}

#[test]
fn comfyui_files_equal_other_formats_in_another_order() {
    let scratch = Scratch::new();
    let weight = ("a.weight", Dtype::F32, vec![ROWS, COLS], floats(&noise(ROWS * COLS)));
    let odd = ("b.weight", Dtype::F32, vec![24, COLS], floats(&noise(24 * COLS)));
    let input = scratch.write_tensors("x.safetensors", &[weight, odd.clone()]);
    for (format, like, bits, block) in
        [("nvfp4", "modelopt", 4, 16), ("mxfp8-e4m3", "compressed-tensors", 8, 32)]
    {
        let options = |to| ["--format", format, "--to", to];
        let names = [format!("{format}.comfy.safetensors"), format!("{format}.like.safetensors")];
        let said_of = quantize(&scratch, &input, &names[0], &options("comfyui")).ok();
        assert!(said_of.contains("N = 24 is not a multiple of"), "{said_of}");
        let mut of_like = options(like).to_vec();
        of_like.extend(["--exclude", "b.*"]);
        quantize(&scratch, &input, &names[1], &of_like).ok();
        let [ours, like_file] = names.map(|name| scratch.path(name));
        let (comfy, other) = (tensors(&ours), tensors(&like_file));
        assert_eq!(comfy["b.weight"].2, odd.3);
        let word = format.split('-').next().unwrap();
        assert_eq!(comfy["a.comfy_quant"].2, said(word));
        let (codes, others) = (&comfy["a.weight"], &other["a.weight"]);
        assert_eq!((codes.0, &codes.1), (others.0, &others.1));
        let order = |byte: &u8| if bits == 4 { byte.rotate_left(4) } else { *byte };
        assert!(codes.2.iter().map(order).eq(others.2.iter().copied()));
        let (scales, others) = (&comfy["a.weight_scale"], &other["a.weight_scale"].2);
        let blocks = COLS / block;
        assert_eq!(scales.1, [256, blocks.next_multiple_of(4)]);
        assert_eq!(scales.0, if bits == 4 { Dtype::F8_E4M3 } else { Dtype::F8_E8M0 });
        let mut expected = vec![0; scales.2.len()];
        for (i, scale) in others.iter().enumerate() {
            expected[place(i / blocks, i % blocks, blocks)] = *scale;
        }
        assert_eq!(scales.2, expected);
        let global = |name: &str| comfy.get(name).map(|tensor| tensor.2.clone());
        assert_eq!(global("a.weight_scale_2"), other.get("a.weight_scale_2").map(|tensor| tensor.2.clone()));
        // A conversion and its reverse give the same bytes.
        for (from, to, expected) in [(&ours, like, &other), (&like_file, "comfyui", &comfy)] {
            let out = scratch.path(format!("{format}.{to}.converted.safetensors"));
            run(&[&"convert", from, &"--to", &to, &"--out", &out]).ok();
            let converted = tensors(&out);
            assert_eq!(converted.len(), expected.len());
            for (name, (dtype, shape, bytes, _)) in expected {
                let found = &converted[name];
                assert!((dtype, shape, bytes) == (&found.0, &found.1, &found.2), "{format} {to} {name}");
            }
        }
        run(&[&"compare", &ours, &like_file]).ok();
        assert!(run(&[&"inspect", &ours]).ok().contains(word));
        assert_eq!(run(&[&"doctor", &ours, &"--against", &input]).code, Some(0));
    }
}

#[test]
fn layers_that_the_metadata_name_are_read_and_named_one_by_one() {
    let scratch = Scratch::new();
    let input = folder("scaled").join("comfy-kitchen-0.2.40-metadata.safetensors");
    let out = scratch.path("out.safetensors");
    run(&[&"convert", &input, &"--to", &"comfyui", &"--out", &out]).ok();
    let (before, after) = (tensors(&input), tensors(&out));
    for (name, (dtype, shape, bytes, _)) in &before {
        assert!((dtype, shape, bytes) == (&after[name].0, &after[name].1, &after[name].2), "{name}");
    }
    let texts: Vec<_> = after.keys().filter(|name| !before.contains_key(*name)).collect();
    assert!(texts.len() == 2 && texts.iter().all(|name| name.ends_with(".comfy_quant")), "{texts:?}");
    let bytes = fs::read(&out).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert!(metadata.contains_key("library") && !metadata.contains_key("_quantization_metadata"));
}

#[test]
fn unknown_layouts_are_refused_by_name() {
    let scratch = Scratch::new();
    let eight = ("a.weight", Dtype::F8_E4M3, vec![128, 128], vec![0x21; 128 * 128]);
    let write = |format: &str, tensors: &[TensorData]| {
        let bytes = said(format);
        let says = ("a.comfy_quant", Dtype::U8, vec![bytes.len()], bytes);
        let tensors: Vec<_> = tensors.iter().cloned().chain([says]).collect();
        scratch.write_tensors("comfy.safetensors", &tensors)
    };
    let out = scratch.path("F32.safetensors");
    for (format, parts) in [
        ("int8_tensorwise", &["a.comfy_quant", "not understood"][..]),
        ("mxfp8", &["a.comfy_quant", "a.weight_scale", "complete the checkpoint"]),
    ] {
        let input = write(format, std::slice::from_ref(&eight));
        let mut all = vec!["a.weight", "ComfyUI", format];
        all.extend(parts);
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&all);
        assert!(!out.exists());
    }
    // Scales that are not tiled match no known format.
    let linear = ("a.weight_scale", Dtype::U8, vec![64, 4], vec![127; 256]);
    let half = ("a.weight", Dtype::F8_E4M3, vec![64, 128], vec![0x21; 64 * 128]);
    run(&[&"dequantize", &write("mxfp8", &[half, linear]), &"--out", &out])
        .fails_with(&["a.weight", "[64, 4]"]);
    // ComfyUI pads such rows.
    let scale = ("a.weight_scale", Dtype::U8, vec![24, 4], vec![127; 96]);
    let few = ("a.weight", Dtype::F8_E4M3, vec![24, 128], vec![0x21; 24 * 128]);
    let few = scratch.write_tensors("few.safetensors", &[few, scale]);
    run(&[&"convert", &few, &"--to", &"comfyui", &"--out", &out]).fails_with(&[
        "a.weight",
        "N = 24 is not a multiple of 32",
        "comfyui",
    ]);
    // A single scale has no order.
    let input = write("float8_e4m3fn", &[eight, ("a.weight_scale", Dtype::F32, vec![], floats(&[0.5]))]);
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &out]).ok();
    let value = 0.5 * E4m3::from_bits(0x21).to_f32();
    assert_eq!(tensors(&out)["a.weight"].2, floats(&[value; 128 * 128]));
    assert_eq!(tensors(&out).len(), 1);
}

#[test]
fn mxfp8_is_quantized_like_that_of_others() {
    let scratch = Scratch::new();
    let weight = ("a.weight", Dtype::F32, vec![ROWS, COLS], floats(&noise(ROWS * COLS)));
    let input = scratch.write_tensors("x.safetensors", &[weight]);
    for to in ["comfyui", "compressed-tensors"] {
        let options = ["--format", "mxfp8-e4m3", "--to", to];
        quantize(&scratch, &input, &format!("{to}.safetensors"), &options).ok();
    }
    for options in
        [&["--format", "nvfp4"][..], &["--format", "mxfp4"], &["--format", "nvfp4", "--to", "comfyui"]]
    {
        let made = ["comfyui", "compressed-tensors"].map(|from| {
            let out = format!("{from}.{}.safetensors", options.concat());
            quantize(&scratch, &scratch.path(format!("{from}.safetensors")), &out, options).ok();
            tensors(&scratch.path(&out))
        });
        let [ours, expected] = made.map(|tensors| {
            tensors
                .into_iter()
                .map(|(name, (dtype, shape, data, _))| (name, dtype, shape, data))
                .collect::<Vec<_>>()
        });
        assert_eq!(ours, expected, "{options:?}");
    }
}
