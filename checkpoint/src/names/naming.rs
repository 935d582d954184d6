//! The roles of a checkpoint's layers, and loaders' names for them.
//!
//! The architecture decides if it is known, otherwise the tensor names do.

use super::architectures::{Architecture, Experts, Loading};
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
        let Some(known) = self.0 else { return role(name, shape.len()) };
        let layer = module(name);
        if ends_with_one(layer, known.embeddings) {
            return Some(Role::Embedding);
        }
        if shape.len() == 2 && name.ends_with(WEIGHT) {
            if ends_with_one(layer, known.transposed) {
                return Some(Role::Transposed);
            }
            if known.converted.iter().any(|part| has_part(layer, part)) {
                return Some(Role::Converted);
            }
            if self.is_head(name) {
                return Some(Role::OutputHead);
            }
            if ends_with_one(layer, known.plain) {
                return None;
            }
        }
        role(name, shape.len())
    }

    /// Returns whether a tensor is the weight of a linear layer; `None` if its name leaves that
    /// open.
    pub(crate) fn is_linear(self, name: &str, shape: &[usize]) -> Option<bool> {
        let Some(layer) = name.strip_suffix(WEIGHT).filter(|_| shape.len() == 2) else { return Some(false) };
        if self.0.is_some_and(|known| ends_with_one(layer, known.linear)) {
            return Some(true);
        }
        match self.unquantized_role(name, shape) {
            Some(Role::Convolution | Role::Transposed) => Some(false),
            Some(Role::Norm | Role::Embedding) => {
                let named = self.0.is_some_and(|known| ends_with_one(layer, known.embeddings));
                (named || is_embedding(layer)).then_some(false)
            }
            _ => Some(true),
        }
    }

    /// The names of a layer in transformers, from its name in the file.
    ///
    /// There are several if transformers splits the layer while it loads it.
    pub(crate) fn modules(self, layer: &str) -> Vec<String> {
        let parts: Vec<&str> = layer.split('.').collect();
        let renamed = self.0.map_or(&[][..], |known| known.renamed);
        let matching = |from: &str| is_prefix(from, &parts).then(|| components(from).count());
        let longest = renamed.iter().filter_map(|(from, _)| matching(from)).max();
        let Some(longest) = longest else { return vec![layer.into()] };
        let rows = renamed.iter().filter(|(from, _)| matching(from) == Some(longest));
        rows.map(|(from, to)| {
            // Each `*` is the number at the next `*` of the pattern.
            let stars = components(from).zip(&parts).filter(|(pattern, _)| *pattern == "*");
            let mut numbers = stars.map(|(_, part)| *part);
            let start = components(to).map(|part| match part {
                "*" => numbers.next().unwrap_or(part),
                _ => part,
            });
            start.chain(parts[longest..].iter().copied()).collect::<Vec<_>>().join(".")
        })
        .collect()
    }

    /// All names of a layer that loaders use: the file's, which vLLM and SGLang use, and
    /// transformers' that differ.
    pub(crate) fn spellings(self, layer: &str) -> Vec<String> {
        let mut spellings = vec![layer.to_string()];
        spellings.extend(self.modules(layer).into_iter().filter(|module| module != layer));
        spellings
    }

    /// How transformers reads the experts of a layer.
    pub(crate) fn experts(self) -> Experts {
        self.0.map_or(Experts::Apart, |known| known.experts)
    }

    /// How transformers loads quantized files.
    pub(crate) fn loading(self) -> Loading {
        self.0.map_or(Loading::Both, |known| known.loading)
    }

    /// Returns whether a tensor is the weight of an output head.
    pub(crate) fn is_head(self, name: &str) -> bool {
        let layer = name.strip_suffix(WEIGHT);
        layer.is_some_and(|layer| self.modules(layer).iter().any(|module| self.heads().contains(&&**module)))
    }

    /// The modules of output heads, which may be tied to an embedding.
    pub(crate) fn heads(self) -> &'static [&'static str] {
        self.0.map_or(&["lm_head"], |known| known.heads)
    }
}

/// The components of a pattern. The empty pattern has no components.
fn components(pattern: &str) -> impl Iterator<Item = &str> {
    pattern.split('.').filter(|part| !part.is_empty())
}

/// Returns whether the first components of a name match a pattern, whose `*` are numbers.
fn is_prefix(pattern: &str, parts: &[&str]) -> bool {
    let mut parts = parts.iter();
    components(pattern).all(|expected| {
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        parts.next().is_some_and(|part| expected == *part || expected == "*" && is_number(part))
    })
}

/// Returns whether a name is one of `ends`, or ends with a dot and one of them.
fn ends_with_one(name: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

/// Returns whether whole components of a name are `part`.
fn has_part(name: &str, part: &str) -> bool {
    let begins = |at: usize| at == 0 || name[..at].ends_with('.');
    let ends = |at: usize| at == name.len() || name[at..].starts_with('.');
    name.match_indices(part).any(|(at, _)| begins(at) && ends(at + part.len()))
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
            ("fuyu", "vision_embed_tokens", "model.vision_embed_tokens"),
            ("deepseek_v4", "head", "lm_head"),
            ("deepseek_v4", "layers.3.attn.wq_a", "model.layers.3.self_attn.q_a_proj"),
            (
                "aya_vision",
                "language_model.model.layers.0.mlp.up_proj",
                "model.language_model.layers.0.mlp.up_proj",
            ),
            ("phimoe", "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.router"),
        ] {
            let naming = Naming::of(model_type);
            assert_eq!(naming.modules(file), [module], "{model_type}");
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
