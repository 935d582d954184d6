//! The table of architectures, by `model_type` of config.json.

use super::{Architecture, Experts, Loading, PLAIN, renames};

/// All architectures. Files of the first row use module names, and their names show all roles.
const TABLE: &[Architecture] = &[
    Architecture {
        types: "afmoe apertus apertus1p5 apertus1p5_text arcee aria_text axk1 bamba \
                bart beam bigbird_pegasus bitnet blenderbot blenderbot-small bros \
                canine chameleon codegen cohere cohere2 cohere2_moe cohere_compass \
                cohere_compass_text colqwen2 cpmant cwm dbrx deepseek_v2 deepseek_v3 \
                deepseek_v32 dia diffllama doge dots1 dots3_note_text \
                emu3_text_model ernie4_5 ernie4_5_moe eurobert evolla exaone4 \
                exaone4_5 exaone_moe falcon_h1 fast_vlm flava flex_olmo flint \
                florence2 fun_asr_nano funnel gemma gemma2 gemma3_text gemma3n \
                gemma3n_text gemma4 gemma4_text gemma4_unified \
                gemma4_unified_assistant gemma4_unified_text glm glm4 glm46v \
                glm4_moe glm4_moe_lite glm4v glm4v_moe glm_moe_dsa glm_ocr gpt_neo \
                gpt_oss gptj granite granite4_vision granite_docling granite_swa \
                granitemoe granitemoehybrid granitemoeshared helium hubert \
                hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hyperclovax idefics \
                idefics2 idefics3 jais2 jamba janus jetmoe kolibri1 lasr_ctc \
                layoutlmv3 led lfm2 lfm2_moe lighton_ocr lilt llama longcat_flash \
                m2m_100 marian markuplm mbart mellum mimo_v2_flash minicpm3 \
                minicpm_ocr minicpmv4_6 minicpmv4_7 ministral ministral3 mistral \
                mllama_text_model moshi moss_transcribe_diarize mpt muse_glimmer \
                musicgen musicgen_decoder musicgen_melody musicgen_melody_decoder \
                mvp nemotron nllb-moe olmo olmo2 olmo3 olmoe omniasr omniasr_ctc \
                openai_privacy_filter ovis2 parakeet_ctc pegasus pegasus_x perceiver \
                persimmon phi phi3 plbart pp_formulanet prophetnet qwen2 qwen2_moe \
                qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr \
                qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl seed_oss sew sew-d \
                smollm3 smolvlm solar_open speech_to_text splinter stablelm \
                starcoder2 vaultgemma vibevoice video_llama_3 videomae xglm youtu \
                zamba2",
        ..PLAIN
    },
    Architecture {
        types: "blt data2vec-audio emu3 falcon falcon_mamba gpt_bigcode longt5 mamba \
                mamba2 mt5 nanochat pop2piano recurrent_gemma switch_transformers t5 \
                udop umt5 unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm \
                xlstm zamba diffusion_gemma",
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "bert big_bird deberta deberta-v2 ernie fnet layoutlm lxmert \
                megatron-bert mobilebert mra nystromformer rembert roc_bert roformer \
                squeezebert tapas visual_bert yoso",
        heads: &["cls.predictions.decoder"],
        ..PLAIN
    },
    Architecture {
        types: "aria audioflamingo3 fuyu glmasr granite_speech granite_speech_plus \
                internvl llava llava_next llava_next_video mistral3 mllama \
                musicflamingo qwen2_audio shieldgemma2 video_llava vipllava voxtral",
        renamed: renames::LLAVA,
        linear: &["vision_embed_tokens"],
        ..PLAIN
    },
    Architecture {
        types: "bert-generation camembert data2vec-text esm esmc longformer mpnet \
                reformer roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl \
                xmod",
        heads: &["lm_head.decoder"],
        ..PLAIN
    },
    Architecture {
        types: "granitemoe_swa inkling_text minimax_m3_vl_text mistral4 muse_spark \
                qwen3_vl_moe zaya",
        experts: Experts::Joined,
        ..PLAIN
    },
    Architecture {
        types: "aya_vision gemma3 llava_onevision paligemma",
        renamed: renames::LLAVA,
        linear: &["vision_embed_tokens"],
        converted: &["vision_tower"],
        ..PLAIN
    },
    Architecture { types: "canary moonshine moonshine_streaming whisper", heads: &["proj_out"], ..PLAIN },
    Architecture {
        types: "blip-2 instructblip instructblipvideo",
        heads: &["language_model.lm_head"],
        ..PLAIN
    },
    Architecture {
        types: "minimax minimax_m2 mixtral",
        renamed: &[("model.layers.*.block_sparse_moe", "model.layers.*.mlp")],
        ..PLAIN
    },
    Architecture { types: "qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker", renamed: renames::QWEN_VL, ..PLAIN },
    Architecture { types: "biogpt trocr", heads: &["output_projection"], ..PLAIN },
    Architecture {
        types: "colmodernvbert modernvbert",
        converted: &["vision_model"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture { types: "convbert electra", heads: &["generator_lm_head"], ..PLAIN },
    Architecture { types: "deepseek_vl deepseek_vl_hybrid", converted: &["vision_model"], ..PLAIN },
    Architecture { types: "flaubert xlm", heads: &["pred_layer.proj"], ..PLAIN },
    Architecture {
        types: "gpt2 openai-gpt",
        renamed: &[("h", "transformer.h")],
        transposed: &["c_attn", "c_proj", "c_fc", "q_attn"],
        ..PLAIN
    },
    Architecture {
        types: "inkling2 inkling2_loop",
        renamed: renames::INKLING2,
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "inkling2_loop_text inkling2_text",
        renamed: renames::INKLING2_LOOP_TEXT,
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "modernbert modernbert-decoder",
        heads: &["decoder"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture { types: "qwen4_exp qwen4_exp_text", converted: &["block_inject_weight"], ..PLAIN },
    Architecture {
        types: "seamless_m4t seamless_m4t_v2",
        converted: &["feature_projection.projection"],
        ..PLAIN
    },
    Architecture { types: "albert", heads: &["predictions.decoder"], ..PLAIN },
    Architecture { types: "axk2", renamed: renames::AXK2, ..PLAIN },
    Architecture {
        types: "bailing_hybrid",
        renamed: renames::BAILING_HYBRID,
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "blip", heads: &["text_decoder.cls.predictions.decoder"], ..PLAIN },
    Architecture { types: "bloom", renamed: &[("h", "transformer.h")], ..PLAIN },
    Architecture { types: "cohere2_vision", converted: &["vision_tower"], ..PLAIN },
    Architecture { types: "cohere_asr", renamed: renames::COHERE_ASR, heads: &["proj_out"], ..PLAIN },
    Architecture {
        types: "colpali",
        renamed: &[("vlm.language_model.model", "vlm.language_model")],
        converted: &["vision_tower"],
        ..PLAIN
    },
    Architecture { types: "cosmos3_edge", renamed: renames::COSMOS3_EDGE, ..PLAIN },
    Architecture { types: "cosmos3_omni", renamed: renames::COSMOS3_OMNI, ..PLAIN },
    Architecture { types: "ctrl", embeddings: &["transformer.w"], loading: Loading::Dequantized, ..PLAIN },
    Architecture {
        types: "deepseek_ocr2",
        embeddings: &[
            "query_1024_resolution",
            "query_768_resolution",
            "qwen2_model.query_1024",
            "qwen2_model.query_768",
        ],
        ..PLAIN
    },
    Architecture { types: "deepseek_v4", renamed: renames::DEEPSEEK_V4, ..PLAIN },
    Architecture { types: "distilbert", heads: &["vocab_projector"], ..PLAIN },
    Architecture {
        types: "dory",
        renamed: &[
            ("backbone", "model"),
            ("backbone.layers.*.self_attn.g_proj", "model.layers.*.self_attn.gate_proj"),
        ],
        ..PLAIN
    },
    Architecture { types: "dots3_note", renamed: renames::DOTS3_NOTE, ..PLAIN },
    Architecture { types: "encoder-decoder", heads: &["decoder.cls.predictions.decoder"], ..PLAIN },
    Architecture {
        types: "ernie4_5_vl_moe",
        renamed: renames::ERNIE4_5_VL_MOE,
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "fsmt", heads: &["model.decoder.output_projection"], ..PLAIN },
    Architecture { types: "git", heads: &["output"], ..PLAIN },
    Architecture { types: "glm5_next", renamed: renames::GLM5_NEXT, loading: Loading::Never, ..PLAIN },
    Architecture { types: "got_ocr2", renamed: renames::GOT_OCR2, ..PLAIN },
    Architecture { types: "gpt_neox", renamed: &[("embed_out", "lm_head")], ..PLAIN },
    Architecture { types: "gpt_neox_japanese", heads: &["embed_out"], linear: &["embed_out"], ..PLAIN },
    Architecture { types: "granite_speech5_ctc", heads: &["ctc_head"], ..PLAIN },
    Architecture {
        types: "gte",
        renamed: renames::GTE,
        heads: &["lm_head.decoder"],
        converted: &["attention.qkv_proj", "mlp.up_gate_proj"],
        ..PLAIN
    },
    Architecture {
        types: "hrm_text",
        renamed: renames::HRM_TEXT,
        converted: &["attn.gqkv_proj", "mlp.gate_up_proj"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "hy_v3",
        renamed: &[("model.layers.*.mlp.shared_mlp", "model.layers.*.mlp.shared_experts")],
        ..PLAIN
    },
    Architecture { types: "hy_v4", renamed: renames::HY_V4, experts: Experts::Joined, ..PLAIN },
    Architecture { types: "hy_v4_vl", renamed: renames::HY_V4_VL, experts: Experts::Joined, ..PLAIN },
    Architecture {
        types: "hyperclovax_vision_v2",
        renamed: &[("model.vision_projector", "model.projector")],
        ..PLAIN
    },
    Architecture { types: "ibert", heads: &["lm_head.decoder"], loading: Loading::Dequantized, ..PLAIN },
    Architecture {
        types: "inkling_mm_model",
        renamed: renames::INKLING_MM_MODEL,
        embeddings: &["audio.encoder"],
        converted: &[
            "layers.linear_0",
            "layers.linear_1",
            "layers.linear_2",
            "layers.linear_3",
            "layers.linear_4",
            "layers.linear_5",
            "layers.linear_6",
            "layers.linear_7",
        ],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "jina_embeddings_v3",
        renamed: renames::JINA_EMBEDDINGS_V3,
        heads: &["lm_head.decoder"],
        converted: &["mixer.Wqkv"],
        ..PLAIN
    },
    Architecture {
        types: "kimi_k25",
        renamed: renames::KIMI_K25,
        converted: &["*.wqkv"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "kimi_linear", renamed: renames::KIMI_LINEAR, loading: Loading::Never, ..PLAIN },
    Architecture {
        types: "kosmos-2",
        heads: &["text_model.lm_head"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture { types: "kosmos-2.5", heads: &["text_model.lm_head"], ..PLAIN },
    Architecture {
        types: "kyutai_speech_to_text",
        renamed: renames::KYUTAI_SPEECH_TO_TEXT,
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "laguna",
        renamed: &[("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts")],
        ..PLAIN
    },
    Architecture {
        types: "lara_mini",
        renamed: renames::LARA_MINI,
        converted: &["linear_attn.in_proj"],
        experts: Experts::Joined,
        ..PLAIN
    },
    Architecture {
        types: "lfm2_vl",
        linear: &["embeddings.patch_embedding"],
        converted: &["vision_tower"],
        ..PLAIN
    },
    Architecture {
        types: "lfm3",
        renamed: &[("model.layers.*.self_attn.gate_proj", "model.layers.*.self_attn.g_proj")],
        ..PLAIN
    },
    Architecture {
        types: "lfm3_vl",
        renamed: &[
            (
                "model.language_model.layers.*.self_attn.gate_proj",
                "model.language_model.layers.*.self_attn.g_proj",
            ),
            ("model.vision_tower.patchifier", "model.vision_tower.patch_embed"),
        ],
        ..PLAIN
    },
    Architecture {
        types: "llama4",
        heads: &["language_model.lm_head"],
        linear: &["patch_embedding.linear"],
        experts: Experts::ApartIfQuantized,
        ..PLAIN
    },
    Architecture { types: "llama4_text", experts: Experts::ApartIfQuantized, ..PLAIN },
    Architecture { types: "luke", heads: &["entity_predictions.decoder", "lm_head.decoder"], ..PLAIN },
    Architecture {
        types: "minimax_m3_vl",
        renamed: renames::MINIMAX_M3_VL,
        converted: &["shared_experts.gate_proj", "shared_experts.up_proj"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "mistral_large4",
        renamed: renames::MISTRAL_LARGE4,
        converted: &["attention.wk", "attention.wq"],
        ..PLAIN
    },
    Architecture {
        types: "molmo2",
        renamed: renames::MOLMO2,
        converted: &["mlp.ff_proj", "self_attn.att_proj"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "nemo_speechlm",
        renamed: renames::NEMO_SPEECHLM,
        converted: &["attn.w_qkv"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "nemotron_h", renamed: &[("backbone", "model")], ..PLAIN },
    Architecture {
        types: "nemotron_h_omni",
        renamed: renames::NEMOTRON_H_OMNI,
        converted: &["attn.qkv", "vision_model"],
        ..PLAIN
    },
    Architecture {
        types: "neomme",
        heads: &["lm_head", "unembedding_projection"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "nomic_bert",
        renamed: renames::NOMIC_BERT,
        heads: &["cls.predictions.decoder"],
        converted: &["attn.Wqkv"],
        ..PLAIN
    },
    Architecture { types: "olmo_hybrid", loading: Loading::Never, ..PLAIN },
    Architecture { types: "opt", renamed: &[("decoder", "model.decoder")], ..PLAIN },
    Architecture { types: "paddleocr_vl", renamed: renames::PADDLEOCR_VL, ..PLAIN },
    Architecture {
        types: "phi4_multimodal",
        embeddings: &["relative_attention_bias_layer.bias_values"],
        converted: &["img_processor"],
        ..PLAIN
    },
    Architecture {
        types: "phimoe",
        renamed: &[("model.layers.*.block_sparse_moe.gate", "model.layers.*.mlp.router")],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture { types: "pi0", renamed: renames::PI0, converted: &["vision_tower"], ..PLAIN },
    Architecture { types: "pix2struct", heads: &["decoder.lm_head"], loading: Loading::Dequantized, ..PLAIN },
    Architecture {
        types: "qianfan_ocr",
        renamed: renames::QIANFAN_OCR,
        converted: &["attn.qkv"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture {
        types: "qwen2_5_omni",
        renamed: renames::QWEN_OMNI,
        heads: &["thinker.lm_head"],
        embeddings: &["audio_bos_eos_token"],
        ..PLAIN
    },
    Architecture {
        types: "qwen2_5_omni_thinker",
        renamed: renames::QWEN_VL,
        embeddings: &["audio_bos_eos_token"],
        ..PLAIN
    },
    Architecture { types: "rwkv", heads: &["head"], loading: Loading::Dequantized, ..PLAIN },
    Architecture {
        types: "speech-encoder-decoder",
        heads: &["decoder.cls.predictions.decoder"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "speecht5",
        heads: &["text_decoder_postnet.lm_head"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "step3p7",
        renamed: renames::STEP3P7,
        converted: &["attn.in_proj_weight"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "t5gemma", heads: &["lm_head.out_proj"], loading: Loading::Dequantized, ..PLAIN },
    Architecture {
        types: "t5gemma2",
        renamed: &[
            ("model.encoder", "model.encoder"),
            ("model.encoder.layers", "model.encoder.text_model.layers"),
        ],
        heads: &["lm_head.out_proj"],
        converted: &["vision_tower"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "ultrabert",
        renamed: &[("cls", "head.decoder"), ("ultrabert", "model")],
        heads: &["head.decoder"],
        ..PLAIN
    },
    Architecture {
        types: "ultravbert",
        renamed: &[("head", "projection_head"), ("head.decoder", "lm_head")],
        converted: &["vision_model"],
        loading: Loading::Dequantized,
        ..PLAIN
    },
    Architecture {
        types: "unlimited_ocr",
        renamed: renames::UNLIMITED_OCR,
        converted: &["self_attn.qkv_proj"],
        loading: Loading::Never,
        ..PLAIN
    },
    Architecture { types: "vibevoice_asr", renamed: renames::VIBEVOICE_ASR, ..PLAIN },
    Architecture {
        types: "vision-encoder-decoder",
        renamed: renames::VISION_ENCODER_DECODER,
        heads: &["decoder.cls.predictions.decoder"],
        ..PLAIN
    },
    Architecture { types: "vit_mae", renamed: renames::VIT_MAE, ..PLAIN },
    Architecture { types: "voxtral_realtime", renamed: renames::VOXTRAL_REALTIME, ..PLAIN },
    Architecture { types: "xlnet", heads: &["lm_loss"], ..PLAIN },
];

impl Architecture {
    /// The architecture of a `model_type`.
    pub(crate) fn called(model_type: &str) -> Option<&'static Self> {
        TABLE.iter().find(|row| row.types.split_ascii_whitespace().any(|name| name == model_type))
    }
}

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
