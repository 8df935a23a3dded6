"""The oracle of AMORTIZE: Hugging Face's unpatched model over a `DynamicCache` that is edited in plain torch.

Shares no code with Leyline. A cut takes rows out of the cache, R's rows are computed by the model, and the keys of
what follows are turned at once, by complex multiplication in float64. Rows that have no KV are computed when `compute`
or `logits` is called, as a server computes them: at the same calls, each over the entries before it in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

Cut = tuple[int, int, Sequence[int]]
"""[start, end) gives way to these ids."""


@torch.inference_mode()
def full_forward(model: Any, ids: Sequence[int]) -> Tensor:
    """HF's own forward over the whole text: [n, vocab] in fp32."""
    return model(torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu()


@torch.inference_mode()
def second_latents(model: Any, ids: Sequence[int]) -> Tensor:
    """c_kv of the second layer of HF's own forward over the whole text: [n, rank] float64."""
    cache = DynamicCache()
    text = torch.tensor([list(ids)], device=model.device)
    model.model(text, use_cache=True, **{_cache_name(model.model): cache})
    return cache.layers[1].keys[0, 0].double().cpu()


def turn(model: Any, k_pe: Tensor, delta: int) -> Tensor:
    """k_pe [.., rope] float64, `delta` positions on. V2 keeps pairs side by side, V3 writes them as halves."""
    angle = delta * model.model.rotary_emb.inv_freq.double().cpu()
    by = torch.polar(torch.ones_like(angle), angle)
    if model.config.model_type == "deepseek_v2":
        pairs = torch.view_as_complex(k_pe.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * by).flatten(-2)
    first, second = k_pe.chunk(2, -1)
    pairs = torch.complex(first, second) * by
    return torch.cat([pairs.real, pairs.imag], -1)


class Oracle:
    """One session: c_kv [L, n, rank], k_pe [L, n, rope] float64, turned to where they stand; NaN where not `known`."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.ids: list[int] = []
        self.known = torch.zeros(0, dtype=torch.bool)
        self.c_kv = torch.zeros(config.num_hidden_layers, 0, config.kv_lora_rank, dtype=torch.float64)
        self.k_pe = torch.zeros(config.num_hidden_layers, 0, config.qk_rope_head_dim, dtype=torch.float64)
        self.computed = 0

    def append(self, ids: Sequence[int]) -> None:
        self._splice(len(self.ids), len(self.ids), ids)

    def amortize(self, *cuts: Cut) -> None:
        """Disjoint cuts, all in the coordinates before any of them: made from right to left."""
        for start, end, ids in sorted(cuts, key=lambda cut: cut[:2], reverse=True):
            self._splice(start, end, ids)

    def forget(self, start: int, end: int, ids: Sequence[int]) -> None:
        self._splice(start, end, ids)
        self.known[start:] = False

    def copy(self, start: int, end: int) -> tuple[list[int], Tensor, Tensor, Tensor, int]:
        """The entries [start, end), to be restored after a cut."""
        c_kv, k_pe = self.c_kv[:, start:end].clone(), self.k_pe[:, start:end].clone()
        return self.ids[start:end], self.known[start:end].clone(), c_kv, k_pe, start

    def restore(self, copied: tuple[list[int], Tensor, Tensor, Tensor, int], start: int, end: int) -> None:
        """What was copied takes the place of [start, end)."""
        ids, known, c_kv, k_pe, stood_at = copied
        self._splice(start, end, ids)
        there = slice(start, start + len(ids))
        self.known[there] = known
        self.c_kv[:, there], self.k_pe[:, there] = c_kv, turn(self.model, k_pe, start - stood_at)

    @torch.inference_mode()
    def compute(self) -> Tensor:
        """Computes all entries without KV in one call: their logits [t, vocab] in fp32."""
        known, fresh = self.known.nonzero()[:, 0], (~self.known).nonzero()[:, 0]
        dtype, device = self.model.dtype, self.model.device
        cache = DynamicCache()
        if len(known):
            for layer, (c_kv, k_pe) in enumerate(zip(self.c_kv, self.k_pe, strict=True)):
                rows = (part[known][None, None].to(device, dtype) for part in (c_kv, k_pe))
                cache.update(*rows, layer)
        # The cache's order is what was known, then what is fresh; causality is by place in the list.
        later = torch.cat([known, fresh])[None] > fresh[:, None]
        mask = torch.zeros(later.shape, dtype=dtype).masked_fill(later, torch.finfo(dtype).min)
        out = self.model(
            torch.tensor([self.ids])[:, fresh].to(device),
            position_ids=fresh[None].to(device),
            attention_mask=mask[None, None].to(device),
            use_cache=True,
            **{_cache_name(self.model): cache},
        )
        for layer, rows in enumerate(cache.layers):
            self.c_kv[layer, fresh] = rows.keys[0, 0, len(known) :].double().cpu()
            self.k_pe[layer, fresh] = rows.values[0, 0, len(known) :].double().cpu()
        self.known[:] = True
        self.computed += len(fresh)
        return out.logits[0].float().cpu()

    def logits(self, forced: Sequence[int] = ()) -> Tensor:
        """The logits of a Generate of these tokens (of one token, when none are given): [tokens, vocab]. The last
        entry is computed anew first."""
        self.known[-1] = False
        found = [self.compute()[-1]]
        for i, token in enumerate(forced):
            self.append([token])
            if i < len(forced) - 1:
                found.append(self.compute()[-1])
        return torch.stack(found)

    def _splice(self, start: int, end: int, ids: Sequence[int]) -> None:
        count = len(ids)
        moved = turn(self.model, self.k_pe[:, end:], count - (end - start))
        self.ids[start:end] = ids
        self.known = torch.cat([self.known[:start], torch.zeros(count, dtype=torch.bool), self.known[end:]])
        self.c_kv = _with_gap(self.c_kv[:, :start], count, self.c_kv[:, end:])
        self.k_pe = _with_gap(self.k_pe[:, :start], count, moved)


def _cache_name(module: Any) -> str:
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


def _with_gap(before: Tensor, count: int, after: Tensor) -> Tensor:
    gap = before.new_full((before.shape[0], count, before.shape[2]), torch.nan)
    return torch.cat([before, gap, after], dim=1)
