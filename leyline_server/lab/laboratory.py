"""The bench on which the lab's arms run: an engine, its model and format, and requests whose logits are kept.

Owns nothing that outlives it: what an arm opens in the engine, it closes. Engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from leyline_kernels import RotaryLayout
from leyline_proto.chat_format import ChatFormat
from leyline_proto.refusal import Refusal
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.cache.slots import Slots
from leyline_server.engine.engine import (
    EndReason,
    GenerateParams,
    MissReason,
    Namespace,
    RowEdit,
    RowReceipt,
    SequenceId,
)
from leyline_server.engine.local import LocalEngine
from leyline_server.engine.requests import LocalRequest
from leyline_server.lab.recording import Asked, RecordingSampler, recording
from leyline_server.model.load import LoadedModel
from leyline_server.sampling import SamplingParams


class LabError(RuntimeError):
    """The model failed under the lab, or its bounds are too small for a scene."""


@dataclass(frozen=True, slots=True)
class Question:
    """Goes on from a sequence for up to `max_tokens` greedy tokens, or along `forced` ones."""

    sequence: SequenceId
    max_tokens: int = 1
    forced: tuple[int, ...] = ()


class Lab:
    """A server's engine and format, or those made for the lab alone."""

    def __init__(self, engine: LocalEngine, format: ChatFormat, model: LoadedModel) -> None:
        self.engine, self.format, self.model = engine, format, model
        self._opened: set[SequenceId] = set()
        self._requests: list[LocalRequest] = []
        self._names = 0
        self._edits = 0

    @property
    def layout(self) -> RotaryLayout:
        """How keys are turned. Raises LabError when they can't be."""
        rotary = self.model.rotary
        if rotary.layout is None:
            raise LabError(rotary.reason)
        return rotary.layout

    def on_device(self, slots: Slots) -> Tensor:
        """Slots as an index [n] int64 into the pool."""
        return torch.from_numpy(slots.astype(np.int64)).to(self.model.device)

    @contextmanager
    def bench(self) -> Iterator[None]:
        """Logits are kept within; afterwards all that was opened is closed, and the caches hold nothing of it."""
        with recording(self.engine):
            try:
                yield
            finally:
                self.clear()

    def clear(self) -> None:
        """Ends what runs, closes what was opened and empties the engine's caches."""
        for request in self._requests:
            request.cancel()
        self._finish()
        for sequence in self._opened:
            self.engine.close(sequence)
        self._opened.clear()
        self.engine.cache.clear_caches()

    def namespace(self) -> Namespace:
        """One in which nobody has computed anything."""
        self._names += 1
        return ("lab", str(self._names))

    def open(self, ids: Sequence[int] = (), namespace: Namespace | None = None, reuse: Reuse = PREFIX) -> SequenceId:
        """A sequence, in a namespace of its own unless one is given: there it finds nobody's rows but those of its
        forks."""
        sequence = self.engine.open(namespace or self.namespace(), reuse)
        self._opened.add(sequence)
        self.engine.append(sequence, ids)
        return sequence

    def fork(self, sequence: SequenceId) -> SequenceId:
        twin = self.engine.fork(sequence)
        self._opened.add(twin)
        return twin

    def close(self, sequence: SequenceId) -> None:
        self._opened.remove(sequence)
        self.engine.close(sequence)

    def splice(self, sequence: SequenceId, edit: RowEdit) -> RowReceipt:
        (receipt,) = self.engine.splice(sequence, [edit])
        return receipt

    def edit_id(self) -> str:
        self._edits += 1
        return f"lab{self._edits}"

    def prefill(self, *sequences: SequenceId) -> None:
        """Computes what is pending. Raises LabError, and a Refusal where the server's bounds are too small."""
        asked = [Asked(RecordingSampler(SamplingParams())) for _ in sequences]
        for sequence, listener in zip(sequences, asked, strict=True):
            self._submit(partial(self.engine.compute, sequence, listener))
        self._run(asked)

    def ask(self, questions: Sequence[Question]) -> list[Asked]:
        """All of them side by side. Raises LabError, and a Refusal where the server's bounds are too small."""
        asked = [Asked(RecordingSampler(SamplingParams())) for _ in questions]
        for question, listener in zip(questions, asked, strict=True):
            count = max(question.max_tokens, len(question.forced))
            params = GenerateParams(count, stop_ids=self.format.stop_ids, force_ids=question.forced)
            request = self._submit(partial(self.engine.generate, question.sequence, params, listener))
            request.sampler = listener.sampler
        self._run(asked)
        return asked

    def _submit(self, submit: Callable[[], LocalRequest]) -> LocalRequest:
        """Queues a request; where the queue is full, the ones before it are computed first."""
        while True:
            try:
                request = submit()
            except Refusal as refusal:
                if refusal.reason != "QUEUE_FULL" or not self.engine.step():
                    raise
            else:
                self._requests.append(request)
                return request

    def _run(self, asked: Sequence[Asked]) -> None:
        self._finish()
        for listener in asked:
            if listener.end not in (EndReason.DONE, EndReason.LENGTH, EndReason.STOP):
                raise LabError(f"a request ended as {listener.end}: {listener.error}")
            if listener.report is not None and listener.report.reason is MissReason.EVICTED:
                # Rows that were evicted are computed honestly: an AMORTIZE would be measured that is none.
                raise LabError(f"the pool of {self.engine.stats().num_slots} slots is too small: rows were evicted")

    def _finish(self) -> None:
        while self.engine.step():
            pass
        self._requests.clear()
