"""What the two sides have to agree on: everything but counts that depend on a tokenizer or a cache."""

from __future__ import annotations

from typing import Any

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from tests.contract.sides import Side


def attempt(side: Side, request: Any) -> tuple[Any, Any]:
    """(answer or None, what both sides must agree on)."""
    try:
        answer = side.send(request)
    except errors.Internal:
        raise
    except errors.APIError as error:
        return None, error.reason
    return answer, summary(answer)


def summary(answer: Any) -> Any:
    """What doesn't depend on a tokenizer or on what was cached."""
    if isinstance(answer, list):
        done = answer[-1].done
        invalid = [call.id for call in done.invalid_tool_calls]
        return ("generated", done.finish_reason, form(done.message), invalid, done.turn, done.version)
    out: list[Any] = [type(answer).__name__]
    out += [
        (receipt.edit_id, receipt.mode, list(receipt.removed_message_ids), receipt.influence_remains)
        for receipt in getattr(answer, "receipts", ())
    ]
    out += [[form(span) for span in getattr(answer, field, ())] for field in ("messages", "edited")]
    out += [getattr(answer, "version", None), bool(getattr(answer, "dropped_half_call", ""))]
    return out


def form(span: pb.MessageSpan) -> Any:
    """A message without its place: lengths of content, kinds of all parts."""
    content = (pb.PART_KIND_TEXT, pb.PART_KIND_REASONING)
    parts: list[Any] = []
    for part in span.parts:
        known = (part.kind, part.end - part.start if part.kind in content else -1, part.tool_call_id)
        if known[0] != pb.PART_KIND_MARKER or parts[-1:] != [known]:  # neighbouring markers are one
            parts.append(known)
    calls = [(call.id, call.name, call.arguments_json) for call in span.tool_calls]
    edits = list(span.edit_ids)
    return (span.message_id, span.role, parts, calls, span.tool_call_id, span.tool_name, span.turn, span.open, edits)


def shape(state: pb.SessionState) -> Any:
    edits = [(e.edit_id, e.mode, e.version, e.undone, e.undoable) for e in state.edits]
    texts = [span.text for span in state.messages]
    return [form(span) for span in state.messages], texts, edits, state.busy


def bare_length(state: pb.SessionState, message_id: str) -> int | None:
    """The length of a message that is text and nothing else, without markers; None for another one."""
    spans = [m for m in state.messages if m.message_id == message_id]
    if not spans or any(part.kind != pb.PART_KIND_TEXT for part in spans[0].parts):
        return None
    return spans[0].end - spans[0].start
