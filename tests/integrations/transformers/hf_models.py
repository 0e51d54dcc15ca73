"""Small models of every supported kind, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
#: The class prefix in transformers and the config of each kind.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_SIZES, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_SIZES, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "olmoe": ("Olmoe", {**_SIZES, "num_local_experts": 4}),
    "gpt_oss": (
        "GptOss",
        {
            **_SIZES,
            "head_dim": 8,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
KINDS = tuple(_MODELS)
_MODELS["mixtral, one expert a token, tied"] = (
    "Mixtral",
    {**_SIZES, "num_experts_per_tok": 1, "num_local_experts": 4, "tie_word_embeddings": True},
)
_MODELS["deepseek_v3 of experts alone"] = (
    "DeepseekV3",
    {**_DEEPSEEK, "first_k_dense_replace": 0, "n_shared_experts": 0, "norm_topk_prob": False},
)
ODD_KINDS = tuple(_MODELS)[len(KINDS) :]
#: A kind with a config that leaves no expert layer.
DENSE_KIND = "qwen2_moe, dense"
_MODELS[DENSE_KIND] = ("Qwen2Moe", {**_SIZES, "num_experts": 4, "mlp_only_layers": [0, 1]})


def hf_model(kind: str) -> PreTrainedModel:
    """Return a model of a kind with fixed random weights."""
    import transformers  # The import is slow, and all processes of pytest import this file.

    name, config = _MODELS[kind]
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name:  # Initial zeros would hide a missing bias.
            tensor.data.normal_(std=0.1)
    return model


def token_ids(number: int = 0) -> torch.Tensor:
    """Return two short texts."""
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(number))


def loss_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss for texts."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss
