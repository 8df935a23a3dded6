"""Inputs of one decode attention over one layer, as edits leave them: who attends to which slots, moved how far."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.registry import Bed

Turning = Literal["unturned", "piecewise", "all different"]
TURNINGS: tuple[Turning, ...] = ("unturned", "piecewise", "all different")
EDITS = 8  # of a sequence, in "piecewise"


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """B queries over B lists of n entries in scrambled slots; `layers` pools, so that no call finds the cache warm."""

    q_latent: Tensor  # [B, H, rank]
    q_pe: Tensor  # [B, H, rope]
    c_kv: Tensor  # [layers, S, rank]
    k_pe: Tensor  # [layers, S, rope]
    kv_start: Tensor
    kv_len: Tensor
    kv_slots: Tensor
    kv_delta: Tensor | None
    inv_freq: Tensor
    max_len: int

    @property
    def row_bytes(self) -> int:
        """Of all rows that one call reads."""
        return int(self.kv_slots.numel()) * self.c_kv.element_size() * (self.c_kv.shape[-1] + self.k_pe.shape[-1])

    def arguments(self, layer: int, bound: bool = True) -> tuple[Any, ...]:
        """Of `leyline_kernels.decode`, or without `max_len` of its reference. Scores of unit deviation."""
        scale = (self.c_kv.shape[-1] + self.k_pe.shape[-1]) ** -0.5
        rows = (self.c_kv[layer], self.k_pe[layer], self.kv_start, self.kv_len, self.kv_slots, self.kv_delta)
        last = (self.max_len,) if bound else ()
        return (self.q_latent, self.q_pe, *rows, self.inv_freq, "interleaved", scale, *last)


def make(bed: Bed, batch: int, length: int, turning: Turning, layers: int = 1) -> DecodeInput:
    config = bed.shape.config
    heads, rank, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    generator = torch.Generator(bed.device).manual_seed(11)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=bed.device, dtype=torch.float32).to(bed.dtype)

    total = batch * length
    return DecodeInput(
        q_latent=random(batch, heads, rank),
        q_pe=random(batch, heads, rope),
        c_kv=torch.stack([random(total, rank) for _ in range(layers)]),
        k_pe=torch.stack([random(total, rope) for _ in range(layers)]),
        kv_start=torch.arange(0, total, length, dtype=torch.int32, device=bed.device),
        kv_len=torch.full((batch,), length, dtype=torch.int32, device=bed.device),
        kv_slots=_slots(batch, length).to(bed.device),
        kv_delta=_deltas(batch, length, turning, bed.device),
        inv_freq=(10_000.0 ** -(torch.arange(rope // 2) / (rope // 2))).to(bed.device),
        max_len=length,
    )


def _slots(batch: int, length: int) -> Tensor:
    """A list's slots: runs of 64 neighbours, as prefills take them, in any order, over the whole pool."""
    run = min(64, length)
    starts = np.random.default_rng(5).permutation(batch * length // run) * run
    slots = (starts[:, None] + np.arange(run)[None]).reshape(-1)
    rest = np.setdiff1d(np.arange(batch * length), slots)  # what no whole run covers
    return torch.from_numpy(np.concatenate([slots, rest]).astype(np.int32))


def _deltas(batch: int, length: int, turning: Turning, device: torch.device) -> Tensor | None:
    """piecewise: what EDITS cuts of other lengths leave. all different: no two neighbours alike."""
    if turning == "unturned":
        return None
    rng = np.random.default_rng(9)
    out = np.zeros((batch, length), np.int32)
    for row in out:
        if turning == "all different":
            row[:] = rng.permutation(length) - length
            continue
        moved = 0
        for start, end in pairwise([*sorted(rng.integers(length // 16, length, EDITS)), length]):
            moved -= int(rng.integers(1, 600))
            row[start:end] = moved
    return torch.from_numpy(out.reshape(-1)).to(device)
