"""The bench on which the lab's arms run: an engine, its model and format, and requests whose logits are kept.

Owns nothing that outlives it: what an arm opens in the engine, it closes. Engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from leyline_proto.chat_format import ChatFormat
from leyline_server.engine.engine import EndReason, GenerateParams, RowEdit, RowReceipt, SequenceId
from leyline_server.engine.local import LocalEngine
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
        self._names = 0
        self._edits = 0

    @contextmanager
    def bench(self) -> Iterator[None]:
        """Logits are kept within; afterwards all that was opened is closed, and the caches hold nothing of it."""
        with recording(self.engine):
            try:
                yield
            finally:
                self.clear()

    def clear(self) -> None:
        """Closes what was opened and empties the engine's caches."""
        for sequence in self._opened:
            self.engine.close(sequence)
        self._opened.clear()
        self.engine.cache.clear_caches()

    def open(self, ids: Sequence[int] = ()) -> SequenceId:
        """A sequence in a namespace of its own: no arm finds another's rows in the prefix tree."""
        self._names += 1
        sequence = self.engine.open(("lab", str(self._names)))
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
        """Computes what is pending. Raises LabError."""
        asked = []
        for sequence in sequences:
            listener = Asked(RecordingSampler(SamplingParams()))
            self.engine.compute(sequence, listener)
            asked.append(listener)
        self._run(asked)

    def ask(self, questions: Sequence[Question]) -> list[Asked]:
        """All of them side by side. Raises LabError."""
        asked = []
        for question in questions:
            listener = Asked(RecordingSampler(SamplingParams()))
            count = max(question.max_tokens, len(question.forced))
            params = GenerateParams(count, stop_ids=self.format.stop_ids, force_ids=question.forced)
            request = self.engine.generate(question.sequence, params, listener)
            request.sampler = listener.sampler
            asked.append(listener)
        self._run(asked)
        return asked

    def _run(self, asked: Sequence[Asked]) -> None:
        while self.engine.step():
            pass
        for listener in asked:
            if listener.end not in (EndReason.DONE, EndReason.LENGTH, EndReason.STOP):
                raise LabError(f"a request ended as {listener.end}: {listener.error}")
