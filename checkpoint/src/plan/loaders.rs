//! Warnings before an output is written: known bugs of loaders, and facts that the output loses.

use microscale::{Format, Words};
use serde_json::Value;

use crate::checkpoint_format::CheckpointFormat;
use crate::dtype::FileDtype;
use crate::names::weight::is_expert;
use crate::plan::Plan;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::read::description::Description;
use crate::read::experts::is_of_all_experts;
use crate::read::tensor::Tensor;
use crate::reason::Reason;

/// Warning about NVFP4 experts with global scales in checkpoints of compressed-tensors.
pub(crate) const EXPERTS: &str = "transformers 5.23 leaves out the global scales of experts in nvfp4, and makes their weights thousands of \
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
        experts.into_iter().chain(self.fused_experts()).chain(self.adapter()).chain(self.cache()).collect()
    }

    /// Warns about tensors with all experts of a layer that are copied only because of this layout.
    fn fused_experts(&self) -> Option<String> {
        let copied = self.jobs.iter().filter(|job| job.plan.copied() == Some(&Reason::NotAWeight));
        let count = copied.filter(|job| is_of_all_experts(job.tensor.name)).count();
        (count > 0).then(|| {
            format!(
                "{count} tensors have the experts of a layer together, and are copied: --split-experts takes them one by one, as \
                 engines look for quantized ones (those of gpt-oss need --out-convention gpt-oss instead)"
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
