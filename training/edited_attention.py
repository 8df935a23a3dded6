"""Attention over rows with edits: keys that stand a second time, turned, and a mask of which queries see which key.

The metadata reaches the attention function as a keyword of `model(.., extra_keys=..)`, which Hugging Face's modelling
code hands down as it is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.batches import Edits


class ExtraKeys(NamedTuple):
    """What all layers share, made once for a batch.

    sources: [B, E] int64. turns: [B, 1, E, rope / 2] complex64, of magnitude one: YaRN's is in the key already.
    mask: [B, 1, T, T + E] bool, what each query sees.
    """

    sources: Tensor
    turns: Tensor
    mask: Tensor


def extra_keys(edits: Edits, inv_freq: Tensor) -> ExtraKeys:
    """The model's own inv_freq: [rope / 2] fp32, on the device that `edits` are on."""
    angles = edits.deltas[:, None, :, None].float() * inv_freq.float()
    turns = torch.polar(torch.ones_like(angles), angles)
    queries = torch.arange(edits.positions.shape[1], device=inv_freq.device, dtype=edits.first.dtype)[None, :, None]
    mask = (queries >= edits.first[:, None]) & (queries < edits.until[:, None])
    return ExtraKeys(edits.sources, turns, mask[:, None])


def with_extra_keys(module: Any, key: Tensor, value: Tensor, extra: ExtraKeys) -> tuple[Tensor, Tensor]:
    """key [B, H, T, nope + rope], value [B, H, T, v]: the same with T + E in T's place. The rotary part comes last.

    DeepseekV2 keeps rotary pairs side by side.
    """
    rope = module.qk_rope_head_dim
    source = extra.sources[:, None, :, None]
    second = key.gather(2, source.expand(-1, key.shape[1], -1, key.shape[3]))
    nope, rotary = second.split([second.shape[-1] - rope, rope], dim=-1)
    pairs = torch.view_as_complex(rotary.float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * extra.turns).flatten(-2).to(key.dtype)
    second_value = value.gather(2, source.expand(-1, value.shape[1], -1, value.shape[3]))
    return torch.cat([key, torch.cat([nope, turned], dim=-1)], dim=2), torch.cat([value, second_value], dim=2)
