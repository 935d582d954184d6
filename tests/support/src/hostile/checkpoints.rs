//! Small valid checkpoints with arbitrary values, which tests may damage.

use serde_json::json;

use super::draw::Draw;

/// A tensor to write to a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

/// Fragments of headers and other JSON files.
pub const HEADER_WORDS: &[&str] = &[
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "0",
    "9",
    "-",
    "1e99",
    "null",
    "[0,0]",
    "18446744073709551615",
    "9223372036854775807",
    "\"F32\"",
    "\"U8\"",
    "\"F4\"",
    "\"F8_E4M3\"",
    "_packed",
    "_scale",
    "_blocks",
    "_scales",
    "_scale_2",
    "_scale_inv",
    "_zero_point",
    "_global_scale",
    ".input_scale",
    ".experts.down_proj",
    "[4294967296,0,4294967296]",
    "[0,4294967296,4294967296]",
    "..",
    "/",
    "\\u0000",
    "__metadata__",
    "\"shape\":",
    "\"dtype\":",
    "\"data_offsets\":",
];

/// Layers that tensors belong to.
const LAYERS: &[&str] = &[
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.mlp.experts.gate_up_proj",
    "lm_head.weight",
    "a",
    "blk.0.ffn_down_exps.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
];

/// Suffixes of tensor names.
const ENDS: &[&str] = &[
    "",
    "_packed",
    "_scale",
    "_global_scale",
    "_scale_2",
    "_blocks",
    "_scales",
    "_weight_scale",
    "_scale_inv",
    "_zero_point",
    ".scale",
    ".input_scale",
];

/// Returns a tensor name, mostly a meaningful one.
pub(super) fn names(draw: &mut Draw<'_>) -> String {
    if draw.once_in(8) {
        return draw.text();
    }
    let (layer, end) = (draw.one_of(LAYERS), draw.one_of(ENDS));
    match end.strip_prefix('.') {
        Some(_) => format!("{}{end}", layer.strip_suffix(".weight").unwrap_or(layer)),
        None => format!("{layer}{end}"),
    }
}

/// How a layer is stored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    Float(&'static str),
    Mxfp4,
    Nvfp4,
    Mxfp8,
    Modelopt,
    GptOss,
    /// FP8 with one scale per block.
    Fp8,
    /// INT8 with one scale per row.
    Int8,
}

const WAYS: &[Way] = &[
    Way::Float("F32"),
    Way::Float("BF16"),
    Way::Float("F16"),
    Way::Mxfp4,
    Way::Nvfp4,
    Way::Mxfp8,
    Way::Modelopt,
    Way::GptOss,
    Way::Fp8,
    Way::Int8,
];

/// Layers, and how each is stored.
#[derive(Clone, Debug)]
pub(super) struct Template {
    layers: Vec<(&'static str, Way, [usize; 2])>,
}

impl Template {
    pub(super) fn draw(draw: &mut Draw<'_>) -> Self {
        let mut layers: Vec<(&'static str, Way, [usize; 2])> = Vec::new();
        for _ in 0..1 + draw.below(3) {
            let (layer, way) = (draw.one_of(LAYERS), draw.one_of(WAYS));
            let shape = [draw.one_of(&[1, 2, 3, 8, 0]), draw.one_of(&[32, 64, 96, 128, 33, 0])];
            if layers.iter().all(|(other, ..)| *other != layer) {
                layers.push((layer, way, shape));
            }
        }
        Self { layers }
    }

    /// Returns the tensors, with values from the input.
    pub(super) fn tensors(&self, draw: &mut Draw<'_>) -> Vec<Stored> {
        let mut tensors = Vec::new();
        for &(layer, way, [rows, cols]) in &self.layers {
            let mut add = |name: String, dtype, shape: Vec<usize>, bits: usize| {
                let bytes = draw.fill(shape.iter().product::<usize>() * bits / 8);
                tensors.push(Stored { name, dtype, shape, bytes });
            };
            let (codes, mx, nv) = (vec![rows, cols / 2], vec![rows, cols / 32], vec![rows, cols / 16]);
            match way {
                Way::Float(dtype) => {
                    let experts = layer.contains("experts");
                    let shape = if experts { vec![2, cols, rows] } else { vec![rows, cols] };
                    add(layer.into(), dtype, shape, if dtype == "F32" { 32 } else { 16 });
                }
                Way::Mxfp4 => {
                    add(format!("{layer}_packed"), "U8", codes, 8);
                    add(format!("{layer}_scale"), "U8", mx, 8);
                }
                Way::Nvfp4 => {
                    add(format!("{layer}_packed"), "U8", codes, 8);
                    add(format!("{layer}_scale"), "F8_E4M3", nv, 8);
                    add(format!("{layer}_global_scale"), "F32", vec![1], 32);
                }
                Way::Mxfp8 => {
                    add(layer.into(), "F8_E4M3", vec![rows, cols], 8);
                    add(format!("{layer}_scale"), "U8", mx, 8);
                }
                Way::Fp8 => {
                    let scales = vec![rows.div_ceil(128), cols.div_ceil(128)];
                    add(layer.into(), "F8_E4M3", vec![rows, cols], 8);
                    add(format!("{layer}_scale_inv"), "F32", scales, 32);
                }
                Way::Int8 => {
                    add(layer.into(), "I8", vec![rows, cols], 8);
                    add(format!("{layer}_scale"), "BF16", vec![rows, 1], 16);
                }
                Way::Modelopt => {
                    add(layer.into(), "U8", codes, 8);
                    add(format!("{layer}_scale"), "F8_E4M3", nv, 8);
                    add(format!("{layer}_scale_2"), "F32", vec![], 32);
                    if let Some(layer) = layer.strip_suffix(".weight") {
                        add(format!("{layer}.input_scale"), "F32", vec![], 32);
                    }
                }
                Way::GptOss => {
                    add(format!("{layer}_blocks"), "U8", vec![2, rows, cols / 32, 16], 8);
                    add(format!("{layer}_scales"), "U8", vec![2, rows, cols / 32], 8);
                }
            }
        }
        // Global scales of ordinary size. Others are refused before any computation.
        for tensor in &mut tensors {
            let global =
                tensor.dtype == "F32" && tensor.bytes.len() == 4 && !tensor.name.ends_with(".weight");
            if global && !draw.once_in(3) {
                tensor.bytes = draw
                    .one_of(&[1.0f32, 0.125, 3.7, 448.0, 1e-30, 1e30, 2f32.powi(-100)])
                    .to_le_bytes()
                    .into();
            }
        }
        tensors
    }
}

/// Returns the header of a file with these tensors, one after the other.
pub(super) fn encode(draw: &mut Draw<'_>, tensors: &[Stored]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    if draw.once_in(8) {
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
    }
    for Stored { name, dtype, shape, bytes } in tensors {
        let offsets = [end, end + bytes.len()];
        end = offsets[1];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
    }
    serde_json::Value::from(header).to_string().into()
}
