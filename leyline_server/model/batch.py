"""What one forward pass computes: which tokens, into which slots, and what each may attend to. All on the device.

Owns the shape of a pass and the choice between the two forms of attention. Lists come from the request table; nothing
here copies one. It does not know sessions or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server.cache.pool import upload
from leyline_server.cache.request_table import RequestTable
from leyline_server.cache.slots import Slots


@dataclass(frozen=True, slots=True)
class Extend:
    """Queries of an absorbed pass. q_indptr [B + 1] int32, q_index [T] int32: their logical indices."""

    q_indptr: Tensor
    q_index: Tensor


@dataclass(frozen=True, slots=True)
class Expanded:
    """Queries and entries of an expanded pass: the lists [N] of all sequences, one after the other."""

    q_indptr: Tensor
    q_index: Tensor
    kv_indptr: Tensor  # [B + 1] int32
    kv_slots: Tensor  # [N] int32
    kv_delta: Tensor | None  # [N] int32


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B sequences in one row.

    ids, positions [1, T] int64; write_slots [T] int64; sampled [n] int64, rows of T, or 0 for all.
    kv_start, kv_len [B] int32: each sequence's list in the flat kv_slots and kv_delta; kv_delta is None when no key of
    any of them is turned. max_len bounds the longest list. queries is None where each sequence has one, at its end.
    """

    ids: Tensor
    positions: Tensor
    write_slots: Tensor
    sampled: Tensor | int
    kv_start: Tensor
    kv_len: Tensor
    kv_slots: Tensor
    kv_delta: Tensor | None
    max_len: int
    queries: Extend | Expanded | None = None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One sequence's part of a packed pass. `row` of the request table; ids, positions, slots [t], ascending."""

    row: int
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: Slots
    turned: bool
    sampled: bool


def pack(parts: Sequence[PrefillPart], table: RequestTable, form: Form) -> Batch:
    """Patches the table with the parts' slots and packs them. One copy to the device."""
    device = table.kv_slots.device
    lengths = [len(part.ids) for part in parts]
    kv_lengths = [int(part.positions[-1]) + 1 for part in parts]
    q_indptr = np.cumsum([0, *lengths])
    sampled = [int(end) - 1 for part, end in zip(parts, q_indptr[1:], strict=True) if part.sampled]
    columns = {
        "ids": np.concatenate([part.ids for part in parts]),
        "positions": np.concatenate([part.positions for part in parts]),
        "slots": np.concatenate([part.slots for part in parts]),
        "rows": np.repeat([part.row for part in parts], lengths),
        "q_indptr": q_indptr,
        "kv_indptr": np.cumsum([0, *kv_lengths]),
        "kv_start": np.array([part.row * table.width for part in parts]),
        "kv_len": np.array(kv_lengths),
        "sampled": np.array(sampled, np.int64),
    }
    sent = upload(np.concatenate([column.astype(np.int32) for column in columns.values()]), device)
    on = dict(zip(columns, sent.split([len(column) for column in columns.values()]), strict=True))
    positions, slots = on["positions"].long(), on["slots"].long()
    table.patch(on["rows"].long(), positions, slots)
    turned = any(part.turned for part in parts)
    queries: Extend | Expanded = Extend(on["q_indptr"], on["positions"])
    if form.expanded(lengths, kv_lengths):
        lists = [(part.row, length) for part, length in zip(parts, kv_lengths, strict=True)]
        kv_slots, kv_delta = (
            torch.cat([table_of[row, :length] for row, length in lists])
            for table_of in (table.kv_slots, table.kv_delta)
        )
        queries = Expanded(on["q_indptr"], on["positions"], on["kv_indptr"], kv_slots, kv_delta if turned else None)
    return Batch(
        ids=on["ids"].long()[None],
        positions=positions[None],
        write_slots=slots,
        sampled=on["sampled"].long(),
        kv_start=on["kv_start"],
        kv_len=on["kv_len"],
        kv_slots=table.kv_slots.view(-1),
        kv_delta=table.kv_delta.view(-1) if turned else None,
        max_len=max(kv_lengths),
        queries=queries,
    )


@dataclass(frozen=True, slots=True)
class Form:
    """When a pass expands its latents: multiply-adds of both forms, in a model of one head.

    Absorbed, each pair of query and entry costs 2 rank + rope; expanded, nope + rope + v_head_dim, and each entry
    first rank (nope + v_head_dim). `handicap` is what an expanded multiply-add costs in absorbed ones.
    """

    rank: int
    rope: int
    nope: int
    v_head_dim: int
    handicap: float

    @staticmethod
    def of(config: Any, handicap: float) -> Form:
        return Form(config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim, handicap)

    def expanded(self, q_lengths: Sequence[int], kv_lengths: Sequence[int]) -> bool:
        pairs = sum(q * n for q, n in zip(q_lengths, kv_lengths, strict=True))
        absorbed = pairs * (2 * self.rank + self.rope)
        own = pairs * (self.nope + self.rope + self.v_head_dim)
        return absorbed > self.handicap * (own + sum(kv_lengths) * self.rank * (self.nope + self.v_head_dim))


HANDICAP: Final = {"cpu": 1.0, "cuda": 0.2}
"""On a GPU the absorbed form keeps rank sums a query in registers, so few queries share a tile. H200, V2-Lite's shape:
both forms take as long for about 27 queries over 8k or 32k entries (`benchmarks/tune_prefill.py`)."""
