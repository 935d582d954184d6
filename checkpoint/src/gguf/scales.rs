//! The global scales that llama.cpp applies, by architecture and layer.
//!
//! llama.cpp (llama-cpp-python 0.3.36) loads the `.scale` tensors of the layers in [`LOADED`] for
//! every architecture. It refuses a file with other `.scale` tensors because of the tensor count.
//! Whether a layer's output is multiplied by its scale depends on the graph of the architecture:
//! `APPLIED` is **the table**.

use super::header::Header;
use super::value::MetadataValue;

/// Layers of one kind, by their names in a block.
type LayerNames = &'static [&'static str];

const ATTENTION: LayerNames = &["attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"];
const GATE: LayerNames = &["attn_gate"];
const DENSE: LayerNames = &["ffn_gate", "ffn_up", "ffn_down"];
const SHARED: LayerNames = &["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
const EXPERTS: LayerNames = &["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const STATES: LayerNames = &["ssm_in", "ssm_out", "ssm_alpha", "ssm_beta"];
const NEXT: LayerNames = &["nextn.eh_proj", "nextn.shared_head_head"];

/// The layers whose scales llama.cpp loads.
const LOADED: [LayerNames; 7] = [ATTENTION, GATE, DENSE, SHARED, EXPERTS, STATES, NEXT];

/// The layers whose scales are applied, and the architectures that do so, separated by blanks.
const APPLIED: &[(&[LayerNames], &str)] = &[
    (
        &[ATTENTION],
        "apertus arcee arctic baichuan bailingmoe bailingmoe2 bert bloom chameleon chatglm codeshell cogvlm \
         command-r dbrx deepseek dots1 dream ernie4_5 eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma \
         gemma-embedding gemma2 gemma3 glm4 glm4moe gpt-oss gpt2 gptneox granite granite_swa granitehybrid grok \
         grovemoe hrm_text hunyuan-moe hunyuan_vl internlm2 jais jais2 jamba laguna lfm2 llada llada-moe llama4 \
         maincoder maple minicpm3 minimax-m2 minimax-m3 modern-bert mpt muse-glimmer nemotron neo-bert olmo \
         olmo2 olmoe orion pangu-embedded phi2 phi3 plamo qwen qwen2 qwen2moe qwen2vl qwen3vl qwen3vlmoe refact \
         rnd1 seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie xverse",
    ),
    (&[ATTENTION, DENSE], "bitnet cohere2 nanbeige qwen3"),
    (&[ATTENTION, DENSE, EXPERTS], "gemma4 llama mistral3"),
    (&[ATTENTION, DENSE, EXPERTS, SHARED], "cohere2moe deepseek32 glm-dsa hy_v3"),
    (&[ATTENTION, DENSE, EXPERTS, SHARED, STATES], "nemotron_h"),
    (&[ATTENTION, EXPERTS], "mellum qwen3moe"),
    (&[ATTENTION, EXPERTS, GATE, STATES], "qwen35moe qwen4exp"),
    (&[ATTENTION, DENSE, GATE, STATES], "qwen35"),
    (&[DENSE, EXPERTS, SHARED], "dots3note"),
    (&[EXPERTS], "qwen3next"),
    (&[STATES], "mamba mamba2"),
];

/// How llama.cpp uses the global scale of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It multiplies by the scale.
    Applied,
    /// It loads the scale and computes as if it were 1.
    LoadedOnly,
    /// It does not know the scale and refuses the file.
    Unknown,
}

/// Returns how llama.cpp uses the global scale of a tensor in an architecture.
pub(crate) fn use_of(architecture: &str, tensor: &str) -> Use {
    if tensor == "output.weight" {
        return Use::Applied;
    }
    let Some(layer) = layer(tensor) else { return Use::Unknown };
    if !LOADED.iter().any(|layers| layers.contains(&layer)) {
        return Use::Unknown;
    }
    let row =
        APPLIED.iter().find(|(_, names)| names.split_ascii_whitespace().any(|name| name == architecture));
    let applied = row.is_some_and(|(kinds, _)| kinds.iter().any(|layers| layers.contains(&layer)));
    if applied { Use::Applied } else { Use::LoadedOnly }
}

/// The name of a layer in its block, from the name of its weight.
fn layer(tensor: &str) -> Option<&str> {
    let (block, layer) = tensor.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    block.parse::<u64>().ok().map(|_| layer)
}

impl Header {
    /// The architecture of the model, or an empty string.
    pub(crate) fn architecture(&self) -> &str {
        match self.value(super::format::ARCHITECTURE) {
            Some(MetadataValue::Text(name)) => name,
            _ => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn scales_are_for_some_layers_of_some_architectures() {
        for (architecture, tensor, expected) in [
            ("llama", "blk.0.ffn_down.weight", Use::Applied),
            ("llama", "blk.11.ffn_up_exps.weight", Use::Applied),
            ("llama", "output.weight", Use::Applied),
            ("qwen2", "blk.0.attn_q.weight", Use::Applied),
            ("qwen2", "blk.0.ffn_down.weight", Use::LoadedOnly),
            ("deepseek2", "blk.0.attn_output.weight", Use::LoadedOnly),
            ("deepseek2", "blk.0.attn_q_a.weight", Use::Unknown),
            ("mamba", "blk.0.ssm_in.weight", Use::Applied),
            ("mamba", "blk.0.ssm_x.weight", Use::Unknown),
            ("gpt2", "position_embd.weight", Use::Unknown),
            ("t5", "enc.blk.0.attn_q.weight", Use::Unknown),
            ("llama", "blk.x.attn_q.weight", Use::Unknown),
        ] {
            assert_eq!(use_of(architecture, tensor), expected, "{architecture} {tensor}");
        }
        let mut seen = HashSet::new();
        assert!(
            APPLIED
                .iter()
                .flat_map(|(_, names)| names.split_ascii_whitespace())
                .all(|name| seen.insert(name))
        );
    }
}
