//! GGUF files: written and read back, with unchanged metadata.

use half::{bf16, f16};
use microscale::{Format, Numerics, Recipe, Shape, quantize as quantized};
use microscale_test_support::{Scratch, run, sample};

use super::{floats, noise, quantize};

/// A tensor of a file: name, sizes with the slowest first, ggml's type, bytes.
pub(super) type Stored = (String, Vec<u64>, u32, Vec<u8>);

pub(super) const F32: u32 = 0;
const Q8_0: u32 = 8;
const BF16: u32 = 30;
const MXFP4: u32 = 39;
pub(super) const NVFP4: u32 = 40;

pub(super) fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

pub(super) fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    text(&mut bytes, key);
    bytes.extend(kind.to_le_bytes());
    bytes.extend(value);
    bytes
}

/// Returns a file's first metadata entries: a string, the file type, a float, an array.
pub(crate) fn metadata() -> Vec<Vec<u8>> {
    let mut architecture = Vec::new();
    text(&mut architecture, "llama");
    let array =
        [&5u32.to_le_bytes()[..], &3u64.to_le_bytes(), &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]].concat();
    vec![
        entry("general.architecture", 8, &architecture),
        entry("general.file_type", 4, &0u32.to_le_bytes()),
        entry("llama.rope.freq_base", 6, &10000f32.to_le_bytes()),
        entry("some.array", 9, &array),
    ]
}

