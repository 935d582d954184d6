//! Checks the sizes in config.json: rows and columns of weights.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::contents::{Contents, Entry, Stack, numbered};
use super::finding::{Defect, Finding};
use super::stacks::{main_stack, text_config};
use crate::names::weight::WEIGHT;
use crate::read::config::Config;

/// Decoders whose attention has `num_attention_heads` heads of `head_dim` in every layer, and whose
/// head may be tied to the embedding.
const PLAIN_DECODERS: &str = "arcee cohere exaone4 ernie4_5 ernie4_5_moe gemma gemma2 glm glm4 glm4_moe gpt_oss granite granitemoe \
    helium llama ministral3 mistral mixtral nemotron olmo olmo2 olmoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm \
    starcoder2";

/// Returns whether a `model_type` is one of [`PLAIN_DECODERS`].
pub(super) fn is_plain_decoder(model_type: Option<&str>) -> bool {
    PLAIN_DECODERS.split_ascii_whitespace().any(|known| Some(known) == model_type)
}

/// Checks the sizes in config.json. Shapes of `odd` tensors are reported already.
pub(super) fn check_sizes(contents: &Contents<'_>, odd: &HashSet<String>, findings: &mut Vec<Finding>) {
    let checkpoint = contents.checkpoint;
    let (Some(file), Some(text)) = (&checkpoint.config, text_config(checkpoint)) else { return };
    let mut found = |tensor: &str, what: String| {
        let (tensor, file) = (Some(tensor.into()), file.file.clone());
        findings.push(Finding { defect: Defect::Config, tensor, file, what });
    };
    let number = |key: &str| text.get(key).and_then(Value::as_u64);
    let Some((name, stack)) = main_stack(contents) else { return };
    let parent = name.rsplit_once('.').map(|(parent, _)| parent);
    // Zamba's shared layers take two hidden states side by side.
    if let Some(hidden) = number("hidden_size").filter(|_| !text.contains_key("attention_hidden_size")) {
        check_widths(contents, parent, odd, hidden, &mut found);
    }
    if let (Some(parent), Some(vocabulary)) = (parent, number("vocab_size"))
        && !text.contains_key("decoder_vocab_size")
    {
        check_vocabulary(contents, parent, vocabulary, &mut found);
    }
    check_all_layers(&stack, text, file.model_type(), &mut found);
}

/// Checks that layers and norms of the language model have the width `hidden`.
fn check_widths(
    contents: &Contents<'_>,
    parent: Option<&str>,
    odd: &HashSet<String>,
    hidden: u64,
    found: &mut impl FnMut(&str, String),
) {
    let is_last_norm = |name: &str| {
        let rest = parent.and_then(|parent| name.strip_prefix(parent)?.strip_prefix('.'));
        rest.and_then(|rest| rest.strip_suffix(WEIGHT)).is_some_and(|norm| LAST_NORMS.contains(&norm))
    };
    for entry in contents.entries().filter(|entry| !odd.contains(entry.name)) {
        let width = match *entry.shape {
            [size] if is_last_norm(entry.name) => Some((size, "values")),
            _ => width(&entry),
        };
        if let Some((width, side)) = width.filter(|(width, _)| *width as u64 != hidden) {
            let shape = entry.shape;
            found(
                entry.name,
                format!("it has {width} {side} (shape {shape:?}), but hidden_size is {hidden}"),
            );
        }
    }
}

/// Last name components of tables of token embeddings.
const EMBEDDINGS: [&str; 5] = ["embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"];

/// Checks the rows of the embedding and the output head.
///
/// Some classes add rows for images or padding.
fn check_vocabulary(
    contents: &Contents<'_>,
    parent: &str,
    vocabulary: u64,
    found: &mut impl FnMut(&str, String),
) {
    let checkpoint = contents.checkpoint;
    let is_plain = is_plain_decoder(checkpoint.config.as_ref().and_then(Config::model_type));
    let names = EMBEDDINGS.map(|part| format!("{parent}.{part}{WEIGHT}"));
    for entry in contents.entries() {
        let [rows, _] = *entry.shape else { continue };
        let is_table = checkpoint.naming.is_head(entry.name) || names.iter().any(|name| name == entry.name);
        if is_table && ((rows as u64) < vocabulary || is_plain && rows as u64 != vocabulary) {
            found(entry.name, format!("it has {rows} rows, but vocab_size is {vocabulary}"));
        }
    }
}

