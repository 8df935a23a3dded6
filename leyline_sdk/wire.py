"""Between the public values and the wire messages, both ways.

Owns what an OpenAI-style dict means here, and refuses every key it would otherwise drop. Nothing else in the
SDK reads a MessageSpan or fills a Message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import reports as r
from leyline_sdk import types as t
from leyline_sdk.error_table import api_error
from leyline_sdk.mode import Mode, Repair
from leyline_sdk.reuse import Reuse
from leyline_sdk.transcript import Message, Part, Transcript

Value = TypeVar("Value")
ROLES: Final = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
    "raw": pb.ROLE_RAW,
}
_ROLE_NAMES: Final = {number: name for name, number in ROLES.items()}
_MESSAGE_KEYS: Final = {"role", "content", "tool_calls", "tool_call_id", "id", "name", "reasoning"}


def invalid(message: str, **metadata: str) -> Exception:
    """The error that the server would give, for what can't even be sent."""
    return api_error("INVALID_ARGUMENT", message, reason="INVALID_ARGUMENT", metadata=metadata)


@contextmanager
def building() -> Iterator[None]:
    """Turns what protobuf says of a value it can't hold into InvalidArgument."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise invalid(f"text holds a lone surrogate at index {error.start}: it is not Unicode", field="text") from error
    except (TypeError, ValueError) as error:
        raise invalid(f"a value does not fit its field: {error}") from error


# ---------------------------------------------------------------- to the wire


def messages_to_pb(messages: t.MessageLike | Sequence[t.MessageLike]) -> list[pb.Message]:
    """One message or several. A str is a user message."""
    if isinstance(messages, str | Mapping):
        messages = [messages]
    if not isinstance(messages, Sequence):
        raise invalid(
            f"messages are a str, a dict or a list of them, not a {type(messages).__name__}", field="messages"
        )
    return [message_to_pb(message) for message in messages]


def message_to_pb(message: t.MessageLike) -> pb.Message:
    """Raises InvalidArgument for an unknown role, key or shape: nothing is dropped silently."""
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise invalid(f"a message is a str or a dict, not a {type(message).__name__}", field="messages")
    role = message.get("role")
    if role not in ROLES or role == "raw":
        raise invalid(f"role {role!r} is none of system, user, assistant, tool", field="role")
    unknown = sorted(key for key, value in message.items() if key not in _MESSAGE_KEYS and value)
    if unknown:
        raise invalid(f"a message has no {', '.join(map(repr, unknown))}", field=unknown[0])
    if message.get("name") and role != "tool":
        raise invalid("only a tool message has a name", field="name")
    with building():
        return pb.Message(
            role=ROLES[role],
            content=content_text(message.get("content")),
            tool_calls=[_call_to_pb(call) for call in message.get("tool_calls") or ()],
            tool_call_id=message.get("tool_call_id") or "",
            message_id=message.get("id") or "",
            reasoning=message.get("reasoning") or "",
        )


def tool_message(call_id: str, content: str) -> dict[str, str]:
    """The message that answers a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def content_text(content: Any) -> str:
    """Text of a message's content: a str, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise invalid("content parts other than text are not supported", field="content")
            texts.append(part["text"])
        return "".join(texts)
    raise invalid(f"content is a str or a list of text parts, not a {type(content).__name__}", field="content")


def _call_to_pb(call: t.ToolCall | Mapping[str, Any]) -> pb.ToolCall:
    if isinstance(call, t.ToolCall):
        return pb.ToolCall(id=call.id, name=call.name, arguments_json=_json(call.arguments))
    if not isinstance(call, Mapping):
        raise invalid(f"a tool call is a ToolCall or a dict, not a {type(call).__name__}", field="tool_calls")
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise invalid('a tool call is {"id", "type": "function", "function": {..}}', field="tool_calls")
    return pb.ToolCall(
        id=call.get("id") or "", name=function.get("name") or "", arguments_json=_json(function.get("arguments"))
    )


def _json(arguments: Any) -> str:
    """Arguments as JSON text. Text passes as it is: the server checks it."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False, separators=(",", ":"))


def tool_to_pb(tool: t.ToolLike) -> pb.Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise invalid("a tool is a dict with a name, a description and parameters", field="tools")
    with building():
        return pb.Tool(
            name=function["name"],
            description=function.get("description") or "",
            parameters_json=_json(function.get("parameters")),
        )


def repair_to_pb(repair: Repair) -> pb.Repair:
    return pb.Repair(share=repair.share) if repair.share is not None else pb.Repair(first=repair.first or 0)


def reuse_to_pb(reuse: Reuse) -> pb.Reuse.ValueType:
    return pb.Reuse.Value(f"REUSE_{reuse}")


# ---------------------------------------------------------------- from the wire


def _same(cls: type[Value], proto: Proto, **others: Any) -> Value:
    """A value whose fields have the names of the proto's; `others` are those that don't."""
    same = {f.name: getattr(proto, f.name) for f in fields(cls) if f.name not in others}  # type: ignore[arg-type]
    return cls(**same, **others)


def call_from_pb(call: pb.ToolCall) -> t.ToolCall:
    return t.ToolCall(call.id, call.name, json.loads(call.arguments_json or "{}"))


