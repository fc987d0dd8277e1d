"""Tiny random models of transformers, of every type that has a causal-LM class."""

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 199
MAX_PARAMETERS = 20_000_000
SIZES = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("attention_hidden_size", "d_inner", "dim_model_base"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "decoder_start_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "n_inner", "shared_intermediate_size"), 64
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "dff"), 64),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
}
"""Values of the fields of configurations that have a size."""


def tiny_config(model_type: str, **fields: Any) -> Any:
    """Return a small configuration of a model type, without dropout; `fields` override it."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**{**shrunk(kind().to_dict()), **SPECIAL.get(model_type, {}), **fields})


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that a small one has otherwise."""
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name in SIZES and isinstance(value, int):
            small[name] = SIZES[name]
        elif "drop" in name and isinstance(value, float):
            small[name] = 0.0
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = min(value, 3)
        elif name.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            small[name] = {"model_type": value["model_type"], **shrunk(value)}
    if "use_cache" in config:
        small["use_cache"] = False
    return small


EQUAL_HEADS = {"num_key_value_heads": 4}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
HEAD_DIM = {"head_dim": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32"), EQUAL_HEADS),
    "deepseek_v2": EQUAL_HEADS | {"num_experts_per_tok": 2},
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), EQUAL_HEADS),
    "dots3_note_text": EQUAL_HEADS,
    **dict.fromkeys(("bamba", "granitemoehybrid"), MAMBA_HEADS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEAD_DIM),
    "cohere_compass_text": {"num_hidden_layers": 4},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"expert_ffn_hidden_size": 64, "num_layers": 1} | EQUAL_HEADS,
    "nemotron": HEAD_DIM | {"num_key_value_heads": 2},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
    },
    "zamba2": {"attention_hidden_size": 64, "layers_block_type": ["mamba", "hybrid"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xlm": {"emb_dim": 32, "n_words": VOCAB},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a model type needs besides."""


def build(config: Any, seed: int = 0) -> nn.Module:
    """Return a causal LM with random weights of a deviation that trained models have.

    Raises:
        ValueError: if it has more than `MAX_PARAMETERS`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"got {count} parameters, expected at most {MAX_PARAMETERS}")
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            nn.init.normal_(parameter, std=0.08)
    return model.float()


def batch() -> dict[str, Tensor]:
    """Return token ids and labels (2, 12), some of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, :6] = -100
    return {"input_ids": ids, "labels": labels}
