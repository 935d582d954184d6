//! Warnings before an output is written: known bugs of loaders, and facts that the output loses.

use microscale::{Format, Words};
use serde_json::Value;

use crate::checkpoint_format::CheckpointFormat;
use crate::dtype::FileDtype;
use crate::names::architectures::Experts;
use crate::names::fused::probably_fused;
use crate::names::role::Role;
use crate::names::weight::is_expert;
use crate::plan::fusions::is_expert_weight;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::plan::{Plan, TensorPlan};
use crate::read::description::Description;
use crate::read::experts::is_of_all_experts;
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::write::job::Job;

/// Problem of transformers with unquantized experts in checkpoints of compressed-tensors.
pub(crate) const UNQUANTIZED_EXPERTS: &str = "transformers 5.24 loses unquantized experts that are stored one by one, and \
     refuses the model or leaves them random. vLLM and SGLang read them";

/// Problem of transformers with transforms of layers' inputs.
pub(crate) const TRANSFORM: &str =
    "transformers 5.24 leaves the transform out, without an error: outputs are wrong; vLLM applies it";

/// Warning about NVFP4 experts with global scales in checkpoints of compressed-tensors.
pub(crate) const EXPERTS: &str = "transformers 5.24 leaves out the global scales of experts in nvfp4, and makes their weights thousands of \
     times too large, without an error. vLLM reads them right; quantized with --global-scale none, or with global_scale = \
     \"none\" in a recipe's rule for \"*.experts.*\", both do";

