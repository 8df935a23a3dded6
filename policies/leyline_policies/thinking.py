"""Clears the reasoning of older turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline_policies.batching import Batching, Candidate
from leyline_policies.facts import count_parts, tokens_of
from leyline_sdk.edits import Edit, clear_reasoning, rerender
from leyline_sdk.policy import PolicyContext
from leyline_sdk.transcript import Message


@dataclass(frozen=True)
class ClearThinking(Batching):
    """The newest `keep` messages with reasoning keep it, older ones lose it. Texts and calls stay. Knobs: Batching."""

    keep: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("keep", self.keep, 0)

    def candidates(self, context: PolicyContext) -> Iterable[Candidate]:
        head = self.head(context)
        editable = {message.id for message in context.editable} - head
        thinking = [message for message in context.transcript if tokens_of(message, "reasoning")]
        for message in thinking[: max(0, len(thinking) - self.keep)]:
            tokens = tokens_of(message, "reasoning")
            if message.id in editable and tokens >= self.min_tokens:
                edit = self._edit(message)
                if edit is not None:
                    yield Candidate((edit,), tokens)

    def _edit(self, message: Message) -> Edit | None:
        if count_parts(message, "reasoning") == 1:
            return clear_reasoning(message, mode=self.mode)
        if not message.text_known or count_parts(message, "call") != len(message.tool_calls):
            return None
        return rerender(message, {**message.to_dict(), "reasoning": ""}, mode=self.mode)
