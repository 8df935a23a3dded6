"""What a policy or a user asks for: replace this by that. Names messages and tool calls, rarely token indices.

Owns the `Edit` value, its constructors, and how it becomes a directive of the contract.

    clear(result, "[cleared]")        a tool result's text gives way to a placeholder
    cut_text(result, 10, 14, "***")   characters of its text do
    remove(message)                   the whole message goes, markers included
    rerender(message, {..})           the message is rendered anew, with the same tool calls
    forget("e7")                      what an earlier edit removed: its influence goes too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leyline_proto import leyline_pb2 as pb
from leyline_sdk.mode import EditMode, Mode, Repair
from leyline_sdk.transcript import Message
from leyline_sdk.types import ToolCall
from leyline_sdk.wire import building, invalid, message_to_pb, repair_to_pb

MessageRef = str | Message
Replacement = str | Sequence[int] | Mapping[str, Any] | None
MessagePart = Literal["content", "reasoning", "whole"]


@dataclass(frozen=True, slots=True)
class InMessage:
    """A message's text, its reasoning, or all of it. `start` and `end` narrow it, in tokens of that part; `char_start`
    and `char_end`, in characters of its text."""

    message_id: str
    part: MessagePart = "content"
    start: int | None = None
    end: int | None = None
    char_start: int | None = None
    char_end: int | None = None

    @property
    def partial(self) -> bool:
        return self.start is not None or self.end is not None or self.in_chars

    @property
    def in_chars(self) -> bool:
        return self.char_start is not None or self.char_end is not None


@dataclass(frozen=True, slots=True)
class ResultOf:
    """The content of the result that answers a tool call."""

    tool_call_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of the session, as it was before this call's edits."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EarlierEdit:
    """Where an earlier edit's span stood. FORGET only, without a replacement."""

    edit_id: str


Target = InMessage | ResultOf | Span | EarlierEdit


@dataclass(frozen=True, slots=True)
class Edit:
    """`target` gives way to `replacement`.

    Attributes:
        replacement: text, token ids, a message dict (with a whole message as target), or None: pure deletion.
        mode: AMORTIZE keeps the KV of what follows; FORGET computes it again; a `Repair` keeps part of it.
        allow_sink: lets AMORTIZE touch the session's first tokens.
        label: shown in receipts; a policy's edits carry its name unless they set one.
    """

    target: Target
    replacement: Replacement = None
    mode: EditMode = Mode.AMORTIZE
    allow_sink: bool = False
    label: str = ""


def replace_content(
    target: MessageRef | ToolCall, replacement: str | Sequence[int], *, mode: EditMode = Mode.AMORTIZE, label: str = ""
) -> Edit:
    """A message's text, or the result of a tool call, gives way to text or ids."""
    return Edit(_content(target), replacement, mode, label=label)


def clear(
    target: MessageRef | ToolCall, placeholder: str | None = None, *, mode: EditMode = Mode.AMORTIZE, label: str = ""
) -> Edit:
    """A message's text, or the result of a tool call, goes. Markers and calls stay."""
    return Edit(_content(target), placeholder, mode, label=label)


def clear_reasoning(
    message: MessageRef, placeholder: str | None = None, *, mode: EditMode = Mode.AMORTIZE, label: str = ""
) -> Edit:
    """An assistant message's reasoning goes."""
    return Edit(InMessage(_id(message), "reasoning"), placeholder, mode, label=label)


def cut_content(
    message: MessageRef,
    start: int | None = None,
    end: int | None = None,
    replacement: str | None = None,
    *,
    mode: EditMode = Mode.AMORTIZE,
    label: str = "",
) -> Edit:
    """Tokens [start, end) of a message's text go; what stays keeps its KV. Raises IllegalCut, when applied, for an
    end inside a character."""
    return Edit(InMessage(_id(message), "content", start, end), replacement, mode, label=label)


