"""A session as a plain list, and failures to inject: what the state machine compares the engine with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from leyline_proto.refusal import Refusal
from leyline_server.cache.slots import OutOfSlots
from leyline_server.engine.admission import Admission
from leyline_server.engine.engine import EndReason
from tests.engine.harness import VOCAB, Run


@dataclass
class Model:
    """A session as a plain list, its AMORTIZEs as (edit id, where R stands, R's length, what was cut).

    `honest`: never AMORTIZEd, so that every row it has is exact.
    """

    ids: list[int] = field(default_factory=list)
    edits: list[tuple[str, int, int, list[int]]] = field(default_factory=list)
    run: Run | None = None
    honest: bool = True

    def splice(self, cuts: list[tuple[int, int, list[int], str | None]]) -> None:
        """Cuts in the coordinates before the call; an edit whose R is touched can't be undone any more."""
        for start, end, ids, edit_id in sorted(cuts, key=lambda cut: cut[:2], reverse=True):
            cut, self.ids[start:end] = self.ids[start:end], ids
            shift, moved = len(ids) - (end - start), []
            for other, at, inserted, was in self.edits:
                if at >= end:
                    moved.append((other, at + shift, inserted, was))
                elif at + inserted <= start:
                    moved.append((other, at, inserted, was))
            self.edits = moved
            if edit_id is not None:
                self.honest = False
                self.edits.append((edit_id, start, len(ids), cut))


class ToldRun(Run):
    """Keeps its session's list in step with what it is told."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def token(self, token_id: int) -> bool:
        assert 0 <= token_id < VOCAB
        self.model.ids.append(token_id)
        return super().token(token_id)

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        super().ended(reason, error)
        assert (reason is EndReason.FAILED) == (error is not None)
        self.model.run = None


@contextmanager
def failing(module: Any, times: int) -> Iterator[None]:
    """The next `times` forwards of a module raise."""
    left = [None] * times

    def fail(module: Any, args: Any) -> None:
        if left:
            left.pop()
            raise RuntimeError("injected")

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def scarce_slots(after: int) -> Iterator[None]:
    """Every allocation but the first `after` finds no slots."""
    allocate, calls = Admission.allocate, []

    def scarce(admission: Admission, positions: Any) -> Any:
        calls.append(positions)
        if len(calls) > after:
            raise OutOfSlots(len(positions), 0)
        return allocate(admission, positions)

    with patch.object(Admission, "allocate", scarce):
        yield
