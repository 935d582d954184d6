//! The sizes and constants of a model, from its config.json.

use std::fs;
use std::path::Path;

use microscale::formats::{Gate, Glu};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::families::{Family, RouterOrder, family};
use crate::rope::{Rope, Scaling};

/// A model's family, sizes and constants.
#[derive(Clone, Debug)]
pub struct Config {
    /// Facts of the family.
    pub(crate) family: &'static Family,
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The longest sequence that the model was made for.
    pub context: usize,
    /// The token that begins a text, if there is one.
    pub bos: Option<u32>,
    /// The gate of feed-forward layers.
    pub(crate) gate: Glu,
    /// Elements between the linear layers of a dense MLP.
    pub(crate) intermediate: usize,
    pub(crate) eps: f32,
    /// Whether embeddings are the weights of the head.
    pub(crate) tied: bool,
    /// The factor of attention scores.
    pub(crate) score_scale: f64,
    /// The limit of the logits: `cap · tanh(logits / cap)`.
    pub(crate) logit_cap: Option<f64>,
    /// Rotary embeddings of layers with full and with sliding attention.
    pub(crate) ropes: [Rope; 2],
    /// Tokens that a layer attends to, by layer; `None` for all.
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) experts: Option<ExpertsConfig>,
    /// Whether each layer has experts.
    pub(crate) sparse: Vec<bool>,
}

/// The sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsConfig {
    pub(crate) count: usize,
    /// Experts per token.
    pub(crate) chosen: usize,
    pub(crate) intermediate: usize,
    /// Whether the weights of a token's experts add up to 1.
    pub(crate) normalized: bool,
}

impl Config {
    /// Reads a checkpoint directory's config.json.
    ///
    /// # Errors
    /// If the file cannot be read or is no JSON, for architectures and kinds of rotary embeddings
    /// that this crate does not have, and for missing or inconsistent numbers.
    pub fn read(directory: &Path) -> Result<Self> {
        let file = directory.join("config.json");
        let text = fs::read_to_string(&file)
            .map_err(|error| Error::Config { file: file.clone(), problem: error.to_string() })?;
        Self::parse(&text).map_err(|problem| Error::Config { file, problem })
    }

    /// Reads a config.json's text.
    ///
    /// # Errors
    /// The problem in words.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let root: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        // Models of several modalities keep the language model's numbers in an object of their own.
        let inner = if root["text_config"].is_object() { &root["text_config"] } else { &root };
        let fields = Fields(inner);
        let model_type = inner["model_type"].as_str().or(root["model_type"].as_str()).unwrap_or_default();
        let family = family(model_type)?;
        let (hidden, heads) = (fields.number("hidden_size")?, fields.number("num_attention_heads")?);
        if hidden == 0 || heads == 0 {
            return Err("hidden_size and num_attention_heads must be positive".into());
        }
        let layers = fields.number("num_hidden_layers")?;
        let head_dim = fields.optional("head_dim").or(family.head_dim).unwrap_or(hidden / heads);
        let kv_heads = fields.optional("num_key_value_heads").unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || !head_dim.is_multiple_of(2) || head_dim == 0 {
            return Err(format!("{heads} heads of {head_dim} do not share {kv_heads} heads of keys"));
        }
        let context = fields.number("max_position_embeddings")?;
        let experts = match family.experts {
            None => None,
            Some(experts) => Some(ExpertsConfig {
                count: fields.any(&["num_experts", "num_local_experts"])?,
                chosen: fields.number("num_experts_per_tok")?,
                intermediate: fields.any(&["moe_intermediate_size", "intermediate_size"])?,
                normalized: experts.order == RouterOrder::ChooseThenSoftmax
                    || inner["norm_topk_prob"].as_bool().unwrap_or(false),
            }),
        };
        if let Some(experts) = experts
            && (experts.chosen == 0 || experts.chosen > experts.count)
        {
            return Err(format!("a token has {} of {} experts", experts.chosen, experts.count));
        }
        let windows = (0..layers).map(|layer| fields.window(family, layer)).collect::<Vec<_>>();
        let score_scale = inner["query_pre_attn_scalar"].as_f64().unwrap_or(head_dim as f64).powf(-0.5);
        Ok(Self {
            family,
            gate: fields.gate(family),
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocabulary: fields.number("vocab_size")?,
            context,
            bos: token(&inner["bos_token_id"]).or(token(&root["bos_token_id"])),
            intermediate: fields.number("intermediate_size")?,
            eps: inner["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
            tied: inner["tie_word_embeddings"]
                .as_bool()
                .or(root["tie_word_embeddings"].as_bool())
                .unwrap_or(family.tied),
            score_scale,
            logit_cap: inner["final_logit_softcapping"].as_f64(),
            ropes: fields.ropes(family, head_dim, context)?,
            sparse: (0..layers).map(|layer| experts.is_some() && fields.is_sparse(layer)).collect(),
            windows,
            experts,
        })
    }
}

