"""The architecture of `tiny`, and faster equals of two of its modules for training.

`use_training_kernels` swaps attention and experts for forms with the same results (to 1e-5 in fp32) and no host sync.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DeepseekV2Config, DeepseekV2ForCausalLM

from training.edited_attention import ExtraKeys, with_extra_keys
from training.render import BOS, END, PAD

TRAINING_ATTENTION = "padded_sdpa"


def tiny_config(vocab_size: int) -> DeepseekV2Config:
    """MLA without a query rank, four dense and two MoE layers, YaRN with unequal mscales: a wrong magnitude shows."""
    return DeepseekV2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        first_k_dense_replace=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=256,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
    )


def padded_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    extra_keys: ExtraKeys | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention with values padded to the keys' width: the flash kernel wants one head size. Whole rows only.

    query, key: [B, H, T, nope + rope]; value: [B, H, T, v_head_dim]; returns [B, T, H, v_head_dim]. With `extra_keys`
    every query sees what their mask says, which no flash kernel takes.
    """
    value_dim, mask = value.shape[-1], None
    if extra_keys is not None:
        mask = extra_keys.mask
        key, value = with_extra_keys(module, key, value, extra_keys)
    padded = F.pad(value, (0, key.shape[-1] - value_dim))
    output = F.scaled_dot_product_attention(query, key, padded, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def dense_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by the router: no sorting, no host sync.

    hidden: [T, D]; chosen, weights: [T, k]; returns [T, D].
    """
    router = torch.zeros(len(hidden), experts.num_experts, device=hidden.device, dtype=weights.dtype)
    router = router.scatter(1, chosen, weights).to(hidden.dtype)
    output = torch.zeros_like(hidden)
    for index in range(experts.num_experts):
        gate, up = F.linear(hidden, experts.gate_up_proj[index]).chunk(2, dim=-1)
        output = output + router[:, index, None] * F.linear(F.silu(gate) * up, experts.down_proj[index])
    return output


def use_training_kernels(model: DeepseekV2ForCausalLM) -> None:
    """Modifies `model` for training on whole rows; a reloaded checkpoint is stock again."""
    AttentionInterface.register(TRAINING_ATTENTION, padded_sdpa)
    AttentionMaskInterface.register(TRAINING_ATTENTION, lambda *args, **kwargs: None)
    model.config._attn_implementation = TRAINING_ATTENTION
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Experts":
            module.forward = MethodType(dense_experts, module)


def new_model(vocab_size: int, seed: int = 0) -> DeepseekV2ForCausalLM:
    torch.manual_seed(seed)
    return DeepseekV2ForCausalLM(tiny_config(vocab_size)).float()
