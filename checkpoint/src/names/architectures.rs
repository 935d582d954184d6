//! Model architectures: **the table** of the layer names in their files, and of facts that no name
//! shows.
//!
//! Each `model_type` here was compared with transformers 5.23: scripts/architectures.py builds a
//! model of it and checks that each weight gets the role of its module. For other architectures
//! names decide.

/// Facts about one architecture, or several with the same facts.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// One or more `model_type`s of config.json, separated by blanks.
    types: &'static str,
    /// Name parts in files, with the replacement in transformers' module names.
    ///
    /// A part that begins with a dot is replaced everywhere. Of the other parts, the first one that
    /// is a prefix of the name is replaced.
    pub(crate) renamed: &'static [(&'static str, &'static str)],
    /// The module of the output head, which may have no weight of its own in the file.
    pub(crate) head: &'static str,
    /// Name endings of linear layers whose names suggest another role.
    pub(crate) linear: &'static [&'static str],
    /// Name endings of embeddings whose names do not show it.
    pub(crate) embeddings: &'static [&'static str],
    /// Name endings of layers with transposed weights (Conv1D).
    pub(crate) transposed: &'static [&'static str],
}

impl Architecture {
    /// The architecture of a `model_type`.
    pub(crate) fn called(model_type: &str) -> Option<&'static Self> {
        TABLE.iter().find(|row| row.types.split_ascii_whitespace().any(|name| name == model_type))
    }
}

/// An architecture whose files use its module names.
const PLAIN: Architecture =
    Architecture { types: "", renamed: &[], head: "lm_head", linear: &[], embeddings: &[], transposed: &[] };

