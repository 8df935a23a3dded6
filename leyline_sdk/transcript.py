"""The session's messages as this side mirrors them: an immutable value that policies read.

Owns order, lengths, ages and what is protected from policies. It is updated from the spans that each answer
returns; it does not know transports. A message stores lengths; positions are sums.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leyline_sdk.types import ToolCall


@dataclass(frozen=True, slots=True)
class Part:
    """`length` tokens of one kind: "marker", "text", "reasoning" or "call" (one tool call, never cut through)."""

    kind: str
    length: int
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a session.

    Attributes:
        role: "system", "user", "assistant", "tool", or "raw" (text or ids without a role).
        text: its content as it stands now, edits included. Empty with `text_known` False until a refresh.
        start: index of its first token.
        turn: the session's turn when it was appended.
        age: Generates finished since then.
        edit_ids: the edits that changed it, oldest first.
        undone_ids: the edits of it that were undone, oldest first.
        open: a Generate was cut short here; the next append closes it.
    """

    id: str
    role: str
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    parts: tuple[Part, ...] = ()
    start: int = 0
    turn: int = 0
    age: int = 0
    edit_ids: tuple[str, ...] = ()
    undone_ids: tuple[str, ...] = ()
    open: bool = False
    text_known: bool = True

    @property
    def num_tokens(self) -> int:
        """Of the whole message, markers and calls included."""
        return sum(part.length for part in self.parts)

    @property
    def content_tokens(self) -> int:
        """Of its text alone."""
        return sum(part.length for part in self.parts if part.kind == "text")

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def edited(self) -> bool:
        """Whether any edit changed it: any policy's, or one by hand. No sign that a certain policy is done with it:
        one that only redacted a word leaves it as long as it was. See `Policy.plan`."""
        return bool(self.edit_ids)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI-style, with `id`. `reasoning` only where there is some."""
        out: dict[str, Any] = {"role": self.role, "content": self.text, "id": self.id}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [call_dict(call) for call in self.tool_calls]
        if self.role == "tool":
            out["tool_call_id"] = self.tool_call_id
            out["name"] = self.tool_name
        return out


def call_dict(call: ToolCall) -> dict[str, Any]:
    """A tool call OpenAI-style: its arguments are JSON text."""
    arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Transcript:
    """The messages in order. They tile [0, num_tokens).

    `pinned` are messages whose edit was undone by hand: policies leave them alone.
    """

    messages: tuple[Message, ...] = ()
    version: int = 0
    turn: int = 0
    pinned: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        """Messages, not tokens."""
        return len(self.messages)

    @property
    def num_tokens(self) -> int:
        return sum(message.num_tokens for message in self.messages)

    def get(self, message_id: str) -> Message | None:
        return next((message for message in self.messages if message.id == message_id), None)

    def result_of(self, call_id: str) -> Message | None:
        """The tool message that answers the call."""
        return next((m for m in reversed(self.messages) if m.role == "tool" and m.tool_call_id == call_id), None)

    def call_of(self, result: Message) -> ToolCall | None:
        """The call that a tool message answers."""
        return next((c for m in self.messages for c in m.tool_calls if c.id == result.tool_call_id), None)

    def of_role(self, role: str) -> list[Message]:
        return [message for message in self.messages if message.role == role]

    def unanswered(self) -> list[ToolCall]:
        """Calls without a result, in order."""
        answered = {message.tool_call_id for message in self.messages if message.role == "tool"}
        return [call for message in self.messages for call in message.tool_calls if call.id not in answered]

    def to_messages(self) -> list[dict[str, Any]]:
        """OpenAI-style dicts, with ids."""
        return [message.to_dict() for message in self.messages]

    def protected(self) -> dict[str, str]:
        """Ids of the messages that no policy may edit, with why."""
        out = {m.id: "a system message" for m in self.messages if m.role == "system"}
        users = self.of_role("user")
        if users:
            out[users[-1].id] = "the last user message"
            out[users[0].id] = "the task: the first user message"
        out.update({m.id: "still open: the model has not finished it" for m in self.messages if m.open})
        return out

    # ------------------------------------------------------------ what answers change

    def placed(self, messages: Iterable[Message], *, version: int | None = None, turn: int | None = None) -> Transcript:
        """The transcript of these messages, each with its start and age set anew."""
        new_turn = self.turn if turn is None else turn
        out: list[Message] = []
        start = 0
        for message in messages:
            out.append(replace(message, start=start, age=max(0, new_turn - message.turn)))
            start = out[-1].end
        return replace(self, messages=tuple(out), version=self.version if version is None else version, turn=new_turn)

    def appended(self, messages: Sequence[Message]) -> Transcript:
        """With these at the end; one that is there already is replaced: an append closes an open message."""
        new = {message.id: message for message in messages}
        kept = [_with_content_of(message, new.pop(message.id, None)) for message in self.messages]
        return self.placed([*kept, *new.values()])

    def after_edit(
        self, edited: Sequence[Message], removed_ids: Iterable[str], texts: Mapping[str, Message], version: int
    ) -> Transcript:
        """With `edited` as they stand now. `texts` are the messages as planned, for content the answer leaves out."""
        gone = set(removed_ids)
        new = {message.id: message for message in edited}
        out: list[Message] = []
        for message in self.messages:
            if message.id in new:
                out.append(_planned(new.pop(message.id), texts.get(message.id)))
            elif message.id not in gone:
                out.append(message)
        for message in sorted(new.values(), key=lambda m: m.start):  # an R in the place of several messages
            out.insert(_index_at(out, message.start), message)
        return self.placed(out, version=version)


def _with_content_of(old: Message, new: Message | None) -> Message:
    """`new` with the content that `old` has, unless it brings its own."""
    if new is None:
        return old
    if new.text or new.reasoning:
        return new
    return replace(new, text=old.text, reasoning=old.reasoning, text_known=old.text_known)


def _planned(now: Message, planned: Message | None) -> Message:
    if now.text_known:
        return now
    if planned is None:
        return now
    return replace(now, text=planned.text, reasoning=planned.reasoning, text_known=planned.text_known)


def _index_at(messages: Sequence[Message], start: int) -> int:
    position = 0
    for index, message in enumerate(messages):
        if position >= start:
            return index
        position += message.num_tokens
    return len(messages)
