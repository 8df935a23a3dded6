"""What one forward pass computes: which tokens, into which slots, and what each may attend to. All on the device.

Owns the shape of a pass and the choice between the two forms of attention. Lists come from the request table; nothing
here copies one. It does not know sessions or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server.cache.request_table import RequestTable
from leyline_server.cache.slots import Slots
from leyline_server.sampling import Sampler

_ALIGNED: Final = 4  # int32s in 16 bytes


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
    """One request's part of a packed pass: its entries at `positions` [t], ascending, of these ids, go into `slots`.

    row: of the request table. turned: whether any row of the list is. With a sampler, token 0 is sampled from the last.
    """

    row: int
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: Slots
    turned: bool
    sampler: Sampler | None

    @property
    def kv_len(self) -> int:
        """Entries of its list up to its last token, which sees them all."""
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    @staticmethod
    def padding(tokens: int, table: RequestTable) -> PrefillPart:
        """Tokens that are all the one entry of the table's padding row, in the spare slot."""
        zeros = np.zeros(tokens, np.int32)
        return PrefillPart(table.num_rows, zeros, zeros.astype(np.int64), zeros + table.spare_slot, False, None)

    @staticmethod
    def at_end(tokens: int, entries: int, table: RequestTable) -> PrefillPart:
        """The last tokens of so many entries of the padding row: to run a pass whose result is of no use."""
        part = PrefillPart.padding(tokens, table)
        return replace(part, positions=np.arange(entries - tokens, entries))