/// Returns a file in ggml's layout.
pub(super) fn file(metadata: &[Vec<u8>], tensors: &[Stored]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    bytes.extend(metadata.concat());
    let mut offset = 0u64;
    for (name, shape, kind, data) in tensors {
        text(&mut bytes, name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += (data.len() as u64).next_multiple_of(32);
    }
    for (.., data) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// Reads a trusted file: the bytes of each entry, and tensors.
pub(super) fn parse(bytes: &[u8]) -> (Vec<(String, Vec<u8>)>, Vec<Stored>) {
    let at = std::cell::Cell::new(8);
    let take = |n: usize| {
        let start = at.replace(at.get() + n);
        &bytes[start..start + n]
    };
    let u64 = || u64::from_le_bytes(take(8).try_into().unwrap());
    let u32 = || u32::from_le_bytes(take(4).try_into().unwrap());
    let text = || String::from_utf8(take(u64() as usize).to_vec()).unwrap();
    let (tensors, entries) = (u64(), u64());
    let mut metadata = Vec::new();
    for _ in 0..entries {
        let start = at.get();
        let key = text();
        match u32() {
            2 | 3 => drop(take(2)),
            8 => drop(text()),
            9 => {
                assert_eq!(u32(), 5);
                take(4 * u64() as usize);
            }
            _ => drop(take(4)),
        }
        metadata.push((key, bytes[start..at.get()].to_vec()));
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let name = text();
        let mut shape: Vec<u64> = (0..u32()).map(|_| u64()).collect();
        shape.reverse();
        infos.push((name, shape, u32(), u64()));
    }
    let data = at.get().next_multiple_of(32);
    let stored = infos.into_iter().map(|(name, shape, kind, offset)| {
        let elements: u64 = shape.iter().product();
        let size = match kind {
            F32 => elements * 4,
            BF16 => elements * 2,
            Q8_0 => elements / 32 * 34,
            MXFP4 => elements / 32 * 17,
            NVFP4 => elements / 64 * 36,
            _ => panic!("type {kind}"),
        };
        let start = data + offset as usize;
        (name, shape, kind, bytes[start..start + size as usize].to_vec())
    });
    (metadata, stored.collect())
}

/// Builds ggml's blocks of codes and scales, element by element.
pub(super) fn blocks(codes: &[u8], scales: &[u8], kind: u32) -> Vec<u8> {
    let code = |element: usize| codes[element / 2] >> (4 * (element % 2)) & 15;
    let (size, together) = if kind == MXFP4 { (32, 1) } else { (16, 4) };
    let mut bytes = Vec::new();
    for (i, scales) in scales.chunks(together).enumerate() {
        bytes.extend(scales);
        for group in 0..together {
            let first = (i * together + group) * size;
            bytes.extend((first..first + size / 2).map(|j| code(j) | code(j + size / 2) << 4));
        }
    }
    bytes
}

/// Returns a model's tensors: some to quantize, and others.
pub(crate) fn model() -> Vec<Stored> {
    let bf16s = |n| noise(n).iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    let tensor = |name: &str, shape: &[u64], kind, data| (name.to_string(), shape.to_vec(), kind, data);
    vec![
        tensor("token_embd.weight", &[8, 64], F32, floats(&noise(512))),
        tensor("blk.0.attn_q.weight", &[6, 128], BF16, bf16s(768)),
        tensor("blk.0.attn_norm.weight", &[128], F32, floats(&noise(128))),
        tensor("blk.0.ffn_down.weight", &[4, 96], F32, floats(&noise(384))),
        tensor("blk.0.ffn_gate_inp.weight", &[2, 64], F32, floats(&noise(128))),
        tensor("blk.0.ffn_up_exps.weight", &[3, 4, 64], F32, floats(&noise(768))),
        tensor("output.weight", &[8, 64], F32, floats(&noise(512))),
    ]
}

#[test]
fn quantized_tensors_are_blocks_and_the_metadata_stays() {
    for (format, word, kind, file_type) in
        [(Format::Mxfp4, "mxfp4", MXFP4, 38u32), (Format::Nvfp4, "nvfp4", NVFP4, 39)]
    {
        let scratch = Scratch::new();
        let input = scratch.write("in.gguf", file(&metadata(), &model()));
        let text = quantize(&scratch, &input, "out.gguf", &["--format", word]).ok();
        assert!(text.contains("files   gguf"), "{text}");
        let (entries, tensors) = parse(&std::fs::read(scratch.path("out.gguf")).unwrap());
        let mut expected = metadata();
        expected[1] = entry("general.file_type", 4, &file_type.to_le_bytes());
        expected.push(entry("general.quantization_version", 4, &2u32.to_le_bytes()));
        assert_eq!(entries.into_iter().map(|(_, raw)| raw).collect::<Vec<_>>(), expected);

        let recipe = Recipe::of(format, Numerics::default_for(format)).unwrap();
        let mut found = tensors.iter();
        for (name, shape, before, data) in model() {
            let stored = found.next().unwrap();
            // NVFP4 blocks have 64 elements in GGUF, which do not divide 96.
            let goes = ["attn_q", "ffn_down", "exps"].iter().any(|part| name.contains(part));
            if !goes || kind == NVFP4 && shape.last() == Some(&96) {
                assert_eq!(*stored, (name, shape, before, data));
                continue;
            }
            let rows: u64 = shape[..shape.len() - 1].iter().product();
            let matrix = Shape::new(rows as usize, *shape.last().unwrap() as usize);
            let made = if before == F32 {
                let values: Vec<f32> =
                    data.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
                quantized(&values, matrix, &recipe)
            } else {
                quantized(&super::bf16s(&data), matrix, &recipe)
            };
            let made = made.unwrap().tensor;
            let expected = blocks(made.codes(), made.scales(), kind);
            assert_eq!(*stored, (name.clone(), shape.clone(), kind, expected), "{name}");
            if let Some(global) = made.global_scale() {
                let (scale, count) = (1.0 / global.value(), if shape.len() == 3 { shape[0] } else { 1 });
                let bytes = scale.to_le_bytes().repeat(count as usize);
                let name = name.replace(".weight", ".scale");
                assert_eq!(*found.next().unwrap(), (name, vec![count], F32, bytes));
            }
        }
        assert_eq!(found.next(), None);
    }
}

#[test]
fn quantized_files_are_read_back() {
    for format in ["mxfp4", "nvfp4"] {
        let scratch = Scratch::new();
        let input = scratch.write("in.gguf", file(&metadata(), &model()));
        let out = scratch.path("out.gguf");
        quantize(&scratch, &input, "out.gguf", &["--format", format]).ok();
        run(&[&"dequantize", &out, &"--dtype", &"f32", &"--out", &scratch.path("back.gguf")]).ok();
        let (entries, tensors) = parse(&std::fs::read(scratch.path("back.gguf")).unwrap());
        assert!(entries.iter().any(|(_, raw)| *raw == entry("general.file_type", 4, &0u32.to_le_bytes())));
        let names = |tensors: &[Stored]| {
            tensors.iter().map(|(name, shape, ..)| (name.clone(), shape.clone())).collect::<Vec<_>>()
        };
        assert_eq!(names(&tensors), names(&model()));
        // The values equal the values of the same tensors in safetensors, except one rounding of
        // scales.
        let text = run(&[&"compare", &input, &out]).ok();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let total = rows.iter().find(|row| row.first() == Some(&"total")).unwrap();
        assert!(total[2].parse::<f64>().unwrap() > 15.0, "{text}");
        assert!(run(&[&"compare", &out, &scratch.path("back.gguf")]).ok().contains("∞") || format == "nvfp4");
        assert!(run(&[&"inspect", &out]).ok().contains(format));
        run(&[&"doctor", &out, &"--against", &input]).ok();
    }
}

#[test]
fn containers_are_not_changed() {
    let scratch = Scratch::new();
    let input = scratch.write("in.gguf", file(&metadata(), &model()));
    let parts = ["in.gguf", "cannot be written as compressed-tensors", "convert_hf_to_gguf"];
    quantize(&scratch, &input, "OUT", &["--to", "compressed-tensors"]).fails_with(&parts);
    let refused = quantize(&scratch, &sample(), "OUT", &["--to", "gguf"]);
    refused.fails_with(&["tiny-llama", "cannot be written as gguf"]);
    quantize(&scratch, &input, "out.gguf", &[]).ok();
    let convert = |to: &str| {
        run(&[&"convert", &scratch.path("out.gguf"), &"--to", &to, &"--out", &scratch.path("c.gguf")])
    };
    convert("compressed-tensors").fails_with(&["out.gguf", "cannot be written as"]);
    convert("gguf").ok();
    assert_eq!(
        std::fs::read(scratch.path("c.gguf")).unwrap(),
        std::fs::read(scratch.path("out.gguf")).unwrap()
    );
}

#[test]
fn scales_without_a_value_in_ggml_are_refused() {
    let scratch = Scratch::new();
    let mut tensors = model();
    tensors[3].3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let input = scratch.write("in.gguf", file(&metadata(), &tensors));
    let refused = quantize(&scratch, &input, "OUT", &["--non-finite", "propagate"]);
    refused.fails_with(&["in.gguf", "blk.0.ffn_down.weight", "block 0", "0xff", "--non-finite"]);
    assert!(!scratch.path("OUT").exists());
}

#[test]
fn global_scales_of_experts_that_differ() {
    let scratch = Scratch::new();
    let packed = |name: &str, shape: &[u64], kind, data| (name.to_string(), shape.to_vec(), kind, data);
    let with = |scales: &[f32]| {
        let tensors = [
            packed(
                "blk.0.ffn_up_exps.weight",
                &[2, 1, 64],
                NVFP4,
                [vec![0x38; 4], vec![0x21; 32]].concat().repeat(2),
            ),
            packed("blk.0.ffn_up_exps.scale", &[2], F32, floats(scales)),
        ];
        scratch.write("in.gguf", file(&metadata(), &tensors))
    };
    let input = with(&[0.5, 0.25]);
    let refused = run(&[&"dequantize", &input, &"--out", &scratch.path("OUT")]);
    refused.fails_with(&["blk.0.ffn_up_exps.scale", "one F32", "[2]"]);
    let input = with(&[0.5, 0.5]);
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("OUT")]).ok();
    let (_, tensors) = parse(&std::fs::read(scratch.path("OUT")).unwrap());
    // Elements of the first half have code 1 (0.5), elements of the second half code 2 (1).
    let values: Vec<f32> = tensors[0].3.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    assert_eq!((values.len(), values[0], values[7], values[8], values[15]), (128, 0.25, 0.25, 0.5, 0.5));
}

