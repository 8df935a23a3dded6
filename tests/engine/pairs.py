"""A session of the engine and the same session of the oracle, led through the same operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.lab.oracle import Cut, Oracle, turn
from tests.engine.harness import Rig


class Pair:
    def __init__(self, rig: Rig, reference: Any, ids: Sequence[int], reuse: Reuse = PREFIX) -> None:
        self.rig, self.oracle = rig, Oracle(reference)
        self.sequence = rig.open(ids, reuse=reuse)
        self.oracle.append(ids)

    def append(self, ids: Sequence[int]) -> None:
        self.rig.engine.append(self.sequence, ids)
        self.oracle.append(ids)

    def amortize(self, *cuts: Cut) -> None:
        self.rig.engine.splice(self.sequence, [self.rig.edit(*cut) for cut in cuts])
        self.oracle.amortize(*cuts)

    def forget(self, start: int, end: int, ids: Sequence[int] = ()) -> None:
        self.rig.engine.splice(self.sequence, [self.rig.edit(start, end, ids, forget=True)])
        self.oracle.forget(start, end, ids)

    def prefill(self) -> None:
        self.rig.prefill(self.sequence)
        self.oracle.compute()

    def error(self, forced: Sequence[int] = ()) -> float:
        """Generates in both: the largest difference of any logit. The texts must be the same."""
        got, want = self.rig.logits(self.sequence, forced), self.oracle.logits(forced)
        if not forced:
            self.oracle.append(self.rig.engine.ids(self.sequence)[-1:])
        assert self.rig.engine.ids(self.sequence) == self.oracle.ids
        return worst(got, want)

    def row_error(self) -> float:
        """The largest difference of any number in any row of the cache, in units of their spread; keys turned to
        where they stand."""
        rows = self.rig.engine.sequences[self.sequence].rows
        pool, known = self.rig.engine.cache.pool, torch.as_tensor(rows.slots >= 0)
        assert torch.equal(known, self.oracle.known), "other entries have KV than the oracle's"
        slots = torch.as_tensor(rows.slots)[known].long()
        delta = known.nonzero()[:, 0] - torch.as_tensor(self.rig.engine.cache.table.written_at)[slots]
        keys = [
            turn(self.oracle.model, k_pe, int(by))
            for k_pe, by in zip(pool.k_pe[:, slots].unbind(1), delta, strict=True)
        ]
        pairs = (
            (pool.c_kv[:, slots], self.oracle.c_kv[:, known]),
            (torch.stack(keys, 1), self.oracle.k_pe[:, known]),
        )
        return max(worst(got, want) / float(want.std()) for got, want in pairs)


def worst(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; infinite where one is not finite."""
    assert got.shape == want.shape, (got.shape, want.shape)
    difference = (got.cpu().double() - want.cpu().double()).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