/// A token's number, or the first of several.
fn token(value: &Value) -> Option<u32> {
    value.as_u64().or(value[0].as_u64()).and_then(|token| u32::try_from(token).ok())
}

/// The object with a language model's numbers.
struct Fields<'a>(&'a Value);

impl Fields<'_> {
    fn optional(&self, name: &str) -> Option<usize> {
        self.0[name].as_u64().and_then(|number| usize::try_from(number).ok())
    }

    fn number(&self, name: &str) -> std::result::Result<usize, String> {
        self.optional(name).ok_or_else(|| format!("it has no number {name}"))
    }

    /// The first of several names that exists.
    fn any(&self, names: &[&str]) -> std::result::Result<usize, String> {
        let found = names.iter().find_map(|name| self.optional(name));
        found.ok_or_else(|| format!("it has no number {}", names.join(" or ")))
    }

    /// Returns the family's gate, with gpt-oss' constants if they are given.
    fn gate(&self, family: &Family) -> Glu {
        match family.gate {
            Glu::Sigmoid(gate) if gate != Gate::SILU => Glu::Sigmoid(Gate {
                alpha: self.0["swiglu_alpha"].as_f64().map_or(gate.alpha, |alpha| alpha as f32),
                limit: self.0["swiglu_limit"].as_f64().map_or(gate.limit, |limit| limit as f32),
                ..gate
            }),
            other => other,
        }
    }

    /// Returns the window of a layer with sliding attention.
    fn window(&self, family: &Family, layer: usize) -> Option<usize> {
        let window = self.optional("sliding_window")?;
        let is_sliding = match self.0["layer_types"][layer].as_str() {
            Some(kind) => kind == "sliding_attention",
            None => match (family.window_pattern, self.optional("sliding_window_pattern")) {
                (_, Some(pattern)) | (Some(pattern), None) => {
                    pattern == 1 || !(layer + 1).is_multiple_of(pattern.max(1))
                }
                // Qwen2 and Qwen3 have a switch, and a number of layers without a window.
                (None, None) => {
                    self.0["use_sliding_window"].as_bool() == Some(true)
                        && layer >= self.optional("max_window_layers").unwrap_or(0)
                }
            },
        };
        is_sliding.then_some(window)
    }

    /// Returns whether a layer of a mixture has experts.
    fn is_sparse(&self, layer: usize) -> bool {
        let dense = self.0["mlp_only_layers"].as_array();
        let is_dense =
            dense.is_some_and(|dense| dense.iter().any(|dense| dense.as_u64() == Some(layer as u64)));
        !is_dense && (layer + 1).is_multiple_of(self.optional("decoder_sparse_step").unwrap_or(1).max(1))
    }

    /// The rotary embeddings of full and of sliding attention.
    ///
    /// transformers 5 writes `rope_parameters`, for Gemma 3 one object for each. Earlier versions
    /// write `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
    fn ropes(
        &self,
        family: &Family,
        head_dim: usize,
        context: usize,
    ) -> std::result::Result<[Rope; 2], String> {
        let parameters = &self.0["rope_parameters"];
        let theta = self.0["rope_theta"].as_f64().unwrap_or(family.theta);
        let rope = |object: &Value, theta: f64| {
            let theta = object["rope_theta"].as_f64().unwrap_or(theta);
            let partial =
                object["partial_rotary_factor"].as_f64().or(self.0["partial_rotary_factor"].as_f64());
            if partial.is_some_and(|partial| partial != 1.0) {
                return Err("partial_rotary_factor is not supported".to_string());
            }
            Ok(Rope { dim: head_dim, theta, scaling: Scaling::parse(object, context)? })
        };
        if parameters["full_attention"].is_object() {
            return Ok([
                rope(&parameters["full_attention"], theta)?,
                rope(&parameters["sliding_attention"], theta)?,
            ]);
        }
        let object = if parameters.is_object() { parameters } else { &self.0["rope_scaling"] };
        let full = rope(object, theta)?;
        let sliding = match self.0["rope_local_base_freq"].as_f64() {
            Some(theta) => Rope { dim: head_dim, theta, scaling: Scaling::None },
            None => full.clone(),
        };
        Ok([full, sliding])
    }
}