#[test]
fn a_recipe_may_mix_both_formats() {
    let scratch = Scratch::new();
    let input = scratch.write("in.gguf", file(&metadata(), &model()));
    let rule = |format: &str| {
        format!("format = \"nvfp4\"\n[[tensors]]\nmatch = [\"*ffn_down*\", \"*_exps*\"]\nformat = {format:?}")
    };
    let recipe = scratch.write("recipe.toml", rule("mxfp4"));
    quantize(&scratch, &input, "out.gguf", &["--recipe", recipe.to_str().unwrap()]).ok();
    for format in ["mxfp4", "nvfp4"] {
        quantize(&scratch, &input, &format!("{format}.gguf"), &["--format", format]).ok();
    }
    let [mixed, mxfp4, nvfp4] = ["out.gguf", "mxfp4.gguf", "nvfp4.gguf"]
        .map(|file| parse(&std::fs::read(scratch.path(file)).unwrap()));
    for stored in &mixed.1 {
        let is_mxfp4 = stored.0.contains("ffn_down") || stored.0.contains("_exps");
        let alone = if is_mxfp4 { &mxfp4 } else { &nvfp4 };
        assert!(alone.1.contains(stored), "{}", stored.0);
    }
    let kinds = [MXFP4, NVFP4].map(|kind| mixed.1.iter().filter(|stored| stored.2 == kind).count());
    assert_eq!(kinds, [2, 1]);
    // The file type is the format of most weights.
    assert!(
        mixed.0.contains(&("general.file_type".into(), entry("general.file_type", 4, &38u32.to_le_bytes())))
    );
    run(&[&"doctor", &scratch.path("out.gguf"), &"--against", &input]).ok();
    scratch.write("recipe.toml", rule("mxfp8-e4m3"));
    let refused = quantize(&scratch, &input, "no.gguf", &["--recipe", recipe.to_str().unwrap()]);
    refused.fails_with(&["recipe.toml:4: format: gguf", "has no mxfp8-e4m3"]);
}

