"""One step: chooses rows, computes them in one packed forward, commits them, samples.

Owns the step and nothing that outlives it but its counters. A step's slots belong to their sequences only after the
forward has returned; when it raises they are released, and the members of the step are run again one by one, so that
one bad request fails alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_proto.refusal import Refusal
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.cache.slots import Slots
from leyline_server.edit.rows import Rows
from leyline_server.engine.admission import Admission
from leyline_server.engine.engine import EndReason
from leyline_server.engine.requests import LocalRequest
from leyline_server.model.attention import PoolCache, forward
from leyline_server.model.batch import Batch, SequenceStep
from leyline_server.model.load import LoadedModel


@dataclass(frozen=True, slots=True)
class _Share:
    """One request's part of a step: the entries at `index` are computed into `slots`; `rows` is the list with them."""

    request: LocalRequest
    index: NDArray[np.int64]
    slots: Slots
    rows: Rows

    @property
    def samples(self) -> bool:
        return self.request.params is not None and int(self.index[-1]) == len(self.rows) - 1


class Stepper:
    def __init__(
        self, model: LoadedModel, cache: KVCache, admission: Admission, prefill_chunk: int, sampled_vocab: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._admission = admission
        self._prefill_chunk = prefill_chunk
        self._sampled_vocab = sampled_vocab
        self.rows_computed = 0
        self.steps = 0

    def step(self) -> bool:
        """See `Engine.step`."""
        ended = self._admission.admit()
        for request in [r for r in self._admission.running if r.cancelled]:
            self._end(request, EndReason.CANCELLED)
            ended = True
        for request in [r for r in self._admission.running if not r.sequence.rows.num_pending]:
            self._end(request, EndReason.DONE)  # a compute whose entries were all in the prefix tree
            ended = True
        chosen = self._choose()
        if chosen:
            self._run(chosen)
        # What ended without a forward may have freed the slots for which another waits.
        return ended or bool(chosen)

    def _choose(self) -> list[tuple[LocalRequest, int]]:
        """Every decode gets its row; prefills, in order of admission, share what that leaves of `prefill_chunk`, and at
        least one row: neither stalls the other."""
        running = self._admission.running
        chosen = [(request, 1) for request in running if request.decoding]
        budget = max(1, self._prefill_chunk - len(chosen))
        for request in running:
            count = 0 if request.decoding else min(request.sequence.rows.num_pending, budget)
            if count:
                chosen.append((request, count))
                budget -= count
        return chosen

    def _run(self, chosen: list[tuple[LocalRequest, int]]) -> None:
        shares: list[_Share] = []
        try:
            for request, count in chosen:
                shares.append(self._share(request, count))
            logits = self._forward(shares)
        except Exception as error:
            for share in shares:
                self._cache.release(share.slots)
            if len(chosen) > 1:
                for one in chosen:
                    self._run([one])
            else:
                self._fail(chosen[0][0], error)
            return
        sampled = iter(logits)
        for share in shares:
            self._commit(share, next(sampled) if share.samples else None)

    def _share(self, request: LocalRequest, count: int) -> _Share:
        rows = request.sequence.rows
        index = rows.pending[:count]
        slots = self._admission.allocate(index.astype(np.int32))
        return _Share(request, index, slots, rows.filled(index, slots))

    def _forward(self, shares: list[_Share]) -> Tensor:
        steps = []
        for share in shares:
            end = int(share.index[-1]) + 1
            rows, table = share.rows.truncated(end), self._cache.table
            delta = np.arange(end, dtype=np.int32) - table.written_at[rows.slots]
            steps.append(
                SequenceStep(
                    ids=share.rows.ids[share.index],
                    positions=share.index,
                    slots=share.rows.slots[:end],
                    delta=delta if rows.turned(table).any() else None,
                    sampled=share.samples,
                )
            )
        batch = Batch.pack(steps, self._model.device)
        rotary = self._model.rotary
        cache = PoolCache(self._cache.pool, batch, rotary.inv_freq, rotary.layout or "halves")
        logits = forward(self._model.model, cache)[:, : self._sampled_vocab]
        if not _finite(logits, self._cache.pool, batch):
            raise FloatingPointError("the model's rows or logits are not finite")
        self.rows_computed += sum(len(share.index) for share in shares)
        self.steps += 1
        return logits

    def _commit(self, share: _Share, logits: Tensor | None) -> None:
        request, state = share.request, share.request.sequence
        share.rows.note_contexts(self._cache.table, share.index)
        state.rows = share.rows
        if logits is None:
            if not state.rows.num_pending:
                self._end(request, EndReason.DONE)
            return
        if len(request.old_last):
            old, request.old_last = request.old_last, request.old_last[:0]
            self._cache.release(old)
        self._sample(request, logits)

    def _sample(self, request: LocalRequest, logits: Tensor) -> None:
        params, sampler = request.params, request.sampler
        assert params is not None
        assert sampler is not None
        if request.generated == 0:
            self._publish(request)
        if request.generated < len(params.force_ids):
            token = params.force_ids[request.generated]
        else:
            token = sampler.sample(logits)
        state = request.sequence
        state.rows = state.rows.appended([token])
        request.generated += 1
        stop = request.listener.token(token)
        if token in params.stop_ids:
            self._end(request, EndReason.STOP)
        elif stop:
            self._end(request, EndReason.LISTENER)
        elif request.generated >= params.max_tokens:
            self._end(request, EndReason.LENGTH)

    def _end(self, request: LocalRequest, reason: EndReason) -> None:
        self._publish(request)
        self._admission.finish(request, reason, None)

    def _fail(self, request: LocalRequest, error: Exception) -> None:
        refusal = Refusal("MODEL_FAILED", f"the forward pass failed: {error}", error=type(error).__name__)
        refusal.__cause__ = error
        self._admission.finish(request, EndReason.FAILED, refusal)

    def _publish(self, request: LocalRequest) -> None:
        """Puts the exact front of the list into the prefix tree: nothing behind an edit answers another session."""
        state = request.sequence
        upto = state.rows.exact_upto(self._cache.table)
        if upto:
            now = self._cache.tick()
            self._cache.tree.insert(state.namespace, state.rows.ids[:upto], state.rows.slots[:upto], now)


def _finite(logits: Tensor, pool: Pool, batch: Batch) -> bool:
    """Whether the step's logits and the rows it wrote are numbers: a row that is none would poison all who share it."""
    rows = (pool.c_kv[:, batch.write_slots], pool.k_pe[:, batch.write_slots])
    return bool(torch.stack([torch.isfinite(values).all() for values in (logits, *rows)]).all())
