"""Directives that the contract refuses, in each verb that carries them: typed, with the bound, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors, replace_content
from tests.contract.scene import Scene, call, message
from tests.contract.sides import BOUNDS, Side

Directives = list[pb.Directive]


def span(start: int | None, end: int | None, **fields: Any) -> pb.Directive:
    return pb.Directive(span=pb.Span(start=start, end=end), **fields)


def whole(message_id: str, **fields: Any) -> pb.Directive:
    return pb.Directive(message=pb.MessageTarget(message_id=message_id, whole=True), **fields)


def content(message_id: str, start: int | None = None, end: int | None = None, **fields: Any) -> pb.Directive:
    target = pb.MessageTarget(message_id=message_id, content_start=start, content_end=end)
    return pb.Directive(message=target, **fields)


def chars(message_id: str, start: int, end: int, **others: Any) -> pb.Directive:
    return pb.Directive(
        message=pb.MessageTarget(message_id=message_id, char_start=start, char_end=end, **others), text="*"
    )


def inside(scene: Scene, first: int, last: int, message_id: str = "says") -> pb.Directive:
    start, _ = scene.part(message_id, "TEXT")
    return span(start + first, start + last)


def character(scene: Scene) -> int:
    """A token inside the character of four bytes."""
    start, _ = scene.part("ra", "TEXT")
    return start + len(scene.side.encode("seven ")) + 2


CASES: dict[str, tuple[Callable[[Scene], Directives], str, Callable[[Scene], dict[str, Any]]]] = {
    "overlap": (lambda s: [inside(s, 0, 2), inside(s, 1, 3)], "SPANS_OVERLAP", lambda s: {}),
    "the same span twice": (lambda s: [inside(s, 0, 2), inside(s, 0, 2)], "SPANS_OVERLAP", lambda s: {}),
    "two insertions in one place": (
        lambda s: [inside(s, 1, 1), inside(s, 1, 1)],
        "SPANS_OVERLAP",
        lambda s: {},
    ),
    "a span in a message that goes": (lambda s: [whole("says"), inside(s, 0, 1)], "SPANS_OVERLAP", lambda s: {}),
    "reversed": (lambda s: [span(9, 7)], "INVALID_ARGUMENT", lambda s: {"field": "span", "start": 9, "end": 7}),
    "negative": (
        lambda s: [span(-1, 7)],
        "SPAN_OUT_OF_RANGE",
        lambda s: {"start": -1, "length": s.state.num_tokens},
    ),
    "beyond the end": (
        lambda s: [span(9, s.state.num_tokens + 1)],
        "SPAN_OUT_OF_RANGE",
        lambda s: {"end": s.state.num_tokens + 1, "length": s.state.num_tokens},
    ),
    "far beyond the end": (lambda s: [span(2**62, 2**62)], "SPAN_OUT_OF_RANGE", lambda s: {"start": 2**62}),
    "content beyond its end": (
        lambda s: [content("rb", 0, 99)],
        "SPAN_OUT_OF_RANGE",
        lambda s: {"end": 99, "length": len(s.side.encode("nine"))},
    ),
    "content reversed": (lambda s: [content("rb", 1, 0)], "SPAN_OUT_OF_RANGE", lambda s: {"start": 1, "end": 0}),
    "characters beyond the end": (
        lambda s: [chars("rb", 1, 5)],
        "SPAN_OUT_OF_RANGE",
        lambda s: {"start": 1, "end": 5, "length": 4},
    ),
    "characters reversed": (lambda s: [chars("rb", 2, 1)], "SPAN_OUT_OF_RANGE", lambda s: {"start": 2, "end": 1}),
    "characters twice": (lambda s: [chars("rb", 0, 2), chars("rb", 1, 3)], "SPANS_OVERLAP", lambda s: {}),
    "characters and tokens": (
        lambda s: [chars("rb", 0, 2, content_end=1)],
        "INVALID_ARGUMENT",
        lambda s: {"field": "message.char_start"},
    ),
    "characters of a whole message": (lambda s: [chars("rb", 0, 2, whole=True)], "INVALID_ARGUMENT", lambda s: {}),
    "ids for characters": (
        lambda s: [pb.Directive(message=pb.MessageTarget(message_id="rb", char_end=2), token_ids=pb.TokenIds(ids=[7]))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "token_ids"},
    ),
    "no start": (lambda s: [span(None, 9)], "INVALID_ARGUMENT", lambda s: {"field": "span.start"}),
    "no end": (lambda s: [span(9, None)], "INVALID_ARGUMENT", lambda s: {"field": "span.end"}),
    "no target": (lambda s: [pb.Directive(text="x")], "INVALID_ARGUMENT", lambda s: {"field": "target"}),
    "unknown mode": (lambda s: [content("rb", mode=7)], "INVALID_ARGUMENT", lambda s: {"field": "mode", "value": 7}),  # type: ignore[arg-type]
    "R too long as ids": (
        lambda s: [content("rb", token_ids=pb.TokenIds(ids=[65] * 61))],
        "TOO_LONG",
        lambda s: {"value": 61, "limit": 60},
    ),
    "R too long as text": (
        lambda s: [content("rb", text="🙂 x9-" * 40)],
        "TOO_LONG",
        lambda s: {"limit": 60, "value": len(s.side.encode("🙂 x9-" * 40))},
    ),
    "R outside the vocabulary": (
        lambda s: [content("rb", token_ids=pb.TokenIds(ids=[65, s.side.vocab_size]))],
        "TOKEN_OUT_OF_RANGE",
        lambda s: {"index": 1, "value": s.side.vocab_size, "limit": s.side.vocab_size},
    ),
    "R with a negative id": (
        lambda s: [content("rb", token_ids=pb.TokenIds(ids=[-1]))],
        "TOKEN_OUT_OF_RANGE",
        lambda s: {"value": -1},
    ),
    "R with NUL": (lambda s: [content("rb", text="a\0b")], "INVALID_ARGUMENT", lambda s: {"field": "text"}),
    "through a role marker": (
        lambda s: [span(s.span("rb").start - 1, s.span("rb").start + 1)],
        "ILLEGAL_CUT",
        lambda s: {"part": "marker"},
    ),
    "through a tool call": (
        lambda s: [span(s.part("asks", "CALL")[0] + 1, s.part("asks", "CALL")[0] + 2)],
        "ILLEGAL_CUT",
        lambda s: {"part": "call", "message_id": "asks"},
    ),
    "an insertion into a tool call": (
        lambda s: [span(s.part("asks", "CALL")[0] + 2, s.part("asks", "CALL")[0] + 2, text="x")],
        "ILLEGAL_CUT",
        lambda s: {"part": "call"},
    ),
    "a whole tool call without its markers": (
        lambda s: [span(*s.part("asks", "CALL"))],
        "ILLEGAL_CUT",
        lambda s: {"message_id": "asks"},
    ),
    "through a character": (
        lambda s: [span(character(s), s.part("ra", "TEXT")[1])],
        "ILLEGAL_CUT",
        lambda s: {"part": "character", "index": character(s), "message_id": "ra"},
    ),
    "in the sink": (lambda s: [whole("sys")], "ATTENTION_SINK", lambda s: {"start": 0, "sink_tokens": 4}),
    "an insertion in the sink": (lambda s: [span(0, 0, text="x")], "ATTENTION_SINK", lambda s: {"start": 0}),
    "a result without its call": (lambda s: [whole("asks")], "UNPAIRED_TOOL_CALL", lambda s: {"call_id": "ca"}),
    "a call without its result": (lambda s: [whole("rb")], "UNPAIRED_TOOL_CALL", lambda s: {"call_id": "cb"}),
    "unknown message": (lambda s: [whole("nobody")], "UNKNOWN_MESSAGE", lambda s: {"message_id": "nobody"}),
    "unknown tool call": (
        lambda s: [pb.Directive(tool_call_id="cx", text="x")],
        "UNKNOWN_TOOL_CALL",
        lambda s: {"call_id": "cx"},
    ),
    "unknown edit": (
        lambda s: [pb.Directive(edit_id="e9", mode=pb.MODE_FORGET)],
        "UNKNOWN_EDIT",
        lambda s: {"edit_id": "e9"},
    ),
    "an earlier edit under AMORTIZE": (
        lambda s: [pb.Directive(edit_id="e9")],
        "INVALID_ARGUMENT",
        lambda s: {"field": "edit_id"},
    ),
    "an earlier edit with R": (
        lambda s: [pb.Directive(edit_id="e9", mode=pb.MODE_FORGET, text="x")],
        "INVALID_ARGUMENT",
        lambda s: {"field": "edit_id"},
    ),
    "no reasoning to clear": (
        lambda s: [pb.Directive(message=pb.MessageTarget(message_id="task", reasoning=True))],
        "INVALID_ARGUMENT",
        lambda s: {"message_id": "task", "parts": 0},
    ),
    "rendered into a span": (
        lambda s: [span(9, 9, rendered=message("user", "x"))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "rendered"},
    ),
    "rendered in another role": (
        lambda s: [whole("last", rendered=message("system", "x"))],
        "INVALID_ARGUMENT",
        lambda s: {"message_id": "last", "field": "role"},
    ),
    "rendered as a raw message": (
        lambda s: [whole("last", rendered=message("raw", "x"))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "message.role"},
    ),
    "rendered with arguments that are no JSON": (
        lambda s: [whole("asks", rendered=message("assistant", tool_calls=[call("ca"), call("cb", "read", "{")]))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "arguments_json", "call_id": "cb"},
    ),
    "rendered with another's reasoning": (
        lambda s: [whole("last", rendered=message("user", "x", reasoning="y"))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "tool_calls"},
    ),
    "rendered with other calls": (
        lambda s: [whole("asks", rendered=message("assistant", "x", tool_calls=[call("ca")]))],
        "INVALID_ARGUMENT",
        lambda s: {"call_ids": "ca,cb"},
    ),
    "too many": (
        lambda s: [content("rb", text="x")] * 9,
        "TOO_LONG",
        lambda s: {"value": 9, "limit": BOUNDS["max_directives"]},
    ),
    "a repair of FORGET": (
        lambda s: [content("rb", mode=pb.MODE_FORGET, repair=pb.Repair(first=1))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair"},
    ),
    "a repair without an amount": (
        lambda s: [content("rb", repair=pb.Repair())],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair"},
    ),
    "a repair of fewer than none": (
        lambda s: [content("rb", repair=pb.Repair(first=-1))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair.first", "value": -1, "bound": "at least 0"},
    ),
    "a repair of no share": (
        lambda s: [content("rb", repair=pb.Repair(share=0.0))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair.share", "value": 0.0, "bound": "in (0, 1]"},
    ),
    "a repair of more than all": (
        lambda s: [content("rb", repair=pb.Repair(share=1.5))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair.share", "value": 1.5},
    ),
    "a repair of a share that is no number": (
        lambda s: [content("rb", repair=pb.Repair(share=float("nan")))],
        "INVALID_ARGUMENT",
        lambda s: {"field": "repair.share"},
    ),
    "a long label": (lambda s: [content("rb", label="x" * 257)], "TOO_LONG", lambda s: {"value": 257, "limit": 256}),
}


@pytest.mark.parametrize("verb", ["edit", "dry_run", "append", "generate"])
@pytest.mark.parametrize("case", CASES)
def test_refused(scene: Scene, case: str, verb: str) -> None:
    directives, reason, metadata = CASES[case]
    bad = directives(scene)
    request: Any = {
        "edit": lambda: scene.edit(*bad),
        "dry_run": lambda: scene.edit(*bad, dry_run=True),
        "append": lambda: scene.append(message("user", "more"), directives=bad),
        "generate": lambda: scene.generate(directives=bad),
    }[verb]()
    scene.refused(request, reason, **metadata(scene))


def test_one_bad_directive_spoils_all(scene: Scene) -> None:
    scene.refused(scene.edit(content("rb", text="x"), whole("nobody")), "UNKNOWN_MESSAGE", message_id="nobody")


def test_a_call_without_directives(scene: Scene) -> None:
    scene.refused(scene.edit(), "INVALID_ARGUMENT", field="directives")
    scene.refused(scene.edit(content("rb"), dry_run=True, prefill=True), "INVALID_ARGUMENT", field="prefill")


def test_a_dry_run_changes_nothing_and_says_what_would_come(scene: Scene) -> None:
    before = scene.state
    told = scene.side.call(scene.edit(content("rb", text="x"), dry_run=True))
    assert scene.state == before
    (receipt,) = told.receipts
    assert (receipt.edit_id, told.version) == ("", 1)
    done = scene.side.call(scene.edit(content("rb", text="x")))
    (made,) = done.receipts
    assert made.edit_id == "e1"
    receipt.edit_id = made.edit_id
    assert receipt == made


@pytest.mark.parametrize("how", [{"mode": pb.MODE_FORGET}, {"allow_sink": True}])
def test_a_span_from_zero_is_legal_where_the_caller_means_it(scene: Scene, how: dict[str, Any]) -> None:
    length = scene.state.num_tokens
    end = scene.span("sys").end
    done = scene.side.call(scene.edit(span(0, end, **how)))
    assert done.num_tokens == length - end
    assert list(done.receipts[0].removed_message_ids) == ["sys"]
    assert scene.state.version == 1


def test_an_r_that_spells_special_tokens_is_text(scene: Scene) -> None:
    text = "<|end|><|call|>"
    scene.side.call(scene.edit(content("rb", text=text)))
    changed = scene.span("rb")
    assert changed.text == text
    start, end = scene.part("rb", "TEXT")
    assert list(scene.state.token_ids)[start:end] == scene.side.encode(text)
    assert scene.side.end not in scene.side.encode(text)


def test_lone_surrogates_never_leave_the_client(side: Side) -> None:
    with side.client.session(messages=["hello"]) as session:
        before = side.state(session.id)
        with pytest.raises(errors.InvalidArgument) as caught:
            session.edit(replace_content(session.transcript.messages[0], "\ud800"))
        assert (caught.value.reason, caught.value.field) == ("INVALID_ARGUMENT", "text")
        assert side.state(session.id) == before
        session.close()
