"""What `tune_prefill` measures on: sequences over one attention layer's pool, of DeepSeek-V2-Lite's shape or tiny."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leyline_kernels import reference
from leyline_kernels.gpu import prefill as gpu
from leyline_kernels.gpu.extend import extend
from leyline_kernels.gpu.gather import gather

SMOKE = "--smoke" in sys.argv
DEVICE = "cpu" if SMOKE else "cuda"
DTYPE = torch.float32 if SMOKE else torch.bfloat16
H, NOPE, ROPE, V, RANK = (2, 16, 16, 20, 32) if SMOKE else (16, 128, 64, 128, 512)
SCALE = (NOPE + ROPE) ** -0.5


class Layer:
    """Sequences over one layer's pool: the arguments of both forms."""

    def __init__(
        self, lens: Sequence[int], counts: Sequence[int], gaps: bool = False, index: Tensor | None = None
    ) -> None:
        """The last `counts` queries of each sequence, a random subset, or those at `index` of one; an eighth of the
        entries never moved."""
        total = sum(lens)
        each = zip(lens, counts, strict=True)
        pick = [torch.randperm(n)[:t].sort().values if gaps else torch.arange(n - t, n) for n, t in each]
        if index is not None:
            pick = [index]
        self.pairs = sum(int(queries.sum()) + len(queries) for queries in pick)
        late = torch.cat([torch.arange(n) >= n // 8 for n in lens])
        self.q = torch.randn(H, sum(counts), NOPE + ROPE, device=DEVICE).to(DTYPE).transpose(0, 1)
        self.c_kv = torch.randn(total, RANK, device=DEVICE).to(DTYPE)
        self.k_pe = torch.randn(total, ROPE, device=DEVICE).to(DTYPE)
        self.kv_slots = torch.randperm(total, device=DEVICE).int()
        self.kv_delta = torch.where(late, -77, 0).int().to(DEVICE)
        self.kv_b_proj = (torch.randn(H * (NOPE + V), RANK, device=DEVICE) * RANK**-0.5).to(DTYPE)
        self.q_indptr = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
        self.q_index = torch.cat(pick).int().to(DEVICE)
        self.kv_indptr = torch.tensor([0, *lens]).cumsum(0).int().to(DEVICE)
        self.kv_len = torch.tensor(lens).int().to(DEVICE)
        self.inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device=DEVICE) / ROPE)

    @property
    def tflop(self) -> float:
        return 2 * H * (NOPE + ROPE + V) * self.pairs * 1e-12

    def expand(self, module: Any = None) -> tuple[Tensor, Tensor]:
        take = gather if module is None else module.gather
        latent, keys = take(self.c_kv, self.k_pe, self.kv_slots, self.kv_delta, self.inv_freq, "interleaved")
        return (latent @ self.kv_b_proj.T).view(-1, H, NOPE + V), keys

    def attend(self, kv: Tensor, keys: Tensor, **choice: Any) -> Tensor:
        return gpu.prefill(self.q, kv, keys, self.q_indptr, self.q_index, self.kv_indptr, SCALE, NOPE, **choice)

    def expanded(self) -> Tensor:
        return self.attend(*self.expand())

    def absorbed(self) -> Tensor:
        """Both absorbing products, as the engine does them, and `extend` between them."""
        up = self.kv_b_proj.view(H, NOPE + V, RANK)
        q_latent = torch.bmm(self.q[..., :NOPE].transpose(0, 1), up[:, :NOPE]).transpose(0, 1)
        out_latent = extend(
            q_latent, self.q[..., NOPE:], self.q_indptr, self.q_index, self.c_kv, self.k_pe,
            self.kv_indptr[:-1], self.kv_len, self.kv_slots, self.kv_delta,
            self.inv_freq, "interleaved", SCALE,
        )  # fmt: skip
        return torch.bmm(out_latent.transpose(0, 1), up[:, NOPE:].mT).transpose(0, 1)

    def want(self, kv: Tensor, keys: Tensor) -> Tensor:
        """The twin in fp32 (float64 for fp32) on the same expanded rows."""
        wide = torch.float64 if SMOKE else torch.float32
        return reference.prefill(
            self.q.to(wide), kv.to(wide), keys.to(wide), self.q_indptr, self.q_index, self.kv_indptr, SCALE, NOPE
        )