@dataclass(frozen=True, slots=True)
class PassSize:
    """Tokens, parts and, in the expanded form, entries of a packed pass; 0 entries say that it is absorbed.

    A graph's are fixed, and hold what is smaller.
    """

    tokens: int
    parts: int
    entries: int = 0

    @staticmethod
    def of(parts: Sequence[PrefillPart], expanded: bool) -> PassSize:
        entries = sum(part.kv_len for part in parts) if expanded else 0
        return PassSize(sum(len(part.ids) for part in parts), len(parts), entries)

    def holds(self, other: PassSize) -> bool:
        """Whether the other pass, and padding of one part and one entry, is one of this size in the same form."""
        same_form = bool(self.entries) == bool(other.entries)
        return (
            same_form
            and self.tokens >= other.tokens
            and self.parts > other.parts
            and (self.entries > other.entries or not self.entries)
        )

    @property
    def columns(self) -> dict[str, int]:
        """What a packed pass is sent as, and how long each is.

        last: each part's last row of [0, tokens). note: the request-table row that its sampled token goes to.
        """
        each_token = dict.fromkeys(("ids", "positions", "slots", "rows", "owner"), self.tokens)
        each_part = dict.fromkeys(("kv_start", "kv_len", "last", "note"), self.parts)
        return {**each_token, **each_part, "q_indptr": self.parts + 1, "kv_indptr": self.parts + 1}

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Where each column stands in what is sent. All begin at 16 bytes: kernels are compiled anew for pointers that
        don't."""
        start = 0
        for name, length in self.columns.items():
            yield name, start, start + length
            start += -(-length // _ALIGNED) * _ALIGNED


def pack(parts: Sequence[PrefillPart], size: PassSize, table: RequestTable) -> NDArray[np.int32]:
    """All columns of a pass, one after the other. What is left of `size` is padding, which changes nothing anybody
    reads: tokens go to a last part of their own, which must be free."""
    padding = size.tokens - sum(len(part.ids) for part in parts)
    assert padding >= 0
    assert len(parts) + (padding > 0) <= size.parts
    spare = PrefillPart.padding(padding, table)
    # Parts between them have no tokens: they end where the part before them does.
    between = [PrefillPart.padding(0, table)] * (size.parts - len(parts) - (padding > 0))
    every = [*parts, *between, *([spare] if padding else [])]
    lengths = [len(part.ids) for part in every]
    kv_lengths = [part.kv_len for part in every]
    q_indptr = np.cumsum([0, *lengths])
    columns: dict[str, Any] = {
        "ids": np.concatenate([part.ids for part in every]),
        "positions": np.concatenate([part.positions for part in every]),
        "slots": np.concatenate([part.slots for part in every]),
        "rows": np.repeat([part.row for part in every], lengths),
        "owner": np.repeat(np.arange(size.parts), lengths),
        "kv_start": [part.row * table.width for part in every],
        "kv_len": kv_lengths,
        "last": np.maximum(q_indptr[1:] - 1, 0),
        "note": [table.num_rows if part.sampler is None else part.row for part in every],
        "q_indptr": q_indptr,
        "kv_indptr": np.cumsum([0, *kv_lengths]),
    }
    spans = list(size.spans())
    sent = np.zeros(spans[-1][2], np.int32)
    for name, start, end in spans:
        sent[start:end] = columns[name]
    return sent


def unpack(sent: Tensor, size: PassSize) -> dict[str, Tensor]:
    """The columns [..] int32 on the device, as views."""
    return {name: sent[start:end] for name, start, end in size.spans()}


def packed(on: dict[str, Tensor], size: PassSize, turned: bool, table: RequestTable) -> Batch:
    """The batch of a packed pass, from its columns on the device. Its entries are patched in the request table."""
    positions, slots = on["positions"].long(), on["slots"].long()
    table.patch(on["rows"].long(), positions, slots)
    queries: Extend | Expanded = Extend(on["q_indptr"], on["positions"])
    if size.entries:
        kv_slots, kv_delta = lists(on["kv_start"], on["kv_indptr"], size.entries, table)
        queries = Expanded(on["q_indptr"], on["positions"], on["kv_indptr"], kv_slots, kv_delta if turned else None)
    return Batch(
        ids=on["ids"].long()[None],
        positions=positions[None],
        write_slots=slots,
        sampled=on["last"].long(),
        kv_start=on["kv_start"],
        kv_len=on["kv_len"],
        kv_slots=table.kv_slots.view(-1),
        kv_delta=table.kv_delta.view(-1) if turned else None,
        max_len=table.width,
        queries=queries,
    )


def num_pairs(parts: Sequence[PrefillPart]) -> int:
    """Pairs of a query and an entry, as if every query saw all of its list."""
    return sum(len(part.ids) * part.kv_len for part in parts)


def lists(kv_start: Tensor, kv_indptr: Tensor, entries: int, table: RequestTable) -> tuple[Tensor, Tensor]:
    """The lists of all parts, one after the other: slots and deltas [entries] int32. Behind them stands padding, the
    spare slot. kv_start [P], kv_indptr [P + 1] int32: where they are in the table, and here."""
    entry = torch.arange(entries, dtype=torch.int32, device=kv_indptr.device)
    part = torch.searchsorted(kv_indptr[1:], entry, right=True)
    in_list = part < len(kv_start)
    part = part.clamp(max=len(kv_start) - 1)
    at = torch.where(in_list, kv_start.long()[part] - kv_indptr[part] + entry, table.num_rows * table.width)
    return table.kv_slots.view(-1)[at], table.kv_delta.view(-1)[at]


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

    def expands(self, pairs: int, entries: int) -> bool:
        """Whether so many pairs of a query and an entry are cheaper in the expanded form of so many entries."""
        absorbed = pairs * (2 * self.rank + self.rope)
        own = pairs * (self.nope + self.rope + self.v_head_dim)
        return absorbed > self.handicap * (own + entries * self.rank * (self.nope + self.v_head_dim))


HANDICAP: Final = {"cpu": 1.0, "cuda": 0.36}
"""On a GPU the absorbed form keeps rank sums a query in registers, so few queries share a tile. H200, V2-Lite's shape:
both forms take as long for some number of queries between 32 and 64, over 4k entries and over 32k
(`benchmarks/forms.py`)."""
