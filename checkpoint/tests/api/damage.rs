//! The doctor's findings in damaged checkpoints: a table of damages, with the defect of each.
//!
//! Each damage is done to the sample in several formats and checkpoint formats. The doctor must
//! report the defect, and nothing else. Sound outputs have no findings.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use microscale::{Device, Format, Words};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Defect, Finding, InputScales, Quantize, Settings, diagnose,
};
use microscale_test_support::{Scratch, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::input::{Tensor, write_file};
use crate::{Tensors, going_on, quantize, tensors};

const DOWN: &str = "model.layers.1.mlp.down_proj.weight";
const UP: &str = "model.layers.1.mlp.up_proj.weight";
const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const K: &str = "model.layers.1.self_attn.k_proj.weight";
const NORM: &str = "model.layers.1.input_layernorm.weight";
const LAST_NORM: &str = "model.norm.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// The first quantized tensor of the file, which findings about all of them name.
const FIRST: &str = "model.layers.0.mlp.down_proj.weight";

/// A format in a checkpoint format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Variant {
    format: Format,
    to: CheckpointFormat,
}

const NVFP4: Variant = Variant { format: Format::Nvfp4, to: CheckpointFormat::CompressedTensors };
const MXFP4: Variant = Variant { format: Format::Mxfp4, to: CheckpointFormat::CompressedTensors };
const MXFP8: Variant = Variant { format: Format::Mxfp8E4m3, to: CheckpointFormat::CompressedTensors };
const MODELOPT: Variant = Variant { format: Format::Nvfp4, to: CheckpointFormat::Modelopt };

const ALL: &[Variant] = &[NVFP4, MXFP4, MXFP8, MODELOPT];
const OURS: &[Variant] = &[NVFP4, MXFP4, MXFP8];
const GLOBAL: &[Variant] = &[NVFP4, MODELOPT];
const FOUR_BITS: &[Variant] = &[NVFP4, MXFP4, MODELOPT];
const POWERS: &[Variant] = &[MXFP4, MXFP8];

/// A quantized checkpoint in memory.
#[derive(Clone)]
struct Model {
    variant: Variant,
    tensors: Tensors,
    config: Value,
    hf_quant_config: Option<Value>,
}

impl Model {
    /// The sample, quantized; NVFP4 with scales of its inputs.
    fn of(scratch: &Scratch, variant: Variant) -> Self {
        let out = scratch.path(format!("{}-{}", variant.format, variant.to.word()));
        let settings = Settings { format: Some(variant.format), ..Settings::default() };
        let input_scales = (variant.format == Format::Nvfp4).then(|| InputScales::from_amax(20.0));
        let request = Quantize { format: Some(variant.to), input_scales, ..Quantize::new(settings) };
        quantize(&request, &sample(), &out).unwrap();
        let json = |name: &str| Some(serde_json::from_slice(&fs::read(out.join(name)).ok()?).unwrap());
        Self {
            variant,
            tensors: tensors(&out),
            config: json("config.json").unwrap(),
            hf_quant_config: json("hf_quant_config.json"),
        }
    }

