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
GAP = 3
"""Places of the table around each list that belong to nobody."""

RUNS = ((0, 16), (-7, 21), (130, 27), (0, 16), (-300, 40))
"""delta, entries: in tiles of 16 zero, uniform, mixed, uniform, zero again, uniform, .."""


@dataclass(frozen=True)
class Batch:
    """Arguments of `decode` (and the shared ones of `extend`) over one layer's pool."""

    q_latent: Tensor
    q_pe: Tensor
    c_kv: Tensor
    k_pe: Tensor
    kv_start: Tensor
    kv_len: Tensor
    kv_slots: Tensor
    kv_delta: Tensor | None
    inv_freq: Tensor
    layout: str
    scale: float

    def args(self) -> dict[str, Any]:
        return dict(vars(self))

    def but(self, **changes: Any) -> Batch:
        return replace(self, **changes)


def _deltas(kind: str, length: int) -> Tensor:
    """[length] int32, as `batch` names them."""
    if kind == "uniform":
        return -torch.randint(1, 700, (1,), device=DEVICE).int().expand(length)
    if kind == "all-different":
        moved = torch.arange(length, device=DEVICE) >= length // 3
        return (moved * torch.randint(-700, 700, (length,), device=DEVICE)).int()
    if kind == "pieces":
        delta, count = torch.tensor(RUNS, device=DEVICE).unbind(1)
        run = delta.repeat_interleave(count)
        return run.repeat(length // len(run) + 1)[:length].int()
    assert kind in ("zero", "none")
    return torch.zeros(length, device=DEVICE).int()


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

    Pool rows that no list holds are NaN. Slots are scattered. The lists lie in a table, the last one first, with
    gaps in which the slots are -1 and the deltas nonsense. `deltas` names how the entries of each list were moved:

    zero          none was, and kv_delta is given
    none          none was, and kv_delta is None
    uniform       all by one delta, another for each list
    pieces        as edits leave them: runs of one delta, of either sign, that end anywhere in a tile
    all-different a third of each list stands where it was written, each other entry was moved by another delta
    """

    def make(
        lens: tuple[int, ...],
        heads: int = 3,
        rank: int = 40,
        rope: int = 16,
        layout: str = "interleaved",
        num_queries: int | None = None,
        dtype: torch.dtype = torch.float32,
        deltas: str = "pieces",
    ) -> Batch:
        total = sum(lens)
        num_slots = total + 7
        slots = torch.randperm(num_slots, device=DEVICE)[:total]
        c_kv = torch.full((num_slots, rank), torch.nan, dtype=dtype, device=DEVICE)
        k_pe = torch.full((num_slots, rope), torch.nan, dtype=dtype, device=DEVICE)
        c_kv[slots] = torch.randn(total, rank, dtype=dtype, device=DEVICE)
        k_pe[slots] = torch.randn(total, rope, dtype=dtype, device=DEVICE)
        starts, size = [0] * len(lens), GAP
        for b in reversed(range(len(lens))):
            starts[b] = size
            size += lens[b] + GAP
        kv_slots = torch.full((size,), -1, dtype=torch.int32, device=DEVICE)
        kv_delta = torch.full((size,), 2**30, dtype=torch.int32, device=DEVICE)
        place = torch.cat(
            [torch.arange(start, start + n, device=DEVICE) for start, n in zip(starts, lens, strict=True)]
        )
        kv_slots[place] = slots.int()
        kv_delta[place] = torch.cat([_deltas(deltas, n) for n in lens])
        n = len(lens) if num_queries is None else num_queries
        return Batch(
            q_latent=torch.randn(n, heads, rank, dtype=dtype, device=DEVICE),
            q_pe=torch.randn(n, heads, rope, dtype=dtype, device=DEVICE),
            c_kv=c_kv,
            k_pe=k_pe,
            kv_start=torch.tensor(starts, device=DEVICE).int(),
            kv_len=torch.tensor(lens, device=DEVICE).int(),
            kv_slots=kv_slots,
            kv_delta=None if deltas == "none" else kv_delta,
            inv_freq=inv_freq(rope),
            layout=layout,
            scale=(rank + rope) ** -0.5,
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
