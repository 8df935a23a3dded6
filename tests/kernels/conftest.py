"""Random batches over a hostile pool, and Triton's interpreter where there is no GPU.

The variable must be set before anything imports Triton (transformers does), so `tests/conftest.py` sets it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Batch:
    """Arguments of `decode` (and the shared ones of `extend`) over one layer's pool."""

    q_latent: Tensor
    q_pe: Tensor
    c_kv: Tensor
    k_pe: Tensor
    written_at: Tensor
    kv_indptr: Tensor
    kv_slots: Tensor
    inv_freq: Tensor
    layout: str
    scale: float
    turned: bool = True

    def args(self) -> dict[str, Any]:
        return dict(vars(self))

    def but(self, **changes: Any) -> Batch:
        return replace(self, **changes)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def inv_freq() -> Callable[[int], Tensor]:
    def make(rope: int) -> Tensor:
        return 10_000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float32, device=DEVICE) / rope)

    return make


@pytest.fixture
def batch(inv_freq: Callable[[int], Tensor]) -> Callable[..., Batch]:
    """Makes a batch whose scores have unit deviation, so that softmax is neither uniform nor one-hot.

    Pool rows that no list holds are NaN, and hold a written_at of nonsense. Slots are scattered. Of each list, a
    third of the entries stand where they were written (tiles with and without turning), the rest was moved.
    """

    def make(
        lens: tuple[int, ...],
        heads: int = 3,
        rank: int = 40,
        rope: int = 16,
        layout: str = "interleaved",
        num_queries: int | None = None,
        dtype: torch.dtype = torch.float32,
        turned: bool = True,
    ) -> Batch:
        total = sum(lens)
        num_slots = total + 7
        slots = torch.randperm(num_slots, device=DEVICE)[:total]
        c_kv = torch.full((num_slots, rank), torch.nan, dtype=dtype, device=DEVICE)
        k_pe = torch.full((num_slots, rope), torch.nan, dtype=dtype, device=DEVICE)
        written_at = torch.full((num_slots,), 2**30, dtype=torch.int32, device=DEVICE)
        c_kv[slots] = torch.randn(total, rank, dtype=dtype, device=DEVICE)
        k_pe[slots] = torch.randn(total, rope, dtype=dtype, device=DEVICE)
        index = torch.cat([torch.arange(n, device=DEVICE) for n in lens])
        moved = index >= torch.tensor(lens, device=DEVICE).repeat_interleave(torch.tensor(lens, device=DEVICE)) // 3
        elsewhere = torch.randint(0, 700, (total,), device=DEVICE)
        written_at[slots] = torch.where(moved & turned, elsewhere, index).int()
        n = len(lens) if num_queries is None else num_queries
        return Batch(
            q_latent=torch.randn(n, heads, rank, dtype=dtype, device=DEVICE),
            q_pe=torch.randn(n, heads, rope, dtype=dtype, device=DEVICE),
            c_kv=c_kv,
            k_pe=k_pe,
            written_at=written_at,
            kv_indptr=torch.tensor([0, *lens], device=DEVICE).cumsum(0).int(),
            kv_slots=slots.int(),
            inv_freq=inv_freq(rope),
            layout=layout,
            scale=(rank + rope) ** -0.5,
            turned=turned,
        )

    return make


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels can run here, and every uninitialised tensor holds NaN."""
    triton = pytest.importorskip("triton")
    interpreted = type(triton.language.max).__name__ == "InterpretedFunction"
    assert interpreted or DEVICE == "cuda", "Triton was imported before TRITON_INTERPRET=1: set it in tests/conftest.py"
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """||got - want|| / ||want||: 1.4 for unrelated vectors, NaN if any element was never written."""

    def measure(got: Tensor, want: Tensor) -> float:
        return float((got.double() - want.double()).norm() / want.double().norm())

    return measure
