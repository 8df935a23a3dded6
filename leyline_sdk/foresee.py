"""What the transcript will look like after an edit, before the server has made it. Pure.

Owns the virtual transcript: texts are exact where the edit gives them, token counts of an R are estimates, and
starts stay those of the real session, so that spans keep their meaning within one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from leyline_sdk.edits import EarlierEdit, Edit, InMessage, ResultOf, Span
from leyline_sdk.policy import estimate_tokens
from leyline_sdk.text_cuts import TextCut
from leyline_sdk.transcript import Message, Part, Transcript
from leyline_sdk.wire import call_from_pb, message_to_pb

PLANNED = "planned"  # stands among edit_ids until the server has given the real one


def touched(edit: Edit, transcript: Transcript) -> list[Message] | None:
    """The messages that the edit would change; None when it names one that is not there."""
    target = edit.target
    if isinstance(target, InMessage):
        message = transcript.get(target.message_id)
    elif isinstance(target, ResultOf):
        message = transcript.result_of(target.tool_call_id)
    elif isinstance(target, Span):
        return [m for m in transcript if m.start < target.end and target.start < m.end]
    else:
        return []
    return None if message is None else [message]


def in_message(edit: Edit, transcript: Transcript) -> InMessage | None:
    """The edit's target as a part of one message, if it is one."""
    if isinstance(edit.target, InMessage):
        return edit.target
    if isinstance(edit.target, ResultOf):
        result = transcript.result_of(edit.target.tool_call_id)
        return InMessage(result.id) if result is not None else None
    return None


def changes_nothing(edit: Edit, transcript: Transcript) -> bool:
    """Whether the transcript is already as the edit would have it: so a policy can't fire for ever."""
    target = in_message(edit, transcript)
    message = transcript.get(target.message_id) if target is not None else None
    if target is None or message is None:
        return isinstance(edit.target, Span) and edit.target.start == edit.target.end and not edit.replacement
    if isinstance(edit.replacement, Mapping):
        after = _rerendered(message, edit.replacement)
        return message.text_known and (after.text, after.reasoning, after.tool_calls) == (
            message.text,
            message.reasoning,
            message.tool_calls,
        )
    if target.part == "whole":
        return False
    if target.in_chars:
        text = text_of(message, target)
        one = text_cut(edit, target, len(text))
        return message.text_known and one.of(text) == text
    length = sum(part.length for part in message.parts if part.kind == _kind(target))
    if not edit.replacement:
        return (target.start or 0) >= (length if target.end is None else min(target.end, length))
    return not target.partial and message.text_known and edit.replacement == text_of(message, target)


def text_of(message: Message, target: InMessage) -> str:
    """The text of the part that the target names."""
    return message.reasoning if target.part == "reasoning" else message.text


def text_cut(edit: Edit, target: InMessage, length: int) -> TextCut:
    """An edit of characters as a cut of its part's text, which has `length` of them."""
    end = length if target.char_end is None else target.char_end
    return TextCut(target.char_start or 0, end, edit.replacement if isinstance(edit.replacement, str) else "")


def foresee_all(transcript: Transcript, edits: Iterable[Edit]) -> Transcript:
    """The transcript after the edits of one call, which count in the texts as they are before it."""

    def last_first(edit: Edit) -> int:
        return -(edit.target.char_start or 0) if isinstance(edit.target, InMessage) else 0

    for edit in sorted(edits, key=last_first):
        transcript = foresee(transcript, edit)
    return transcript


def foresee(transcript: Transcript, edit: Edit) -> Transcript:
    """The transcript after the edit."""
    if isinstance(edit.target, EarlierEdit):
        return transcript
    if isinstance(edit.target, Span):
        return _after_span(transcript, edit, edit.target)
    target = in_message(edit, transcript)
    out: list[Message] = []
    for message in transcript:
        if target is None or message.id != target.message_id:
            out.append(message)
        elif target.part == "whole" and edit.replacement is None:
            continue
        else:
            changed = _changed(message, edit, target, transcript)
            out.append(replace(changed, edit_ids=(*message.edit_ids, PLANNED)))
    return replace(transcript, messages=tuple(out))


