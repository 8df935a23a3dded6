"""Runs the model over the pool: one forward pass a call, launched and read later.

Owns what lies on the device between passes: the request table, staging, CUDA graphs. Launching returns at once on a
GPU; `Outcome.read` waits. It does not know sequences, only rows of the request table, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server import sampling
from leyline_server.cache.pool import Pool, upload
from leyline_server.cache.request_table import RequestTable
from leyline_server.cache.slots import Slots
from leyline_server.model.attention import PoolCache, forward
from leyline_server.model.batch import Batch, Form, PrefillPart, pack
from leyline_server.model.decode_graphs import DecodeGraphs
from leyline_server.model.load import LoadedModel
from leyline_server.sampling import Sampler

_UNFORCED: Final = -1
_WARM_UP: Final = (1, 17, 100, 160, 2048)
"""Tokens of passes that take between them every path: absorbed and expanded, few and many pairs of experts."""


@dataclass(frozen=True, slots=True)
class DecodeShare:
    """One request's entry: `position` is computed into `slot`, and token number `number` sampled.

    Its id is the token sampled last, which is on the device, or `forced`.
    """

    row: int
    position: int
    slot: int
    forced: int | None
    turned: bool
    sampler: Sampler
    number: int


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """One request's entries at `positions` [t], of these ids, computed into `slots`; with a sampler, token 0 is
    sampled from the last."""

    row: int
    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: Slots
    turned: bool
    sampler: Sampler | None


class Outcome:
    """What a pass gave, once it is through: for each share a token (meaningless if none was sampled) and whether its
    rows and logits are finite."""

    def __init__(self, tokens: Tensor, finite: Tensor) -> None:
        self._both = torch.stack([tokens, finite.long()])
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._both = torch.empty_like(self._both, device="cpu", pin_memory=True).copy_(
                self._both, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[list[int], list[bool]]:
        """Waits for the pass."""
        if self._event is not None:
            self._event.synchronize()
        tokens, finite = self._both.tolist()
        return tokens, [bool(value) for value in finite]


class Runner:
    """`vocab` bounds the ids that are sampled. `form` chooses between the forms of attention."""

    def __init__(self, model: LoadedModel, pool: Pool, table: RequestTable, vocab: int, form: Form) -> None:
        self._model, self._pool, self._table, self._vocab, self._form = model, pool, table, vocab, form
        self._graphs: DecodeGraphs | None = None
        self.draw = sampling.draw

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles the kernels and captures the decode pass for every batch size: seconds, that no request should wait
        for. On a CPU there is nothing to do."""
        table, device = self._table, self._pool.c_kv.device
        if device.type == "cpu":
            return
        padding = (table.num_rows, 0, table.spare_slot, 0)
        self._graphs = DecodeGraphs(
            lambda inputs: self._decode_pass(inputs, turned=True, max_len=table.width), table.num_rows, padding, device
        )
        sampler = Sampler(sampling.SamplingParams())
        for length in _WARM_UP:
            for turned in (False, True):
                entries = np.arange(min(length, table.width))
                slots = np.full(len(entries), table.spare_slot, np.int32)
                ids = np.zeros(len(entries), np.int32)
                self.prefill([PrefillShare(table.num_rows, ids, entries, slots, turned, sampler)]).read()

    # ------------------------------------------------------------ decode

    @torch.inference_mode()
    def decode(self, shares: Sequence[DecodeShare]) -> Outcome:
        """One entry of each request."""
        columns = [[s.row, s.position, s.slot, _UNFORCED if s.forced is None else s.forced] for s in shares]
        inputs = np.array(columns, np.int32).T
        if self._graphs is not None:
            logits, tokens, finite = self._graphs.replay(inputs)
        else:
            turned = any(share.turned for share in shares)
            max_len = max(share.position for share in shares) + 1
            logits, tokens, finite = self._decode_pass(upload(inputs, self._pool.c_kv.device), turned, max_len)
        if not all(share.sampler.greedy for share in shares):
            tokens = self.draw(logits, [s.sampler for s in shares], [s.number for s in shares])
            rows = torch.tensor([s.row for s in shares])
            self._table.last_token[upload(rows.numpy(), tokens.device)] = tokens
        return Outcome(tokens, finite)

    def _decode_pass(self, inputs: Tensor, turned: bool, max_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """inputs [4, B] int32: row, position, slot, forced id or -1. Returns logits [B, vocab], the greedy tokens [B],
        which it also notes as sampled last, and which rows are finite. Nothing in it asks the host."""
        table = self._table
        rows, positions, slots, forced = inputs.long().unbind(0)
        table.patch(rows, positions, slots)
        batch = Batch(
            ids=torch.where(forced == _UNFORCED, table.last_token[rows], forced)[None],
            positions=positions[None],
            write_slots=slots,
            sampled=0,
            kv_start=(rows * table.width).int(),
            kv_len=(positions + 1).int(),
            kv_slots=table.kv_slots.view(-1),
            kv_delta=table.kv_delta.view(-1) if turned else None,
            max_len=max_len,
        )
        logits = self._forward(batch)
        tokens = sampling.greedy(logits)
        table.last_token[rows] = tokens
        return logits, tokens, self._rows_finite(slots) & torch.isfinite(logits).all(-1)

    # ------------------------------------------------------------ prefill

    @torch.inference_mode()
    def prefill(self, shares: Sequence[PrefillShare]) -> Outcome:
        """Any number of pending entries of each request, packed."""
        device = self._pool.c_kv.device
        parts = [PrefillPart(s.row, s.ids, s.positions, s.slots, s.turned, s.sampler is not None) for s in shares]
        batch = pack(parts, self._table, self._form)
        logits = self._forward(batch)
        lengths = torch.tensor([len(share.ids) for share in shares])
        owner = upload(torch.repeat_interleave(torch.arange(len(shares)), lengths).numpy(), device)
        bad_rows = torch.zeros(len(shares), dtype=torch.int64, device=device)
        bad_rows.index_add_(0, owner, (~self._rows_finite(batch.write_slots)).long())
        tokens = torch.zeros(len(shares), dtype=torch.int64, device=device)
        sampling_shares = [(i, share) for i, share in enumerate(shares) if share.sampler is not None]
        if sampling_shares:
            samplers = [share.sampler for _, share in sampling_shares if share.sampler is not None]
            if all(sampler.greedy for sampler in samplers):
                sampled = sampling.greedy(logits)
            else:
                sampled = self.draw(logits, samplers, [0] * len(samplers))
            which = upload(np.array([[i, share.row] for i, share in sampling_shares]).T, device)
            tokens[which[0]] = sampled
            bad_rows.index_add_(0, which[0], (~torch.isfinite(logits).all(-1)).long())
            self._table.last_token[which[1]] = sampled
        return Outcome(tokens, bad_rows == 0)

    # ------------------------------------------------------------ both

    def _forward(self, batch: Batch) -> Tensor:
        rotary = self._model.rotary
        cache = PoolCache(self._pool, batch, rotary.inv_freq, rotary.layout or "halves")
        return forward(self._model.model, cache)[:, : self._vocab]

    def _rows_finite(self, slots: Tensor) -> Tensor:
        """[n]: whether the rows just written are numbers: one that is none would poison all who share it."""
        pool = self._pool
        return torch.isfinite(pool.c_kv[:, slots]).all(-1).all(0) & torch.isfinite(pool.k_pe[:, slots]).all(-1).all(0)