def message_from_pb(span: pb.MessageSpan, content: bool = False) -> Message:
    """`content`: the span was asked for with its text; else text that is left out is unknown."""
    parts = tuple(
        Part(pb.PartKind.Name(part.kind).removeprefix("PART_KIND_").lower(), part.end - part.start, part.tool_call_id)
        for part in span.parts
    )
    has_text = any(part.length for part in parts if part.kind in ("text", "reasoning"))
    return Message(
        id=span.message_id,
        role=_ROLE_NAMES.get(span.role, "raw"),
        text=span.text,
        reasoning=span.reasoning,
        tool_calls=tuple(map(call_from_pb, span.tool_calls)),
        tool_call_id=span.tool_call_id,
        tool_name=span.tool_name,
        parts=parts,
        start=span.start,
        turn=span.turn,
        edit_ids=tuple(span.edit_ids),
        undone_ids=tuple(span.undone_edit_ids),
        open=span.open,
        text_known=content or not has_text or bool(span.text or span.reasoning),
    )


def appended_from_pb(spans: Sequence[pb.MessageSpan], sent: Sequence[pb.Message], raw_text: str = "") -> list[Message]:
    """Spans of an append's answer, with the content that was sent. Results may stand in another order than sent."""
    left = list(sent)
    out: list[Message] = []
    for span in spans:
        message = message_from_pb(span)
        match = next((m for m in left if _is_sent(span, m)), None)
        if match is not None:
            left.remove(match)
            message = replace(message, text=match.content, reasoning=match.reasoning, text_known=True)
        elif raw_text and span.role == pb.ROLE_RAW:
            message = replace(message, text=raw_text, text_known=True)
        out.append(message)
    return out


def _is_sent(span: pb.MessageSpan, message: pb.Message) -> bool:
    return (
        span.role == message.role
        and span.tool_call_id == message.tool_call_id
        and message.message_id in ("", span.message_id)
    )


def transcript_from_pb(state: pb.SessionState, pinned: frozenset[str] = frozenset()) -> Transcript:
    """From a state with its content."""
    messages = [message_from_pb(span, content=True) for span in state.messages]
    return Transcript(pinned=pinned).placed(messages, version=state.version, turn=state.turn)


def receipt_from_pb(receipt: pb.Receipt) -> r.Receipt:
    return _same(
        r.Receipt,
        receipt,
        mode=mode_from_pb(receipt.mode),
        held_elsewhere=tuple(receipt.held_elsewhere),
        removed_message_ids=tuple(receipt.removed_message_ids),
    )


def mode_from_pb(mode: pb.Mode.ValueType) -> Mode:
    return Mode.FORGET if mode == pb.MODE_FORGET else Mode.AMORTIZE


def reuse_from_pb(reuse: pb.Reuse.ValueType) -> Reuse:
    """A server that doesn't say reuses prefixes."""
    return Reuse(pb.Reuse.Name(reuse or pb.REUSE_PREFIX).removeprefix("REUSE_"))


def cache_from_pb(cache: pb.CacheReport) -> r.CacheReport:
    return _same(
        r.CacheReport,
        cache,
        first_divergence=cache.first_divergence if cache.HasField("first_divergence") else None,
        reason=pb.CacheReport.Reason.Name(cache.reason).removeprefix("REASON_"),
        content_spans=tuple((span.start, span.end) for span in cache.content_spans),
    )


def reply_from_pb(done: pb.GenerateDone, applied_edits: tuple[r.AppliedEdit, ...]) -> t.Reply:
    return t.Reply(
        text=done.message.text,
        reasoning=done.message.reasoning,
        tool_calls=tuple(map(call_from_pb, done.message.tool_calls)),
        invalid_tool_calls=tuple(_same(t.InvalidToolCall, call) for call in done.invalid_tool_calls),
        finish_reason=t.FinishReason(pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_")),
        applied_edits=applied_edits,
        usage=_same(r.Usage, done.usage),
        cache=cache_from_pb(done.cache),
        message_id=done.message.message_id,
        stop_string=done.stop_string,
    )


def session_info_from_pb(state: pb.SessionState) -> t.SessionInfo:
    return _same(
        t.SessionInfo,
        state,
        id=state.session_id,
        reuse=reuse_from_pb(state.reuse),
        unanswered_call_ids=tuple(state.unanswered_call_ids),
        edits=tuple(_same(t.EditInfo, entry, mode=mode_from_pb(entry.mode)) for entry in state.edits),
        token_ids=tuple(state.token_ids),
    )


def summary_from_pb(summary: pb.SessionSummary) -> t.SessionSummary:
    return _same(t.SessionSummary, summary, id=summary.session_id)


def server_info_from_pb(info: pb.GetServerInfoResponse) -> r.ServerInfo:
    return _same(
        r.ServerInfo,
        info.model,
        model=info.model.name,
        server_version=info.server_version,
        limits=_same(r.Limits, info.limits),
        pool=_same(r.PoolStats, info.pool),
        features={s.feature: r.Feature(s.feature, s.supported, s.reason) for s in info.supports},
        canary=_canary_from_pb(info.canary) if info.HasField("canary") else None,
    )


def _canary_from_pb(canary: pb.Canary) -> r.Canary:
    agreement = canary.agreement if canary.HasField("agreement") else None
    return _same(r.Canary, canary, agreement=agreement, failures=tuple(canary.failures))
