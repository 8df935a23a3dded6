"""From the directives of a call to cuts in token coordinates, or a refusal.

Owns every check of a directive. Pure: it reads the span table and the edit log and changes neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from leyline_proto import leyline_pb2 as pb
from leyline_proto.char_range import CharCut, char_cuts, content_range
from leyline_proto.chat_format import ChatFormat
from leyline_proto.edit_log import EditLog
from leyline_proto.messages import check_message
from leyline_proto.refusal import Refusal, check_length
from leyline_proto.repair import NO_REPAIR, Repair, repair_of
from leyline_proto.spans import CONTENT_KINDS, REASONING, TEXT, Call, MessageEntry, SpanTable


@dataclass(frozen=True, slots=True)
class Cut:
    """One checked directive: [start, end) is replaced by `ids`.

    `forgets` names an earlier edit whose span's influence has to go; then the cut itself is empty and stands behind the
    `behind_r` tokens of that edit's R. It is empty too when `joined`.
    """

    start: int
    end: int
    ids: tuple[int, ...]
    mode: pb.Mode.ValueType
    label: str
    rendered: MessageEntry | None = None
    forgets: str = ""
    behind_r: int = 0
    joined: bool = False  # another directive's cut does what this one asks for
    repair: Repair = NO_REPAIR


@dataclass(frozen=True, slots=True)
class Rules:
    """The bounds and the functions that a check needs. `token_range(a, b)` gives the session's ids [a, b)."""

    format: ChatFormat
    max_replacement: int
    max_directives: int
    sink_tokens: int
    token_range: Callable[[int, int], Sequence[int]]
    amortize_refused: str = ""
    repair_share_refused: str = ""


_AROUND: Final = 16  # tokens on each side of a cut in which a character that it splits would lie


def resolve(
    directives: Sequence[pb.Directive], table: SpanTable, log: EditLog, rules: Rules, tools: Sequence[pb.Tool] = ()
) -> list[Cut]:
    """The cuts in the order of the directives. Raises a Refusal that names the first directive at fault."""
    check_length("the call", len(directives), rules.max_directives, "directives")
    by_chars = char_cuts(directives, table, rules.format, rules.token_range)
    cuts = [_resolve_one(one, table, log, rules, tools, by_chars.get(index)) for index, one in enumerate(directives)]
    previous: Cut | None = None
    for cut in sorted((c for c in cuts if not c.joined), key=lambda c: (c.start - c.behind_r, c.end)):
        twice = previous is not None and cut.start == cut.end == previous.start == previous.end
        if previous is not None and (cut.start - cut.behind_r < previous.end or twice):
            raise Refusal(
                "SPANS_OVERLAP",
                f"[{previous.start}, {previous.end}) and [{cut.start}, {cut.end}) overlap; the spans of one call "
                "must be disjoint",
                first=f"[{previous.start}, {previous.end})",
                second=f"[{cut.start}, {cut.end})",
            )
        previous = cut
    return cuts


def _resolve_one(
    directive: pb.Directive,
    table: SpanTable,
    log: EditLog,
    rules: Rules,
    tools: Sequence[pb.Tool],
    chars: CharCut | None,
) -> Cut:
    if directive.mode not in (pb.MODE_UNSPECIFIED, pb.MODE_AMORTIZE, pb.MODE_FORGET):
        raise Refusal("INVALID_ARGUMENT", f"unknown mode {directive.mode}", field="mode", value=directive.mode)
    mode = directive.mode or pb.MODE_AMORTIZE
    repair = repair_of(directive, mode, rules.repair_share_refused)
    if directive.WhichOneof("target") == "edit_id":
        return _forget_edit(directive, mode, log)
    rendered: MessageEntry | None = None
    if chars is None:
        start, end = _target_range(directive, table)
        ids, rendered = _replacement(directive, table, rules, tools)
    else:
        start, end, ids = chars.start, chars.end, chars.ids
        if chars.forget:
            mode, repair = pb.MODE_FORGET, NO_REPAIR
        check_length("the replacement", len(ids), rules.max_replacement)
    if mode == pb.MODE_AMORTIZE:
        if rules.amortize_refused:
            raise Refusal(
                "NOT_SUPPORTED",
                f"this model does not support AMORTIZE: {rules.amortize_refused}; use FORGET",
                feature="AMORTIZE",
                why=rules.amortize_refused,
            )
        if start < rules.sink_tokens and not directive.allow_sink and (end > start or ids):
            raise Refusal(
                "ATTENTION_SINK",
                f"AMORTIZE at token {start} would move or remove the first {rules.sink_tokens} tokens, which "
                "attention leans on; use FORGET, or allow_sink",
                start=start,
                sink_tokens=rules.sink_tokens,
            )
    table.check_cut(start, end)
    for index in (start, end) if chars is None else ():
        _check_character(index, table, rules)
    joined = chars is not None and chars.joined
    return Cut(start, end, ids, mode, directive.label, rendered, joined=joined, repair=repair)


