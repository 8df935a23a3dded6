"""One step: chooses entries, launches them on the device, commits what the step before gave.

Owns the order of things and nothing that outlives a step but its counters. A step has two lanes: every decoding request
computes one entry, and prefilling ones share a chunk of entries in one packed forward. With `ahead`, step
N + 1 is launched before N is read, so that the device never waits for listeners; what N turns out to have ended is
dropped from N + 1. A step's slots belong to their sequences only once it was read. A lane that can't be launched has
its members launched one by one, so that one bad request fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from leyline_server.cache.kv_cache import KVCache
from leyline_server.engine.admission import Admission
from leyline_server.engine.engine import EndReason
from leyline_server.engine.requests import LocalRequest, Share
from leyline_server.engine.reuse import publish
from leyline_server.model.batch import PrefillPart
from leyline_server.model.runner import DecodeShare, Outcome, Runner


@dataclass(frozen=True, slots=True)
class _Launched:
    """One lane on its way: outcome i is that of share i."""

    shares: list[Share]
    outcome: Outcome
    prefills: bool


_Lane = Callable[[Sequence[Share]], Outcome]


class Stepper:
    """chunks: how many entries prefills compute in one step, and one alone on the device."""

    def __init__(
        self, runner: Runner, cache: KVCache, admission: Admission, chunks: tuple[int, int], ahead: bool
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._admission = admission
        self._chunk, self._alone_chunk = chunks
        self._ahead = ahead
        self._in_flight: list[_Launched] = []
        self.rows_computed = 0
        self.steps = 0

    def step(self) -> bool:
        """See `Engine.step`."""
        acted = self._admission.admit()
        for request in [r for r in self._admission.running if r.cancelled]:
            self._end(request, EndReason.CANCELLED)
            acted = True
        for request in [r for r in self._admission.running if not (len(r.pending) or r.params)]:
            self._end(request, EndReason.DONE)  # a compute whose entries were all in the prefix tree
            acted = True
        before, self._in_flight = self._in_flight, []
        acted = acted or bool(before)
        launched: list[_Launched] = []
        decoding = [(r, 1) for r in self._admission.running if r.decodes]
        self._launch_lane(decoding, self._decode, launched)
        if any(lane.prefills for lane in before):
            # The device has a chunk to do: there is time to tell the tokens in front of it before the next is launched,
            # which may take the host as long.
            for lane in before:
                if not lane.prefills:
                    self._read(lane)
            before = [lane for lane in before if lane.prefills]
        self._launch_lane(self._prefilling(len(decoding)), self._prefill, launched)
        self.steps += bool(launched)
        acted = acted or bool(launched)
        if self._ahead:
            launched, self._in_flight = before, launched
        for lane in launched:
            self._read(lane)
        # What ended without a forward may have freed the slots for which another waits.
        return acted

    # ------------------------------------------------------------ launching

    def _prefilling(self, num_decoding: int) -> list[tuple[LocalRequest, int]]:
        """Equal shares of the chunk, what some don't need going to the others: a short message never waits for all of a
        long text, nor do decodes. The oldest always has a share; the others while their lists together are no longer
        than one may be, since a pass may expand them all."""
        waiting = [r for r in self._admission.running if r.to_prefill]
        alone = not num_decoding and len(waiting) == 1
        budget = self._alone_chunk if alone else max(1, self._chunk - num_decoding)
        chosen, entries = waiting[:1], waiting[0].length if waiting else 0
        for request in sorted(waiting[1:], key=lambda r: r.to_prefill):
            if len(chosen) < budget and entries + request.length <= self._admission.max_context:
                chosen.append(request)
                entries += request.length
        shares = []
        for place, request in enumerate(sorted(chosen, key=lambda r: r.to_prefill)):
            count = min(request.to_prefill, budget // (len(chosen) - place))
            shares.append((request, count))
            budget -= count
        return shares

    def _launch_lane(self, chosen: list[tuple[LocalRequest, int]], lane: _Lane, launched: list[_Launched]) -> None:
        if not chosen:
            return
        slots = np.zeros(0, np.int32)
        try:
            parts = [(request, *request.next(count)) for request, count in chosen]
            slots = self._admission.allocate(np.concatenate([index for _, index, _ in parts]).astype(np.int32))
            each = np.split(slots, np.cumsum([len(index) for _, index, _ in parts])[:-1])
            shares = [Share(r, index, own, samples) for (r, index, samples), own in zip(parts, each, strict=True)]
            outcome = lane(shares)
        except Exception as error:
            self._cache.release(slots)
            if len(chosen) == 1:
                self._admission.fail(chosen[0][0], error)
            else:
                for one in chosen:
                    self._launch_lane([one], lane, launched)
            return
        for share in shares:
            share.request.launched += len(share.index)
            share.request.shares.append(share)
            self.rows_computed += len(share.index)
        launched.append(_Launched(shares, outcome, prefills=lane == self._prefill))

    def _decode(self, shares: Sequence[Share]) -> Outcome:
        return self._runner.decode([self._decode_share(share) for share in shares])

    def _decode_share(self, share: Share) -> DecodeShare:
        request, token = share.request, share.samples
        assert request.row is not None
        assert token is not None
        assert request.sampler is not None
        forced = request.forced(token - 1)
        return DecodeShare(
            request.row, int(share.index[0]), int(share.slots[0]), forced, request.turned, request.sampler, token
        )

    def _prefill(self, shares: Sequence[Share]) -> Outcome:
        parts = []
        for share in shares:
            request = share.request
            assert request.row is not None
            ids = request.sequence.rows.ids[share.index]
            sampler = None if share.samples is None else request.sampler
            parts.append(PrefillPart(request.row, ids, share.index, share.slots, request.turned, sampler))
        return self._runner.prefill(parts)

    # ------------------------------------------------------------ reading

    def _read(self, lane: _Launched) -> None:
        tokens, finite = lane.outcome.read()
        for share, token, is_finite in zip(lane.shares, tokens, finite, strict=True):
            if share.dropped:
                continue
            if is_finite:
                self._commit(share, token)
            else:
                self._admission.fail(share.request, FloatingPointError("the model's rows or logits are not finite"))
        for share in lane.shares:
            # After all first tokens, which wait for nobody's books. What has ended is published already.
            if share.samples == 0 and share.request.admitted:
                publish(self._cache, share.request.sequence)

    def _commit(self, share: Share, sampled: int) -> None:
        request, state = share.request, share.request.sequence
        request.shares.remove(share)
        if share.samples:
            state.computed(int(share.slots[0]))
        else:
            rows = state.rows.filled(share.index, share.slots)
            rows.note_contexts(self._cache.table, share.index)
            state.rows = rows
            if share.samples is None:
                if request.params is None and not rows.num_pending:
                    self._end(request, EndReason.DONE)
                return
            self._admission.replaced_last(request)
        self._tell(request, share.samples, sampled)

    def _tell(self, request: LocalRequest, number: int, sampled: int) -> None:
        params, forced = request.params, request.forced(number)
        assert params is not None
        token = sampled if forced is None else forced
        request.sequence.appended(token)
        request.generated += 1
        stop = request.listener.token(token)
        if token in params.stop_ids:
            self._end(request, EndReason.STOP)
        elif stop:
            self._end(request, EndReason.LISTENER)
        elif request.generated >= params.max_tokens:
            self._end(request, EndReason.LENGTH)

    def _end(self, request: LocalRequest, reason: EndReason) -> None:
        publish(self._cache, request.sequence)
        self._admission.finish(request, reason, None)
