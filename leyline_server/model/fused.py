"""Fewer and faster launches for Hugging Face's own layers: module by module, on one loaded model.

Recognises modules by what they hold, not by their names; a module it doesn't know stays as it is, and another model
in the process is not touched. Every replacement computes what HF's forward does, up to rounding, can be captured by a
CUDA graph, and works for `deepseek_v2` and `deepseek_v3`. Torch operations of one layer with transformers 5.24, each
of them a launch or more, and launches instead: a norm 8 -> 1; router 6 -> 2; experts, shared experts and their sum
23 -> 4 (5.17: 28); dense MLP 5 -> 3; rotation of V2 6 -> 1.

Not `torch.compile`: a norm is one launch in torch already (`rms_norm`). The experts gain nothing from it, since
grouping rows by expert and reading each expert once is an algorithm, not a fusion of element-wise ops, and
`grouped_mm` stays an opaque call to it. What would be left is the router's softmax and top-k, and silu times up: two
small kernels here, against a compilation at every start, a guard check on every call outside a graph, and one more
compilation for each new kind of shape.
"""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

import leyline_kernels

_NAME = "leyline"
_ROTARY = "apply_rotary_emb"


def fuse(model: Any) -> None:
    """Replaces what is recognised. Call once, after the weights are on their device and in their dtype.

    Modifies the model: gate and up projections become one weight, and a block's shared experts the last of its
    experts; the modules they were in go. While a block's weights move, they are there twice.
    """
    ExpertsInterface.register(_NAME, _experts)
    model.config._experts_implementation = _NAME
    modules = list(model.modules())
    for module in modules:
        if _is_norm(module):
            module.forward = MethodType(_norm, module)
        elif _is_block(module):
            _fuse_block(module)
        elif _is_attention(module):
            _fuse_attention(module)
    # After the blocks: they take their shared experts with them.
    for module in modules:
        if _is_mlp(module):
            _fuse_mlp(module)
    # The weights' old places: whoever sizes the pool by free memory has to see them as free.
    torch.cuda.empty_cache()


def _is_norm(module: nn.Module) -> bool:
    weights = dict(module.named_parameters())
    return (
        type(module).__name__.endswith("RMSNorm") and weights.keys() == {"weight"} and _has(module, "variance_epsilon")
    )


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """HF rounds to the input's dtype before it multiplies by the weight, torch after: bf16 differs in the last bit."""
    return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _is_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        children.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and _is_silu(children["act_fn"])
        and all(
            isinstance(children[name], nn.Linear) and children[name].bias is None for name in ("gate_proj", "up_proj")
        )
    )


def _fuse_mlp(mlp: Any) -> None:
    gate_up = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
    mlp.gate_up = nn.Parameter(gate_up, requires_grad=False)
    del mlp.gate_proj, mlp.up_proj
    mlp.forward = MethodType(_mlp, mlp)


def _mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(leyline_kernels.silu_mul(linear(x, self.gate_up)))


def _is_experts(module: Any) -> bool:
    """Weights in the layout of `leyline_kernels.experts`, by the flags that HF's own decorator sets."""
    return (
        {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and _is_silu(getattr(module, "act_fn", None))
        and _has(module, "has_gate", "is_concatenated")
        and not any(getattr(module, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
    )


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered experts function: for experts in a block that isn't fused whole."""
    if not _is_experts(self):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    weights = (self.gate_up_proj, self.down_proj)
    return leyline_kernels.experts(hidden_states, top_k_index, top_k_weights, *weights)


def _is_block(module: Any) -> bool:
    """A router, experts, and shared experts as wide as a whole number of them."""
    if {name for name, _ in module.named_children()} != {"experts", "gate", "shared_experts"}:
        return False
    shared = module.shared_experts
    return (
        _is_experts(module.experts)
        and _is_mlp(shared)
        and shared.down_proj.bias is None
        and shared.gate_proj.weight.shape[0] % module.experts.down_proj.shape[-1] == 0
        and shared.gate_proj.weight.dtype == module.experts.down_proj.dtype
    )


def _fuse_block(block: Any) -> None:
    """Shared experts become the last experts, which answer every token: no launch of their own is left."""
    experts, shared = block.experts, block.shared_experts
    width = experts.down_proj.shape[-1]
    gate_up = [w.data.unflatten(0, (-1, width)) for w in (shared.gate_proj.weight, shared.up_proj.weight)]
    down = shared.down_proj.weight.data.unflatten(1, (-1, width)).transpose(0, 1)
    block.num_shared = len(down)
    experts.gate_up_proj.data = torch.cat([experts.gate_up_proj.data, torch.cat(gate_up, dim=1)])
    experts.down_proj.data = torch.cat([experts.down_proj.data, down])
    del block.shared_experts
    block.forward = MethodType(_block, block)


def _block(self: Any, hidden_states: Tensor) -> Tensor:
    x = hidden_states.view(-1, hidden_states.shape[-1])
    gate = self.gate
    if getattr(gate, "topk_method", None) == "greedy":
        weights, index = leyline_kernels.route(x, gate.weight, gate.top_k, gate.routed_scaling_factor)
    else:
        _, weights, index = gate(hidden_states)
    experts = self.experts
    out = leyline_kernels.experts(x, index, weights, experts.gate_up_proj, experts.down_proj, self.num_shared)
    return out.view(hidden_states.shape)


def _is_attention(module: nn.Module) -> bool:
    """Attention whose forward rotates as DeepSeek-V2's does: by a function of its module, with complex angles."""
    return hasattr(module, "kv_a_proj_with_mqa") and _ROTARY in unwrap(type(module).forward).__code__.co_names


def _fuse_attention(attention: Any) -> None:
    """The very code of HF's forward, bound to this module alone, with another function under one of its names."""
    forward = unwrap(type(attention).forward)
    names = {**forward.__globals__, _ROTARY: partial(_rotary, forward.__globals__[_ROTARY])}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    attention.forward = MethodType(bound, attention)


def _rotary(theirs: Any, q_pe: Tensor, k_pe: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """q_pe [B, H, T, rope], k_pe [B, 1, T, rope], turns [B, T, rope / 2] complex, as HF's function takes them."""
    if q_pe.shape[0] != 1 or turns.dtype is not torch.complex64:
        return theirs(q_pe, k_pe, turns)
    q, k = leyline_kernels.rope(q_pe[0], k_pe[0, 0], torch.view_as_real(turns[0]))
    return q[None], k[None, None]


def _is_silu(module: object) -> bool:
    return isinstance(module, nn.SiLU | SiLUActivation)


def _has(module: object, *names: str) -> bool:
    return all(getattr(module, name, None) for name in names)
