"""Runs the model over the pool: one forward pass a call, launched and read later.

Owns what lies on the device between passes: the request table, staging, CUDA graphs. Launching returns at once on a
GPU; `Outcome.read` waits. It does not know sequences, only rows of the request table, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server import sampling
from leyline_server.cache.pool import Pool, upload
from leyline_server.cache.request_table import RequestTable
from leyline_server.model.attention import PoolCache, forward
from leyline_server.model.batch import (
    Batch,
    Form,
    PassSize,
    PrefillPart,
    num_pairs,
    pack,
    packed,
    unpack,
)
from leyline_server.model.graphs import Graphs, Pass, batch_sizes
from leyline_server.model.load import LoadedModel
from leyline_server.sampling import Sampler

_UNFORCED: Final = -1
_ABSORBED: Final = tuple(PassSize(tokens, 16) for tokens in (*range(8, 129, 8), *range(160, 257, 32)))
_ABSORBED_PAIRS: Final = 1 << 22
"""Of a pass that would expand, but in more parts than its graphs have. An H200 takes some 20 ms to attend to as many in
V2-Lite's shape, absorbed; to launch the pass by hand takes the host 30 to 40."""
_EXPANDED_TOKENS: Final = (64, 128, 256, 512, 768, 1024, 2048)
_EXPANDED_ENTRIES: Final = tuple(k * 1088 for k in (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128))
_EXPANDED_PARTS: Final = 4
_EXPANDED_PAIRS: Final = 36_000_000
_EXPANDED_TOKENS_FP32: Final = 256
"""Prefill passes that run as graphs, one of their parts being padding. Launched by hand one takes the host 30 to 40 ms:
V2-Lite's shape keeps an H200 busy for as long with about so many pairs of token and entry. Sizes of lists lie a
sixteenth above the round numbers: a message often follows a text of a round length. In fp32 the experts of more tokens
ask the host."""
_WARM_UP: Final = ((8,), (32,), (200,), (300,), (600,), (2048,), (50,) * 4, (50,) * 8, (50,) * 12)
_WARM_UP_ENTRIES: Final = 1 << 15
"""Tokens of the parts of passes that take between them every path of those that are launched by hand: absorbed and
expanded, few and many pairs of experts, each tiling and number of splits of `prefill`."""


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
        self._model, self._pool, self._table, self._vocab, self.form = model, pool, table, vocab, form
        self._device = pool.c_kv.device
        self._decodes: Graphs[int] | None = None
        self._prefills: Graphs[PassSize] | None = None
        self.draw = sampling.draw

    @torch.inference_mode()
    def warm_up(self, turned: bool = True) -> None:
        """Captures the passes that run as graphs and compiles the kernels of the others: seconds, that no request
        should wait for. On a CPU there is nothing to do.

        turned: False for graphs that turn no key, to measure what turning costs; they are wrong for moved rows.
        """
        if self._device.type == "cpu":
            return
        table = self._table
        self._prefills = Graphs(self._captured_sizes(), self._device)
        for shape in sorted(self._prefills.sizes, key=lambda size: (size.entries, size.tokens), reverse=True):
            self._prefills.capture(shape, pack([], shape, table), self._whole_prefill_pass(shape, turned))
        self._decodes = Graphs(batch_sizes(table.num_rows), self._device)
        for batch in reversed(self._decodes.sizes):
            self._decodes.capture(
                batch, self._padded(np.zeros((4, 0), np.int32), batch), self._whole_decode_pass(turned)
            )
        for lengths in _WARM_UP:
            entries = min(table.width, _WARM_UP_ENTRIES // len(lengths))
            parts = [PrefillPart.at_end(min(length, entries), entries, table) for length in lengths]
            for expanded, any_turned in product((False, True), repeat=2):
                self._pass_by_hand(parts, expanded, any_turned)

    def _captured_sizes(self) -> list[PassSize]:
        """Of prefill passes: the one to prefer first."""
        longest = self._table.width + 1  # and an entry of padding
        most = _EXPANDED_TOKENS_FP32 if self._pool.c_kv.dtype == torch.float32 else _EXPANDED_TOKENS[-1]
        entries = sorted({longest, *(size for size in _EXPANDED_ENTRIES if size < longest)})
        grid = [PassSize(tokens, _EXPANDED_PARTS, n) for tokens in _EXPANDED_TOKENS for n in entries]
        expanded = [
            size
            for size in grid
            if size.tokens <= min(size.entries, most)
            and size.tokens * size.entries <= _EXPANDED_PAIRS
            and self.form.expands(size.tokens * size.entries, size.entries)
        ]
        absorbed = [size for size in _ABSORBED if size.tokens <= self._table.width]
        return absorbed + sorted(expanded, key=lambda size: size.tokens * size.entries)

    # ------------------------------------------------------------ decode

    @torch.inference_mode()
    def decode(self, shares: Sequence[DecodeShare]) -> Outcome:
        """One entry of each request."""
        columns = [[s.row, s.position, s.slot, _UNFORCED if s.forced is None else s.forced] for s in shares]
        inputs = np.array(columns, np.int32).T
        if self._decodes is not None:
            size = self._decodes.first(lambda size: size >= len(shares))
            assert size is not None, "more requests than rows of the request table"
            outputs = self._decodes.replay(size, self._padded(inputs, size))
            logits, tokens, finite, rows = (output[: len(shares)] for output in outputs)
        else:
            turned = any(share.turned for share in shares)
            max_len = max(share.position for share in shares) + 1
            logits, tokens, finite, rows = self._decode_pass(upload(inputs, self._device), turned, max_len)
        if not all(share.sampler.greedy for share in shares):
            tokens = self.draw(logits, [s.sampler for s in shares], [s.number for s in shares])
        return self._noted(Outcome(tokens, finite), rows, tokens)

    def _noted(self, outcome: Outcome, rows: Tensor, tokens: Tensor) -> Outcome:
        """The tokens become the next step's input: the last thing a pass does, so that one that failed can be run again
        on the input it had."""
        self._table.last_token.index_put_((rows,), tokens)
        return outcome

    def _padded(self, inputs: NDArray[np.int32], batch: int) -> NDArray[np.int32]:
        """inputs [4, b] as a whole batch, flat: columns of padding behind them."""
        padding = np.array([[self._table.num_rows], [0], [self._table.spare_slot], [0]], np.int32)
        return np.concatenate([inputs, np.repeat(padding, batch - inputs.shape[1], axis=1)], axis=1).reshape(-1)

    def _whole_decode_pass(self, turned: bool) -> Pass:
        return lambda inputs: self._decode_pass(inputs.view(4, -1), turned, self._table.width)

    def _decode_pass(self, inputs: Tensor, turned: bool, max_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """inputs [4, B] int32: row, position, slot, forced id or -1. Returns logits [B, vocab], the greedy tokens [B],
        which rows are finite, and the request-table rows that the tokens go to. Nothing in it asks the host."""
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
        return logits, sampling.greedy(logits), self._rows_finite(slots) & torch.isfinite(logits).all(-1), rows

    # ------------------------------------------------------------ prefill

    @torch.inference_mode()
    def prefill(self, parts: Sequence[PrefillPart]) -> Outcome:
        """Any number of pending entries of each request, packed."""
        expanded = self.form.expands(num_pairs(parts), sum(part.kv_len for part in parts))
        size = self._captured(parts, expanded)
        if size is not None and self._prefills is not None:
            outputs = self._prefills.replay(size, pack(parts, size, self._table))
            logits, tokens, finite, note = (output[: len(parts)] for output in outputs)
        else:
            turned = any(part.turned for part in parts)
            logits, tokens, finite, note = self._pass_by_hand(parts, expanded, turned)
        sampled = [(i, part.sampler) for i, part in enumerate(parts) if part.sampler is not None]
        if not all(sampler.greedy for _, sampler in sampled):
            which = upload(np.array([i for i, _ in sampled]), self._device)
            drawn = self.draw(logits[which], [sampler for _, sampler in sampled], [0] * len(sampled))
            tokens = tokens.index_put((which,), drawn)
        return self._noted(Outcome(tokens, finite), note, tokens)

    def _captured(self, parts: Sequence[PrefillPart], expanded: bool) -> PassSize | None:
        """The size of the graph that this pass runs in: of its own form, else absorbed if that beats launching it."""
        if self._prefills is None:
            return None
        needed = PassSize.of(parts, expanded)
        size = self._prefills.first(lambda size: size.holds(needed))
        if size is None and expanded and num_pairs(parts) <= _ABSORBED_PAIRS:
            absorbed = PassSize.of(parts, False)
            size = self._prefills.first(lambda size: size.holds(absorbed))
        return size

    def _whole_prefill_pass(self, size: PassSize, turned: bool) -> Pass:
        return lambda inputs: self._packed_pass(unpack(inputs, size), size, turned)

    def _pass_by_hand(
        self, parts: Sequence[PrefillPart], expanded: bool, turned: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = PassSize.of(parts, expanded)
        return self._packed_pass(unpack(upload(pack(parts, size, self._table), self._device), size), size, turned)

    def _packed_pass(
        self, on: dict[str, Tensor], size: PassSize, turned: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`on`: the columns of `size`. Returns for each part the logits after its last token [P, vocab], the greedy
        token [P], whether its rows and logits are finite, and the request-table row that its token goes to. Nothing in
        it asks the host."""
        slots, batch = on["slots"].long(), packed(on, size, turned, self._table)
        logits = self._forward(batch)
        bad = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        bad.index_add_(0, on["owner"].long(), (~self._rows_finite(slots)).long())
        finite = (bad == 0) & torch.isfinite(logits).all(-1)
        return logits, sampling.greedy(logits), finite, on["note"].long()

    # ------------------------------------------------------------ both

    def _forward(self, batch: Batch) -> Tensor:
        rotary = self._model.rotary
        cache = PoolCache(self._pool, batch, rotary.inv_freq, rotary.layout or "halves")
        return forward(self._model.model, cache)[:, : self._vocab]

    def _rows_finite(self, slots: Tensor) -> Tensor:
        """[n]: whether the rows just written are numbers: one that is none would poison all who share it."""
        pool = self._pool
        return torch.isfinite(pool.c_kv[:, slots]).all(-1).all(0) & torch.isfinite(pool.k_pe[:, slots]).all(-1).all(0)
