//! Roles of weights that are unquantized by default: norms, embeddings, output heads, routers, ….
//!
//! Quantizing these weights costs more accuracy than it saves bytes, or serving engines expect them
//! unquantized. These rules decide for architectures that microscale does not know, and for the
//! weights of known ones that the [table](super::architectures) has no fact about.

use super::weight::is_expert;

/// Components that show the role of every layer inside the module: **the table of exceptions**.
const MODULES: &[(&str, Role)] = &[
    ("gate", Role::Router),
    ("router", Role::Router),
    ("ffn_gate_inp", Role::Router),
    ("ffn_gate_inp_shexp", Role::Router),
    // DeepSeek Sparse Attention: engines build these layers without a quantization config.
    ("indexer", Role::SparseAttention),
    ("compressor", Role::SparseAttention),
];

/// Last components of output heads.
const HEADS: &[&str] = &["head", "embed_out", "unembed", "shared_head_head"];

/// Output heads with generic names. These are whole names, because other layers have the same last
/// components.
const WHOLE_HEADS: &[&str] = &[
    "output",
    "decoder",
    "proj_out",
    "lm_loss",
    "pred_layer.proj",
    "output_projection",
    "output_layer",
    "transformer.output_layer",
    "language_model.output",
    "score",
    "classifier",
    "qa_outputs",
];

/// Last components of the layer that joins hidden state and embedding before a layer for multi-token
/// prediction. Engines build it without a quantization config.
const NEXT_TOKEN: &[&str] = &["eh_proj", "mtp_linear_proj"];

/// Words of a component that mean an embedding.
const EMBEDDING_WORDS: &[&str] = &["embed", "embeds", "embedding", "embeddings", "embedder", "embd", "emb"];

/// Last components that mean an embedding in every model.
const EMBEDDINGS: &[&str] = &[
    "embed_tokens",
    "embed_positions",
    "embeddings",
    "word_embeddings",
    "position_embeddings",
    "position_embedding",
    "token_type_embeddings",
    "tok_embeddings",
    "relative_attention_bias",
    "shared",
    "token_types",
    "wte",
    "wpe",
];

/// The role of a weight that is unquantized by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// The scales of a normalization.
    Norm,
    /// A table of token or position embeddings.
    Embedding,
    /// The last layer, which computes the logits.
    OutputHead,
    /// A layer that assigns tokens to experts.
    Router,
    /// A layer that selects or compresses the tokens that sparse attention reads.
    SparseAttention,
    /// The layer that joins hidden state and embedding for multi-token prediction.
    NextToken,
    /// The kernels of a convolution.
    Convolution,
    /// The transposed weights of GPT-2's layers (Conv1D). No loader accepts them quantized.
    Transposed,
    /// A weight that transformers does not load quantized: it splits or joins it while loading, or
    /// the model's class initializes it.
    Converted,
}

/// The role of a tensor that is unquantized by default, from its name and number of dimensions.
///
/// Whole words of the name decide. For norms and embeddings only the last two components count:
/// those before them are names of models and towers.
pub fn role(name: &str, dimensions: usize) -> Option<Role> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let parts: Vec<&str> = module.split('.').collect();
    let last = parts.last().copied().unwrap_or_default();
    let ends = &parts[parts.len().saturating_sub(2)..];
    // Some heads have several layers: `lm_head.dense` and `lm_head.decoder`.
    let is_in_head =
        module.starts_with("cls.predictions.") || parts.iter().any(|part| part.ends_with("lm_head"));
    if is_in_head || HEADS.contains(&last) || WHOLE_HEADS.contains(&module) {
        return Some(Role::OutputHead);
    }
    if ends.iter().any(|part| part.to_ascii_lowercase().contains("norm")) {
        return Some(Role::Norm);
    }
    if ends.iter().any(|part| part.split('_').any(|word| EMBEDDING_WORDS.contains(&word)))
        || EMBEDDINGS.contains(&last)
        || last.ends_with("emb")
    {
        return Some(Role::Embedding);
    }
    // Inside an expert, `gate` is a projection.
    let modules = || MODULES.iter().filter(|(_, role)| *role != Role::Router || !is_expert(name));
    if let Some((_, role)) = modules().find(|(known, _)| parts.contains(known)) {
        return Some(*role);
    }
    let is_router =
        |part: &&str| part.split('_').any(|word| word == "router") || part.ends_with("_expert_gate");
    if parts.iter().any(is_router) {
        return Some(Role::Router);
    }
    if ends.iter().any(|part| NEXT_TOKEN.contains(part)) {
        return Some(Role::NextToken);
    }
    // Experts have three dimensions too.
    let convolution = dimensions > 3 || dimensions == 3 && name.contains("conv");
    convolution.then_some(Role::Convolution)
}

