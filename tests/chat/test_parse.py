import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leyline_proto.spans import CALL, MARKER, REASONING, TEXT

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
NAMES = st.text(st.characters(categories=["L", "N"], include_characters="_-.<|>/"), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3)


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def tiled(parsed, ids):
    assert sum(part.length for part in parsed.parts) == len(ids)
    assert TEXT in [part.kind for part in parsed.parts]
    calls = [part for part in parsed.parts if part.kind == CALL]
    assert len(calls) == len(parsed.calls) + bool(parsed.half_call)
    if parsed.half_call:
        assert parsed.parts[-1] == calls[-1]
        assert (calls[-1].length, calls[-1].call_id) == (parsed.half_call, "")
    return parsed


@pytest.fixture
def write(case):
    """Ids from texts and special tokens by their names in the tiny format; None where the family has no such token."""
    v3 = {
        "<|call|>": "<｜tool▁call▁begin｜>",
        "<|args|>": "<｜tool▁sep｜>",
        "<|/call|>": "<｜tool▁call▁end｜>",
        "<|end|>": "<｜end▁of▁sentence｜>",
        "<|think|>": "<think>",
        "<|/think|>": "</think>",
    }

    def to_ids(*pieces):
        ids = []
        for piece in pieces:
            special = case.tokenizer.special_id(piece) or case.tokenizer.special_id(v3.get(piece, ""))
            ids += case.tokenizer.encode(piece) if special is None else [special]
        return ids

    return to_ids


def test_any_message_comes_back(case, say, body):
    fmt = case.fmt
    reasons = "REASONING" not in fmt.lacking

    @settings(deadline=None)
    @given(TEXTS, TEXTS, CALLS)
    @example("", "", [("f", {}), ("f", {})])
    @example(" lead", "", [("f", {"a": "```"})])
    @example("<|call|>", "</think>", [("<|args|>", {"<|/call|>": "\n```"})])
    def check(text, reasoning, calls):
        message = say("assistant", text, [(name, compact(value)) for name, value in calls])
        message.reasoning = reasoning if reasons else ""
        ids = body(fmt, message)
        rendered = fmt.render(message, [call.id for call in message.tool_calls], (), False)
        parsed = tiled(fmt.parse(ids), ids)
        assert (parsed.text, parsed.reasoning, parsed.closed, parsed.half_call) == (text, message.reasoning, True, 0)
        assert [(c.name, c.arguments_json, c.error) for c in parsed.calls] == [(n, compact(v), "") for n, v in calls]
        marker = len(fmt.open_assistant(False).ids)
        first, *rest = rendered.parts
        expected = [(p.kind, p.length) for p in rest]
        if first.length > marker:
            expected.insert(0, (MARKER, first.length - marker))
        assert [(p.kind, p.length) for p in parsed.parts] == expected

    check()


def test_any_ids_are_parsed_and_streamed_alike(case):
    """Garbage of every kind: never an exception, always a tiling, and the stream says what the parse says."""
    fmt, tokenizer = case.fmt, case.tokenizer
    names = ["open", "separator", "close"]
    special = [getattr(fmt._layout.calls, name) for name in names] + [*(fmt._layout.calls.section or ())]
    special += [*(fmt._layout.reasoning or ()), fmt._layout.end, *tokenizer.encode('f{}"\n ')]
    ids_of = st.lists(st.sampled_from(special) | st.integers(0, tokenizer.vocab_size + 1), max_size=24)

    @settings(deadline=None)
    @given(ids_of)
    def check(ids):
        parsed = tiled(fmt.parse(ids), ids)
        stream = fmt.stream()
        deltas = [*map(stream.push, ids), stream.flush()]
        assert "".join(delta.text for delta in deltas) == parsed.text
        assert "".join(delta.reasoning for delta in deltas) == parsed.reasoning
        assert parsed.closed == (ids[-1:] == [fmt._layout.end])
        if parsed.half_call:
            assert not parsed.closed
            assert fmt.parse(ids[: len(ids) - parsed.half_call]).text == parsed.text

    check()


