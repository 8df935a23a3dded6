"""The engine of this server: sequences as lists of slots over one pool, computed in steps of two lanes.

Owns sequences, admission and the step. Book-keeping is in `cache/` and `edit/`, the model in `model/`. One thread
calls it; a request's part of a step is committed whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.cache.chunks import SINK
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.cache.request_table import RequestTable
from leyline_server.edit.plan import plan
from leyline_server.edit.rows import Doubt, Rows
from leyline_server.engine.admission import Admission
from leyline_server.engine.engine import (
    EngineStats,
    GenerateParams,
    Listener,
    Namespace,
    Restored,
    RowEdit,
    RowReceipt,
    SequenceId,
)
from leyline_server.engine.forgetting import forget, influenced, without_reached
from leyline_server.engine.receipts import receipts
from leyline_server.engine.requests import LocalRequest
from leyline_server.engine.sequence import SequenceState
from leyline_server.engine.stepper import Stepper
from leyline_server.model.batch import HANDICAP, Form
from leyline_server.model.deviation import DeviationProbe
from leyline_server.model.load import LoadedModel
from leyline_server.model.runner import Runner
from leyline_server.sampling import Sampler


class LocalEngine:
    """See `Engine`.

    prefill_chunk: pending entries computed in one step; alone_chunk: while one request has the device to itself, by
    default the same. max_queue: requests that may wait. sampled_vocab: ids below it are sampled. max_context: entries
    of one sequence that can be computed. max_running: requests at once. ahead: steps are launched before the ones in
    front of them are read; the default is what the device gains from. chunk_budget: rows that the chunk
    registry may hold; the default is half of all.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_slots: int,
        prefill_chunk: int,
        max_queue: int,
        sampled_vocab: int,
        max_context: int | None = None,
        max_running: int = 64,
        ahead: bool | None = None,
        alone_chunk: int | None = None,
        chunk_budget: int | None = None,
    ) -> None:
        config, device = model.config, model.device
        pool = Pool(
            config.num_hidden_layers, num_slots, config.kv_lora_rank, config.qk_rope_head_dim, model.dtype, device
        )
        self.cache = KVCache(pool, num_slots // 2 if chunk_budget is None else chunk_budget)
        self.sequences: dict[SequenceId, SequenceState] = {}
        self._beside: dict[SequenceId, tuple[Doubt | None, tuple[float, ...], int]] = {}  # rows of checkpoints
        self._next_id = 1
        self._requests = RequestTable(max_running, min(max_context or num_slots, num_slots), pool.spare_slot, device)
        self.runner = Runner(model, pool, self._requests, sampled_vocab, Form.of(config, HANDICAP[device.type]))
        self.runner.warm_up()
        chunks = (prefill_chunk, alone_chunk or prefill_chunk)
        probe = DeviationProbe(model, pool, self._requests, self.runner.form, chunks[1])  # all others wait for it
        self._admission = Admission(self.cache, self._requests, self.sequences, max_queue, probe)
        ahead = device.type == "cuda" if ahead is None else ahead
        self._stepper = Stepper(self.runner, self.cache, self._admission, chunks, ahead)
        self.amortize_refused = model.rotary.reason
        self.repair_share_refused = DeviationProbe.refused(model)

    @property
    def content_reuse_refused(self) -> str:
        off = "" if self.cache.chunks.budget else "the server keeps nothing for it (--content-share)"
        return self.amortize_refused or off

    # ------------------------------------------------------------ sequences

    def open(self, namespace: Namespace, reuse: Reuse = PREFIX) -> SequenceId:
        return self._add(namespace, reuse, Rows.empty()).id

    def fork(self, sequence: SequenceId) -> SequenceId:
        origin = self.sequences[sequence]
        self.cache.retain(origin.rows.slots)
        copy = self._add(origin.namespace, origin.reuse, origin.rows)
        copy.takes_content_from, copy.borrowed = origin.takes_content_from, origin.borrowed
        copy.cold, copy.edited, copy.evicted = origin.cold, origin.edited, origin.evicted
        copy.lost = origin.lost
        self.cache.kept.copy(origin.id, copy.id)
        return copy.id

    def close(self, sequence: SequenceId) -> int:
        state = self._idle(sequence)
        del self.sequences[sequence]
        self._drop_kept(sequence)
        return self.cache.release(state.rows.slots)

    def length(self, sequence: SequenceId) -> int:
        return len(self.sequences[sequence])

    def num_pending(self, sequence: SequenceId, end: int | None = None) -> int:
        return int(np.count_nonzero(self.sequences[sequence].rows.slots[:end] < 0))

    def exact_upto(self, sequence: SequenceId) -> int:
        return self.sequences[sequence].rows.exact_upto(self.cache.table)

    def ids(self, sequence: SequenceId, start: int = 0, end: int | None = None) -> list[int]:
        ids: list[int] = self.sequences[sequence].rows.ids[start:end].tolist()
        return ids

    def append(self, sequence: SequenceId, ids: Sequence[int]) -> None:
        state = self._idle(sequence)
        state.rows = state.rows.appended(ids)

    def truncate(self, sequence: SequenceId, length: int) -> None:
        state = self._idle(sequence)
        gone = state.rows.slots[length:]
        state.rows = state.rows.truncated(length)
        self.cache.release(gone)

    # ------------------------------------------------------------ edits

    def splice(self, sequence: SequenceId, edits: Sequence[RowEdit], dry_run: bool = False) -> list[RowReceipt]:
        state = self._idle(sequence)
        planned = plan(state.rows, edits)
        influences = [influenced(self.cache, state, item, planned) for item in planned.edits if item.edit.forget]
        planned = without_reached(self.cache, state, planned, influences)
        told = receipts(self.cache, state, self.sequences.values(), planned, influences)
        if dry_run:
            return told
        for edit in edits:
            state.grew(edit.start, len(edit.ids) - (edit.end - edit.start))
        state.rows, state.edited = planned.rows, True
        for item in planned.edits:
            if not item.edit.forget:
                self.cache.kept.keep((sequence, item.edit.edit_id), item.ids, item.slots, self.cache.tick())
        for item in planned.edits:
            if item.edit.forget:
                forget(self.cache, state, item, influences.pop(0))
                state.takes_content_from = max(SINK, len(state.rows))
            self.cache.release(item.slots)
            self.cache.release(item.repaired)
        self.cache.release(planned.tail_slots)
        self.cache.release(planned.reached)
        return told

    def undo(self, sequence: SequenceId, edit_id: str, at: int, inserted: int) -> Restored:
        state = self._idle(sequence)
        key = (sequence, edit_id)
        ids, slots = self.cache.kept.get(key)
        self.cache.retain(slots)
        self.cache.release_cached(self.cache.kept.drop(key))
        state.grew(at, len(ids) - inserted)
        r_slots = state.rows.slots[at : at + inserted]
        rows = state.rows.spliced(at, at + inserted, ids, slots)
        if rows.doubt is not None:  # what is exact again needs no repair
            rows = rows.settled(np.arange(rows.exact_upto(self.cache.table)))
        state.rows, state.edited = rows, True
        self.cache.release(r_slots)
        return Restored(len(ids), int(np.count_nonzero(slots >= 0)))

    def checkpoint(self, sequence: SequenceId) -> SequenceId:
        # Kept like the rows of an edit, by an owner that is no sequence: evicted last, and never in use.
        state, owner = self._idle(sequence), -self._next_id
        self._next_id += 1
        self.cache.kept.copy(sequence, owner)
        self.cache.kept.keep((owner, ""), state.rows.ids, state.rows.slots, self.cache.tick())
        self._beside[owner] = state.rows.doubt, state.rows.shares, state.takes_content_from
        return owner

    def rollback(self, sequence: SequenceId, checkpoint: SequenceId) -> None:
        state = self._idle(sequence)
        ids, slots = self.cache.kept.get((checkpoint, ""))
        self.cache.retain(slots)
        gone = state.rows.slots
        doubt, shares, state.takes_content_from = self._beside[checkpoint]
        state.rows = replace(Rows.of(ids, slots), doubt=doubt, shares=shares)
        self.cache.release(gone)
        self._drop_kept(sequence)
        self.cache.kept.copy(checkpoint, sequence)
        self.cache.release_cached(self.cache.kept.drop((sequence, "")))
        self.discard(checkpoint)

    def discard(self, checkpoint: SequenceId) -> None:
        del self._beside[checkpoint]
        self._drop_kept(checkpoint)

    def _drop_kept(self, owner: SequenceId) -> None:
        for key in self.cache.kept.keys(owner):
            self.cache.release_cached(self.cache.kept.drop(key))

    # ------------------------------------------------------------ requests

    def check_queue(self) -> None:
        self._admission.check_queue()

    def compute(self, sequence: SequenceId, listener: Listener) -> LocalRequest:
        return self._admission.submit(LocalRequest(self._idle(sequence), listener))

    def generate(self, sequence: SequenceId, params: GenerateParams, listener: Listener) -> LocalRequest:
        sampler = Sampler(params.sampling)
        return self._admission.submit(LocalRequest(self._idle(sequence), listener, params, sampler))

    def step(self) -> bool:
        return self._stepper.step()

    def stats(self) -> EngineStats:
        table = self.cache.table
        return EngineStats(
            num_slots=table.num_slots,
            free=table.num_free,
            in_use=table.in_use,
            cached=table.cached,
            running=len(self._admission.running),
            queued=len(self._admission.queue),
            rows_computed=self._stepper.rows_computed,
            steps=self._stepper.steps,
        )

    def check_integrity(self) -> None:
        held = [state.rows.slots for state in self.sequences.values()]
        for request in self._admission.running:
            held += [request.old_last, *(share.slots for share in request.shares)]
        self.cache.check_integrity(held)
        self._admission.check_integrity()
        for state in self.sequences.values():
            rows = state.rows
            upto = rows.exact_upto(self.cache.table)
            written = self.cache.table.written_at[rows.slots[:upto]]
            assert np.array_equal(written, np.arange(upto)), "an exact row stands elsewhere than it was written"
            assert np.array_equal(Rows.empty().appended(rows.ids).contexts, rows.contexts), "contexts are stale"

    def _add(self, namespace: Namespace, reuse: Reuse, rows: Rows) -> SequenceState:
        state = SequenceState(self._next_id, namespace, reuse, rows, self.cache.tick(), self.cache.table)
        self._next_id += 1
        self.sequences[state.id] = state
        return state

    def _idle(self, sequence: SequenceId) -> SequenceState:
        state = self.sequences[sequence]
        assert state.request is None, "the sequence has a request; sessions refuse with BUSY before they come here"
        state.used = self.cache.tick()
        return state
