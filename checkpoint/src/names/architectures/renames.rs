//! Prefixes of names in files, with the prefixes of transformers' module names.
//!
//! Each list has the names that transformers 5.24 saves, and the names in older files on the Hub.

pub(super) const AXK2: &[(&str, &str)] = &[
    ("model.layers.*.input_layernorm.W_down", "model.layers.*.input_layernorm.mlp.fc1"),
    ("model.layers.*.input_layernorm.W_up", "model.layers.*.input_layernorm.mlp.fc2"),
    ("model.layers.*.post_attention_layernorm.W_down", "model.layers.*.post_attention_layernorm.mlp.fc1"),
    ("model.layers.*.post_attention_layernorm.W_up", "model.layers.*.post_attention_layernorm.mlp.fc2"),
    ("model.layers.*.self_attn.q_b_proj", "model.layers.*.self_attn.q_gate_proj"),
];

pub(super) const BAILING_HYBRID: &[(&str, &str)] = &[
    ("model.layers.*.attention", "model.layers.*.self_attn"),
    ("model.layers.*.attention.dense", "model.layers.*.self_attn.o_proj"),
    ("model.layers.*.attention.f_proj", "model.layers.*.self_attn.forget_gate.f_proj"),
];

pub(super) const COHERE_ASR: &[(&str, &str)] = &[
    ("log_softmax.mlp.layer0", "proj_out"),
    ("model.encoder.layers.*.self_attn.linear_k", "model.encoder.layers.*.self_attn.k_proj"),
    ("model.encoder.layers.*.self_attn.linear_out", "model.encoder.layers.*.self_attn.o_proj"),
    ("model.encoder.layers.*.self_attn.linear_pos", "model.encoder.layers.*.self_attn.relative_k_proj"),
    ("model.encoder.layers.*.self_attn.linear_q", "model.encoder.layers.*.self_attn.q_proj"),
    ("model.encoder.layers.*.self_attn.linear_v", "model.encoder.layers.*.self_attn.v_proj"),
    ("model.encoder.pre_encode.out", "model.encoder.subsampling.linear"),
    ("model.encoder_decoder_proj", "model.decoder.proj"),
    (
        "model.transf_decoder._decoder.layers.*.first_sub_layer.key_net",
        "model.decoder.layers.*.self_attn.k_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.first_sub_layer.out_projection",
        "model.decoder.layers.*.self_attn.o_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.first_sub_layer.query_net",
        "model.decoder.layers.*.self_attn.q_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.first_sub_layer.value_net",
        "model.decoder.layers.*.self_attn.v_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.second_sub_layer.key_net",
        "model.decoder.layers.*.encoder_attn.k_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.second_sub_layer.out_projection",
        "model.decoder.layers.*.encoder_attn.o_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.second_sub_layer.query_net",
        "model.decoder.layers.*.encoder_attn.q_proj",
    ),
    (
        "model.transf_decoder._decoder.layers.*.second_sub_layer.value_net",
        "model.decoder.layers.*.encoder_attn.v_proj",
    ),
    ("model.transf_decoder._decoder.layers.*.third_sub_layer.dense_in", "model.decoder.layers.*.mlp.fc1"),
    ("model.transf_decoder._decoder.layers.*.third_sub_layer.dense_out", "model.decoder.layers.*.mlp.fc2"),
];

pub(super) const COSMOS3_EDGE: &[(&str, &str)] = &[
    ("layers.*.mlp.down_proj", "model.language_model.layers.*.mlp.fc2"),
    ("layers.*.mlp.up_proj", "model.language_model.layers.*.mlp.fc1"),
    ("layers.*.self_attn.to_k", "model.language_model.layers.*.self_attn.k_proj"),
    ("layers.*.self_attn.to_out", "model.language_model.layers.*.self_attn.o_proj"),
    ("layers.*.self_attn.to_q", "model.language_model.layers.*.self_attn.q_proj"),
    ("layers.*.self_attn.to_v", "model.language_model.layers.*.self_attn.v_proj"),
    ("model.visual.encoder.layers.*.mlp.down_proj", "model.visual.encoder.layers.*.mlp.fc2"),
    ("model.visual.encoder.layers.*.mlp.up_proj", "model.visual.encoder.layers.*.mlp.fc1"),
    ("model.visual.encoder.layers.*.self_attn.to_k", "model.visual.encoder.layers.*.self_attn.k_proj"),
    ("model.visual.encoder.layers.*.self_attn.to_q", "model.visual.encoder.layers.*.self_attn.q_proj"),
    ("model.visual.encoder.layers.*.self_attn.to_v", "model.visual.encoder.layers.*.self_attn.v_proj"),
];

pub(super) const COSMOS3_OMNI: &[(&str, &str)] = &[
    ("blocks", "model.visual.blocks"),
    ("deepstack_merger_list", "model.visual.deepstack_merger_list"),
    ("layers", "model.language_model.layers"),
    ("layers.*.self_attn.to_k", "model.language_model.layers.*.self_attn.k_proj"),
    ("layers.*.self_attn.to_out", "model.language_model.layers.*.self_attn.o_proj"),
    ("layers.*.self_attn.to_q", "model.language_model.layers.*.self_attn.q_proj"),
    ("layers.*.self_attn.to_v", "model.language_model.layers.*.self_attn.v_proj"),
    ("merger", "model.visual.merger"),
];

