"""Small random models of all transformers classes, and their inputs.

For reader_classes.py and architectures.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

# Tasks, with the transformers table of their classes.
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
DEPTH, WIDTH, WIDE, HEADS, HEAD, EXPERTS, VOCABULARY, IMAGE, PATCH = 2, 64, 128, 2, 32, 4, 128, 32, 16

LAYERS = r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_(en|de)coder_layers|num_(global|local)_layers|layers|.*_encoder_layers|.*_decoder_layers|(en|de)coder_num_hidden_layers|conf_num_hidden_layers|decoder_num_layers|num_layers_per_stack|num_blocks|resampler_depth"

# Sizes of small models by name of the setting. The first pattern that matches the whole name
# decides.
SIZES: list[tuple[str, int]] = [
    (r".*vocab_size.*|num_embeddings|codebook_size", VOCABULARY),
    (LAYERS, DEPTH),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts|moe_n_routed_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_topk", 2),
    (r"n_group|num_expert_group|n_groups|topk_group|n_shared_experts|num_shared_experts|num_shared_expert|moe_num_shared_experts|num_zero_experts", 1),
    (r"(en|de)coder_attention_heads|num_(attention|key_value)_heads|n_heads?|num_heads|num_head|n_kv_heads", HEADS),
    (r"linear_num_(key|value)_heads|linear_num_heads|num_kv_heads|index_n_heads|num_attention_heads_.*|swa_num.*heads", HEADS),
    (r"head_dim|d_kv|kv_channels|attention_head_dim|v_head_dim|qk_rope_head_dim|qk_nope_head_dim|global_head_dim|d_head", HEAD),
    (r"linear_(key|value)_head_dim|index_head_dim|swa_head_dim|swa_v_head_dim|attention_head_size", HEAD),
    (r"(q|kv|o)_lora_rank|.*_lora_rank", HEAD),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|word_embed_proj_dim|embedding_size|emb_dim|model_dim", WIDTH),
    (r"out_hidden_size|projection_dim|output_dim|encoder_hidden_size|decoder_hidden_size|vision_output_dim|projector_(in|out)put_dim", WIDTH),
    (r"audio_hidden_size|adapter_(in|out)_dim|adapter_input_size|audio_embed_dim|hidden_dim|text_hidden_size|text_embed_dim|vision_hidden_size|d_embed|lru_width|kv_dim|encoder_embed_dim", WIDTH),
    (r"intermediate_size.*|ffn_dim|d_ff|d_inner|(en|de)coder_ffn_dim|mlp_dim|ffn_hidden_size|inner_dim|n_inner|d_ffn", WIDE),
    (r"(moe|shared_expert|shared|expert|moe_shared_expert|dense|router)_intermediate_size|expert_ffn_hidden_size|feed_forward_dim", WIDE),
    (r"rotary_dim", HEAD),
    (r"qk_head_dim", 2 * HEAD),
    (r"num_filters", 4),
    (r"base_channels", 32),
    (r"d_latents", WIDTH),
    (r"image_size|img_size|video_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_mel_bins|num_mel|input_feat_per_channel", 32),
    (r"max_source_positions", 16),
    (r"max_target_positions", 64),
    (r"mamba_n_heads|mamba_num_heads|mamba_nheads", 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", HEAD),
    (r"mamba_n_groups|mamba_ngroups", 1),
    (r"mamba_dt_rank|time_step_rank", HEAD),
]

# Values of settings by model type or name of a nested config, or anywhere ("").
EXACT: dict[tuple[str, str], object] = {
    ("wavtokenizer_encoder", "codebook_dim"): WIDTH,
    ("chameleon", "vocabulary_map"): {"<image>": VOCABULARY - 1} | {f"IMGIMG{name}Z": 64 + at for at, name in enumerate("ABCDEFGH")},
    ("emu3", "vocabulary_map"): {"<image>": VOCABULARY - 1, "<|extra_200|>": VOCABULARY - 2}
    | {f"<|visual token {number:06d}|>": 64 + number for number in range(8)},
    ("cohere_compass_text", "rope_parameters"): {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    ("diffusion_gemma_text", "num_experts"): EXPERTS,
    ("diffusion_gemma_text", "top_k_experts"): 2,
    ("diffusion_gemma_text", "moe_intermediate_size"): WIDE,
    ("dots1", "n_routed_experts"): EXPERTS,
    ("dots1", "n_shared_experts"): 1,
    ("dots1", "num_experts_per_tok"): 2,
    ("dots3_note_text", "head_dim"): 2 * HEAD,
    ("florence_vision", "embed_dim"): [32, 32, 64, 64],
    ("florence_vision", "num_heads"): [1, 1, 2, 2],
    ("florence_vision", "num_groups"): [1, 1, 2, 2],
    ("perception_lm", "vision_config"): {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_large_patch14_336",
        "model_args": {"embed_dim": WIDTH, "img_size": [28, 28], "depth": DEPTH, "global_pool": "", "use_post_transformer_norm": False,
                       "init_values": 0.1, "ref_feat_shape": [2, 2]},
    },
    ("fun_asr_nano", "adaptor_config"): {"hidden_size": WIDTH, "intermediate_size": WIDTH // 4, "num_attention_heads": HEADS},
    ("granite4_vision", "deepstack_layer_map"): [[-1, 0]],
    ("granite4_vision", "spatial_target_layers"): [0, 1],
    ("granite4_vision", "downsample_rate"): "1/2",
    ("mimi", "upsample_groups"): WIDTH,
    ("mimi", "codebook_dim"): WIDTH,
    ("molmo2_adapter", "vision_feature_layer"): [1, 0],
    ("qwen4_exp_text", "indexer_compress_ratio"): 2,
    ("qwen4_exp_text", "indexer_budget"): 8,
    ("qwen4_exp_text", "indexer_n_heads"): HEADS,
    ("qwen4_exp_text", "indexer_kv_heads"): 1,
    ("qwen4_exp_text", "indexer_head_dim"): HEAD,
    ("qwen3_omni_moe_talker_text", "shared_expert_intermediate_size"): WIDE,
    ("moonshine_streaming", "num_key_value_heads"): HEADS,
    ("dory", "num_hidden_layers"): 3,
    ("dory", "n_input_layers"): 1,
    ("dory", "n_recurrent_layers"): 1,
    ("dory", "n_output_layers"): 1,
    ("dory", "layer_types"): ["full_attention", "sliding_attention", "full_attention"],
    ("talker_config", "spatial_merge_size"): 2,
    ("apertus1p5_text", "vocab_size"): 4 * VOCABULARY,
    ("", "use_cache"): False,
    **{
        (whose, "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        for whose in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "hunyuan_vl_text")
    },
    ("glm4v_moe_text", "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
    ("bamba", "attn_layer_indices"): [1],
    ("deepseek_v2", "num_experts_per_tok"): 2,
    ("deepseek_ocr2_text", "num_experts_per_tok"): 2,
    ("esm", "pad_token_id"): 1,
    ("rwkv", "attention_hidden_size"): WIDTH,
    ("zamba", "attention_hidden_size"): 2 * WIDTH,
    ("zamba", "attention_head_dim"): WIDTH,
    ("zamba2", "attention_hidden_size"): 2 * WIDTH,
    ("zamba2", "attention_head_dim"): WIDTH,
    ("zamba2", "n_mamba_heads"): 4,
    ("zamba2", "mamba_headdim"): HEAD,
    ("xlstm", "embedding_dim"): WIDTH,
    ("xmod", "default_language"): "en_XX",
    ("zaya", "num_experts_per_tok"): 1,
    ("step3p7_text", "sliding_window"): 8,
    ("apertus1p5", "image_token_offset"): 0,
    ("apertus1p5", "audio_token_offset"): VOCABULARY,
    ("dbrx", "attn_config"): {"kv_n_heads": HEADS, "clip_qkv": 8, "rope_theta": 10000.0},
    ("dbrx", "ffn_config"): {"ffn_hidden_size": WIDE, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    ("ernie4_5_vl_moe_text", "rope_parameters"): {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 6, 4]},
    ("falcon_h1", "mamba_d_ssm"): 4 * HEAD,
    ("", "num_kv_shared_layers"): 0,
    ("", "vocab_size_per_layer_input"): VOCABULARY,
    ("", "hidden_size_per_layer_input"): HEAD,
    ("gemma4_assistant", "hidden_size_per_layer_input"): 0,
    ("hunyuan_v1_dense", "head_dim"): HEAD,
    ("hunyuan_v1_moe", "head_dim"): HEAD,
    ("hunyuan_vl_text", "head_dim"): HEAD,
    ("ministral", "head_dim"): HEAD,
    ("nemotron", "num_key_value_heads"): HEADS,
    ("mamba2", "num_heads"): 4,
    ("mamba2", "n_groups"): 1,
    ("", "mamba_chunk_size"): 8,
    ("reformer", "axial_pos_embds_dim"): [HEAD, HEAD],
    ("zamba", "num_hidden_layers"): 4,
    ("zamba", "attn_layer_period"): 2,
    ("zamba", "attn_layer_offset"): 1,
    ("zamba", "layers_block_type"): ["mamba", "hybrid", "mamba", "hybrid"],
    ("zamba", "layer_types"): ["mamba", "hybrid", "mamba", "hybrid"],
    ("jamba", "attn_layer_period"): 2,
    ("jamba", "attn_layer_offset"): 1,
    ("", "first_k_dense_replace"): 1,
    ("lfm2_moe", "layer_types"): ["conv", "full_attention"],
    ("esm", "vocab_size"): VOCABULARY,
    ("esm", "mask_token_id"): 32,
    ("deepseek_ocr2_text", "mlp_layer_types"): ["dense", "sparse"],
    ("blt", "encoder_hash_byte_group_vocab"): VOCABULARY,
}

# Settings that the default config of a class requires.
GIVEN: dict[str, dict[str, object]] = {"Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}}
# Settings of the top-level config, by class.
OF_CLASS: dict[str, dict[str, object]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
    "Qwen2_5OmniForConditionalGeneration": {"enable_audio_output": False},
}


def classes() -> dict[str, str]:
    """Returns the task of each class."""
    found: dict[str, str] = {}
    for task, mapping in TASKS.items():
        for names in getattr(modeling_auto, mapping).values():
            for name in names if isinstance(names, (tuple, list)) else [names]:
                found.setdefault(name, task)
    return found


def size(name: str) -> int | None:
    """Returns the size of a setting in a small model."""
    return next((small for pattern, small in SIZES if re.fullmatch(pattern, name)), None)


def is_by_layer(name: str, value: object, depth: int) -> bool:
    """Returns whether a setting has a value per layer."""
    return isinstance(value, (list, tuple)) and len(value) > DEPTH and (len(value) == depth or name.endswith(("layer_types", "block_type")))


def shrunk(value: object, name: str, old_depth: int, depth: int = DEPTH) -> object:
    """Returns the value of a setting in a small model with `depth` layers."""
    small = size(name)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if small is not None and value > 0:
            return min(value, depth) if re.fullmatch(LAYERS, name) else small
        if name.endswith(("_id", "_token_index", "_index")) and value >= VOCABULARY - 32:
            return VOCABULARY - 1 - value % 31
        return value
    if isinstance(value, (list, tuple)):
        if name in ("image_size", "patch_size") and small is not None:
            return type(value)(small for _ in value)
        if name == "mrope_section":
            return type(value)([4, 6, 6])
        if is_by_layer(name, value, old_depth):
            return type(value)(kinds(list(value), depth))
        if name.endswith("_id") or name.endswith("_ids"):
            return type(value)(shrunk(part, "_id", 0) for part in value)
    if name == "per_layer_config":
        return {key: part for key, part in value.items() if int(key) < depth}
    if isinstance(value, dict):
        return {key: shrunk(part, str(key), old_depth, depth) for key, part in value.items()}
    return value


def kinds(layers: list, depth: int) -> list:
    """Returns `depth` layers: the first of each kind, then the following ones."""
    first = [layer for at, layer in enumerate(layers) if layer not in layers[:at]]
    return (first + layers)[:depth]


def small_config(made: type[PreTrainedModel]) -> PreTrainedConfig:
    """Returns the default config of a class, with small sizes."""
    described = made.config_class(**GIVEN.get(made.__name__, {})).to_dict()
    small = small_dict(described, described.get("model_type", "")) | OF_CLASS.get(made.__name__, {})
    return made.config_class.from_dict(small)


def small_dict(described: dict, model_type: str) -> dict:
    depths = [value for key, value in described.items() if isinstance(value, int) and re.fullmatch(LAYERS, str(key))]
    old_depth = max(depths, default=0)
    lists = [value for key, value in described.items() if is_by_layer(str(key), value, old_depth)]
    depth = min(max([DEPTH, *(len(set(map(str, value))) for value in lists)]), 2 * DEPTH)
    small = {}
    for key, value in described.items():
        if isinstance(value, dict) and key != "per_layer_config" and ("model_type" in value or str(key).endswith("_config")):
            small[key] = small_dict(value, value.get("model_type") or str(key))
        else:
            small[key] = shrunk(value, str(key), old_depth, depth)
    for (whose, key), value in EXACT.items():
        if whose == model_type or not whose and small.get(key):
            small[key] = value
    return small


def small_model(name: str) -> PreTrainedModel:
    """Returns a small bf16 model with random weights; no tensor is all zeros or ones."""
    made = getattr(transformers, name)
    torch.manual_seed(0)
    model = made(small_config(made)).to(torch.bfloat16).eval()
    model.config.dtype = "bfloat16"
    for parameter in model.parameters():
        if parameter.is_floating_point():
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def inputs(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Yields inputs to try in order: tokens, sound, an image. A model accepts some of them."""
    tokens = torch.tensor([ordinary_tokens(model.config)])
    words = {"input_ids": tokens}
    decoder = {"decoder_input_ids": tokens}
    sound = [
        {"input_features": wave(1, bins, frames)} for bins in (32, 80, 128) for frames in (32, 64, 3000)
    ] + [{"input_features": wave(1, frames, bins)} for bins in (32, 80, 160) for frames in (32,)] + [{"input_values": wave(1, 4000)}]
    images = [{"pixel_values": wave(1, 3, IMAGE, IMAGE)}]
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        yield words | decoder
        yield from (other | decoder for other in sound + images)
    yield words
    yield words | {"decoder_input_ids": tokens}
    yield from (words | image for image in images)


def wave(*shape: int) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return torch.linspace(-1, 1, count).reshape(shape).to(torch.bfloat16)


def ordinary_tokens(config: PreTrainedConfig) -> list[int]:
    """Returns eight tokens that are not special in the config."""
    special: set[object] = set()

    def collect(described: dict) -> None:
        for key, value in described.items():
            if isinstance(value, dict):
                collect(value)
            elif str(key).endswith(("_id", "_ids", "_index")):
                special.update(value if isinstance(value, (list, tuple)) else [value])

    collect(config.to_dict())
    return [token for token in range(3, VOCABULARY) if token not in special][:8]
