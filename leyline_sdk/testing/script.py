"""What the fake's model says: a list of replies, taken in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_proto.refusal import Refusal
from leyline_sdk.testing.byte_format import ByteFormat, Special
from leyline_sdk.types import ToolCall


@dataclass(frozen=True, slots=True)
class Say:
    """A reply: reasoning, then text, then tool calls, whose ids the server makes."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


Scripted = str | ToolCall | Say | Refusal | Sequence[int]
"""Text, a call, both, an error instead of a reply, or raw token ids (END is not added)."""

ScriptedReply = Scripted | Callable[[list[dict[str, Any]]], Scripted]
"""A callable gets the session's messages, OpenAI-style."""


def call(name: str, **arguments: Any) -> ToolCall:
    """A tool call to be said."""
    return ToolCall("", name, arguments)


class Script:
    """The replies still to come, then `otherwise` for ever."""

    def __init__(self, replies: Iterable[ScriptedReply], otherwise: ScriptedReply = "ok") -> None:
        self._left = list(replies)
        self._otherwise = otherwise

    def next_ids(self, messages: Callable[[], list[dict[str, Any]]], format: ByteFormat) -> list[int]:
        """The next reply as ids. Raises the Refusal that stands in its place."""
        reply = self._left.pop(0) if self._left else self._otherwise
        if callable(reply):
            reply = reply(messages())
        if isinstance(reply, Refusal):
            raise reply
        if isinstance(reply, str):
            reply = Say(reply)
        elif isinstance(reply, ToolCall):
            reply = Say(tool_calls=(reply,))
        if not isinstance(reply, Say):
            return list(reply)
        out: list[int] = []
        if reply.reasoning:
            out += [Special.THINK, *format.encode(reply.reasoning), Special.END_THINK]
        out += format.encode(reply.text)
        for tool_call in reply.tool_calls:
            out += format.call_ids(tool_call.name, json.dumps(tool_call.arguments))
        return [*out, Special.END]