pub(super) const DEEPSEEK_V4: &[(&str, &str)] = &[
    ("head", "lm_head"),
    ("model.layers.*.attn.compressor.wgate", "model.layers.*.self_attn.compressor.gate_proj"),
    ("model.layers.*.attn.compressor.wkv", "model.layers.*.self_attn.compressor.kv_proj"),
    ("model.layers.*.attn.indexer", "model.layers.*.self_attn.compressor.indexer.scorer"),
    ("model.layers.*.attn.indexer.compressor.wgate", "model.layers.*.self_attn.compressor.indexer.gate_proj"),
    ("model.layers.*.attn.indexer.compressor.wkv", "model.layers.*.self_attn.compressor.indexer.kv_proj"),
    ("model.layers.*.attn.indexer.wq_b", "model.layers.*.self_attn.compressor.indexer.q_b_proj"),
    ("model.layers.*.attn.wkv", "model.layers.*.self_attn.kv_proj"),
    ("model.layers.*.attn.wo_a", "model.layers.*.self_attn.o_a_proj"),
    ("model.layers.*.attn.wo_b", "model.layers.*.self_attn.o_b_proj"),
    ("model.layers.*.attn.wq_a", "model.layers.*.self_attn.q_a_proj"),
    ("model.layers.*.attn.wq_b", "model.layers.*.self_attn.q_b_proj"),
    ("model.layers.*.ffn.shared_experts.w1", "model.layers.*.mlp.shared_experts.gate_proj"),
    ("model.layers.*.ffn.shared_experts.w2", "model.layers.*.mlp.shared_experts.down_proj"),
    ("model.layers.*.ffn.shared_experts.w3", "model.layers.*.mlp.shared_experts.up_proj"),
    // Published files have no prefix.
    ("layers", "model.layers"),
    ("layers.*.attn.compressor.wgate", "model.layers.*.self_attn.compressor.gate_proj"),
    ("layers.*.attn.compressor.wkv", "model.layers.*.self_attn.compressor.kv_proj"),
    ("layers.*.attn.indexer", "model.layers.*.self_attn.compressor.indexer.scorer"),
    ("layers.*.attn.indexer.compressor.wgate", "model.layers.*.self_attn.compressor.indexer.gate_proj"),
    ("layers.*.attn.indexer.compressor.wkv", "model.layers.*.self_attn.compressor.indexer.kv_proj"),
    ("layers.*.attn.indexer.wq_b", "model.layers.*.self_attn.compressor.indexer.q_b_proj"),
    ("layers.*.attn.wkv", "model.layers.*.self_attn.kv_proj"),
    ("layers.*.attn.wo_a", "model.layers.*.self_attn.o_a_proj"),
    ("layers.*.attn.wo_b", "model.layers.*.self_attn.o_b_proj"),
    ("layers.*.attn.wq_a", "model.layers.*.self_attn.q_a_proj"),
    ("layers.*.attn.wq_b", "model.layers.*.self_attn.q_b_proj"),
    ("layers.*.ffn.shared_experts.w1", "model.layers.*.mlp.shared_experts.gate_proj"),
    ("layers.*.ffn.shared_experts.w2", "model.layers.*.mlp.shared_experts.down_proj"),
    ("layers.*.ffn.shared_experts.w3", "model.layers.*.mlp.shared_experts.up_proj"),
];

pub(super) const DOTS3_NOTE: &[(&str, &str)] = &[
    ("audio_encoder.audio_adapter.proj.*", "model.audio_tower.adapter.fc1"),
    ("audio_encoder.audio_adapter.proj.*", "model.audio_tower.adapter.fc2"),
    ("audio_encoder.dots_encoder.speech_encoder", "model.audio_tower"),
    ("audio_encoder.dots_encoder.speech_encoder.conv_out", "model.audio_tower.conv_stem.conv_out"),
    ("audio_encoder.dots_encoder.speech_encoder.layers.*.fc1", "model.audio_tower.layers.*.mlp.gate_up_proj"),
    ("audio_encoder.dots_encoder.speech_encoder.layers.*.fc2", "model.audio_tower.layers.*.mlp.down_proj"),
    (
        "audio_encoder.dots_encoder.speech_encoder.layers.*.self_attn.out_proj",
        "model.audio_tower.layers.*.self_attn.o_proj",
    ),
    ("model", "model.language_model"),
    ("model.audio_tower", "model.audio_tower"),
    ("model.language_model", "model.language_model"),
    ("model.vision_tower", "model.vision_tower"),
    ("vision_encoder", "model.vision_tower"),
    ("vision_encoder.adapter", "model.vision_tower.merger"),
    ("vision_encoder.blocks.*.mlp.fc1", "model.vision_tower.blocks.*.mlp.gate_proj"),
    ("vision_encoder.blocks.*.mlp.fc2", "model.vision_tower.blocks.*.mlp.down_proj"),
    ("vision_encoder.blocks.*.mlp.fc3", "model.vision_tower.blocks.*.mlp.up_proj"),
];

