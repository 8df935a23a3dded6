"""Small models with random weights, made with the configuration classes of real checkpoints.

Weights are scaled up so that attention is far from uniform: with 0.02-scaled weights a wrong rotation would not show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,  # unequal, so that a magnitude applied twice shows
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 512,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-6,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-moe-yarn": ("v2", {"q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": YARN}),
    "v2-qlora-dense": ("v2", {"q_lora_rank": 32, "first_k_dense_replace": 3, "rope_parameters": DEFAULT}),
    "v3-moe-yarn": ("v3", {"q_lora_rank": 32, "first_k_dense_replace": 1, "rope_parameters": YARN}),
    "v3-noqlora-dense": ("v3", {"q_lora_rank": None, "first_k_dense_replace": 3, "rope_parameters": DEFAULT}),
}


def make(variant: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A fresh model of this variant; the same weights every time."""
    family, own = VARIANTS[variant]
    own = {**_COMMON, **own, **overrides}
    if family == "v3":
        own = {**own, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
    torch.manual_seed(7)
    if family == "v2":
        model: Any = DeepseekV2ForCausalLM(DeepseekV2Config(**own))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**own))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                fan_in = weight.shape[-1]
                scale = 4.0 if "kv_a_proj" in name or "q_proj" in name or "q_b_proj" in name else 1.0
                weight.normal_(0.0, scale * fan_in**-0.5)
    return model.to(dtype).eval()


def save(variant: str, directory: Path, **overrides: Any) -> Path:
    make(variant, **overrides).save_pretrained(directory)
    return directory