    fn findings(&self, scratch: &Scratch, against: Option<&Checkpoint>) -> Vec<Finding> {
        let all: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| Tensor::of_bytes(name, *dtype, shape, bytes))
            .collect();
        let file = write_file(scratch, "CASE/model.safetensors", &all);
        scratch.write("CASE/config.json", self.config.to_string());
        let own = scratch.path("CASE/hf_quant_config.json");
        match &self.hf_quant_config {
            Some(json) => fs::write(&own, json.to_string()).unwrap(),
            None => drop(fs::remove_file(&own)),
        }
        let checkpoint = Checkpoint::open(file.parent().unwrap()).unwrap();
        diagnose(&checkpoint, against, &Device::Cpu, going_on()).unwrap().findings
    }

    fn is_ours(&self) -> bool {
        self.variant.to == CheckpointFormat::CompressedTensors
    }

    /// The name of a tensor's codes.
    fn codes(&self, weight: &str) -> String {
        let packed = self.is_ours() && self.variant.format != Format::Mxfp8E4m3;
        format!("{weight}{}", if packed { "_packed" } else { "" })
    }

    fn global(&self, weight: &str) -> String {
        format!("{weight}{}", if self.is_ours() { "_global_scale" } else { "_scale_2" })
    }

    /// The name of the scale of a layer's inputs.
    fn input(&self, weight: &str) -> String {
        weight.replace(".weight", if self.is_ours() { ".input_global_scale" } else { ".input_scale" })
    }

    /// The name of a scale of the cache, by `k` or `v`.
    fn cache(&self, layer: usize, of: &str) -> String {
        let projection = if self.is_ours() { String::new() } else { format!("{of}_proj.") };
        format!("model.layers.{layer}.self_attn.{projection}{of}_scale")
    }

    fn tensor(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("{name}"))
    }

    fn bytes(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.tensor(name).2
    }

    fn remove(&mut self, name: &str) {
        self.tensors.remove(name).unwrap_or_else(|| panic!("{name}"));
    }

    fn remove_all(&mut self, prefix: &str) {
        self.tensors.retain(|name, _| !name.starts_with(prefix));
    }

    /// The parts of a weight with a number for each row: codes and scales.
    fn cut_rows(&mut self, weight: &str, rows: usize) {
        for name in [self.codes(weight), format!("{weight}_scale")] {
            let (_, shape, bytes) = self.tensor(&name);
            let row = bytes.len() / shape[0];
            shape[0] -= rows;
            bytes.truncate(shape[0] * row);
        }
    }

    /// Changes an F32 scalar.
    fn number(&mut self, name: &str, change: impl FnOnce(f32) -> f32) {
        let bytes = self.bytes(name);
        *bytes = change(f32::from_le_bytes(bytes[..].try_into().unwrap())).to_le_bytes().to_vec();
    }

    fn quantization(&mut self) -> &mut Value {
        &mut self.config["quantization_config"]
    }

    fn group(&mut self) -> &mut Value {
        &mut self.quantization()["config_groups"]["group_0"]
    }

    /// ModelOpt's own config.
    fn own(&mut self) -> &mut Value {
        &mut self.hf_quant_config.as_mut().unwrap()["quantization"]
    }

    /// Announces an FP8 cache, with scales for all layers.
    fn with_cache(&mut self) {
        let scheme = json!({ "type": "float", "num_bits": 8, "dynamic": false, "strategy": "tensor" });
        self.quantization()["kv_cache_scheme"] = scheme;
        if self.hf_quant_config.is_some() {
            self.own()["kv_cache_quant_algo"] = json!("FP8");
        }
        for layer in 0..3 {
            for of in ["k", "v"] {
                let shape = if self.is_ours() { vec![1] } else { vec![] };
                let scale = (Dtype::F32, shape, 0.03f32.to_le_bytes().to_vec());
                self.tensors.insert(self.cache(layer, of), scale);
            }
        }
    }
}

fn object(value: &mut Value) -> &mut serde_json::Map<String, Value> {
    value.as_object_mut().unwrap()
}