/// Returns Q8_0 blocks and their values.
fn q8_0(blocks: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut random, mut bytes, mut values) = (fastrand::Rng::with_seed(8), Vec::new(), Vec::new());
    for scale in noise(blocks) {
        let scale = f16::from_f32(scale);
        bytes.extend(scale.to_le_bytes());
        let codes: [i8; 32] = std::array::from_fn(|_| random.i8(..));
        bytes.extend(codes.map(|code| code as u8));
        values.extend(codes.map(|code| f32::from(code) * scale.to_f32()));
    }
    (bytes, values)
}

#[test]
fn q8_0_is_quantized_like_its_values_and_copied_where_it_stays() {
    let (bytes, values) = q8_0(6 * 4);
    let with = |kind, data: Vec<u8>| {
        let tensor = |name: &str| (name.to_string(), vec![6, 128], kind, data.clone());
        [tensor("blk.0.attn_q.weight"), tensor("output.weight")]
    };
    for (format, kind) in [("mxfp4", MXFP4), ("nvfp4", NVFP4)] {
        let scratch = Scratch::new();
        let input = scratch.write("in.gguf", file(&metadata(), &with(Q8_0, bytes.clone())));
        let floats = scratch.write("floats.gguf", file(&metadata(), &with(F32, floats(&values))));
        quantize(&scratch, &input, "out.gguf", &["--format", format]).ok();
        quantize(&scratch, &floats, "expected.gguf", &["--format", format]).ok();
        let [ours, expected] =
            ["out.gguf", "expected.gguf"].map(|name| parse(&std::fs::read(scratch.path(name)).unwrap()));
        assert_eq!(ours.0, expected.0);
        let quantized = |tensors: &[Stored]| -> Vec<Stored> {
            tensors.iter().filter(|(name, ..)| name.starts_with("blk")).cloned().collect()
        };
        assert_eq!(quantized(&ours.1), quantized(&expected.1));
        assert!(ours.1.iter().any(|(.., found, _)| *found == kind));
        let [_, head] = with(Q8_0, bytes.clone());
        assert_eq!(ours.1.iter().find(|(name, ..)| name == "output.weight"), Some(&head));
        let same = run(&[&"compare", &input, &floats]).ok();
        assert!(same.lines().any(|line| line.starts_with("total") && line.contains('∞')), "{same}");
    }
}