/// Name endings of layers whose input width is the model's hidden size, then of those whose output
/// is.
const FROM_HIDDEN: [&str; 5] = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
const TO_HIDDEN: [&str; 2] = ["o_proj", "down_proj"];

/// Norms of the hidden size, right below the layer.
const NORMS: [&str; 4] = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
];

/// Names of the norm after all layers, in the module that has their stack.
const LAST_NORMS: [&str; 5] = ["norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm"];

/// Returns the size of a tensor of the language model that is the hidden size, and its side.
fn width(entry: &Entry<'_>) -> Option<(usize, &'static str)> {
    let others = ["vision", "visual", "audio", "encoder"];
    let (stack, _, rest) = numbered(entry.name).filter(|(stack, ..)| stack.ends_with("layers"))?;
    if others.iter().any(|other| entry.name.contains(other)) && stack != "layers" {
        return None;
    }
    if let [size] = *entry.shape {
        return NORMS.contains(&rest).then_some((size, "values"));
    }
    let (parent, part) = rest.strip_suffix(".weight")?.rsplit_once('.')?;
    // Routers and adapters have layers with the same names.
    if !["self_attn", "attention", "attn", "mlp"].contains(&parent) && !parent.contains("expert") {
        return None;
    }
    let [rows, cols] = *entry.shape else { return None };
    match part {
        _ if FROM_HIDDEN.contains(&part) => Some((cols, "inputs")),
        _ if TO_HIDDEN.contains(&part) => Some((rows, "outputs")),
        _ => None,
    }
}

/// Checks sizes that all layers have: of MLPs and attention heads. Sizes of single layers may differ
/// on purpose, so only a size that no layer has is reported.
fn check_all_layers(
    stack: &Stack<'_>,
    text: &Map<String, Value>,
    model_type: Option<&str>,
    found: &mut impl FnMut(&str, String),
) {
    let number = |key: &str| text.get(key).and_then(Value::as_u64);
    let mut check = |rest: &str, row: bool, expected: u64, says: String| {
        let entries =
            || stack.values().filter_map(|layer| layer.get(rest)).filter(|entry| entry.shape.len() == 2);
        let size = |entry: &Entry<'_>| entry.shape[usize::from(!row)] as u64;
        let side = if row { "rows" } else { "columns" };
        if let Some(first) = entries().next()
            && entries().all(|entry| size(entry) != expected)
        {
            let (name, size) = (first.name, size(first));
            found(name, format!("it has {size} {side}, and {says} makes {expected}"));
        }
    };
    if let Some(width) = number("intermediate_size").filter(|_| text.get("use_double_wide_mlp").is_none()) {
        let says = format!("intermediate_size {width}");
        check("mlp.gate_proj.weight", true, width, says.clone());
        check("mlp.up_proj.weight", true, width, says.clone());
        check("mlp.down_proj.weight", false, width, says);
    }
    let is_plain = is_plain_decoder(model_type);
    let (Some(heads), Some(hidden), true) = (number("num_attention_heads"), number("hidden_size"), is_plain)
    else {
        return;
    };
    let head = number("head_dim").or_else(|| hidden.checked_div(heads)).unwrap_or(0);
    let few = number("num_key_value_heads").unwrap_or(heads);
    for (rest, row, heads, key) in [
        ("self_attn.q_proj.weight", true, heads, "num_attention_heads"),
        ("self_attn.k_proj.weight", true, few, "num_key_value_heads"),
        ("self_attn.v_proj.weight", true, few, "num_key_value_heads"),
        ("self_attn.o_proj.weight", false, heads, "num_attention_heads"),
    ] {
        check(rest, row, heads.saturating_mul(head), format!("{key} {heads} with head_dim {head}"));
    }
}
