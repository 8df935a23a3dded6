"""Measure: what chained edits do to the keys and to the logits, against an engine that turns and stores them again.

One session; edits insert into its front and delete from it, and its tail is kept. Arms, over the same edits:

    leyline        as the engine is: real splices, stored keys never rewritten, attention turns them as it reads
    eager, bf16    after each edit every key of the tail is turned by that edit's shift and stored again, in bf16
    eager, fp32    the same in fp32; for the logits they are rounded once to the pool's type
    rounded once   the exact keys in the pool's type: the least that a pool can err

Exact is the tail's key as it was first computed and stored, turned in float64 by the net shift. Logits are compared
with those of a list that holds the exact keys, rounded once to the pool's type, and differs in nothing else.

The eager arms are the most exact of their kind: angles and products in fp32, rounded when they are stored. A model of
bf16 rounds its logits so coarsely that the last bit of a few keys shows in them: as far as `leyline` differs there, a
difference says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_kernels import gather, rotate
from leyline_server.cache.slots import OutOfSlots, Slots
from leyline_server.edit.rows import Ids, Rows
from leyline_server.engine.engine import RowEdit
from leyline_server.lab.figures import Figure, spread
from leyline_server.lab.laboratory import Lab, LabError, Question
from leyline_server.lab.oracle import turn
from leyline_server.lab.recording import divergence

BENCH: Final = "drift"
SINK: Final = 4  # entries in front that no edit touches
FORCED: Final = 16  # tokens at the end of the text that are generated: their logits are compared
LONGEST: Final = 8  # tokens that one edit inserts or deletes
SHORTEST_TEXT: Final = 128


def drift(lab: Lab, ids: Sequence[int], counts: Sequence[int] = (1, 10, 100, 1000), seed: int = 0) -> list[Figure]:
    """A bench of its own: closes what is open on the lab. Raises ValueError when the text is too short, LabError when
    the pool is."""
    figures: list[Figure] = []
    with lab.bench():
        session = EditedSession(lab, ids[:-FORCED], seed)
        dtypes = {"eager, bf16": torch.bfloat16, "eager, fp32": torch.float32}
        eager = {name: EagerKeys(lab, session.computed, dtype) for name, dtype in dtypes.items()}
        for number in range(1, max(counts) + 1):
            shift = session.edit()
            for arm in eager.values():
                arm.turn(shift)
            if number in counts:
                case = f"{number} edit{'s' * (number > 1)}"
                figures += _compare(session, eager, ids[-FORCED:], case)
    return figures


class EditedSession:
    """A sequence of the lab whose front is edited, and whose tail stays.

    computed [L, T, rope]: the tail's keys as they were stored when they were computed. shift: how far they stand from
    there now, never 0.
    """

    def __init__(self, lab: Lab, ids: Sequence[int], seed: int) -> None:
        if len(ids) < SHORTEST_TEXT - FORCED:
            raise ValueError(f"a text of {len(ids) + FORCED} tokens is too short: at least {SHORTEST_TEXT} are needed")
        self.lab, self._words, self._random = lab, list(ids), Random(seed)
        self._front = len(ids) // 4  # where the tail stood at first
        self.shift = 0
        self.sequence = lab.open(ids)
        lab.prefill(self.sequence)
        self.computed = lab.engine.cache.pool.k_pe[:, lab.on_device(self.rows.slots[self._front :])].clone()

    @property
    def rows(self) -> Rows:
        return self.lab.engine.sequences[self.sequence].rows

    @property
    def tail_at(self) -> int:
        """Where the tail starts now."""
        return self._front + self.shift

    def edit(self) -> int:
        """One splice: an insertion or a deletion somewhere in the front. Returns by how much the tail moves."""
        room = (self._front - SINK) // 2
        steps = [by for by in range(-LONGEST, LONGEST + 1) if by and 0 < abs(self.shift + by) <= room]
        by = self._random.choice(steps)
        start = self._random.randint(SINK, self.tail_at - max(0, -by))
        new = tuple(self._random.choices(self._words, k=max(0, by)))
        self.lab.splice(self.sequence, RowEdit(start, start + max(0, -by), new, self.lab.edit_id()))
        self.shift += by
        return by


class EagerKeys:
    """The tail's keys [L, T, rope] of an engine that turns them after each edit and stores them again, in `dtype`."""

    def __init__(self, lab: Lab, computed: Tensor, dtype: torch.dtype) -> None:
        self.keys = computed.to(dtype, copy=True)
        self._places = torch.arange(computed.shape[1], dtype=torch.int32, device=computed.device)
        self._inv_freq, self._layout = lab.model.rotary.inv_freq, lab.layout

    def turn(self, shift: int) -> None:
        by = torch.full_like(self._places, shift)
        rotate(self.keys, self._places, self._places, by, self._inv_freq, self._layout)