/// Returns whether a module with this name is an embedding in every model.
pub(crate) fn is_embedding(module: &str) -> bool {
    EMBEDDINGS.contains(&module.rsplit('.').next().unwrap_or(module))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_decide_about_roles() {
        for (name, dimensions, expected) in [
            ("model.norm.weight", 1, Some(Role::Norm)),
            ("shared.weight", 2, Some(Role::Embedding)),
            ("model.shared.weight", 2, Some(Role::Embedding)),
            ("model.layers.0.mlp.shared.up_proj.weight", 2, None),
            (
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                2,
                Some(Role::Embedding),
            ),
            ("position_embd.weight", 2, Some(Role::Embedding)),
            ("emb.weight", 2, Some(Role::Embedding)),
            ("embed_out.weight", 2, Some(Role::OutputHead)),
            ("head.weight", 2, Some(Role::OutputHead)),
            ("proj_out.weight", 2, Some(Role::OutputHead)),
            ("blocks.0.proj_out.weight", 2, None),
            ("lm_head.decoder.weight", 2, Some(Role::OutputHead)),
            ("generator_lm_head.weight", 2, Some(Role::OutputHead)),
            ("cls.predictions.transform.dense.weight", 2, Some(Role::OutputHead)),
            ("model.layers.61.shared_head.head.weight", 2, Some(Role::OutputHead)),
            ("mtp.0.head.weight", 2, Some(Role::OutputHead)),
            ("vision_model.head.mlp.fc1.weight", 2, None),
            ("score.weight", 2, Some(Role::OutputHead)),
            ("model.layers.0.mlp.router.classifier.weight", 2, Some(Role::Router)),
            ("model.layers.0.mlp.gate.wg.weight", 2, Some(Role::Router)),
            ("model.layers.0.block_sparse_moe.router.layer.weight", 2, Some(Role::Router)),
            ("model.layers.0.mlp.shared_expert_gate.weight", 2, Some(Role::Router)),
            ("blk.0.ffn_gate_inp.weight", 2, Some(Role::Router)),
            ("model.layers.0.mlp.gate_proj.weight", 2, None),
            ("model.layers.0.mlp.experts.3.gate.weight", 2, None),
            ("model.layers.0.self_attn.indexer.wq_b.weight", 2, Some(Role::SparseAttention)),
            ("model.layers.0.self_attn.indexer.weights_proj.weight", 2, Some(Role::SparseAttention)),
            ("layers.0.attn.compressor.wkv.weight", 2, Some(Role::SparseAttention)),
            ("layers.0.attn.indexer.compressor.wgate.weight", 2, Some(Role::SparseAttention)),
            ("model.layers.0.self_attn.index_q_proj.weight", 2, None),
            ("model.layers.61.eh_proj.weight", 2, Some(Role::NextToken)),
            ("model.mtp_linear_proj.0.weight", 2, Some(Role::NextToken)),
            // Names of models and towers say nothing about the layers inside.
            ("roberta_prelayernorm.encoder.layer.0.attention.self.query.weight", 2, None),
            ("model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0.mlp.fc1.weight", 2, None),
            ("transformer_blocks.0.norm1.linear.weight", 2, Some(Role::Norm)),
            ("time_text_embed.timestep_embedder.linear_1.weight", 2, Some(Role::Embedding)),
            ("encoder.layer.0.attention.output.LayerNorm.weight", 1, Some(Role::Norm)),
            ("model.layers.0.mlp.unembedded.weight", 2, None),
            ("output.weight", 2, Some(Role::OutputHead)),
            ("transformer.output_layer.weight", 2, Some(Role::OutputHead)),
            ("blk.0.attn_output.weight", 2, None),
            ("model.layers.0.mlp.gate.weight", 2, Some(Role::Router)),
            ("vision_tower.patch_conv.weight", 4, Some(Role::Convolution)),
            ("model.visual.downsample.weight", 4, Some(Role::Convolution)),
            ("model.encoder.conv1.weight", 3, Some(Role::Convolution)),
            ("model.layers.0.mlp.experts.fc1.weight", 3, None),
            ("in_proj.conv.weight", 2, None),
        ] {
            assert_eq!(role(name, dimensions), expected, "{name}");
        }
    }
}