pub(super) const ERNIE4_5_VL_MOE: &[(&str, &str)] = &[
    ("model", "model.language_model"),
    ("model.language_model", "model.language_model"),
    ("model.resampler_model", "model.resampler_model"),
    ("model.resampler_model.spatial_linear.*", "model.resampler_model.spatial_linear.fc1"),
    ("model.resampler_model.spatial_linear.*", "model.resampler_model.spatial_linear.fc2"),
    ("model.resampler_model.temporal_linear.*", "model.resampler_model.temporal_linear.fc1"),
    ("model.resampler_model.temporal_linear.*", "model.resampler_model.temporal_linear.fc2"),
    ("model.vision_model", "model.vision_tower"),
    ("model.vision_tower", "model.vision_tower"),
];

pub(super) const GLM5_NEXT: &[(&str, &str)] = &[
    ("model.language_model.layers.*.self_attn", "model.language_model.layers.*.self_attn"),
    (
        "model.language_model.layers.*.self_attn.f_a_proj",
        "model.language_model.layers.*.self_attn.forget_gate.f_a_proj",
    ),
    (
        "model.language_model.layers.*.self_attn.f_b_proj",
        "model.language_model.layers.*.self_attn.forget_gate.f_b_proj",
    ),
];

pub(super) const GOT_OCR2: &[(&str, &str)] = &[
    ("language_model.model", "model.language_model"),
    ("multi_modal_projector", "model.multi_modal_projector"),
    ("vision_tower", "model.vision_tower"),
];

pub(super) const GTE: &[(&str, &str)] = &[
    ("gte.encoder.layer", "gte.layers"),
    ("gte.encoder.layer.*.attention", "gte.layers.*.self_attn"),
    ("gte.encoder.layer.*.attention.qkv_proj", "gte.layers.*.self_attn.k_proj"),
    ("gte.encoder.layer.*.attention.qkv_proj", "gte.layers.*.self_attn.q_proj"),
    ("gte.encoder.layer.*.attention.qkv_proj", "gte.layers.*.self_attn.v_proj"),
    ("gte.encoder.layer.*.mlp.up_gate_proj", "gte.layers.*.mlp.gate_proj"),
    ("gte.encoder.layer.*.mlp.up_gate_proj", "gte.layers.*.mlp.up_proj"),
];

pub(super) const HRM_TEXT: &[(&str, &str)] = &[
    ("model.H_module.layers.*.attn", "model.H_module.layers.*.self_attn"),
    ("model.H_module.layers.*.attn.gqkv_proj", "model.H_module.layers.*.self_attn.gate_proj"),
    ("model.H_module.layers.*.attn.gqkv_proj", "model.H_module.layers.*.self_attn.k_proj"),
    ("model.H_module.layers.*.attn.gqkv_proj", "model.H_module.layers.*.self_attn.q_proj"),
    ("model.H_module.layers.*.attn.gqkv_proj", "model.H_module.layers.*.self_attn.v_proj"),
    ("model.H_module.layers.*.mlp.gate_up_proj", "model.H_module.layers.*.mlp.gate_proj"),
    ("model.H_module.layers.*.mlp.gate_up_proj", "model.H_module.layers.*.mlp.up_proj"),
    ("model.L_module.layers.*.attn", "model.L_module.layers.*.self_attn"),
    ("model.L_module.layers.*.attn.gqkv_proj", "model.L_module.layers.*.self_attn.gate_proj"),
    ("model.L_module.layers.*.attn.gqkv_proj", "model.L_module.layers.*.self_attn.k_proj"),
    ("model.L_module.layers.*.attn.gqkv_proj", "model.L_module.layers.*.self_attn.q_proj"),
    ("model.L_module.layers.*.attn.gqkv_proj", "model.L_module.layers.*.self_attn.v_proj"),
    ("model.L_module.layers.*.mlp.gate_up_proj", "model.L_module.layers.*.mlp.gate_proj"),
    ("model.L_module.layers.*.mlp.gate_up_proj", "model.L_module.layers.*.mlp.up_proj"),
];

pub(super) const HY_V4: &[(&str, &str)] = &[
    ("model.layers.*.mlp.linear_gate", "model.layers.*.mlp.gate_proj"),
    ("model.layers.*.mlp.shared_experts.linear_gate", "model.layers.*.mlp.shared_experts.gate_proj"),
    ("model.layers.*.self_attn.linear_gate", "model.layers.*.self_attn.gate_proj"),
];

pub(super) const HY_V4_VL: &[(&str, &str)] = &[
    ("model", "model.language_model"),
    ("model.language_model", "model.language_model"),
    ("model.layers.*.mlp.linear_gate", "model.language_model.layers.*.mlp.gate_proj"),
    (
        "model.layers.*.mlp.shared_experts.linear_gate",
        "model.language_model.layers.*.mlp.shared_experts.gate_proj",
    ),
    ("model.layers.*.self_attn.linear_gate", "model.language_model.layers.*.self_attn.gate_proj"),
    ("model.vision_tower", "model.vision_tower"),
    ("vit", "model.vision_tower"),
    ("vit.layers.*.mlp.dense_4h_to_h", "model.vision_tower.layers.*.mlp.fc2"),
    ("vit.layers.*.mlp.dense_h_to_4h", "model.vision_tower.layers.*.mlp.fc1"),
];