def _compare(session: EditedSession, eager: dict[str, EagerKeys], forced: Sequence[int], case: str) -> list[Figure]:
    """The figures of one number of edits. The session stays as it is."""
    lab, pool = session.lab, session.lab.engine.cache.pool
    twin = lab.fork(session.sequence)
    lab.prefill(twin)  # what was inserted
    rows, tail = lab.engine.sequences[twin].rows, slice(session.tail_at, None)
    exact = exact_keys(lab, rows)
    rounded = exact.to(pool.k_pe)
    keys = {
        "leyline": keys_as_read(lab, rows)[:, tail],
        **{name: arm.keys for name, arm in eager.items()},
        "rounded once": rounded[:, tail],
    }
    errors = {name: _relative(arm, exact[:, tail]) for name, arm in keys.items()}
    num_rows = exact[:, tail].shape[1]
    figures = [Figure(BENCH, case, name, "error of keys", error, "", num_rows) for name, error in errors.items()]

    want = planted_logits(lab, rows, rounded, forced)
    for name, arm in keys.items():
        if name == "leyline":
            got = _logits(lab, twin, forced)
        elif name == "rounded once":
            continue  # what the others are compared with
        else:
            got = planted_logits(lab, rows, torch.cat([rounded[:, : tail.start], arm.to(rounded)], 1), forced)
        figures.append(spread(BENCH, case, name, "KL of logits", divergence(want, got), "nats"))
        worst = [float(row) for row in (got - want).abs().amax(-1)]
        figures.append(spread(BENCH, case, name, "largest difference of a logit", worst))
    lab.close(twin)
    return figures


def keys_as_read(lab: Lab, rows: Rows) -> Tensor:
    """[L, n, rope]: the keys of a list without pending entries as the engine's attention sees them."""
    pool, device = lab.engine.cache.pool, lab.model.device
    slots, delta = (torch.from_numpy(part).to(device) for part in (rows.slots, rows.delta(lab.engine.cache.table)))
    layers = zip(pool.c_kv, pool.k_pe, strict=True)
    return torch.stack([gather(c, k, slots, delta, lab.model.rotary.inv_freq, lab.layout)[1] for c, k in layers])


def exact_keys(lab: Lab, rows: Rows) -> Tensor:
    """[L, n, rope] float64 on the CPU: stored keys turned to where they stand, without the engine's kernels."""
    stored = lab.engine.cache.pool.k_pe[:, lab.on_device(rows.slots)].double().cpu()
    delta = np.arange(len(rows)) - lab.engine.cache.table.written_at[rows.slots]
    for by in np.unique(delta[delta != 0]):
        there = torch.from_numpy(delta == by)
        stored[:, there] = turn(lab.model.model, stored[:, there], int(by))
    return stored


def planted_logits(lab: Lab, rows: Rows, keys: Tensor, forced: Sequence[int]) -> Tensor:
    """The logits [tokens, vocab] of `forced` behind this list, had it these keys [L, n, rope] where it stands."""
    sequence = plant(lab, rows.ids, rows.slots, keys)
    logits = _logits(lab, sequence, forced)
    lab.close(sequence)
    return logits


def plant(lab: Lab, ids: Ids, slots: Slots, keys: Tensor) -> int:
    """A sequence with rows of its own: latents of `slots`, and `keys` as if they were written where they stand, so
    that nothing is turned. Nothing takes them for exact. Raises LabError when the pool is full."""
    cache, sequence = lab.engine.cache, lab.open()
    positions: NDArray[np.int32] = np.arange(len(ids), dtype=np.int32)
    try:
        own = cache.allocate(positions)
    except OutOfSlots as error:
        raise LabError(f"the pool is too small for the lab: {error}") from error
    there = lab.on_device(own)
    cache.pool.c_kv[:, there] = cache.pool.c_kv[:, lab.on_device(slots)]
    cache.pool.k_pe[:, there] = keys.to(cache.pool.k_pe)
    lab.engine.sequences[sequence].rows = Rows.of(ids, own)
    return sequence


def _logits(lab: Lab, sequence: int, forced: Sequence[int]) -> Tensor:
    (asked,) = lab.ask([Question(sequence, forced=tuple(forced))])
    return asked.logits


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm())
