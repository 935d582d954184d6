"""Small models of transformers with random weights, for tests of whole models."""

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
SEQUENCES = {"vocab_size": 96, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BOTH_SIDES = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 0,
}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
#: Classes and configs by name.
MODELS = {
    "llama": ("LlamaForCausalLM", lambda t: t.LlamaConfig(**GROUPED)),
    "llama, tied": ("LlamaForCausalLM", lambda t: t.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama, classes": ("LlamaForSequenceClassification", lambda t: t.LlamaConfig(**GROUPED)),
    "llama, base": ("LlamaModel", lambda t: t.LlamaConfig(**GROUPED)),
    "gptneox": ("GPTNeoXForCausalLM", lambda t: t.GPTNeoXConfig(**SMALL)),
    "falcon": ("FalconForCausalLM", lambda t: t.FalconConfig(**{k: v for k, v in SMALL.items() if k != "intermediate_size"})),
    "bert": ("BertForMaskedLM", lambda t: t.BertConfig(**SMALL)),
    "roberta": ("RobertaForMaskedLM", lambda t: t.RobertaConfig(**SMALL)),
    "electra": ("ElectraForMaskedLM", lambda t: t.ElectraConfig(**SMALL, embedding_size=64)),
    "albert": ("AlbertForMaskedLM", lambda t: t.AlbertConfig(**SMALL, embedding_size=64)),
    "mobilebert": (
        "MobileBertForMaskedLM",
        lambda t: t.MobileBertConfig(
            vocab_size=96,
            hidden_size=64,
            embedding_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
            intra_bottleneck_size=64,
        ),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda t: t.WhisperConfig(
            **BOTH_SIDES, num_mel_bins=32, max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2
        ),
    ),
    "t5": ("T5ForConditionalGeneration", lambda t: t.T5Config(**SEQUENCES, pad_token_id=0)),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        lambda t: t.SwitchTransformersConfig(
            **SEQUENCES, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
        ),
    ),
    "nllb": (
        "NllbMoeForConditionalGeneration",
        lambda t: t.NllbMoeConfig(
            **BOTH_SIDES, num_experts=4, expert_capacity=8, encoder_sparse_step=2, decoder_sparse_step=2, pad_token_id=1
        ),
    ),
    "mamba": ("MambaForCausalLM", lambda t: t.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, time_step_rank=32)),
    "llava": (
        "LlavaForConditionalGeneration",
        lambda t: t.LlavaConfig(text_config=t.LlamaConfig(**GROUPED), vision_config=t.CLIPVisionConfig(**VISION), image_token_index=95),
    ),
    "siglip": (
        "SiglipVisionModel",
        lambda t: t.SiglipVisionConfig(**VISION),
    ),
    "mixtral": ("MixtralForCausalLM", lambda t: t.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3": (
        "Qwen3MoeForCausalLM",
        lambda t: t.Qwen3MoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda t: t.GptOssConfig(**GROUPED, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    ),
    "llama 4": (
        "Llama4ForCausalLM",
        lambda t: t.Llama4TextConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=1, head_dim=32, intermediate_size_mlp=96),
    ),
}


def config(name):
    return MODELS[name][1](transformers)


def empty(name, dtype, device="cpu", made_of=None):
    """A model as transformers makes it, of its config or of another one."""
    with torch.device(device):
        return getattr(transformers, MODELS[name][0])._from_config(made_of or config(name), dtype=dtype).eval()


def model(name, dtype=torch.float32, seed=3):
    """A model with weights of the usual size, which are not zeros."""
    torch.manual_seed(seed)
    made = empty(name, dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    made.tie_weights()
    return made


def outputs(made):
    """The logits or the last hidden states of a model."""
    tokens, dtype = torch.arange(3, 11)[None], made.dtype
    inputs = {"input_ids": tokens}
    if made.main_input_name == "input_features":
        inputs = {"input_features": torch.linspace(-1, 1, 32 * 32).reshape(1, 32, 32).to(dtype)}
    elif made.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16).to(dtype)}
    if made.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        result = made(**inputs)
    return result["logits"] if "logits" in result else result["last_hidden_state"]


def relative_squared_error(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).square().sum() / expected.square().sum())


def weights(module, dtype=torch.float32):
    """The dequantized weights of a quantized module, under their original names."""
    from microscale.torch import QuantizedLinear

    if isinstance(module, QuantizedLinear):
        return {"weight": module.dequantize(dtype)}
    transposed = getattr(module, "is_transposed", False)
    found = {part: module.dequantize(part, dtype) for part in ("gate_up_proj", "down_proj")}
    return {part: x.transpose(1, 2) if transposed else x for part, x in found.items()}


def parameters(made, dtype=torch.float32):
    """The parameters of a model by name, and the dequantized weights of its quantized modules."""
    from microscale.torch import QuantizedExperts, QuantizedLinear

    found = {}
    for name, module in made.named_modules():
        own = dict(module._parameters)
        if isinstance(module, (QuantizedLinear, QuantizedExperts)):
            own |= weights(module, dtype)
        found |= {f"{name}.{key}": x.detach() for key, x in own.items() if x is not None}
    return found


def dequantized(quantized, original, names):
    """The original model with the dequantized weights of the quantized one."""
    for name in names:
        own = original.get_submodule(name)
        for key, x in weights(quantized.get_submodule(name), next(own.parameters()).dtype).items():
            getattr(own, key).data.copy_(x)
    return original