def cut_text(
    message: MessageRef,
    start: int | None = None,
    end: int | None = None,
    replacement: str = "",
    *,
    part: Literal["content", "reasoning"] = "content",
    mode: EditMode = Mode.AMORTIZE,
    label: str = "",
) -> Edit:
    """Characters [start, end) of a message's text give way to text; None is the text's start or end.

    The tokens that they touch go, and what those held beside them comes back with the replacement. All cuts of one
    call, or of one policy's plan, count in the text as it was before; they are disjoint.
    """
    target = InMessage(_id(message), part, char_start=0 if start is None else start, char_end=end)
    return Edit(target, replacement or None, mode, label=label)


def remove(message: MessageRef, *, mode: EditMode = Mode.AMORTIZE, label: str = "") -> Edit:
    """The whole message goes. A call and its results go together or not at all."""
    return Edit(InMessage(_id(message), "whole"), None, mode, label=label)


def rerender(message: MessageRef, new: Mapping[str, Any], *, mode: EditMode = Mode.AMORTIZE, label: str = "") -> Edit:
    """The message is rendered anew from an OpenAI-style dict with the same role and tool-call ids."""
    return Edit(InMessage(_id(message), "whole"), dict(new), mode, label=label)


def remove_span(
    start: int,
    end: int,
    replacement: str | Sequence[int] | None = None,
    *,
    mode: EditMode = Mode.AMORTIZE,
    label: str = "",
) -> Edit:
    """Tokens [start, end) of the session give way."""
    return Edit(Span(start, end), replacement, mode, label=label)


def forget(edit_id: str, *, label: str = "") -> Edit:
    """Computes again from where an earlier edit's span stood: nothing in the cache comes from it any more."""
    return Edit(EarlierEdit(edit_id), None, Mode.FORGET, label=label)


def _id(message: MessageRef) -> str:
    return message if isinstance(message, str) else message.id


def _content(target: MessageRef | ToolCall) -> Target:
    return ResultOf(target.id) if isinstance(target, ToolCall) else InMessage(_id(target))


def to_directive(edit: Edit) -> pb.Directive:
    """Raises InvalidArgument for what doesn't fit the wire."""
    with building():
        if not isinstance(edit.mode, Repair):
            Mode(edit.mode)  # raises for what is none
        directive = pb.Directive(
            mode=pb.MODE_FORGET if edit.mode == Mode.FORGET else pb.MODE_AMORTIZE,
            repair=repair_to_pb(edit.mode) if isinstance(edit.mode, Repair) else None,
            allow_sink=edit.allow_sink,
            label=edit.label,
        )
        _set_target(directive, edit.target)
        if isinstance(edit.replacement, str):
            directive.text = edit.replacement
        elif isinstance(edit.replacement, Mapping):
            directive.rendered.CopyFrom(_rendered(edit.replacement))
        elif edit.replacement is not None:
            directive.token_ids.SetInParent()
            directive.token_ids.ids.extend(edit.replacement)
    return directive


def _set_target(directive: pb.Directive, target: Target) -> None:
    if isinstance(target, InMessage):
        directive.message.message_id = target.message_id
        directive.message.whole = target.part == "whole"
        directive.message.reasoning = target.part == "reasoning"
        if target.start is not None:
            directive.message.content_start = target.start
        if target.end is not None:
            directive.message.content_end = target.end
        if target.char_start is not None:
            directive.message.char_start = target.char_start
        if target.char_end is not None:
            directive.message.char_end = target.char_end
    elif isinstance(target, ResultOf):
        directive.tool_call_id = target.tool_call_id
    elif isinstance(target, Span):
        directive.span.start = target.start
        directive.span.end = target.end
    elif isinstance(target, EarlierEdit):
        directive.edit_id = target.edit_id
    else:
        raise invalid(f"an edit's target can't be a {type(target).__name__}", field="target")


def _rendered(message: Mapping[str, Any]) -> pb.Message:
    proto = message_to_pb(message)
    proto.message_id = ""  # it keeps the id that it has
    return proto