#[test]
fn unquantized_tensors_can_be_q8_0() {
    let scratch = Scratch::new();
    let input = scratch.write("in.gguf", file(&metadata(), &model()));
    let rule = "kept = \"q8_0\"\n[[tensors]]\nmatch = \"*attn_q*\"\nkeep = true";
    let recipe = scratch.write("recipe.toml", rule);
    let recipe = ["--recipe", recipe.to_str().unwrap()];
    for (out, options, eight) in [
        ("a.gguf", &["--format", "mxfp4", "--kept", "q8_0"][..], &["token_embd", "output"][..]),
        // Rows of 96 do not divide into NVFP4 blocks.
        ("b.gguf", &["--format", "nvfp4", "--kept", "q8_0"], &["token_embd", "output", "blk.0.ffn_down"]),
        ("c.gguf", &["--kept", "q8_0", "--exclude", "output*"], &["token_embd"]),
        ("d.gguf", &recipe, &["token_embd", "output", "blk.0.attn_q"]),
        ("e.gguf", &[&recipe[..], &["--kept", "unchanged"]].concat(), &[]),
    ] {
        let text = quantize(&scratch, &input, out, options).ok();
        assert_eq!(text.contains("embedding; in q8_0"), !eight.is_empty(), "{text}");
        let (_, tensors) = parse(&std::fs::read(scratch.path(out)).unwrap());
        for (name, shape, before, data) in model() {
            let (_, found, kind, bytes) = tensors.iter().find(|(other, ..)| *other == name).unwrap();
            assert_eq!(*found, shape, "{name}");
            let is_eight = eight.iter().any(|start| name == format!("{start}.weight"));
            assert_eq!(*kind == Q8_0, is_eight, "{out}: {name}");
            if is_eight {
                let error =
                    |(value, code): (f32, f32), scale: f32| (value - code * scale).abs() <= scale * 0.51;
                let values: Vec<f32> = match before {
                    F32 => data.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
                    _ => super::bf16s(&data).iter().map(|value| value.to_f32()).collect(),
                };
                for (values, block) in values.chunks(32).zip(bytes.as_chunks::<34>().0) {
                    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                    let codes = block[2..].iter().map(|code| f32::from(*code as i8));
                    assert!(values.iter().copied().zip(codes).all(|pair| error(pair, scale)), "{name}");
                }
            } else if *kind == before {
                assert_eq!(*bytes, data, "{name}");
            }
        }
        run(&[&"doctor", &scratch.path(out), &"--against", &input]).ok();
    }
    let mut wrong = model();
    wrong[0].3[4 * 70..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let input = scratch.write("nan.gguf", file(&metadata(), &wrong));
    let refused = quantize(&scratch, &input, "no.gguf", &["--kept", "q8_0"]);
    refused.fails_with(&["token_embd.weight has the value NaN in row 1, column 6", "--exclude"]);
    let safetensors = quantize(&scratch, &sample(), "NO", &["--kept", "q8_0"]);
    assert_eq!(safetensors.code, Some(2), "{safetensors:#?}");
    assert!(safetensors.stderr.contains("q8_0 is a type of GGUF files"), "{safetensors:#?}");
}

#[test]
fn scales_of_inputs_are_stored_where_llama_cpp_loads_them() {
    let scratch = Scratch::new();
    let input = scratch.write("in.gguf", file(&metadata(), &model()));
    let given = r#"{"blk.0.attn_q": 26.88, "blk.0.ffn_up_exps.input_scale": 0.5, "blk.7.attn_q": 1}"#;
    let given = scratch.write("inputs.json", given);
    let run = quantize(
        &scratch,
        &input,
        "out.gguf",
        &["--format", "nvfp4", "--input-scale", given.to_str().unwrap()],
    );
    assert!(run.stderr.contains("blk.7.attn_q: no weight that becomes nvfp4 is called so"), "{run:#?}");
    run.ok();
    let (_, tensors) = parse(&std::fs::read(scratch.path("out.gguf")).unwrap());
    let scales: Vec<_> = tensors.into_iter().filter(|(name, ..)| name.ends_with(".input_scale")).collect();
    let scale = |name: &str, count: u64, scale: f32| {
        (format!("blk.0.{name}.input_scale"), vec![count], F32, scale.to_le_bytes().repeat(count as usize))
    };
    assert_eq!(scales, [scale("attn_q", 1, 26.88 / 2688.0), scale("ffn_up_exps", 3, 0.5)]);
    let mut other = model();
    other[1].0 = "blk.0.attn_kv_b.weight".into();
    let input = scratch.write("other.gguf", file(&metadata(), &other));
    let options = ["--format", "nvfp4", "--global-scale", "none", "--input-scale", "4"];
    let refused = quantize(&scratch, &input, "no.gguf", &options);
    assert!(
        refused.stderr.contains("blk.0.attn_kv_b.weight can have no scale of its inputs"),
        "{refused:#?}"
    );
}