/// A language model, an image or audio tower and a projector. Files predate the current module
/// names.
const LLAVA: &[(&str, &str)] = &[
    ("language_model.lm_head", "lm_head"),
    ("language_model.model.", "model.language_model."),
    // CLIP and SigLIP modules no longer have this part.
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("image_tower.", "model.image_tower."),
    ("video_tower.", "model.video_tower."),
    ("audio_tower.", "model.audio_tower."),
    ("encoder.", "model.encoder."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("projector.", "model.projector."),
    ("vision_embed_tokens.", "model.vision_embed_tokens."),
];

const QWEN_VL: &[(&str, &str)] = &[
    ("visual.", "model.visual."),
    ("audio_tower.", "model.audio_tower."),
    ("model.visual.", "model.visual."),
    ("model.audio_tower.", "model.audio_tower."),
    ("model.language_model.", "model.language_model."),
    ("model.", "model.language_model."),
];

const QWEN_OMNI: &[(&str, &str)] = &[
    ("thinker.visual.", "thinker.model.visual."),
    ("thinker.audio_tower.", "thinker.model.audio_tower."),
    ("thinker.model.visual.", "thinker.model.visual."),
    ("thinker.model.audio_tower.", "thinker.model.audio_tower."),
    ("thinker.model.language_model.", "thinker.model.language_model."),
    ("thinker.model.", "thinker.model.language_model."),
];

const TABLE: &[Architecture] = &[
    Architecture {
        types: "afmoe apertus arcee aria_text axk1 bamba bart beam bigbird_pegasus bitnet blenderbot \
                blenderbot-small blip blip-2 codegen cohere cohere2 cohere2_moe cohere2_vision cpmant cwm \
                deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl deepseek_vl_hybrid dia diffllama doge emu3 \
                encoder-decoder ernie4_5 ernie4_5_moe exaone4 exaone4_5 exaone_moe falcon falcon_h1 \
                falcon_mamba flex_olmo florence2 gemma gemma2 gemma3_text gemma3n_text gemma4 gemma4_text glm \
                glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_moe_dsa glm_ocr gpt_bigcode gpt_neo gpt_oss \
                gptj granite helium hyperclovax idefics idefics2 idefics3 instructblip instructblipvideo \
                jais2 jamba janus kosmos-2.5 led lfm2 lfm3 lighton_ocr llama llama4_text longcat_flash longt5 \
                m2m_100 mamba mamba2 marian mbart mellum mimo_v2_flash minicpm3 ministral3 mistral mistral4 \
                moshi mpt mt5 musicgen musicgen_melody mvp nanochat nllb-moe olmo olmo2 olmo3 olmo_hybrid \
                olmoe ovis2 pegasus pegasus_x persimmon phi phi3 plbart pop2piano qwen2 qwen2_moe qwen3 \
                qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe \
                recurrent_gemma seamless_m4t seamless_m4t_v2 seed_oss smollm3 smolvlm solar_open \
                speech-encoder-decoder speech_to_text stablelm starcoder2 switch_transformers t5 udop umt5 \
                vaultgemma video_llama_3 xglm xlstm youtu zamba zamba2",
        ..PLAIN
    },
    Architecture {
        types: "aria audioflamingo3 fuyu gemma3 glmasr granite_speech \
                granite_speech_plus internvl llava llava_next llava_next_video llava_onevision mistral3 mllama \
                musicflamingo paligemma qwen2_audio shieldgemma2 video_llava vipllava voxtral",
        renamed: LLAVA,
        linear: &["vision_embed_tokens"],
        ..PLAIN
    },
    Architecture { types: "qwen2_vl qwen2_5_vl", renamed: QWEN_VL, ..PLAIN },
    Architecture {
        types: "qwen2_5_omni",
        renamed: QWEN_OMNI,
        head: "thinker.lm_head",
        embeddings: &["audio_bos_eos_token"],
        ..PLAIN
    },
    Architecture {
        types: "llama4",
        head: "language_model.lm_head",
        linear: &["patch_embedding.linear"],
        ..PLAIN
    },
    Architecture { types: "lfm2_vl", linear: &["embeddings.patch_embedding"], ..PLAIN },
    Architecture {
        types: "mixtral minimax minimax_m2",
        renamed: &[(".block_sparse_moe.", ".mlp.")],
        ..PLAIN
    },
    Architecture { types: "nemotron_h", renamed: &[("backbone.", "model.")], ..PLAIN },
    Architecture { types: "gpt_neox", renamed: &[("embed_out", "lm_head")], ..PLAIN },
    Architecture { types: "gpt_neox_japanese", head: "embed_out", linear: &["embed_out"], ..PLAIN },
    Architecture { types: "whisper moonshine", head: "proj_out", ..PLAIN },
    Architecture { types: "rwkv", head: "head", ..PLAIN },
    Architecture { types: "ctrl", embeddings: &["transformer.w"], ..PLAIN },
    // Files on the Hub omit the name of the model without its head.
    Architecture { types: "bloom", renamed: &[("h.", "transformer.h.")], ..PLAIN },
    Architecture { types: "opt", renamed: &[("decoder.", "model.decoder.")], ..PLAIN },
    Architecture {
        types: "gpt2 openai-gpt",
        renamed: &[("h.", "transformer.h.")],
        transposed: &["c_attn", "c_proj", "c_fc", "q_attn"],
        ..PLAIN
    },
    Architecture {
        types: "bert big_bird ernie megatron-bert rembert roc_bert roformer",
        head: "cls.predictions.decoder",
        ..PLAIN
    },
    Architecture {
        types: "bert-generation camembert data2vec-text roberta roberta-prelayernorm xlm-roberta \
                xlm-roberta-xl xmod",
        head: "lm_head.decoder",
        ..PLAIN
    },
    Architecture { types: "electra", head: "generator_lm_head", ..PLAIN },
    Architecture { types: "biogpt trocr", head: "output_projection", ..PLAIN },
    Architecture { types: "git", head: "output", ..PLAIN },
    Architecture { types: "modernbert-decoder", head: "decoder", ..PLAIN },
    Architecture { types: "xlnet", head: "lm_loss", ..PLAIN },
    Architecture { types: "xlm", head: "pred_layer.proj", ..PLAIN },
    Architecture { types: "kosmos-2", head: "text_model.lm_head", ..PLAIN },
    Architecture { types: "pix2struct", head: "decoder.lm_head", ..PLAIN },
    Architecture { types: "t5gemma", head: "lm_head.out_proj", ..PLAIN },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_architecture_stands_in_two_rows() {
        let mut seen = HashSet::new();
        for name in TABLE.iter().flat_map(|row| row.types.split_ascii_whitespace()) {
            assert!(seen.insert(name), "{name}");
            assert!(Architecture::called(name).is_some());
        }
        assert!(seen.len() > 150, "{}", seen.len());
        assert!(Architecture::called("").is_none() && Architecture::called("llama mistral").is_none());
    }
}
