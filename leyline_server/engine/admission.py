"""Who may run: the queue, the reservation of slots, and who gives way.

Owns the running and the waiting requests and the rows of the request table. A request runs once everything it may
allocate fits beside what the running ones hold and may allocate; so a running request never finds the pool full. First
come, first served.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from leyline_proto.refusal import Refusal
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.request_table import RequestTable
from leyline_server.cache.slots import PENDING, OutOfSlots, Slots, ascending, counted, indices, runs
from leyline_server.engine.engine import EndReason, HitReport, MissReason, SequenceId
from leyline_server.engine.requests import LocalRequest
from leyline_server.engine.reuse import take_content, take_prefix
from leyline_server.engine.sequence import SequenceState
from leyline_server.model.deviation import DeviationProbe


class Admission:
    def __init__(
        self,
        cache: KVCache,
        requests: RequestTable,
        sequences: dict[SequenceId, SequenceState],
        max_queue: int,
        deviations: DeviationProbe,
    ) -> None:
        self._cache = cache
        self._deviations = deviations
        self._requests = requests
        self._sequences = sequences
        self._max_queue = max_queue
        # How many running requests held a slot when they were admitted: two may share a prefix.
        self._held_by = np.zeros(cache.table.num_slots, np.int32)
        self._num_held = 0
        self._reserved = 0
        self.queue: deque[LocalRequest] = deque()
        self.running: list[LocalRequest] = []

    @property
    def max_context(self) -> int:
        """Entries of the longest list that can be computed."""
        return self._requests.width

    def submit(self, request: LocalRequest) -> LocalRequest:
        """Queues a request. Raises CONTEXT_EXCEEDED and POOL_EXCEEDED when it can never fit, QUEUE_FULL when too many
        wait."""
        state = request.sequence
        rows = state.rows
        needed = len(rows) + request.needs - rows.num_pending
        limit = self._cache.table.num_slots
        if needed > limit:
            raise Refusal(
                "POOL_EXCEEDED",
                f"the request needs {needed} slots; the pool has {limit}, {self._cache.table.num_free} of them free",
                needed=needed,
                limit=limit,
                free=self._cache.table.num_free,
            )
        longest = len(rows) + (request.params.max_tokens - 1 if request.params else 0)
        if longest > self.max_context:
            raise Refusal(
                "CONTEXT_EXCEEDED",
                f"the request computes {longest} entries; the context holds {self.max_context}",
                needed=longest,
                limit=self.max_context,
            )
        self.check_queue(request)
        state.request = request
        self.queue.append(request)
        return request

    def check_queue(self, *coming: LocalRequest) -> None:
        """Raises QUEUE_FULL when no more requests may wait. Those that start with the next step don't wait."""
        together = [*self.queue, *coming]
        if len(together) < self._max_queue:
            return
        fitting = next(n for n in range(len(together), -1, -1) if not n or self._fits(*together[:n]))
        waiting = len(together) - fitting
        before = waiting - len(coming)
        if waiting and before >= self._max_queue:
            # The first that waits: there is no place for it, or there is one and too few slots.
            placeless = fitting >= self._requests.num_free
            what = f"one of the {self._requests.num_rows} that may run at once to end" if placeless else "slots"
            raise Refusal(
                "QUEUE_FULL",
                f"{before} requests wait for {what}; the limit is {self._max_queue}",
                waiting=before,
                limit=self._max_queue,
                retry_after_s=1,
            )

    def admit(self) -> bool:
        """Starts waiting requests, in order, as far as slots reach; ends cancelled ones. True when there were any."""
        cancelled = [r for r in self.queue if r.cancelled]
        for request in cancelled:
            self.queue.remove(request)
            self.finish(request, EndReason.CANCELLED, None)
        while self.queue and self._fits(self.queue[0]):
            self._start(self.queue.popleft())
        return bool(cancelled)

    def finish(self, request: LocalRequest, reason: EndReason, error: Refusal | None) -> None:
        """Takes a request off and tells its listener. Its sequence keeps every row that was committed."""
        state = request.sequence
        for share in request.shares:
            share.dropped = True
            self._cache.release(share.slots)
        request.shares.clear()
        if len(request.old_last):
            # Ended before its last entry was computed anew: the old row stands again.
            last = len(state.rows) - 1
            assert state.rows.slots[last] == PENDING
            state.rows = state.rows.filled(np.array([last]), request.old_last)
            self._unhold(indices(request.old_last))
            request.old_last = request.old_last[:0]
        if request.row is not None:
            self.running.remove(request)
            self._requests.give(request.row)
            self._unhold(request.held)
            self._reserved -= request.reserved
            request.row = None
        state.request = None
        state.used = self._cache.tick()
        request.listener.ended(reason, error)

    def fail(self, request: LocalRequest, error: Exception) -> None:
        refusal = Refusal("MODEL_FAILED", f"the forward pass failed: {error}", error=type(error).__name__)
        refusal.__cause__ = error
        self.finish(request, EndReason.FAILED, refusal)

    def replaced_last(self, request: LocalRequest) -> None:
        """The last entry was computed anew: its old row goes."""
        old, request.old_last = request.old_last, request.old_last[:0]
        if len(old):
            self._unhold(indices(old))
            self._cache.release(old)

    def allocate(self, positions: NDArray[np.int32]) -> Slots:
        """Slots for a step's rows: caches give way first, then idle sequences, least recently used first."""
        while True:
            try:
                return self._cache.allocate(positions)
            except OutOfSlots:
                if not self._evict_idle():
                    raise

    def check_integrity(self) -> None:
        """Asserts that what is reserved, and what lies on the device, is what the running requests have."""
        held_by = np.zeros_like(self._held_by)
        for request in self.running:
            held_by[request.held] += 1
            held_by[request.old_last] += 1
            rows = request.sequence.rows
            assert request.row is not None
            self._requests.check_integrity(request.row, rows.slots, rows.delta(self._cache.table))
        assert np.array_equal(held_by, self._held_by), "slots are noted as held by requests that don't run"
        assert self._num_held == np.count_nonzero(held_by)
        assert self._reserved == sum(request.reserved for request in self.running)
        assert len(self.running) + self._requests.num_free == self._requests.num_rows

    def _fits(self, *requests: LocalRequest) -> bool:
        """Whether these can run beside those that do."""
        if len(requests) > self._requests.num_free:
            return False
        free = self._cache.table.num_slots - self._num_held - self._reserved
        slots = np.concatenate([request.sequence.rows.slots for request in requests])
        fresh = slots[(slots >= 0) & (self._held_by[indices(slots)] == 0)]
        needs = sum(request.needs + self._shared_repairs(request) for request in requests)
        # Lists may share slots: what looks too much is counted again.
        return len(fresh) + needs <= free or len(counted(fresh)[0]) + needs <= free

    def _shared_repairs(self, request: LocalRequest) -> int:
        """Slots that repairs need beside those they replace, because a running request holds those too."""
        rows = request.sequence.rows
        held = int(np.count_nonzero(self._held_by[rows.slots[rows.in_doubt]]))
        return min(held, rows.num_to_repair) if held else 0

    def _hold(self, slots: Slots) -> NDArray[np.intp]:
        """One more running request holds these slots. Returns them, each once."""
        held, _ = counted(slots)
        before = self._held_by[held]
        self._held_by[held] = before + 1
        self._num_held += int(np.count_nonzero(before == 0))
        return held

    def _unhold(self, held: NDArray[np.intp]) -> None:
        after = self._held_by[held] - 1
        self._held_by[held] = after
        self._num_held -= int(np.count_nonzero(after == 0))

    def _start(self, request: LocalRequest) -> None:
        state = request.sequence
        rows = state.rows
        nothing_to_do = rows.num_pending + rows.num_to_repair == 0
        hits = take_prefix(self._cache, state)
        content = take_content(self._cache, state)
        delta = state.rows.delta(self._cache.table)
        try:
            request.row = self._requests.take(state.rows.slots, delta)
            self._choose_repairs(state, request.row)
        except Exception as error:  # the device has no memory left, or the model failed
            if request.row is not None:
                self._requests.give(request.row)
                request.row = None
            self.fail(request, error)
            return
        rows = state.rows
        if request.params is not None and rows.slots[-1] >= 0:
            # Logits come from evaluating the last token against the list as it is now, into a fresh slot. What is
            # repaired was chosen before: it is the same whether a Generate or a compute comes first.
            request.old_last = rows.slots[-1:].copy()
            state.rows = rows = rows.filled(np.array([len(rows) - 1]), PENDING)
            self._hold(request.old_last)
        pending = rows.pending
        turned = int(np.count_nonzero(delta[rows.slots >= 0]))
        content = content[rows.slots[content] >= 0]  # a repair may have chosen some
        taken = np.zeros(len(rows), np.bool_)
        taken[content] = True
        if nothing_to_do:
            reason = MissReason.APPEND
        elif state.evicted:
            reason = MissReason.EVICTED
        elif state.cold:
            reason = MissReason.COLD
        else:
            reason = MissReason.EDIT if state.edited else MissReason.APPEND
        report = HitReport(
            prefix_hit=hits,
            content_spans=tuple(runs(taken)),
            kept=len(rows) - len(pending) - hits - len(content),
            turned=turned,
            computed=len(pending),
            first_divergence=int(pending[0]) if len(pending) else None,
            reason=reason,
        )
        state.evicted = state.edited = state.cold = False
        request.length, request.pending, request.turned = len(rows), pending, turned > 0
        request.held = self._hold(rows.slots)
        request.reserved = request.needs
        self._reserved += request.reserved
        self.running.append(request)
        request.listener.started(report)

    def _choose_repairs(self, state: SequenceState, row: int) -> None:
        """Of the rows in doubt those that deviate most become pending; the others are in doubt no more.

        Entries without KV in front of them have a part in that: they are computed as far as it takes, and again later.
        """
        if state.rows.doubt is None:
            return
        rows, doubted = state.rows, state.rows.in_doubt
        if not len(doubted):
            state.rows = rows.settled()
            return
        pending = rows.pending
        index = np.sort(np.concatenate([pending[pending < doubted[-1]], doubted]))
        stored = rows.slots[index]
        fresh = np.full(len(index), PENDING, np.int32)
        try:
            fresh[stored < 0] = self.allocate(index[stored < 0].astype(np.int32))
            deviation = self._deviations.measure(row, rows.ids[index], index, fresh, stored)
        finally:
            self._cache.release(fresh[fresh >= 0])
        again = rows.to_repair(deviation[stored >= 0])
        state.rows = rows.made_pending(again).settled()
        self._cache.release(rows.slots[again])

    def _evict_idle(self) -> bool:
        """The least recently used sequence that does not run falls back to pending. False when there is none."""
        idle = [s for s in self._sequences.values() if not (s.request and s.request.admitted)]
        idle = [s for s in idle if (s.rows.slots >= 0).any()]
        if not idle:
            return False
        state = min(idle, key=lambda s: s.used)
        gone = state.rows.slots
        own = np.setdiff1d(self._cache.table.context[gone[gone >= 0]], state.borrowed)
        state.lost = ascending(np.concatenate([state.lost, own[own != 0]]))  # 0 is of no text
        state.rows = state.rows.pending_from(0)
        state.evicted = True
        self._cache.release(gone)
        return True