ARGS = '{"a":1}'


@pytest.mark.parametrize(
    ("pieces", "errors"),
    [
        (["<|call|>", "f", "<|args|>", "{", "<|/call|>"], ["JSON"]),
        (["<|call|>", "f", "<|args|>", "[1]", "<|/call|>"], ["object"]),
        (["<|call|>", "f", "<|args|>", "", "<|/call|>"], ["JSON"]),
        (["<|call|>", "f", "<|args|>", '{"a":NaN}', "<|/call|>"], ["NaN"]),
        (["<|call|>", "f", ARGS, "<|/call|>"], ["has 0"]),
        (["<|call|>", "f", "<|args|>", ARGS, "<|args|>", "<|/call|>"], ["has 2"]),
        (["<|call|>", "", "<|args|>", ARGS, "<|/call|>"], ["name"]),
        (["<|call|>", "<|/call|>"], ["has 0"]),
        (["<|call|>", "f", "<|call|>", "g", "<|args|>", ARGS, "<|/call|>"], ["another call", ""]),
        (["<|call|>", "f", "<|args|>", ARGS, "<|end|>"], ["message ends"]),
        (["<|call|>", "f", "<|args|>", "[" * 100_000, "<|/call|>"], ["JSON"]),
    ],
)
def test_malformed_calls_come_back_with_an_error_and_their_text(open_case, pieces, errors):
    case = open_case("tiny")
    ids = [i for p in pieces for i in ([case.tokenizer.special_id(p)] if p[:2] == "<|" else case.tokenizer.encode(p))]
    parsed = tiled(case.fmt.parse(ids), ids)
    assert len(parsed.calls) == len(errors)
    for call, error in zip(parsed.calls, errors, strict=True):
        assert error in call.error
        assert bool(call.error) == bool(error)
    assert (
        parsed.calls[-1].text
        == case.fmt.decode(ids).removesuffix("<|/call|>").removesuffix("<|end|>").rpartition("<|call|>")[2]
    )
    assert not parsed.half_call


@pytest.mark.parametrize(
    ("tail", "call"),
    [
        ('f\n```json\n{"a":1}\n```', ("f", '{"a":1}')),
        ('f\n```\n{"a": 1}\n```\n', ("f", '{"a": 1}')),
        ('f\n{"a": 1}', ("f", '{"a": 1}')),
        ('\n f \n\n```json\n{\n  "a": 1\n}\n\n```', ("f", '{\n  "a": 1\n}')),
        ('f```json\n{"a":1}```', ("f", '{"a":1}')),
        ('f\n```json{"a":"```\\n```"}\n```', ("f", '{"a":"```\\n```"}')),
    ],
)
def test_a_fence_is_read_tolerantly(open_case, tail, call):
    case = open_case("v3")
    special = case.tokenizer.special_id
    ids = [special("<｜tool▁call▁begin｜>"), *case.tokenizer.encode("function"), special("<｜tool▁sep｜>")]
    ids += [*case.tokenizer.encode(tail), special("<｜tool▁call▁end｜>")]
    (read,) = case.fmt.parse(ids).calls
    assert (read.name, read.arguments_json, read.error) == (*call, "")
    for bad in ("f", "", "f\n```json\n```", "```json\n{}\n```"):
        ids[3:-1] = case.tokenizer.encode(bad)
        assert case.fmt.parse(ids).calls[0].error


def test_a_call_of_another_kind_is_malformed(open_case):
    case = open_case("v3")
    special = case.tokenizer.special_id
    ids = [special("<｜tool▁call▁begin｜>"), *case.tokenizer.encode("widget"), special("<｜tool▁sep｜>")]
    ids += [*case.tokenizer.encode("f\n```json\n{}\n```"), special("<｜tool▁call▁end｜>")]
    assert "widget" in case.fmt.parse(ids).calls[0].error