impl Plan<'_> {
    /// Returns loaders that silently misread the output, with the remedy, and facts about the input
    /// that the output's config cannot state.
    pub(crate) fn misread_by(&self) -> Vec<String> {
        let scaled =
            |(tensor, recipe): (&Tensor<'_>, &TensorRecipe)| is_expert(tensor.name) && recipe.has_global();
        let ours = self.format == CheckpointFormat::CompressedTensors;
        let experts = ours && self.with_recipes().any(scaled);
        let experts = experts.then(|| EXPERTS.to_string());
        let transformed = self.with_recipes().any(|(_, recipe)| recipe.hadamard.is_some());
        let transformed =
            transformed.then(|| format!("layers' inputs need a Hadamard transform: {TRANSFORM}"));
        let others = [
            transformed,
            self.loading(),
            self.unquantized_experts(),
            self.split_experts(),
            self.fused_experts(),
            self.other_tensors_of_experts(),
            self.no_linear_layers(),
            self.tied_heads(),
            self.probably_fused(),
            self.adapter(),
            self.cache(),
        ];
        experts.into_iter().chain(others.into_iter().flatten()).collect()
    }

    /// Warns about architectures that transformers does not load quantized in every mode.
    fn loading(&self) -> Option<String> {
        let is_read = self.format == CheckpointFormat::CompressedTensors && self.count_quantized() > 0;
        self.checkpoint().naming.loading().problem().filter(|_| is_read).map(String::from)
    }

    /// Warns about unquantized experts next to quantized layers.
    fn unquantized_experts(&self) -> Option<String> {
        let copied = self.jobs.iter().filter(|job| job.plan.copied().is_some());
        let count = copied.filter(|job| is_expert_weight(&job.tensor)).count();
        let is_read = self.format == CheckpointFormat::CompressedTensors && self.count_quantized() > 0;
        (is_read && count > 0)
            .then(|| format!("{count} weights of experts are copied: {UNQUANTIZED_EXPERTS}"))
    }

    /// Warns about split experts that transformers does not find.
    fn split_experts(&self) -> Option<String> {
        let checkpoint = self.checkpoint();
        let is_split = checkpoint.options.split_experts && checkpoint.naming.experts() == Experts::Joined;
        is_split.then(|| {
            "transformers 5.24 reads the experts of this architecture only as one tensor per layer, and leaves split ones \
             random: load the output with vLLM or SGLang, or leave out --split-experts"
                .into()
        })
    }

    /// Warns about tensors with more than two dimensions that are copied only for that reason.
    fn other_tensors_of_experts(&self) -> Option<String> {
        let is_one = |job: &&Job<'_, TensorPlan>| matches!(job.plan.copied(), Some(Reason::NotAMatrix(_)));
        let count = self.jobs.iter().filter(is_one).count();
        let first = self.jobs.iter().find(is_one)?;
        let name = first.tensor.name;
        Some(format!(
            "{count} tensors such as {name} have more than two dimensions, probably the experts of a layer, and are \
             copied: loaders take only matrices quantized"
        ))
    }

    /// Warns about weights that an include pattern selects and that loaders need unquantized.
    fn no_linear_layers(&self) -> Option<String> {
        if [CheckpointFormat::Gguf, CheckpointFormat::GptOss].contains(&self.format) {
            return None;
        }
        let naming = self.checkpoint().naming;
        let is_refused = |tensor: &Tensor<'_>| {
            naming.unquantized_role(tensor.name, tensor.shape) == Some(Role::Converted)
                || naming.is_linear(tensor.name, tensor.shape) == Some(false)
        };
        let names: Vec<_> = self
            .quantized()
            .map(|(job, _)| job.tensor)
            .filter(is_refused)
            .map(|tensor| tensor.name)
            .collect();
        let first = names.first()?;
        Some(format!(
            "{} tensors such as {first} are quantized only because a pattern or rule includes them: transformers and vLLM \
             load them unquantized, and fail or compute with random weights; leave them out",
            names.len()
        ))
    }

    /// Warns about quantized output heads that loaders replace by the embedding.
    fn tied_heads(&self) -> Option<String> {
        let config = &self.checkpoint().config.as_ref()?.object.json;
        let of_text = config.get("text_config").and_then(|text| text.get("tie_word_embeddings"));
        let tied = config.get("tie_word_embeddings").or(of_text).and_then(Value::as_bool);
        let naming = self.checkpoint().naming;
        let head = self.quantized().map(|(job, _)| job.tensor.name).find(|name| naming.is_head(name));
        head.filter(|_| tied == Some(true)).map(|head| {
            format!(
                "{head} is quantized, but tie_word_embeddings in config.json ties it to the embedding: loaders ignore the \
                 quantized head or fail; leave it out, or set tie_word_embeddings to false if the file's head is another matrix"
            )
        })
    }

    /// Warns about siblings with separate global scales that engines may fuse.
    fn probably_fused(&self) -> Option<String> {
        self.checkpoint().unknown_architecture()?;
        let scaled = self.quantized().filter(|(_, plan)| self.recipe_of(plan).has_global());
        let patterns = probably_fused(scaled.map(|(job, _)| (job.tensor.name, job.tensor.shape)));
        let first = patterns.first()?;
        Some(format!(
            "{} groups of layers such as {first} have the same inputs and separate global scales: an engine that fuses them \
             computes wrong values; if yours does, quantize with --global-scale none, or give them one scale with --global-scales",
            patterns.len()
        ))
    }

    /// Warns about tensors with all experts of a layer that are copied only because of this layout.
    fn fused_experts(&self) -> Option<String> {
        let copied = self.jobs.iter().filter(|job| job.plan.copied() == Some(&Reason::NotAWeight));
        let count = copied.filter(|job| is_of_all_experts(job.tensor.name)).count();
        (count > 0).then(|| {
            format!(
                "{count} tensors have the experts of a layer together, and are copied: --split-experts takes them one by one, as \
                 engines look for quantized ones (those of gpt-oss need --to gpt-oss instead)"
            )
        })
    }

    /// Warns if the input's config describes a quantized KV cache and the output's config will not.
    fn cache(&self) -> Option<String> {
        let cache = Description::dropped_cache(self.checkpoint(), self.format)?;
        Some(format!("the config will no longer say how the cache of keys and values is quantized: {cache}"))
    }

    /// Warns if weights of a LoRA adapter are to be quantized.
    fn adapter(&self) -> Option<String> {
        let lora = |tensor: &Tensor<'_>| tensor.name.contains(".lora_A.") || tensor.name.contains(".lora_B.");
        let count = self.quantized().filter(|(job, _)| lora(&job.tensor)).count();
        (count > 0).then(|| {
            format!(
                "{count} tensors are a LoRA adapter's, which loaders take unquantized: merge it into its model first \
                 (merge_and_unload of PEFT), or leave it with --exclude \"*.lora_*\""
            )
        })
    }

    /// Returns loaders that refuse the output, or need an option to load it.
    pub fn refused_by(&self) -> Vec<String> {
        if self.format != CheckpointFormat::CompressedTensors {
            return Vec::new();
        }
        let dense = |(tensor, recipe): (&Tensor<'_>, &TensorRecipe)| {
            (!is_expert(tensor.name)).then_some(recipe.format()).filter(|format| *format != Format::Nvfp4)
        };
        let dense = self.with_recipes().find_map(dense);
        let dense = dense.map(|format| {
            format!(
                "SGLang 0.5.23 has no {} for layers that are not experts; vLLM and transformers have",
                format.word()
            )
        });
        let dtype = self.loaded_dtype().map(|dtype| {
            format!(
                "transformers dequantizes to bf16, and the model is {dtype}: load it with dtype=torch.bfloat16, or with \
                 CompressedTensorsConfig(dequantize=True)"
            )
        });
        dense.into_iter().chain(dtype).collect()
    }

    /// Iterates over the tensors to quantize, with their recipes.
    fn with_recipes(&self) -> impl Iterator<Item = (&Tensor<'_>, &TensorRecipe)> {
        self.quantized().map(|(job, plan)| (&job.tensor, self.recipe_of(plan)))
    }

    /// Returns the dtype that transformers loads the model in, unless it is bf16.
    ///
    /// This is the dtype in the config, or else the dtype of the weights. A file without a config
    /// has no loader that depends on it.
    fn loaded_dtype(&self) -> Option<String> {
        let config = &self.checkpoint().config.as_ref()?.object.json;
        let text = config.get("text_config").and_then(Value::as_object);
        let stated = |key: &str| config.get(key).or_else(|| text?.get(key)).and_then(Value::as_str);
        let dtype = match stated("dtype").or_else(|| stated("torch_dtype")) {
            Some(word) => word.strip_prefix("torch.").unwrap_or(word).to_string(),
            None => match self.quantized().next()?.0.tensor.dtype {
                FileDtype::BF16 => "bfloat16".into(),
                other => other.to_string(),
            },
        };
        (dtype != "bfloat16").then_some(dtype)
    }
}