pub(super) const INKLING2: &[(&str, &str)] = &[
    ("model.llm.layers.*.attn.attn_sink_proj", "model.language_model.layers.*.self_attn.sink_proj"),
    ("model.llm.layers.*.attn.gate_attn", "model.language_model.layers.*.self_attn.o_proj.gate_proj"),
    ("model.llm.layers.*.attn.wk_dv", "model.language_model.layers.*.self_attn.k_proj.linear"),
    ("model.llm.layers.*.attn.wo_ud", "model.language_model.layers.*.self_attn.o_proj.linear"),
    ("model.llm.layers.*.attn.wq_du", "model.language_model.layers.*.self_attn.q_proj.linear"),
    (
        "model.llm.layers.*.attn.wr_du",
        "model.language_model.layers.*.self_attn.relative_position_bias.linear",
    ),
    ("model.llm.layers.*.attn.wv_dv", "model.language_model.layers.*.self_attn.v_proj.linear"),
    ("model.llm.unembed", "lm_head"),
    ("model.visual.backbone", "model.vision_tower"),
    ("model.visual.backbone.layers.*.mlp.c_fc", "model.vision_tower.layers.*.mlp.fc1"),
    ("model.visual.backbone.layers.*.mlp.c_proj", "model.vision_tower.layers.*.mlp.fc2"),
    ("model.visual.proj_in", "model.vision_tower.merger.linear_1"),
    ("model.visual.proj_out", "model.vision_tower.merger.linear_2"),
];

pub(super) const INKLING2_LOOP_TEXT: &[(&str, &str)] = &[
    ("model.llm.layers.*.attn.attn_sink_proj", "model.layers.*.self_attn.sink_proj"),
    ("model.llm.layers.*.attn.gate_attn", "model.layers.*.self_attn.o_proj.gate_proj"),
    ("model.llm.layers.*.attn.wk_dv", "model.layers.*.self_attn.k_proj.linear"),
    ("model.llm.layers.*.attn.wo_ud", "model.layers.*.self_attn.o_proj.linear"),
    ("model.llm.layers.*.attn.wq_du", "model.layers.*.self_attn.q_proj.linear"),
    ("model.llm.layers.*.attn.wr_du", "model.layers.*.self_attn.relative_position_bias.linear"),
    ("model.llm.layers.*.attn.wv_dv", "model.layers.*.self_attn.v_proj.linear"),
    ("model.llm.unembed", "lm_head"),
];

pub(super) const INKLING_MM_MODEL: &[(&str, &str)] = &[
    ("model.llm.layers.*.attn.wk_dv", "model.language_model.layers.*.self_attn.k_proj"),
    ("model.llm.layers.*.attn.wo_ud", "model.language_model.layers.*.self_attn.o_proj"),
    ("model.llm.layers.*.attn.wq_du", "model.language_model.layers.*.self_attn.q_proj"),
    ("model.llm.layers.*.attn.wr_du", "model.language_model.layers.*.self_attn.r_proj"),
    ("model.llm.layers.*.attn.wv_dv", "model.language_model.layers.*.self_attn.v_proj"),
    ("model.llm.unembed", "lm_head"),
    ("model.visual.layers.linear_0", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_1", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_2", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_3", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_4", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_5", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_6", "model.vision_tower.encoder_layers.*.projection"),
    ("model.visual.layers.linear_7", "model.vision_tower.encoder_layers.*.projection"),
];

pub(super) const JINA_EMBEDDINGS_V3: &[(&str, &str)] = &[
    ("roberta.encoder", "roberta"),
    ("roberta.encoder.layers.*.mixer.Wqkv", "roberta.layers.*.self_attn.k_proj"),
    ("roberta.encoder.layers.*.mixer.Wqkv", "roberta.layers.*.self_attn.q_proj"),
    ("roberta.encoder.layers.*.mixer.Wqkv", "roberta.layers.*.self_attn.v_proj"),
    ("roberta.encoder.layers.*.mixer.out_proj", "roberta.layers.*.self_attn.o_proj"),
];

pub(super) const KIMI_K25: &[(&str, &str)] = &[
    ("language_model.model.blocks", "model.language_model.layers"),
    ("mm_projector.proj.*", "model.mm_projector.in_proj"),
    ("mm_projector.proj.*", "model.mm_projector.out_proj"),
    ("vision_tower.encoder.blocks.*.mlp.fc0", "model.vision_tower.layers.*.mlp.fc1"),
    ("vision_tower.encoder.blocks.*.mlp.fc1", "model.vision_tower.layers.*.mlp.fc2"),
    ("vision_tower.encoder.blocks.*.wo", "model.vision_tower.layers.*.attn.proj"),
    ("vision_tower.encoder.blocks.*.wqkv", "model.vision_tower.layers.*.attn.k_proj"),
    ("vision_tower.encoder.blocks.*.wqkv", "model.vision_tower.layers.*.attn.q_proj"),
    ("vision_tower.encoder.blocks.*.wqkv", "model.vision_tower.layers.*.attn.v_proj"),
];

pub(super) const KIMI_LINEAR: &[(&str, &str)] = &[
    ("model.layers.*.block_sparse_moe", "model.layers.*.mlp"),
    ("model.layers.*.self_attn", "model.layers.*.self_attn"),
    ("model.layers.*.self_attn.f_a_proj", "model.layers.*.self_attn.forget_gate.f_a_proj"),
    ("model.layers.*.self_attn.f_b_proj", "model.layers.*.self_attn.forget_gate.f_b_proj"),
];