def test_every_cut_of_a_body_is_open_and_never_a_false_call(case, say, body):
    """A Generate may end after any token: what stands stays, only an unfinished call is reported as half."""
    fmt = case.fmt
    calls = [("f", ARGS), ("g", '{"b":"é🤖"}')]
    ids = body(fmt, say("assistant", "text 🤖", calls))
    for cut in range(len(ids)):
        parsed = tiled(fmt.parse(ids[:cut]), ids[:cut])
        assert not parsed.closed
        assert [(c.name, c.arguments_json, c.error) for c in parsed.calls] == [
            (*call, "") for call in calls[: len(parsed.calls)]
        ]
        kept = fmt.parse(ids[: cut - parsed.half_call])
        assert not kept.half_call
        assert (kept.text, kept.calls) == (parsed.text, parsed.calls)


def test_dropping_the_first_half_call_leaves_plain_text(open_case, say, body):
    fmt = open_case("v3").fmt
    ids = body(fmt, say("assistant", "x", [("f", ARGS), ("g", ARGS)]))
    plain = list(body(fmt, say("assistant", "x"))[:-1])
    starts = [i for i, token in enumerate(ids) if token == fmt._layout.calls.open]
    for cut in range(starts[0], starts[0] + 4):
        parsed = fmt.parse(ids[:cut])
        assert ids[: cut - parsed.half_call] == plain
    parsed = fmt.parse(ids[: starts[1] + 3])  # the line break between two calls goes with the second
    assert fmt.decode(ids[: starts[1] + 3 - parsed.half_call]).endswith("<｜tool▁call▁end｜>")


def test_text_after_calls_is_text(case, write):
    kind = "f" if case.name in ("tiny", "shipped") else "function"
    tail = ARGS if kind == "f" else f"f\n```json\n{ARGS}\n```"
    ids = write("before ", "<|call|>", kind, "<|args|>", tail, "<|/call|>", " after", "<|end|>")
    parsed = tiled(case.fmt.parse(ids), ids)
    assert parsed.text == "before  after"
    assert [part.kind for part in parsed.parts] == [TEXT, CALL, TEXT, MARKER]
    assert [(c.name, c.error) for c in parsed.calls] == [("f", "")]


def test_stray_markers_are_text_and_nothing_is_lost(open_case):
    case = open_case("tiny")
    special = case.tokenizer.special_id
    ids = [special("<|/call|>"), *case.tokenizer.encode("a"), special("<|args|>"), special("<|/think|>")]
    ids += [special("<|user|>")]
    parsed = tiled(case.fmt.parse(ids), ids)
    assert parsed.text == "<|/call|>a<|args|><|/think|><|user|>"
    assert [part.kind for part in parsed.parts] == [TEXT]


def test_reasoning_is_apart_and_may_be_cut_short(open_case):
    case = open_case("tiny")
    special, encode = case.tokenizer.special_id, case.tokenizer.encode
    ids = [special("<|think|>"), *encode("hm"), special("<|/think|>"), *encode("yes"), special("<|end|>")]
    parsed = tiled(case.fmt.parse(ids), ids)
    assert (parsed.reasoning, parsed.text, parsed.closed) == ("hm", "yes", True)
    assert [part.kind for part in parsed.parts] == [MARKER, REASONING, MARKER, TEXT, MARKER]
    parsed = tiled(case.fmt.parse(ids[:2]), ids[:2])
    assert (parsed.text, parsed.closed) == ("", False)
    assert parsed.reasoning
    stream = case.fmt.stream()
    deltas = [stream.push(token) for token in ids]
    assert ("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)) == ("hm", "yes")


def test_an_empty_body_is_an_empty_text(fmt):
    parsed = fmt.parse([])
    assert (parsed.text, parsed.closed, parsed.half_call) == ("", False, 0)
    assert [(part.kind, part.length) for part in parsed.parts] == [(TEXT, 0)]