def _forget_edit(directive: pb.Directive, mode: pb.Mode.ValueType, log: EditLog) -> Cut:
    if mode != pb.MODE_FORGET or directive.WhichOneof("replacement") is not None:
        raise Refusal(
            "INVALID_ARGUMENT",
            "an edit_id target takes mode FORGET and no replacement",
            field="edit_id",
            edit_id=directive.edit_id,
        )
    record, at = log.find(directive.edit_id), log.where(directive.edit_id)
    if record.undone:
        raise Refusal(
            "INVALID_ARGUMENT",
            f"edit {directive.edit_id!r} was undone: its span is in the session; name the span itself",
            edit_id=directive.edit_id,
        )
    # R was computed from what stands before it; cut by another edit, where it ends is not known.
    where = at if record.touched_by else at + record.inserted
    return Cut(where, where, (), mode, directive.label, forgets=record.edit_id, behind_r=where - at)


def _target_range(directive: pb.Directive, table: SpanTable) -> tuple[int, int]:
    target = directive.WhichOneof("target")
    if target == "span":
        span = directive.span
        if not span.HasField("start") or not span.HasField("end"):
            missing = "start" if not span.HasField("start") else "end"
            raise Refusal("INVALID_ARGUMENT", f"the span has no {missing}", field=f"span.{missing}")
        if span.start > span.end:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the span [{span.start}, {span.end}) is reversed",
                field="span",
                start=span.start,
                end=span.end,
            )
        length = len(table)
        if span.start < 0 or span.end > length:
            raise Refusal(
                "SPAN_OUT_OF_RANGE",
                f"the span [{span.start}, {span.end}) is not inside [0, {length})",
                start=span.start,
                end=span.end,
                length=length,
            )
        return span.start, span.end
    if target == "message":
        message = directive.message
        index, first = table.find(message.message_id)
        entry = table.messages[index]
        if message.whole:
            return first, first + entry.length
        return content_range(entry, first, REASONING if message.reasoning else TEXT, message)
    if target == "tool_call_id":
        entry = table.result_of(directive.tool_call_id)
        _, first = table.find(entry.id)
        return content_range(entry, first, TEXT)
    raise Refusal("INVALID_ARGUMENT", "the directive has no target", field="target")


def _replacement(
    directive: pb.Directive, table: SpanTable, rules: Rules, tools: Sequence[pb.Tool]
) -> tuple[tuple[int, ...], MessageEntry | None]:
    kind = directive.WhichOneof("replacement")
    rendered: MessageEntry | None = None
    ids: tuple[int, ...] = ()
    if kind == "text":
        at_least = len(directive.text.encode()) // rules.format.longest_token
        check_length("the replacement", at_least, rules.max_replacement)
        ids = tuple(rules.format.encode(directive.text))
    elif kind == "token_ids":
        ids = tuple(directive.token_ids.ids)
        check_vocabulary(ids, rules.format.vocab_size)
    elif kind == "rendered":
        ids, rendered = _render_anew(directive, table, rules, tools)
    check_length("the replacement", len(ids), rules.max_replacement)
    return ids, rendered


def _render_anew(
    directive: pb.Directive, table: SpanTable, rules: Rules, tools: Sequence[pb.Tool]
) -> tuple[tuple[int, ...], MessageEntry]:
    if directive.WhichOneof("target") != "message" or not directive.message.whole:
        raise Refusal("INVALID_ARGUMENT", "a rendered replacement needs a whole message as target", field="rendered")
    index, _ = table.find(directive.message.message_id)
    old = table.messages[index]
    new = directive.rendered
    check_message(new)
    if new.role != old.role:
        raise Refusal("INVALID_ARGUMENT", f"message {old.id!r} can't change its role", message_id=old.id, field="role")
    kept = {call.id: call for call in old.calls}
    if [call.id for call in new.tool_calls] != list(kept):
        raise Refusal(
            "INVALID_ARGUMENT",
            f"the message rendered anew must have the tool calls {list(kept)} of message {old.id!r}, in that order",
            message_id=old.id,
            call_ids=",".join(kept),
        )
    if new.role == pb.ROLE_TOOL and new.tool_call_id not in ("", old.tool_call_id):
        raise Refusal("INVALID_ARGUMENT", f"message {old.id!r} answers {old.tool_call_id!r}", message_id=old.id)
    rendered = rules.format.render(new, list(kept), tools if index == 0 else (), index == 0)
    calls = tuple(Call(call.id, call.name, call.arguments_json) for call in new.tool_calls)
    return rendered.ids, replace(old, parts=rendered.parts, calls=calls, open=False)


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Raises TOKEN_OUT_OF_RANGE, naming the first id outside [0, vocab_size)."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise Refusal(
        "TOKEN_OUT_OF_RANGE",
        f"token id {ids[bad]} at index {bad} is not inside [0, {vocab_size})",
        index=bad,
        value=ids[bad],
        limit=vocab_size,
    )


def _check_character(index: int, table: SpanTable, rules: Rules) -> None:
    """Raises ILLEGAL_CUT when `index` splits a UTF-8 character inside a content part."""
    for message, first in zip(table.messages, table.starts, strict=False):
        if first <= index <= first + message.length:
            for part, start, end in message.ranges(first):
                if part.kind in CONTENT_KINDS and start < index < end:
                    # A character is a few tokens at most: those far from the cut say nothing.
                    near = max(start, index - _AROUND)
                    whole = rules.token_range(near, min(end, index + _AROUND))
                    cut = index - near
                    decode = rules.format.decode
                    if decode(whole[:cut]) + decode(whole[cut:]) != decode(whole):
                        raise Refusal(
                            "ILLEGAL_CUT",
                            f"token {index} stands inside a character of message {message.id!r}",
                            index=index,
                            message_id=message.id,
                            part="character",
                        )