pub(super) const KYUTAI_SPEECH_TO_TEXT: &[(&str, &str)] = &[
    ("codec_model", "codec_model.decoder"),
    ("codec_model.decoder", "codec_model.decoder"),
    ("codec_model.encoder", "codec_model.encoder"),
    ("codec_model.encoder_transformer", "codec_model.encoder.encoder_transformer"),
];

pub(super) const LARA_MINI: &[(&str, &str)] = &[
    ("model.layers.*.linear_attn.in_proj", "model.layers.*.linear_attn.in_proj_a"),
    ("model.layers.*.linear_attn.in_proj", "model.layers.*.linear_attn.in_proj_b"),
    ("model.layers.*.linear_attn.in_proj", "model.layers.*.linear_attn.in_proj_qkv"),
    ("model.layers.*.linear_attn.in_proj", "model.layers.*.linear_attn.in_proj_z"),
];

pub(super) const LLAVA: &[(&str, &str)] = &[
    ("audio_tower", "model.audio_tower"),
    ("encoder", "model.encoder"),
    ("image_tower", "model.image_tower"),
    ("language_model.lm_head", "lm_head"),
    ("language_model.model", "model.language_model"),
    ("model.vision_tower.vision_model", "model.vision_tower"),
    ("multi_modal_projector", "model.multi_modal_projector"),
    ("projector", "model.projector"),
    ("video_tower", "model.video_tower"),
    ("vision_embed_tokens", "model.vision_embed_tokens"),
    ("vision_model", "model.vision_model"),
    ("vision_tower", "model.vision_tower"),
    ("vision_tower.vision_model", "model.vision_tower"),
];

pub(super) const MINIMAX_M3_VL: &[(&str, &str)] = &[
    ("language_model.lm_head", "lm_head"),
    ("language_model.model", "model.language_model"),
    ("language_model.model.layers.*.block_sparse_moe", "model.language_model.layers.*.mlp"),
    (
        "language_model.model.layers.*.block_sparse_moe.shared_experts.gate_proj",
        "model.language_model.layers.*.mlp.shared_experts.gate_up_proj",
    ),
    (
        "language_model.model.layers.*.block_sparse_moe.shared_experts.up_proj",
        "model.language_model.layers.*.mlp.shared_experts.gate_up_proj",
    ),
    ("multi_modal_projector", "model.multi_modal_projector"),
    ("patch_merge_mlp.linear_1", "model.multi_modal_projector.merge_linear_1"),
    ("patch_merge_mlp.linear_2", "model.multi_modal_projector.merge_linear_2"),
    ("vision_tower.vision_model.encoder", "model.vision_tower"),
];

pub(super) const MISTRAL_LARGE4: &[(&str, &str)] = &[
    ("layers.*.attention", "model.language_model.layers.*.self_attn"),
    ("layers.*.attention.wkv_a_with_mqa", "model.language_model.layers.*.self_attn.kv_a_proj_with_mqa"),
    ("layers.*.attention.wkv_b", "model.language_model.layers.*.self_attn.kv_b_proj"),
    ("layers.*.attention.wo", "model.language_model.layers.*.self_attn.o_proj"),
    ("layers.*.attention.wq", "model.language_model.layers.*.self_attn.q_proj"),
    ("layers.*.feed_forward.w1", "model.language_model.layers.*.mlp.gate_proj"),
    ("layers.*.feed_forward.w2", "model.language_model.layers.*.mlp.down_proj"),
    ("layers.*.feed_forward.w3", "model.language_model.layers.*.mlp.up_proj"),
    ("layers.*.shared_experts.w1", "model.language_model.layers.*.mlp.shared_experts.gate_proj"),
    ("layers.*.shared_experts.w2", "model.language_model.layers.*.mlp.shared_experts.down_proj"),
    ("layers.*.shared_experts.w3", "model.language_model.layers.*.mlp.shared_experts.up_proj"),
    ("output", "lm_head"),
    ("patch_merger", "model.multi_modal_projector.patch_merger"),
    (
        "vision_encoder.transformer.layers.*.attention.wk",
        "model.vision_tower.transformer.layers.*.attention.k_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.attention.wo",
        "model.vision_tower.transformer.layers.*.attention.o_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.attention.wq",
        "model.vision_tower.transformer.layers.*.attention.q_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.attention.wv",
        "model.vision_tower.transformer.layers.*.attention.v_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.feed_forward.w1",
        "model.vision_tower.transformer.layers.*.feed_forward.gate_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.feed_forward.w2",
        "model.vision_tower.transformer.layers.*.feed_forward.down_proj",
    ),
    (
        "vision_encoder.transformer.layers.*.feed_forward.w3",
        "model.vision_tower.transformer.layers.*.feed_forward.up_proj",
    ),
    ("vision_language_adapter.w_in", "model.multi_modal_projector.linear_1"),
    ("vision_language_adapter.w_out", "model.multi_modal_projector.linear_2"),
];

