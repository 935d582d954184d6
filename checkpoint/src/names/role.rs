//! Roles of weights that are unquantized by default: norms, embeddings, output heads, routers, ….

/// Name parts that show the role of a weight: **the table of exceptions**. The first match decides.
///
/// Quantizing these weights costs more accuracy than it saves bytes, and serving engines expect
/// them unquantized.
const ROLES: &[(&str, Role)] = &[
    ("norm", Role::Norm),
    ("lm_head", Role::OutputHead),
    ("embed_out", Role::OutputHead),
    ("unembed", Role::OutputHead),
    ("cls.predictions.", Role::OutputHead),
    ("embed", Role::Embedding),
    ("wte", Role::Embedding),
    ("wpe", Role::Embedding),
    ("token_embd", Role::Embedding),
    ("position_embd", Role::Embedding),
    ("token_types", Role::Embedding),
    ("relative_attention_bias", Role::Embedding),
    ("ffn_gate_inp", Role::Router),
    ("router", Role::Router),
    (".gate.weight", Role::Router),
    ("_expert_gate.weight", Role::Router),
];

/// Output heads with generic names. These are whole names, because other layers contain the same
/// parts.
const HEADS: &[&str] = &[
    "output",
    "head",
    "decoder",
    "proj_out",
    "lm_loss",
    "pred_layer.proj",
    "output_projection",
    "output_layer",
    "transformer.output_layer",
    "language_model.output",
];

/// Last name components that mean an embedding in every model.
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
    /// The kernels of a convolution.
    Convolution,
    /// The transposed weights of GPT-2's layers (Conv1D). No loader accepts them quantized.
    Transposed,
}

/// The role of a tensor that is unquantized by default, from its name and number of dimensions.
pub fn role(name: &str, dimensions: usize) -> Option<Role> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    if HEADS.contains(&module) {
        return Some(Role::OutputHead);
    }
    if let Some((_, role)) = ROLES.iter().find(|(part, _)| name.contains(part)) {
        return Some(*role);
    }
    let last = last_part(module);
    if last == "shared" || last.ends_with("emb") {
        return Some(Role::Embedding);
    }
    // Experts have three dimensions too.
    let convolution = dimensions > 3 || dimensions == 3 && name.contains("conv");
    convolution.then_some(Role::Convolution)
}

/// Returns whether a module with this name is an embedding in every model.
pub(crate) fn is_embedding(module: &str) -> bool {
    EMBEDDINGS.contains(&last_part(module))
}

fn last_part(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
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
