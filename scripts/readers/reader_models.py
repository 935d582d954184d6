"""Small random models of many architectures, made and saved by transformers, for readers.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as t
from safetensors.torch import load_file, save_file

TEXT = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=32)


@dataclass(frozen=True)
class Model:
    """An architecture: a small model, its loader class, and names in published files."""

    make: Callable[[], t.PreTrainedModel]
    loader: type = t.AutoModelForCausalLM
    # Pairs of name prefixes: saved by transformers 5, and in published files.
    published: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()
    # Whether the forward pass works with quantized weights. T5 reads the dtype of a weight first.
    plain: bool = True

    def save(self, directory: Path) -> Path:
        torch.manual_seed(0)
        model = self.make().to(torch.bfloat16)
        model.config.dtype = "bfloat16"
        # No tensor is all zeros or ones, so that every change is visible.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(directory)
        file = directory / "model.safetensors"
        saved = load_file(file)
        renamed = {self.name(name): weight for name, weight in saved.items()}
        save_file(renamed, file, metadata={"format": "pt"})
        return directory

    def name(self, saved: str) -> str:
        return next((new + saved[len(old) :] for old, new in self.published if saved.startswith(old)), saved)


def llava(vision: t.PreTrainedConfig, **more: object) -> t.PreTrainedModel:
    text = t.LlamaConfig(**TEXT, tie_word_embeddings=False)
    return t.LlavaForConditionalGeneration(t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, tie_word_embeddings=False, **more))


def mistral3() -> t.PreTrainedModel:
    text = t.MistralConfig(**TEXT, head_dim=32, tie_word_embeddings=False)
    vision = t.PixtralVisionConfig(**VISION, patch_size=16, head_dim=32)
    return t.Mistral3ForConditionalGeneration(t.Mistral3Config(vision_config=vision, text_config=text, image_token_index=63, tie_word_embeddings=False))


def qwen2_5_vl() -> t.PreTrainedModel:
    vision = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=64, fullatt_block_indexes=[1])
    text = TEXT | dict(rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]})
    special = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
    config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **special)
    return t.Qwen2_5_VLForConditionalGeneration(config)


def gemma3() -> t.PreTrainedModel:
    text = t.Gemma3TextConfig(**TEXT, head_dim=32, sliding_window=16)
    vision = t.SiglipVisionConfig(**VISION, patch_size=16)
    config = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63, boi_token_index=61, eoi_token_index=62)
    return t.Gemma3ForConditionalGeneration(config)


def llama4() -> t.PreTrainedModel:
    text = t.Llama4TextConfig(**TEXT, intermediate_size_mlp=96, num_local_experts=2, interleave_moe_layer_step=4, head_dim=32)
    vision = t.Llama4VisionConfig(**VISION | dict(intermediate_size=256), patch_size=16, vision_output_dim=64,
                                  projector_input_dim=64, projector_output_dim=64)  # fmt: skip
    return t.Llama4ForConditionalGeneration(t.Llama4Config(vision_config=vision, text_config=text))


def whisper() -> t.PreTrainedModel:
    config = t.WhisperConfig(
        vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, num_mel_bins=32,
        decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=16, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config)


def bart() -> t.PreTrainedModel:
    sizes = dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=96, decoder_ffn_dim=96)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    return t.BartForConditionalGeneration(t.BartConfig(vocab_size=64, d_model=64, max_position_embeddings=64, **sizes, **heads))


def t5() -> t.PreTrainedModel:
    config = t.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=96, num_layers=2, num_heads=32, decoder_start_token_id=0)
    return t.T5ForConditionalGeneration(config)


def gpt_neox() -> t.PreTrainedModel:
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes, tie_word_embeddings=False))


def mixtral() -> t.PreTrainedModel:
    return t.MixtralForCausalLM(t.MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=False))


def qwen3_moe() -> t.PreTrainedModel:
    experts = dict(num_experts=3, num_experts_per_tok=1, moe_intermediate_size=64, decoder_sparse_step=1)
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**TEXT, **experts, head_dim=32, tie_word_embeddings=False))


def qwen3_next() -> t.PreTrainedModel:
    experts = dict(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    linear = dict(linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2)
    sizes = dict(head_dim=32, layer_types=["linear_attention", "full_attention"], tie_word_embeddings=False)
    return t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**TEXT, **experts, **linear, **sizes))


def deepseek_v3() -> t.PreTrainedModel:
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=2, topk_group=1, first_k_dense_replace=1)
    ranks = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32)
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**TEXT, **experts, **ranks, tie_word_embeddings=False))


PIXTRAL = dict(patch_size=16, head_dim=32)
TOWER = (("vision_tower.", "vision_tower.vision_model."),)
SEQUENCES = t.AutoModelForSeq2SeqLM
IMAGES = t.AutoModelForImageTextToText

MODELS: dict[str, Model] = {
    "LLaVA": Model(lambda: llava(t.CLIPVisionConfig(**VISION, patch_size=16)), IMAGES, TOWER, ("*vision_tower*",)),
    "Pixtral": Model(lambda: llava(t.PixtralVisionConfig(**VISION, **PIXTRAL), vision_feature_layer=-1,
                                   vision_feature_select_strategy="full"), IMAGES),
    "Mistral 3": Model(mistral3, IMAGES, exclude=("*vision_tower*",)),
    "Qwen2.5-VL": Model(qwen2_5_vl, IMAGES, exclude=("*visual*",)),
    "Gemma 3": Model(gemma3, IMAGES, TOWER, ("*vision_tower*", "*.0.mlp.*")),
    "Llama 4": Model(llama4, IMAGES),
    "Whisper": Model(whisper, t.AutoModelForSpeechSeq2Seq),
    "BART": Model(bart, SEQUENCES),
    "T5": Model(t5, SEQUENCES, plain=False),
    "GPT-NeoX": Model(gpt_neox),
    "OPT": Model(lambda: t.OPTForCausalLM(t.OPTConfig(vocab_size=64, hidden_size=64, word_embed_proj_dim=64, ffn_dim=96,
                 num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)),
                 published=(("model.decoder.", "decoder."),), exclude=("*fc1*",)),
    "BLOOM": Model(lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=2)),
                   published=(("transformer.", ""),), exclude=("*dense_h_to_4h*",)),
}  # fmt: skip

MIXTURES: dict[str, Model] = {
    "Mixtral": Model(mixtral),
    "Qwen3-MoE": Model(qwen3_moe),
    "Qwen3-Next": Model(qwen3_next),
    "DeepSeek-V3": Model(deepseek_v3),
}