pub(super) const MOLMO2: &[(&str, &str)] = &[
    ("model.transformer.blocks.*.mlp.ff_out", "model.language_model.layers.*.mlp.down_proj"),
    ("model.transformer.blocks.*.mlp.ff_proj", "model.language_model.layers.*.mlp.gate_proj"),
    ("model.transformer.blocks.*.mlp.ff_proj", "model.language_model.layers.*.mlp.up_proj"),
    ("model.transformer.blocks.*.self_attn.att_proj", "model.language_model.layers.*.self_attn.k_proj"),
    ("model.transformer.blocks.*.self_attn.att_proj", "model.language_model.layers.*.self_attn.q_proj"),
    ("model.transformer.blocks.*.self_attn.att_proj", "model.language_model.layers.*.self_attn.v_proj"),
    ("model.transformer.blocks.*.self_attn.attn_out", "model.language_model.layers.*.self_attn.o_proj"),
    ("model.vision_backbone.image_pooling_2d.wk", "model.multi_modal_projector.image_pooling_2d.k_proj"),
    ("model.vision_backbone.image_pooling_2d.wo", "model.multi_modal_projector.image_pooling_2d.o_proj"),
    ("model.vision_backbone.image_pooling_2d.wq", "model.multi_modal_projector.image_pooling_2d.q_proj"),
    ("model.vision_backbone.image_pooling_2d.wv", "model.multi_modal_projector.image_pooling_2d.v_proj"),
    ("model.vision_backbone.image_projector.w1", "model.multi_modal_projector.image_projector.gate_proj"),
    ("model.vision_backbone.image_projector.w2", "model.multi_modal_projector.image_projector.down_proj"),
    ("model.vision_backbone.image_projector.w3", "model.multi_modal_projector.image_projector.up_proj"),
    ("model.vision_backbone.image_vit", "model.vision_tower"),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.attention.wk",
        "model.vision_tower.layers.*.self_attn.k_proj",
    ),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.attention.wo",
        "model.vision_tower.layers.*.self_attn.o_proj",
    ),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.attention.wq",
        "model.vision_tower.layers.*.self_attn.q_proj",
    ),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.attention.wv",
        "model.vision_tower.layers.*.self_attn.v_proj",
    ),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.feed_forward.w1",
        "model.vision_tower.layers.*.mlp.fc1",
    ),
    (
        "model.vision_backbone.image_vit.transformer.resblocks.*.feed_forward.w2",
        "model.vision_tower.layers.*.mlp.fc2",
    ),
];

pub(super) const NEMOTRON_H_OMNI: &[(&str, &str)] = &[
    ("language_model.backbone", "language_model.model"),
    ("mlp1.*", "multi_modal_projector.linear_1"),
    ("mlp1.*", "multi_modal_projector.linear_2"),
    ("vision_model.radio_model.model.blocks", "vision_model.encoder.layer"),
    ("vision_model.radio_model.model.blocks.*.attn.proj", "vision_model.encoder.layer.*.attention.o_proj"),
    ("vision_model.radio_model.model.blocks.*.attn.qkv", "vision_model.encoder.layer.*.attention.k_proj"),
    ("vision_model.radio_model.model.blocks.*.attn.qkv", "vision_model.encoder.layer.*.attention.q_proj"),
    ("vision_model.radio_model.model.blocks.*.attn.qkv", "vision_model.encoder.layer.*.attention.v_proj"),
    ("vision_model.radio_model.model.patch_generator.embedder", "vision_model.embeddings.patch_projection"),
    (
        "vision_model.radio_model.model.patch_generator.video_embedder",
        "vision_model.embeddings.video_patch_projection",
    ),
];

pub(super) const NEMO_SPEECHLM: &[(&str, &str)] = &[
    (
        "ctc_timestamp.decoder.transformer.layers.*.attn.out_proj",
        "model.word_timestamp_encoder.layers.*.self_attn.o_proj",
    ),
    (
        "ctc_timestamp.decoder.transformer.layers.*.attn.w_qkv",
        "model.word_timestamp_encoder.layers.*.self_attn.k_proj",
    ),
    (
        "ctc_timestamp.decoder.transformer.layers.*.attn.w_qkv",
        "model.word_timestamp_encoder.layers.*.self_attn.q_proj",
    ),
    (
        "ctc_timestamp.decoder.transformer.layers.*.attn.w_qkv",
        "model.word_timestamp_encoder.layers.*.self_attn.v_proj",
    ),
    ("ctc_timestamp.decoder.transformer.layers.*.ffn.net.*", "model.word_timestamp_encoder.layers.*.mlp.fc1"),
    ("ctc_timestamp.decoder.transformer.layers.*.ffn.net.*", "model.word_timestamp_encoder.layers.*.mlp.fc2"),
    ("llm.lm_head", "lm_head"),
    ("llm.model", "model.language_model"),
    (
        "perception.encoder.asr_encoder.layers.*.attn.out_proj",
        "model.audio_tower.asr_encoder.layers.*.self_attn.o_proj",
    ),
    (
        "perception.encoder.asr_encoder.layers.*.attn.w_qkv",
        "model.audio_tower.asr_encoder.layers.*.self_attn.k_proj",
    ),
    (
        "perception.encoder.asr_encoder.layers.*.attn.w_qkv",
        "model.audio_tower.asr_encoder.layers.*.self_attn.q_proj",
    ),
    (
        "perception.encoder.asr_encoder.layers.*.attn.w_qkv",
        "model.audio_tower.asr_encoder.layers.*.self_attn.v_proj",
    ),
    ("perception.encoder.asr_encoder.layers.*.ffn.net.*", "model.audio_tower.asr_encoder.layers.*.mlp.fc1"),
    ("perception.encoder.asr_encoder.layers.*.ffn.net.*", "model.audio_tower.asr_encoder.layers.*.mlp.fc2"),
    ("perception.encoder.asr_encoder.pre_encode.proj", "model.audio_tower.asr_encoder.embedder.projection"),
    (
        "perception.encoder.diarization_model.encoder.layers.*.attn.out_proj",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.self_attn.o_proj",
    ),
    (
        "perception.encoder.diarization_model.encoder.layers.*.attn.w_qkv",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.self_attn.k_proj",
    ),
    (
        "perception.encoder.diarization_model.encoder.layers.*.attn.w_qkv",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.self_attn.q_proj",
    ),
    (
        "perception.encoder.diarization_model.encoder.layers.*.attn.w_qkv",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.self_attn.v_proj",
    ),
    (
        "perception.encoder.diarization_model.encoder.layers.*.ffn.net.*",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.mlp.fc1",
    ),
    (
        "perception.encoder.diarization_model.encoder.layers.*.ffn.net.*",
        "model.audio_tower.diarization_model.model.audio_tower.layers.*.mlp.fc2",
    ),
    (
        "perception.encoder.diarization_model.encoder.pre_encode.proj",
        "model.audio_tower.diarization_model.model.audio_tower.embedder.projection",
    ),
    (
        "perception.encoder.diarization_model.sortformer_modules.encoder_proj",
        "model.audio_tower.diarization_model.model.proj",
    ),
    (
        "perception.encoder.diarization_model.sortformer_modules.first_hidden_to_hidden",
        "model.audio_tower.diarization_model.classifier.dense",
    ),
    (
        "perception.encoder.diarization_model.sortformer_modules.single_hidden_to_spks",
        "model.audio_tower.diarization_model.classifier.out_proj",
    ),
    ("perception.proj", "model.multi_modal_projector"),
];

