"""Which rotary layout a loaded model really has: asks its own code, not its configuration.

A random key is turned by each of the model's attention modules at p and at p + delta; the layout that turns one into
the other is the model's. When none does, rows can't be moved, and the model is refused for AMORTIZE with the reason.
Catches partial rotary, per-layer theta, dynamic rope (which passes at short distances and fails at long ones) and
M-RoPE, whatever the configuration says.

Runs once at load, on the unpatched model, and changes nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from leyline_kernels import RotaryLayout
from leyline_kernels.reference import turn
from leyline_server.model.attention import cache_argument

TOLERANCE: Final = 0.02
"""Relative error of a turned key. At 160k positions fp32 angles are off by 0.01 in the fastest pairs; an off-by-one
errs by 0.11, another layout or theta by about 1."""


@dataclass(frozen=True, slots=True)
class RotaryProbe:
    """`layout` is None when no layout fits; then `reason` says what was seen."""

    layout: RotaryLayout | None
    inv_freq: Tensor  # [rope / 2] fp32, the model's own
    reason: str = ""


class _Capture(Cache):
    """Takes the rotated key that the attention module hands to its cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.k_pe: Tensor | None = None

    def update(self, c_kv: Tensor, k_pe: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.k_pe = k_pe[0, 0].float().clone()
        return c_kv, k_pe

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def probe(model: Any) -> RotaryProbe:
    """Finds the layout of the stored keys. The model must still be unpatched."""
    rotary = model.model.rotary_emb
    inv_freq: Tensor = rotary.inv_freq.detach().float().clone()
    window = _trained_window(model)
    far = window + 977
    # A rope that adapts to length keeps state, so that it is a copy too.
    rotary = deepcopy(rotary).float()
    wrong: dict[RotaryLayout, str] = {}
    for layer in model.model.layers:
        # In fp32: bf16 keys are off by 4e-3 by themselves. One copy at a time.
        module = deepcopy(layer.self_attn).float()
        for layout in get_args(RotaryLayout):
            for position, delta in ((5, 17), (3, far), (far, 2 - far)):
                error = 0.0 if layout in wrong else _error(module, rotary, inv_freq, layout, position, delta)
                if not error < TOLERANCE:
                    wrong[layout] = f"turning by {delta} from {position} as {layout} errs by {error:.2g}"
    for layout in get_args(RotaryLayout):
        if layout not in wrong:
            return RotaryProbe(layout, inv_freq)
    return RotaryProbe(None, inv_freq, "no rotary layout fits the model's own keys: " + "; ".join(wrong.values()))


def _error(module: Any, rotary: Any, inv_freq: Tensor, layout: RotaryLayout, position: int, delta: int) -> float:
    """Relative error of the key at `position` turned by `delta`, against the model's own key at `position + delta`."""
    here, there = (_key_at(module, rotary, p) for p in (position, position + delta))
    if here.shape[-1] != 2 * len(inv_freq):
        return float("inf")
    turned = turn(here, torch.tensor([delta], device=here.device), inv_freq, layout)
    return float((turned - there).norm() / there.norm())


def _key_at(module: Any, rotary: Any, position: int) -> Tensor:
    """The key [1, rope] that the model's own code gives a fixed random hidden state at `position`."""
    weight = module.kv_a_proj_with_mqa.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, weight.shape[1], generator=generator).to(weight)
    positions = torch.tensor([[position]], device=weight.device)
    capture = _Capture()
    module(
        hidden_states=hidden,
        position_embeddings=rotary(hidden, positions),
        attention_mask=None,
        **{cache_argument(module): capture},
    )
    assert capture.k_pe is not None, "the attention module did not call cache.update"
    return capture.k_pe


def _trained_window(model: Any) -> int:
    """Positions beyond which a length-dependent rope would change: the far probe has to cross it."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return int(parameters.get("original_max_position_embeddings") or model.config.max_position_embeddings)