/// A damage: its name, the variants that it is done to, the damage, and the defect with the tensor
/// of the first finding.
type Damage = (&'static str, &'static [Variant], fn(&mut Model), Defect, &'static str);

const NAN: [u8; 2] = bf16::NAN.to_le_bytes();
const INFINITY: [u8; 2] = bf16::NEG_INFINITY.to_le_bytes();

/// Damages to tensors.
const TENSORS: &[Damage] = &[
    ("codes gone", ALL, |m| m.remove(&m.codes(DOWN)), Defect::Unreadable, DOWN),
    ("scales gone", FOUR_BITS, |m| m.remove(&format!("{DOWN}_scale")), Defect::Unreadable, DOWN),
    ("global scale gone", GLOBAL, |m| m.remove(&m.global(DOWN)), Defect::Unreadable, DOWN),
    (
        "layer gone from a module",
        ALL,
        |m| m.remove_all(DOWN.trim_end_matches("weight")),
        Defect::Missing,
        DOWN,
    ),
    ("norm gone", ALL, |m| m.remove(NORM), Defect::Missing, NORM),
    ("last norm gone", ALL, |m| m.remove(LAST_NORM), Defect::Missing, LAST_NORM),
    ("embedding gone", ALL, |m| m.remove(EMBEDDING), Defect::Missing, EMBEDDING),
    ("head gone", ALL, |m| m.remove(HEAD), Defect::Missing, HEAD),
    ("layer gone", ALL, |m| m.remove_all("model.layers.1."), Defect::Config, ""),
    ("last layer gone", ALL, |m| m.remove_all("model.layers.2."), Defect::Config, ""),
    ("embedding of zeros", ALL, |m| m.bytes(EMBEDDING).fill(0), Defect::ZeroTensor, EMBEDDING),
    (
        "half of an embedding of zeros",
        ALL,
        |m| {
            let bytes = m.bytes(EMBEDDING);
            let half = bytes.len() / 2;
            bytes[half..].fill(0);
        },
        Defect::ZeroTensor,
        EMBEDDING,
    ),
    ("head of zeros", ALL, |m| m.bytes(HEAD).fill(0), Defect::ZeroTensor, HEAD),
    ("norm of zeros", ALL, |m| m.bytes(NORM).fill(0), Defect::ZeroTensor, NORM),
    ("last norm of zeros", ALL, |m| m.bytes(LAST_NORM).fill(0), Defect::ZeroTensor, LAST_NORM),
    ("NaN in a norm", ALL, |m| m.bytes(NORM)[6..8].copy_from_slice(&NAN), Defect::NonFinite, NORM),
    (
        "infinity in the last norm",
        ALL,
        |m| m.bytes(LAST_NORM)[..2].copy_from_slice(&INFINITY),
        Defect::NonFinite,
        LAST_NORM,
    ),
    (
        "NaN in the embedding",
        ALL,
        |m| m.bytes(EMBEDDING)[700..702].copy_from_slice(&NAN),
        Defect::NonFinite,
        EMBEDDING,
    ),
    (
        "infinity in the head",
        ALL,
        |m| m.bytes(HEAD)[700..702].copy_from_slice(&INFINITY),
        Defect::NonFinite,
        HEAD,
    ),
    ("NaN among codes", &[MXFP8], |m| m.bytes(DOWN)[33] = 0x7F, Defect::NonFinite, DOWN),
    ("NaN block scale", GLOBAL, |m| m.bytes(&format!("{DOWN}_scale"))[5] = 0x7F, Defect::NanScales, DOWN),
    ("NaN block scale", POWERS, |m| m.bytes(&format!("{DOWN}_scale"))[5] = 0xFF, Defect::NanScales, DOWN),
    (
        "negative block scales",
        GLOBAL,
        |m| m.bytes(&format!("{DOWN}_scale")).iter_mut().for_each(|byte| *byte |= 0x80),
        Defect::SignedScales,
        DOWN,
    ),
    ("block scales of zeros", ALL, |m| m.bytes(&format!("{DOWN}_scale")).fill(0), Defect::ZeroBlocks, DOWN),
    (
        "the same block scale",
        GLOBAL,
        |m| m.bytes(&format!("{DOWN}_scale")).fill(0x40),
        Defect::EqualScales,
        DOWN,
    ),
    (
        "an enormous block scale",
        POWERS,
        |m| m.bytes(&format!("{DOWN}_scale"))[9] = 0xFE,
        Defect::EnormousBlocks,
        DOWN,
    ),
    ("codes of zeros", ALL, |m| m.bytes(&m.codes(DOWN)).fill(0), Defect::ZeroBlocks, DOWN),
    (
        "only the largest code",
        FOUR_BITS,
        |m| m.bytes(&m.codes(DOWN)).fill(0xF7),
        Defect::SaturatedBlocks,
        DOWN,
    ),
    ("only the largest code", &[MXFP8], |m| m.bytes(DOWN).fill(0x7E), Defect::SaturatedBlocks, DOWN),
    ("global scale 0", GLOBAL, |m| m.number(&m.global(DOWN), |_| 0.0), Defect::Unreadable, DOWN),
    (
        "infinite global scale",
        GLOBAL,
        |m| m.number(&m.global(DOWN), |_| f32::INFINITY),
        Defect::Unreadable,
        DOWN,
    ),
    ("NaN global scale", GLOBAL, |m| m.number(&m.global(DOWN), |_| f32::NAN), Defect::Unreadable, DOWN),
    (
        "negative global scale",
        GLOBAL,
        |m| m.number(&m.global(DOWN), |scale| -scale),
        Defect::Unreadable,
        DOWN,
    ),
    (
        "inverted global scale",
        GLOBAL,
        |m| m.number(&m.global(DOWN), f32::recip),
        Defect::InvertedGlobalScale,
        DOWN,
    ),
    (
        "unequal global scales",
        GLOBAL,
        |m| m.number(&m.global(Q), |scale| 1.5 * scale),
        Defect::UnequalGlobalScales,
        Q,
    ),
    (
        "global scale in another shape",
        &[NVFP4],
        |m| m.tensor(&m.global(DOWN)).1.clear(),
        Defect::Misread,
        DOWN,
    ),
    (
        "two global scales",
        GLOBAL,
        |m| {
            let (_, shape, bytes) = m.tensor(&m.global(DOWN));
            *shape = vec![2];
            *bytes = [&bytes[..], &[0, 0, 0x80, 0x3F]].concat();
        },
        Defect::Unreadable,
        DOWN,
    ),
    (
        "global scale in F16",
        GLOBAL,
        |m| {
            let (dtype, _, bytes) = m.tensor(&m.global(DOWN));
            *dtype = Dtype::F16;
            bytes.truncate(2);
        },
        Defect::Unreadable,
        DOWN,
    ),
    ("input scale 0", GLOBAL, |m| m.number(&m.input(DOWN), |_| 0.0), Defect::Unreadable, DOWN),
    (
        "infinite input scale",
        GLOBAL,
        |m| m.number(&m.input(DOWN), |_| f32::INFINITY),
        Defect::Unreadable,
        DOWN,
    ),
    ("input scale gone", GLOBAL, |m| m.remove(&m.input(DOWN)), Defect::InputScale, DOWN),
    ("inverted input scale", GLOBAL, |m| m.number(&m.input(DOWN), f32::recip), Defect::InputScale, DOWN),
    ("unequal input scales", GLOBAL, |m| m.number(&m.input(Q), |scale| 2.0 * scale), Defect::InputScale, Q),
    ("transposed codes", ALL, |m| m.tensor(&m.codes(DOWN)).1.reverse(), Defect::Unreadable, DOWN),
    ("rows cut, hidden size", ALL, |m| m.cut_rows(DOWN, 32), Defect::Unreadable, DOWN),
    ("rows cut, heads", ALL, |m| m.cut_rows(K, 32), Defect::Unreadable, K),
    ("rows cut, intermediate size", ALL, |m| m.cut_rows(UP, 32), Defect::Unreadable, UP),
    (
        "rows of the embedding cut",
        ALL,
        |m| {
            let (_, shape, bytes) = m.tensor(EMBEDDING);
            shape[0] /= 2;
            bytes.truncate(bytes.len() / 2);
        },
        Defect::Config,
        EMBEDDING,
    ),
    (
        "last norm cut",
        ALL,
        |m| {
            let (_, shape, bytes) = m.tensor(LAST_NORM);
            shape[0] /= 2;
            bytes.truncate(bytes.len() / 2);
        },
        Defect::Config,
        LAST_NORM,
    ),
    (
        "norm in U8",
        ALL,
        |m| {
            let (dtype, _, bytes) = m.tensor(NORM);
            *dtype = Dtype::U8;
            bytes.truncate(bytes.len() / 2);
        },
        Defect::Unreadable,
        NORM,
    ),
    (
        "scales in F32",
        FOUR_BITS,
        |m| {
            let (dtype, _, bytes) = m.tensor(&format!("{DOWN}_scale"));
            *dtype = Dtype::F32;
            *bytes = bytes.repeat(4);
        },
        Defect::Unreadable,
        DOWN,
    ),
    (
        "scales in F32",
        &[MXFP8],
        |m| {
            let (dtype, _, bytes) = m.tensor(&format!("{DOWN}_scale"));
            *dtype = Dtype::F32;
            *bytes = [0, 0, 0x80, 0x3F].repeat(bytes.len());
        },
        Defect::Config,
        DOWN,
    ),
    (
        "unquantized weight next to its codes",
        &[NVFP4, MXFP4],
        |m| {
            let bytes = vec![0x3F; 2 * 128 * 352];
            m.tensors.insert(DOWN.into(), (Dtype::BF16, vec![128, 352], bytes));
        },
        Defect::Config,
        DOWN,
    ),
];

/// Damages to configs.
const CONFIGS: &[Damage] = &[
    ("type int", ALL, |m| m.group()["weights"]["type"] = json!("int"), Defect::Config, FIRST),
    (
        "strategy channel",
        OURS,
        |m| m.group()["weights"]["strategy"] = json!("channel"),
        Defect::Config,
        FIRST,
    ),
    (
        "strategy group",
        &[NVFP4],
        |m| m.group()["weights"]["strategy"] = json!("group"),
        Defect::Config,
        FIRST,
    ),
    (
        "strategy tensor_group",
        POWERS,
        |m| m.group()["weights"]["strategy"] = json!("tensor_group"),
        Defect::Config,
        FIRST,
    ),
    ("not symmetric", ALL, |m| m.group()["weights"]["symmetric"] = json!(false), Defect::Config, FIRST),
    ("other bits", ALL, |m| m.group()["weights"]["num_bits"] = json!(3), Defect::Config, FIRST),
    ("other groups", ALL, |m| m.group()["weights"]["group_size"] = json!(64), Defect::Config, FIRST),
    ("dynamic weights", OURS, |m| m.group()["weights"]["dynamic"] = json!(true), Defect::Config, FIRST),
    ("no type", OURS, |m| drop(object(&mut m.group()["weights"]).remove("type")), Defect::Config, FIRST),
    (
        "no group_size",
        OURS,
        |m| drop(object(&mut m.group()["weights"]).remove("group_size")),
        Defect::Config,
        FIRST,
    ),
    (
        "no scale_dtype",
        &[MXFP8],
        |m| drop(object(&mut m.group()["weights"]).remove("scale_dtype")),
        Defect::Config,
        FIRST,
    ),
    ("no weights", ALL, |m| m.group()["weights"] = Value::Null, Defect::Config, FIRST),
    ("targets of another class", ALL, |m| m.group()["targets"] = json!(["Conv2d"]), Defect::Config, ""),
    (
        "targets that match nothing",
        ALL,
        |m| m.group()["targets"] = json!(["re:.*experts.*"]),
        Defect::Config,
        "",
    ),
    ("no targets", ALL, |m| m.group()["targets"] = json!([]), Defect::Config, ""),
    (
        "targets of some layers",
        ALL,
        |m| m.group()["targets"] = json!(["re:.*self_attn.*"]),
        Defect::Config,
        FIRST,
    ),
    (
        "integer inputs",
        OURS,
        |m| m.group()["input_activations"] = json!({ "type": "int", "num_bits": 8, "dynamic": true }),
        Defect::Config,
        FIRST,
    ),
    (
        "no config_groups",
        OURS,
        |m| drop(object(m.quantization()).remove("config_groups")),
        Defect::Config,
        "",
    ),
    (
        "other format of a group",
        OURS,
        |m| m.group()["format"] = json!("pack-quantized"),
        Defect::Config,
        FIRST,
    ),
    ("other format", OURS, |m| m.quantization()["format"] = json!("float-quantized"), Defect::Config, FIRST),
    ("other status", OURS, |m| m.quantization()["quantization_status"] = json!("frozen"), Defect::Config, ""),
    ("no status", OURS, |m| drop(object(m.quantization()).remove("quantization_status")), Defect::Config, ""),
    (
        "no quantization_config",
        OURS,
        |m| drop(object(&mut m.config).remove("quantization_config")),
        Defect::Config,
        FIRST,
    ),
    ("other method", ALL, |m| m.quantization()["quant_method"] = json!("gptq"), Defect::Config, FIRST),
    ("no method", ALL, |m| drop(object(m.quantization()).remove("quant_method")), Defect::Config, FIRST),
    ("ignore without the head", ALL, |m| m.quantization()["ignore"] = json!([]), Defect::Config, HEAD),
    ("no ignore", ALL, |m| drop(object(m.quantization()).remove("ignore")), Defect::Config, HEAD),
    (
        "ignore of a quantized layer",
        ALL,
        |m| m.quantization()["ignore"] = json!(["lm_head", "model.layers.1.mlp.down_proj"]),
        Defect::Config,
        DOWN,
    ),
    (
        "ignore of quantized layers",
        ALL,
        |m| m.quantization()["ignore"] = json!(["lm_head", "re:.*layers.1.mlp.down.*"]),
        Defect::Config,
        DOWN,
    ),
    ("more layers", ALL, |m| m.config["num_hidden_layers"] = json!(4), Defect::Config, ""),
    ("fewer layers", ALL, |m| m.config["num_hidden_layers"] = json!(2), Defect::Config, ""),
    (
        "more layers of the language model",
        ALL,
        |m| m.config["text_config"] = json!({ "num_hidden_layers": 5 }),
        Defect::Config,
        "",
    ),
    ("other hidden size", ALL, |m| m.config["hidden_size"] = json!(64), Defect::Config, FIRST),
    (
        "other intermediate size",
        ALL,
        |m| m.config["intermediate_size"] = json!(512),
        Defect::Config,
        "model.layers.0.mlp.gate_proj.weight",
    ),
    ("other vocabulary", ALL, |m| m.config["vocab_size"] = json!(2000), Defect::Config, HEAD),
    (
        "other heads",
        ALL,
        |m| m.config["num_attention_heads"] = json!(8),
        Defect::Config,
        "model.layers.0.self_attn.q_proj.weight",
    ),
    (
        "other key heads",
        ALL,
        |m| m.config["num_key_value_heads"] = json!(4),
        Defect::Config,
        "model.layers.0.self_attn.k_proj.weight",
    ),
    (
        "other head dimension",
        ALL,
        |m| m.config["head_dim"] = json!(64),
        Defect::Config,
        "model.layers.0.self_attn.q_proj.weight",
    ),
    (
        "too few kinds of layers",
        ALL,
        |m| m.config["layer_types"] = json!(["full_attention"]),
        Defect::Config,
        "",
    ),
    ("tied, with another head", ALL, |m| m.config["tie_word_embeddings"] = json!(true), Defect::Config, HEAD),
    (
        "another library's config",
        OURS,
        |m| {
            let own = json!({ "quant_algo": "FP8", "kv_cache_quant_algo": null, "group_size": 16, "exclude_modules": ["lm_head"] });
            m.hf_quant_config = Some(json!({ "producer": { "name": "modelopt" }, "quantization": own }));
        },
        Defect::Config,
        "",
    ),
    (
        "inputs unquantized in the config",
        GLOBAL,
        |m| drop(object(m.group()).remove("input_activations")),
        Defect::InputScale,
        FIRST,
    ),
    (
        "another algorithm in hf_quant_config",
        &[MODELOPT],
        |m| m.own()["quant_algo"] = json!("FP8"),
        Defect::Config,
        "",
    ),
    ("unknown algorithm", &[MODELOPT], |m| m.own()["quant_algo"] = json!("NF5"), Defect::Config, ""),
    (
        "weights only in hf_quant_config",
        &[MODELOPT],
        |m| m.own()["quant_algo"] = json!("W4A16_NVFP4"),
        Defect::Config,
        "",
    ),
    (
        "no algorithm in hf_quant_config",
        &[MODELOPT],
        |m| drop(object(m.own()).remove("quant_algo")),
        Defect::Config,
        "",
    ),
    (
        "another algorithm in both",
        &[MODELOPT],
        |m| {
            m.own()["quant_algo"] = json!("MXFP4");
            m.quantization()["quant_algo"] = json!("MXFP4");
        },
        Defect::Config,
        FIRST,
    ),
    (
        "other groups in hf_quant_config",
        &[MODELOPT],
        |m| m.own()["group_size"] = json!(32),
        Defect::Config,
        FIRST,
    ),
    (
        "no exclude_modules",
        &[MODELOPT],
        |m| drop(object(m.own()).remove("exclude_modules")),
        Defect::Config,
        "",
    ),
    (
        "exclude_modules without the head",
        &[MODELOPT],
        |m| m.own()["exclude_modules"] = json!([]),
        Defect::Config,
        HEAD,
    ),
    (
        "exclude_modules of a quantized layer",
        &[MODELOPT],
        |m| m.own()["exclude_modules"] = json!(["lm_head", "*layers.1.mlp.down*"]),
        Defect::Config,
        DOWN,
    ),
    (
        "no quantization in hf_quant_config",
        &[MODELOPT],
        |m| m.hf_quant_config = Some(json!({})),
        Defect::Config,
        "",
    ),
    (
        "cache only in hf_quant_config",
        &[MODELOPT],
        |m| {
            m.with_cache();
            m.quantization()["kv_cache_scheme"] = Value::Null;
        },
        Defect::Config,
        "",
    ),
    (
        "cache without scales",
        ALL,
        |m| {
            m.with_cache();
            m.tensors.retain(|name, _| !name.ends_with("k_scale") && !name.ends_with("v_scale"));
        },
        Defect::CacheScale,
        "",
    ),
    (
        "cache without one scale",
        ALL,
        |m| {
            m.with_cache();
            m.remove(&m.cache(1, "v"));
        },
        Defect::CacheScale,
        "model.layers.1.self_attn.v_scale",
    ),
    (
        "cache with scale 0",
        ALL,
        |m| {
            m.with_cache();
            m.number(&m.cache(1, "k"), |_| 0.0);
        },
        Defect::CacheScale,
        "model.layers.1.self_attn.",
    ),
    (
        "cache with an infinite scale",
        ALL,
        |m| {
            m.with_cache();
            m.number(&m.cache(1, "k"), |_| f32::INFINITY);
        },
        Defect::CacheScale,
        "model.layers.1.self_attn.",
    ),
    (
        "cache with a NaN scale",
        ALL,
        |m| {
            m.with_cache();
            m.number(&m.cache(2, "v"), |_| f32::NAN);
        },
        Defect::CacheScale,
        "model.layers.2.self_attn.",
    ),
    (
        "cache with a negative scale",
        ALL,
        |m| {
            m.with_cache();
            m.number(&m.cache(0, "k"), |scale| -scale);
        },
        Defect::CacheScale,
        "model.layers.0.self_attn.",
    ),
];

/// Swaps the bytes of two tensors of the same shape.
fn swap(model: &mut Model, first: &str, second: &str) {
    let bytes = std::mem::take(model.bytes(first));
    let other = std::mem::replace(model.bytes(second), bytes);
    *model.bytes(first) = other;
}

/// Damages that only the original shows.
const VALUES: &[Damage] = &[
    ("a code changed", ALL, |m| m.bytes(&m.codes(DOWN))[100] ^= 0x44, Defect::OtherValues, DOWN),
    (
        "a block scale changed",
        GLOBAL,
        |m| m.bytes(&format!("{DOWN}_scale"))[100] ^= 0x10,
        Defect::OtherValues,
        DOWN,
    ),
    (
        "a block scale changed",
        POWERS,
        |m| m.bytes(&format!("{DOWN}_scale"))[100] ^= 0x02,
        Defect::OtherValues,
        DOWN,
    ),
    (
        "nibbles swapped",
        FOUR_BITS,
        |m| m.bytes(&m.codes(DOWN)).iter_mut().for_each(|byte| *byte = byte.rotate_left(4)),
        Defect::NibbleOrder,
        DOWN,
    ),
    ("rows moved", ALL, |m| m.bytes(&m.codes(DOWN)).rotate_left(176), Defect::OtherValues, DOWN),
    ("scales moved", ALL, |m| m.bytes(&format!("{DOWN}_scale")).rotate_left(3), Defect::OtherValues, DOWN),
    (
        "scales of another layer",
        ALL,
        |m| {
            let other = m.bytes(&format!("{FIRST}_scale")).clone();
            *m.bytes(&format!("{DOWN}_scale")) = other;
        },
        Defect::OtherValues,
        DOWN,
    ),
    (
        "scales swizzled",
        GLOBAL,
        |m| {
            let (_, shape, bytes) = m.tensor(&format!("{DOWN}_scale"));
            *bytes = swizzled(bytes, shape[0], shape[1]);
        },
        Defect::OtherValues,
        DOWN,
    ),
    (
        "global scale doubled",
        GLOBAL,
        |m| m.number(&m.global(DOWN), |scale| 2.0 * scale),
        Defect::OtherValues,
        DOWN,
    ),
    (
        "codes of two layers swapped",
        ALL,
        |m| {
            let (first, second) = (m.codes(FIRST), m.codes(DOWN));
            swap(m, &first, &second);
        },
        Defect::OtherValues,
        FIRST,
    ),
    (
        "norms swapped",
        ALL,
        |m| swap(m, NORM, "model.layers.1.post_attention_layernorm.weight"),
        Defect::OtherValues,
        NORM,
    ),
    ("a bit of a norm changed", ALL, |m| m.bytes(NORM)[10] ^= 1, Defect::OtherValues, NORM),
    (
        "rows of the embedding moved",
        ALL,
        |m| m.bytes(EMBEDDING).rotate_left(256),
        Defect::OtherValues,
        EMBEDDING,
    ),
    ("a value of the head changed", ALL, |m| m.bytes(HEAD)[5001] ^= 0x80, Defect::OtherValues, HEAD),
];

/// Scales in tiles of 128×4, without padding of rows.
fn swizzled(scales: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(rows % 128, 0);
    let whole = blocks.div_ceil(4) * 4;
    let mut tiles = vec![0; rows * whole];
    for (at, scale) in scales.iter().enumerate() {
        let (row, block) = (at / blocks, at % blocks);
        let tile = row / 128 * (whole / 4) + block / 4;
        tiles[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4] = *scale;
    }
    tiles.truncate(scales.len());
    tiles
}

/// Does each damage to each of its variants, and checks the findings.
#[track_caller]
fn check(damages: &[Damage], against: bool) {
    let scratch = Scratch::new();
    let models: Vec<_> = ALL.iter().map(|variant| Model::of(&scratch, *variant)).collect();
    let original = Checkpoint::open(&sample()).unwrap();
    let mut seen = BTreeMap::new();
    for (name, variants, damage, defect, tensor) in damages {
        for model in models.iter().filter(|model| variants.contains(&model.variant)) {
            let mut damaged = model.clone();
            damage(&mut damaged);
            if against {
                assert_eq!(damaged.findings(&scratch, None), [], "{name}, {:?}", model.variant);
            }
            let found = damaged.findings(&scratch, against.then_some(&original));
            let case = format!("{name}, {:?}: {found:#?}", model.variant);
            assert!(found.iter().all(|finding| finding.defect == *defect), "{case}");
            let first = found.first().unwrap_or_else(|| panic!("{case}"));
            let about = first.tensor.clone().unwrap_or_default();
            let stem = tensor.trim_end_matches("_scale");
            assert!(about.starts_with(stem.rsplit_once("v_scale").map_or(stem, |(stem, _)| stem)), "{case}");
            assert_eq!(about.is_empty(), tensor.is_empty(), "{case}");
            assert!(!first.what.is_empty() && !defect.effect().is_empty() && !defect.fix().is_empty());
            *seen.entry((name, format!("{:?}", model.variant))).or_insert(0) += 1;
        }
    }
    assert!(seen.values().all(|times| *times == 1), "a damage is there twice: {seen:?}");
}

#[test]
fn damaged_tensors_are_found() {
    check(TENSORS, false);
}

#[test]
fn damaged_configs_are_found() {
    check(CONFIGS, false);
}

#[test]
fn damaged_values_are_found_against_the_original() {
    check(VALUES, true);
}

#[test]
fn sound_checkpoints_have_no_findings() {
    let scratch = Scratch::new();
    let original = Checkpoint::open(&sample()).unwrap();
    for variant in ALL {
        let model = Model::of(&scratch, *variant);
        let mut with_cache = model.clone();
        with_cache.with_cache();
        let mut tied = model.clone();
        tied.config["tie_word_embeddings"] = json!(true);
        *tied.bytes(HEAD) = tied.bytes(EMBEDDING).clone();
        // Weights of Gemma's norms are offsets from 1, and its first ones are zeros.
        let mut offsets = model.clone();
        for name in model.tensors.keys().filter(|name| name.contains("norm")) {
            offsets.bytes(name).fill(0);
        }
        for (what, model) in [("cache", &with_cache), ("tied", &tied), ("offsets", &offsets)] {
            assert_eq!(model.findings(&scratch, None), [], "{what}, {variant:?}");
        }
        assert_eq!(model.findings(&scratch, Some(&original)), [], "{variant:?}");
    }
    for input in [sample(), sample().join("../tiny-story")] {
        let checkpoint = Checkpoint::open(Path::new(&input)).unwrap();
        let found = diagnose(&checkpoint, None, &Device::Cpu, going_on()).unwrap();
        assert_eq!((found.findings, found.quantized), (vec![], 0));
    }
}