pub(super) const NOMIC_BERT: &[(&str, &str)] = &[
    ("nomic_bert.encoder.layers.*.attn.Wqkv", "nomic_bert.layers.*.self_attn.k_proj"),
    ("nomic_bert.encoder.layers.*.attn.Wqkv", "nomic_bert.layers.*.self_attn.q_proj"),
    ("nomic_bert.encoder.layers.*.attn.Wqkv", "nomic_bert.layers.*.self_attn.v_proj"),
    ("nomic_bert.encoder.layers.*.attn.out_proj", "nomic_bert.layers.*.self_attn.o_proj"),
    ("nomic_bert.encoder.layers.*.mlp.fc11", "nomic_bert.layers.*.mlp.up_proj"),
    ("nomic_bert.encoder.layers.*.mlp.fc12", "nomic_bert.layers.*.mlp.gate_proj"),
    ("nomic_bert.encoder.layers.*.mlp.fc2", "nomic_bert.layers.*.mlp.down_proj"),
];

pub(super) const PADDLEOCR_VL: &[(&str, &str)] = &[
    ("mlp_AR", "model.projector"),
    ("model", "model.language_model"),
    ("model.language_model", "model.language_model"),
    ("model.projector", "model.projector"),
    ("model.visual", "model.visual"),
    ("visual", "model.visual"),
];

pub(super) const PI0: &[(&str, &str)] = &[
    ("action_in_proj", "embed_action_time.action_in_proj"),
    ("action_time_mlp_in", "embed_action_time.action_time_mlp_in"),
    ("action_time_mlp_out", "embed_action_time.action_time_mlp_out"),
    ("paligemma_with_expert.gemma_expert.model", "model.dit"),
    ("paligemma_with_expert.paligemma.model", "model.vlm"),
    ("paligemma_with_expert.paligemma.model.language_model.model", "model.vlm.language_model"),
    ("state_proj", "embed_action_time.state_proj"),
];

pub(super) const QIANFAN_OCR: &[(&str, &str)] = &[
    ("language_model.lm_head", "lm_head"),
    ("language_model.model.encoder", "model.language_model"),
    ("mlp1.*", "model.multi_modal_projector.linear_1"),
    ("mlp1.*", "model.multi_modal_projector.linear_2"),
    ("vision_model.encoder", "model.vision_tower"),
    ("vision_model.encoder.layers.*.attn.proj", "model.vision_tower.layers.*.attention.projection_layer"),
    ("vision_model.encoder.layers.*.attn.qkv", "model.vision_tower.layers.*.attention.k_proj"),
    ("vision_model.encoder.layers.*.attn.qkv", "model.vision_tower.layers.*.attention.q_proj"),
    ("vision_model.encoder.layers.*.attn.qkv", "model.vision_tower.layers.*.attention.v_proj"),
];

pub(super) const QWEN_OMNI: &[(&str, &str)] = &[
    ("thinker", "thinker.model"),
    ("thinker.audio_tower", "thinker.model.audio_tower"),
    ("thinker.lm_head", "thinker.lm_head"),
    ("thinker.model", "thinker.model.language_model"),
    ("thinker.model.audio_tower", "thinker.model.audio_tower"),
    ("thinker.model.language_model", "thinker.model.language_model"),
    ("thinker.model.visual", "thinker.model.visual"),
    ("thinker.visual", "thinker.model.visual"),
];