def _changed(message: Message, edit: Edit, target: InMessage, transcript: Transcript) -> Message:
    if isinstance(edit.replacement, Mapping):
        return _rerendered(message, edit.replacement)
    text = edit.replacement if isinstance(edit.replacement, str) else None
    tokens = _tokens(edit, transcript)
    known = edit.replacement is None or text is not None
    if target.part == "whole":
        return replace(
            message, text=text or "", reasoning="", tool_calls=(), parts=(Part("text", tokens),), text_known=known
        )
    if target.in_chars:
        return _after_text_cut(message, edit, target, tokens)
    kind = _kind(target)
    parts: list[Part] = []
    for part in message.parts:
        if part.kind == kind:
            end = part.length if target.end is None else min(target.end, part.length)
            part = Part(kind, max(0, part.length - (end - (target.start or 0))) + tokens)
        parts.append(part)
    if target.partial:
        return replace(message, parts=tuple(parts), text_known=False)
    if target.part == "reasoning":
        return replace(message, parts=tuple(parts), reasoning=text or "", text_known=message.text_known and known)
    return replace(message, parts=tuple(parts), text=text or "", text_known=known)


def _after_text_cut(message: Message, edit: Edit, target: InMessage, tokens: int) -> Message:
    text = text_of(message, target)
    one = text_cut(edit, target, len(text))
    left = 1 - (one.end - one.start) / len(text) if text else 1.0
    parts = tuple(
        replace(part, length=max(0, round(part.length * left) + tokens)) if part.kind == _kind(target) else part
        for part in message.parts
    )
    if target.part == "reasoning":
        return replace(message, parts=parts, reasoning=one.of(text))
    return replace(message, parts=parts, text=one.of(text))


def _rerendered(message: Message, new: Mapping[str, object]) -> Message:
    proto = message_to_pb(new)
    old_text, old_calls = message.text, message.tool_calls
    calls = tuple(call_from_pb(call) for call in proto.tool_calls)
    scale = {
        "text": _ratio(proto.content, old_text),
        "reasoning": _ratio(proto.reasoning, message.reasoning),
        "call": _ratio(str([dict(c.arguments) for c in calls]), str([dict(c.arguments) for c in old_calls])),
    }
    parts = tuple(replace(part, length=round(part.length * scale.get(part.kind, 1.0))) for part in message.parts)
    return replace(
        message,
        text=proto.content,
        reasoning=proto.reasoning,
        tool_calls=tuple(calls),
        parts=parts,
        open=False,
        text_known=True,
    )


def _ratio(new: str, old: str) -> float:
    return len(new) / len(old) if old else 1.0


def _after_span(transcript: Transcript, edit: Edit, span: Span) -> Transcript:
    hit = touched(edit, transcript) or []
    if len(hit) == 1 and edit.replacement and span.start <= hit[0].start and hit[0].end <= span.end:
        return foresee(transcript, replace(edit, target=InMessage(hit[0].id, "whole")))
    left = _tokens(edit, transcript)  # R stands once, in the first message that keeps tokens
    out: list[Message] = []
    for message in transcript:
        low, high = max(span.start, message.start), min(span.end, message.end)
        if low >= high:
            out.append(message)
        elif not (span.start <= message.start and message.end <= span.end):
            parts = list(message.parts)
            position = message.start
            for index, part in enumerate(parts):
                if position <= low and high <= position + part.length:
                    parts[index] = replace(part, length=part.length - (high - low) + left)
                    left = 0
                    break
                position += part.length
            out.append(replace(message, parts=tuple(parts), text_known=False, edit_ids=(*message.edit_ids, PLANNED)))
    return replace(transcript, messages=tuple(out))


def _tokens(edit: Edit, transcript: Transcript) -> int:
    if edit.replacement is None:
        return 0
    if isinstance(edit.replacement, str):
        return estimate_tokens(edit.replacement, transcript)
    return len(edit.replacement)


def _kind(target: InMessage) -> str:
    return "reasoning" if target.part == "reasoning" else "text"
