//! The roles of a checkpoint's layers, and loaders' names for them.
//!
//! The architecture decides if it is known, otherwise the tensor names do.

use super::architectures::Architecture;
use super::role::{Role, is_embedding, role};
use super::weight::{WEIGHT, module};

/// The architecture of a checkpoint, if it is known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Naming(Option<&'static Architecture>);

impl Naming {
    /// The naming for a `model_type` of config.json.
    pub(crate) fn of(model_type: &str) -> Self {
        Self(Architecture::called(model_type))
    }

    /// Returns whether the table of architectures has this one.
    pub(crate) fn is_known(self) -> bool {
        self.0.is_some()
    }

    /// The role of a tensor that is unquantized by default.
    pub(crate) fn unquantized_role(self, name: &str, shape: &[usize]) -> Option<Role> {
        let ends = |ends: &[&str]| is_among(module(name), ends);
        match self.0 {
            Some(known) if ends(known.embeddings) => Some(Role::Embedding),
            Some(known) if shape.len() == 2 && ends(known.transposed) => Some(Role::Transposed),
            _ => role(name, shape.len()),
        }
    }

    /// Returns whether a tensor is the weight of a linear layer; `None` if its name leaves that
    /// open.
    pub(crate) fn is_linear(self, name: &str, shape: &[usize]) -> Option<bool> {
        let Some(module) = name.strip_suffix(WEIGHT).filter(|_| shape.len() == 2) else { return Some(false) };
        if self.0.is_some_and(|known| is_among(module, known.linear)) {
            return Some(true);
        }
        match self.unquantized_role(name, shape) {
            None | Some(Role::OutputHead | Role::Router) => Some(true),
            Some(Role::Convolution | Role::Transposed) => Some(false),
            Some(Role::Norm | Role::Embedding) => {
                let named = self.0.is_some_and(|known| is_among(module, known.embeddings));
                (named || is_embedding(module)).then_some(false)
            }
        }
    }

    /// The name of a layer in transformers, from its name in the file.
    pub(crate) fn module(self, layer: &str) -> String {
        let mut module = layer.to_string();
        for (from, to) in self.0.map_or(&[][..], |known| known.renamed) {
            if from.starts_with('.') {
                module = module.replace(from, to);
            } else if let Some(rest) = module.strip_prefix(from) {
                return format!("{to}{rest}");
            }
        }
        module
    }

    /// All names of a layer that loaders use: the file's, which vLLM and SGLang use, and
    /// transformers' if it differs.
    pub(crate) fn spellings(self, layer: &str) -> Vec<String> {
        let module = self.module(layer);
        if module == layer { vec![module] } else { vec![layer.into(), module] }
    }

    /// The module of the output head.
    pub(crate) fn head(self) -> &'static str {
        self.0.map_or("lm_head", |known| known.head)
    }
}

/// Returns whether a module's name is one of `ends`, or ends with a dot and one of them.
fn is_among(module: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| module.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_called_as_transformers_calls_them() {
        for (model_type, file, module) in [
            ("llava", "language_model.lm_head", "lm_head"),
            (
                "llava",
                "language_model.model.layers.0.mlp.up_proj",
                "model.language_model.layers.0.mlp.up_proj",
            ),
            (
                "llava",
                "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
                "model.vision_tower.encoder.layers.0.mlp.fc1",
            ),
            (
                "mistral3",
                "vision_tower.transformer.layers.0.attention.q_proj",
                "model.vision_tower.transformer.layers.0.attention.q_proj",
            ),
            (
                "gemma3",
                "model.language_model.layers.0.mlp.up_proj",
                "model.language_model.layers.0.mlp.up_proj",
            ),
            ("qwen2_5_vl", "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"),
            ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"),
            ("qwen2_5_vl", "model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
            ("qwen2_5_vl", "lm_head", "lm_head"),
            ("mixtral", "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"),
            ("gpt_neox", "embed_out", "lm_head"),
            ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
            ("who-knows", "language_model.lm_head", "language_model.lm_head"),
        ] {
            let naming = Naming::of(model_type);
            assert_eq!(naming.module(file), module, "{model_type}");
            let spellings = naming.spellings(file);
            assert_eq!(spellings.first().map(String::as_str), Some(file));
            assert_eq!(spellings.len(), 1 + usize::from(file != module), "{file}");
        }
    }

    #[test]
    fn the_architecture_decides_before_names_do() {
        let role = |model_type, name| Naming::of(model_type).unquantized_role(name, &[64, 64]);
        assert_eq!(role("gpt2", "h.0.attn.c_attn.weight"), Some(Role::Transposed));
        assert_eq!(role("gpt_bigcode", "transformer.h.0.attn.c_attn.weight"), None);
        assert_eq!(role("ctrl", "transformer.w.weight"), Some(Role::Embedding));
        assert_eq!(role("who-knows", "transformer.w.weight"), None);
        assert_eq!(Naming::of("gpt2").unquantized_role("h.0.attn.c_attn.bias", &[64]), None);
    }

    #[test]
    fn linear_layers_are_distinguished_from_others() {
        let linear = |model_type, name, shape: &[usize]| Naming::of(model_type).is_linear(name, shape);
        assert_eq!(linear("llama4", "vision_model.patch_embedding.linear.weight", &[8, 8]), Some(true));
        assert_eq!(linear("who-knows", "vision_model.patch_embedding.linear.weight", &[8, 8]), None);
        assert_eq!(linear("llama", "model.embed_tokens.weight", &[8, 8]), Some(false));
        assert_eq!(linear("llama", "lm_head.weight", &[8, 8]), Some(true));
        assert_eq!(linear("llama", "model.layers.0.mlp.up_proj.weight", &[8, 8]), Some(true));
        assert_eq!(linear("llama", "model.layers.0.mlp.up_proj.bias", &[8]), Some(false));
        assert_eq!(linear("gpt2", "h.0.mlp.c_fc.weight", &[8, 8]), Some(false));
        assert_eq!(linear("ctrl", "transformer.w.weight", &[8, 8]), Some(false));
        assert_eq!(linear("whisper", "model.encoder.conv1.weight", &[8, 8, 3]), Some(false));
    }
}