pub(super) const QWEN_VL: &[(&str, &str)] = &[
    ("audio_tower", "model.audio_tower"),
    ("model", "model.language_model"),
    ("model.audio_tower", "model.audio_tower"),
    ("model.language_model", "model.language_model"),
    ("model.visual", "model.visual"),
    ("visual", "model.visual"),
];

pub(super) const STEP3P7: &[(&str, &str)] = &[
    ("model", "model.language_model"),
    ("model.language_model", "model.language_model"),
    ("model.layers.*.share_expert", "model.language_model.layers.*.mlp.shared_experts"),
    ("model.multi_modal_projector", "model.multi_modal_projector"),
    ("model.vision_model", "model.vision_model"),
    ("vision_model.transformer.resblocks.*.attn", "model.vision_model.layers.*.self_attn"),
    (
        "vision_model.transformer.resblocks.*.attn.in_proj_weight",
        "model.vision_model.layers.*.self_attn.k_proj",
    ),
    (
        "vision_model.transformer.resblocks.*.attn.in_proj_weight",
        "model.vision_model.layers.*.self_attn.v_proj",
    ),
    ("vision_model.transformer.resblocks.*.mlp.c_fc", "model.vision_model.layers.*.mlp.fc1"),
    ("vision_model.transformer.resblocks.*.mlp.c_proj", "model.vision_model.layers.*.mlp.fc2"),
    ("vit_large_projector", "model.multi_modal_projector"),
];

pub(super) const UNLIMITED_OCR: &[(&str, &str)] = &[
    ("model", "model.language_model"),
    ("model.language_model", "model.language_model"),
    ("model.multi_modal_projector", "model.multi_modal_projector"),
    ("model.projector.layers", "model.multi_modal_projector"),
    ("model.sam_model.blocks", "model.vision_tower.sam_encoder.layers"),
    ("model.vision_model.transformer", "model.vision_tower.vision_encoder.encoder"),
    (
        "model.vision_model.transformer.layers.*.self_attn.qkv_proj",
        "model.vision_tower.vision_encoder.encoder.layers.*.self_attn.k_proj",
    ),
    (
        "model.vision_model.transformer.layers.*.self_attn.qkv_proj",
        "model.vision_tower.vision_encoder.encoder.layers.*.self_attn.q_proj",
    ),
    (
        "model.vision_model.transformer.layers.*.self_attn.qkv_proj",
        "model.vision_tower.vision_encoder.encoder.layers.*.self_attn.v_proj",
    ),
    ("model.vision_tower", "model.vision_tower"),
];

pub(super) const VIBEVOICE_ASR: &[(&str, &str)] = &[
    ("acoustic_tokenizer_encoder", "model.acoustic_tokenizer_encoder"),
    ("language_model.lm_head", "lm_head"),
    ("language_model.model", "model.language_model"),
    ("multi_modal_projector", "model.multi_modal_projector"),
    ("semantic_tokenizer_encoder", "model.semantic_tokenizer_encoder"),
];

pub(super) const VISION_ENCODER_DECODER: &[(&str, &str)] = &[
    ("encoder.encoder.layer.*.attention.attention.key", "encoder.layers.*.attention.k_proj"),
    ("encoder.encoder.layer.*.attention.attention.query", "encoder.layers.*.attention.q_proj"),
    ("encoder.encoder.layer.*.attention.attention.value", "encoder.layers.*.attention.v_proj"),
    ("encoder.encoder.layer.*.attention.output.dense", "encoder.layers.*.attention.o_proj"),
    ("encoder.encoder.layer.*.intermediate.dense", "encoder.layers.*.mlp.fc1"),
    ("encoder.encoder.layer.*.output.dense", "encoder.layers.*.mlp.fc2"),
];

pub(super) const VIT_MAE: &[(&str, &str)] = &[
    ("decoder.decoder_encoder.layer.*.attention.attention.key", "decoder.decoder_layers.*.attention.k_proj"),
    (
        "decoder.decoder_encoder.layer.*.attention.attention.query",
        "decoder.decoder_layers.*.attention.q_proj",
    ),
    (
        "decoder.decoder_encoder.layer.*.attention.attention.value",
        "decoder.decoder_layers.*.attention.v_proj",
    ),
    ("decoder.decoder_encoder.layer.*.attention.output.dense", "decoder.decoder_layers.*.attention.o_proj"),
    ("decoder.decoder_encoder.layer.*.intermediate.dense", "decoder.decoder_layers.*.mlp.fc1"),
    ("decoder.decoder_encoder.layer.*.output.dense", "decoder.decoder_layers.*.mlp.fc2"),
    ("vit.encoder.layer.*.attention.attention.key", "vit.layers.*.attention.k_proj"),
    ("vit.encoder.layer.*.attention.attention.query", "vit.layers.*.attention.q_proj"),
    ("vit.encoder.layer.*.attention.attention.value", "vit.layers.*.attention.v_proj"),
    ("vit.encoder.layer.*.attention.output.dense", "vit.layers.*.attention.o_proj"),
    ("vit.encoder.layer.*.intermediate.dense", "vit.layers.*.mlp.fc1"),
    ("vit.encoder.layer.*.output.dense", "vit.layers.*.mlp.fc2"),
];

pub(super) const VOXTRAL_REALTIME: &[(&str, &str)] = &[
    ("audio_tower", "model.audio_tower"),
    ("language_model.model", "model.language_model"),
    ("multi_modal_projector", "model.multi_modal_projector"),
];
