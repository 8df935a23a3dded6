"""Removes the middle of the history: the shape of StreamingLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline_policies.batching import Batching, Candidate
from leyline_policies.facts import exchanges
from leyline_sdk.edits import remove
from leyline_sdk.planning import pairs_of
from leyline_sdk.policy import PolicyContext


@dataclass(frozen=True)
class SlidingWindow(Batching):
    """The first `keep_first` and the last `window` exchanges stay, those between go, calls with their results.

    An exchange is an assistant message with what led to it and the results of its calls. System messages, the task
    and the last user message stay wherever they stand. Knobs: Batching.
    """

    keep_first: int = 1
    window: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window", self.window, 1)

    def candidates(self, context: PolicyContext) -> Iterable[Candidate]:
        steps = exchanges(context.transcript)
        editable = {message.id for message in context.editable}
        for step in steps[self.keep_first : max(self.keep_first, len(steps) - self.window)]:
            going = [m for m in step if m.id in editable and pairs_of(context.transcript, [m.id]) <= editable]
            tokens = sum(message.num_tokens for message in going)
            if going and tokens >= self.min_tokens:
                yield Candidate(tuple(remove(message, mode=self.mode) for message in going), tokens)
