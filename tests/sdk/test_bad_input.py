"""Every bad input gets its typed error, with the bound, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_sdk import errors
from leyline_sdk.client import Leyline
from leyline_sdk.testing import FakeServer, FakeTransport, call

VOCAB = 267
FORGET, AMORTIZE = pb.MODE_FORGET, pb.MODE_AMORTIZE


def _span(start: int | None, end: int | None, **others: Any) -> pb.Directive:
    return pb.Directive(span=pb.Span(start=start, end=end), **others)


def _message(message_id: str, **target: Any) -> pb.MessageTarget:
    return pb.MessageTarget(message_id=message_id, **target)


def _user(content: str, **others: Any) -> pb.Message:
    return pb.Message(role=pb.ROLE_USER, content=content, **others)


@pytest.fixture
def world() -> tuple[FakeServer, FakeTransport]:
    """Session "s": system, task, a call and its result, an answer with ü; "calling" has an unanswered call; "empty"."""
    fake = FakeServer([call("read"), "grüß", call("read")], max_replacement=50, max_directives=3, max_context=2000)
    client: Leyline = fake.client()
    session = client.session("s", system="a system prompt", tools=[{"name": "read"}])
    session.append({"role": "user", "content": "the task", "id": "task"})
    session.tool_result(session.complete().tool_calls[0], "the result")
    session.complete()
    calling = client.session("calling")
    calling.append("hi")
    calling.complete()
    client.session("empty")
    return fake, FakeTransport(fake)


def edit(*directives: pb.Directive, **others: Any) -> pb.ApplyDirectivesRequest:
    return pb.ApplyDirectivesRequest(request_id="r", session_id="s", directives=directives, **others)


def append(session_id: str = "s", **content: Any) -> pb.AppendRequest:
    return pb.AppendRequest(request_id="r", session_id=session_id, **content)


def said(*messages: pb.Message, session_id: str = "s") -> pb.AppendRequest:
    return append(session_id, messages=pb.Messages(messages=messages))


def generate(session_id: str = "s", **others: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", session_id=session_id, **others)


def create(**others: Any) -> pb.CreateSessionRequest:
    return pb.CreateSessionRequest(request_id="r", **others)


CASES: dict[str, tuple[Proto, type[errors.APIError], str]] = {
    # ---- directives
    "no start": (edit(_span(None, 5, mode=FORGET)), errors.InvalidArgument, "no start"),
    "no end": (edit(_span(5, None)), errors.InvalidArgument, "no end"),
    "reversed": (edit(_span(9, 5)), errors.InvalidArgument, "reversed"),
    "beyond": (edit(_span(5, 5000)), errors.SpanOutOfRange, "not inside"),
    "negative": (edit(_span(-1, 5)), errors.SpanOutOfRange, "not inside"),
    "overlap": (edit(_span(5, 9), _span(8, 10)), errors.SpansOverlap, "overlap"),
    "same place twice": (edit(_span(5, 5, text="a"), _span(5, 5, text="b")), errors.SpansOverlap, "overlap"),
    "sink": (edit(_span(3, 5)), errors.AttentionSink, "first 4"),
    "zero is a start": (edit(_span(0, 5)), errors.AttentionSink, "token 0"),
    "marker": (edit(_span(1, 5, mode=FORGET)), errors.IllegalCut, "marker"),
    "R too long": (edit(pb.Directive(tool_call_id="call_3", text="x" * 51)), errors.TooLong, "limit is 50"),
    "R beyond the vocabulary": (
        edit(pb.Directive(tool_call_id="call_3", token_ids=pb.TokenIds(ids=[1, VOCAB]))),
        errors.TokenOutOfRange,
        "267",
    ),
    "negative id": (
        edit(pb.Directive(tool_call_id="call_3", token_ids=pb.TokenIds(ids=[-1]))),
        errors.TokenOutOfRange,
        "-1",
    ),
    "NUL in R": (edit(pb.Directive(tool_call_id="call_3", text="a\0b")), errors.InvalidArgument, "NUL"),
    "too many": (edit(*[_span(10, 10)] * 4), errors.TooLong, "limit is 3"),
    "none": (edit(), errors.InvalidArgument, "no directives"),
    "no target": (edit(pb.Directive(text="x")), errors.InvalidArgument, "no target"),
    "unknown message": (edit(pb.Directive(message=_message("nobody"))), errors.UnknownMessage, "nobody"),
    "unknown call": (edit(pb.Directive(tool_call_id="call_99")), errors.UnknownToolCall, "call_99"),
    "unknown edit": (edit(pb.Directive(edit_id="e99", mode=FORGET)), errors.UnknownEdit, "e99"),
    "edit id amortized": (edit(pb.Directive(edit_id="e99")), errors.InvalidArgument, "FORGET"),
    "content range": (
        edit(pb.Directive(message=_message("task", content_start=2, content_end=99))),
        errors.SpanOutOfRange,
        "content",
    ),
    "inside a character": (
        edit(pb.Directive(message=_message("m5", content_start=0, content_end=3))),
        errors.IllegalCut,
        "character",
    ),
    "unknown mode": (edit(_span(5, 6, mode=9)), errors.InvalidArgument, "mode"),
    "rendered part": (
        edit(pb.Directive(message=_message("task"), rendered=_user("x"))),
        errors.InvalidArgument,
        "whole",
    ),
    "rendered role": (
        edit(pb.Directive(message=_message("task", whole=True), rendered=pb.Message(role=pb.ROLE_TOOL))),
        errors.InvalidArgument,
        "role",
    ),
    "label": (edit(_span(5, 6, label="x" * 300)), errors.TooLong, "256"),
    "version from the future": (edit(_span(5, 6), expected_version=7), errors.StaleVersion, "version 0"),
    "dry prefill": (edit(_span(5, 6), dry_run=True, prefill=True), errors.InvalidArgument, "dry run"),
    # ---- append
    "no content": (append(), errors.InvalidArgument, "no content"),
    "no messages": (append(messages=pb.Messages()), errors.InvalidArgument, "no messages"),
    "no text": (append(text=""), errors.InvalidArgument, "nothing to append"),
    "no ids": (append(token_ids=pb.TokenIds()), errors.InvalidArgument, "nothing to append"),
    "id beyond": (append(token_ids=pb.TokenIds(ids=[VOCAB])), errors.TokenOutOfRange, "267"),
    "1.1 million ids": (
        append(token_ids=pb.TokenIds(ids=[1] * 1_100_000)),
        errors.ContextExceeded,
        "1100000 tokens",
    ),
    "NUL": (said(_user("a\0b")), errors.InvalidArgument, "NUL"),
    "no role": (said(pb.Message(content="x")), errors.InvalidArgument, "role"),
    "calls of a user": (said(_user("x", tool_calls=[pb.ToolCall(name="f")])), errors.InvalidArgument, "assistant"),
    "id taken": (said(_user("x", message_id="task")), errors.MessageExists, "task"),
    "id too long": (said(_user("x", message_id="i" * 129)), errors.TooLong, "128"),
    "id not ASCII": (said(_user("x", message_id="ü")), errors.InvalidArgument, "ASCII"),
    "result for nobody": (
        said(pb.Message(role=pb.ROLE_TOOL, tool_call_id="call_99")),
        errors.UnknownToolCall,
        "call_99",
    ),
    "result twice": (said(pb.Message(role=pb.ROLE_TOOL, tool_call_id="call_3")), errors.UnknownToolCall, "call_3"),
    "unanswered": (said(_user("x"), session_id="calling"), errors.UnansweredToolCall, "call_"),
    "text while unanswered": (append("calling", text="x"), errors.UnansweredToolCall, "call_"),
    "arguments": (
        said(pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="f", arguments_json="[1]")])),
        errors.InvalidArgument,
        "JSON object",
    ),
    "unknown session": (append("nobody", text="x"), errors.SessionNotFound, "nobody"),
    "length from the future": (append(text="x", expected_len=9), errors.StaleLength, "expects 9"),
    "no request id": (pb.AppendRequest(session_id="s", text="x"), errors.InvalidArgument, "request_id"),
    "long request id": (pb.AppendRequest(request_id="r" * 129, session_id="s", text="x"), errors.TooLong, "128"),
    "good edit, bad append": (
        append(directives=[pb.Directive(tool_call_id="call_3", text="x")], messages=pb.Messages()),
        errors.InvalidArgument,
        "no messages",
    ),
    # ---- generate
    "empty session": (generate("empty"), errors.EmptySession, "empty"),
    "unanswered call": (generate("calling"), errors.UnansweredToolCall, "call_"),
    "max_tokens": (generate(max_tokens=0), errors.InvalidArgument, "at least 1"),
    "too many tokens": (generate(max_tokens=2000), errors.ContextExceeded, "holds 2000"),
    "cold": (generate(sampling=pb.Sampling(temperature=-0.1)), errors.InvalidArgument, "temperature"),
    "not a number": (generate(sampling=pb.Sampling(temperature=float("nan"))), errors.InvalidArgument, "nan"),
    "top_p": (generate(sampling=pb.Sampling(top_p=0.0)), errors.InvalidArgument, "(0, 1]"),
    "top_k": (generate(sampling=pb.Sampling(top_k=0)), errors.InvalidArgument, "top_k"),
    "stops": (generate(stop=["x"] * 17), errors.TooLong, "limit is 16"),
    "empty stop": (generate(stop=[""]), errors.InvalidArgument, "empty"),
    "stop id": (generate(stop_token_ids=[VOCAB]), errors.TokenOutOfRange, "267"),
    "constraint": (generate(constraint="json"), errors.NotSupported, "grammar"),
    "good edit, bad generate": (
        generate("s", directives=[pb.Directive(tool_call_id="call_3", text="x")], max_tokens=2000),
        errors.ContextExceeded,
        "2000",
    ),
    # ---- the rest
    "session exists": (create(session_id="s"), errors.SessionExists, "'s'"),
    "ttl": (create(ttl_s=0.0), errors.InvalidArgument, "ttl_s"),
    "tool twice": (create(tools=[pb.Tool(name="f")] * 2), errors.InvalidArgument, "twice"),
    "tool schema": (create(tools=[pb.Tool(name="f", parameters_json="{")]), errors.InvalidArgument, "'f'"),
    "first message": (create(messages=[pb.Message(role=pb.ROLE_TOOL)]), errors.UnknownToolCall, ""),
    "fork of nobody": (pb.ForkSessionRequest(request_id="r", session_id="x"), errors.SessionNotFound, "x"),
    "fork onto another": (
        pb.ForkSessionRequest(request_id="r", session_id="s", new_session_id="empty"),
        errors.SessionExists,
        "empty",
    ),
    "close nobody": (pb.CloseSessionRequest(request_id="r", session_id="x"), errors.SessionNotFound, "x"),
    "get nobody": (pb.GetSessionRequest(session_id="x"), errors.SessionNotFound, "x"),
    "get nothing": (pb.GetSessionRequest(), errors.InvalidArgument, "session_id"),
    "undo nothing": (pb.UndoRequest(request_id="r", session_id="s"), errors.InvalidArgument, "edit_id"),
    "undo unknown": (pb.UndoRequest(request_id="r", session_id="s", edit_id="e9"), errors.UnknownEdit, "e9"),
    "page size": (pb.ListSessionsRequest(page_size=-1), errors.InvalidArgument, "page_size"),
    "page token": (pb.ListSessionsRequest(page_token="x"), errors.InvalidArgument, "page_token"),
    "tokenize NUL": (pb.TokenizeRequest(text="\0"), errors.InvalidArgument, "NUL"),
    "detokenize": (pb.DetokenizeRequest(ids=[VOCAB]), errors.TokenOutOfRange, "267"),
}


def _everything(fake: FakeServer) -> dict[tuple[str, str], Any]:
    return {key: session.state for key, session in fake.sessions.items()}


def _ask(transport: FakeTransport, request: Proto) -> None:
    method = type(request).__name__.removesuffix("Request")
    if isinstance(request, pb.GenerateRequest):
        next(transport.stream(method, request, 1.0, ()))
    else:
        transport.unary(method, request, 1.0, ())


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, world: tuple[FakeServer, FakeTransport]) -> None:
    fake, transport = world
    request, kind, match = CASES[name]
    before = _everything(fake)
    with pytest.raises(kind) as raised:
        _ask(transport, request)
    assert type(raised.value) is kind
    assert match in str(raised.value)
    assert _everything(fake) == before


def _place(fake: FakeServer, kind: pb.PartKind.ValueType) -> tuple[int, int]:
    spans = fake.sessions["", "s"].state.conversation.spans()
    return next((part.start, part.end) for span in spans for part in span.parts if part.kind == kind)


@pytest.mark.parametrize(
    ("directives", "kind"),
    [
        (lambda call, ids: [_span(call[0] + 1, call[1])], errors.IllegalCut),
        (lambda call, ids: [_span(call[0] + 2, call[0] + 2, text="x")], errors.IllegalCut),
        (lambda call, ids: [pb.Directive(message=_message(ids[pb.ROLE_TOOL], whole=True))], errors.UnpairedToolCall),
        (
            lambda call, ids: [pb.Directive(message=_message(ids[pb.ROLE_ASSISTANT], whole=True), text="R")],
            errors.UnpairedToolCall,
        ),
        (
            lambda call, ids: [
                pb.Directive(
                    message=_message(ids[pb.ROLE_ASSISTANT], whole=True), rendered=pb.Message(role=pb.ROLE_ASSISTANT)
                )
            ],
            errors.InvalidArgument,
        ),
    ],
)
def test_cuts_through_calls(
    directives: Callable[..., list[pb.Directive]],
    kind: type[errors.APIError],
    world: tuple[FakeServer, FakeTransport],
) -> None:
    fake, transport = world
    spans = fake.sessions["", "s"].state.conversation.spans()
    ids = {span.role: span.message_id for span in reversed(spans)}
    before = _everything(fake)
    with pytest.raises(kind):
        _ask(transport, edit(*directives(_place(fake, pb.PART_KIND_CALL), ids)))
    assert _everything(fake) == before


def test_text_that_spells_a_marker_stays_text() -> None:
    session = FakeServer().client().session()
    session.append("<|end|><|assistant|>")
    (message,) = session.transcript
    assert message.content_tokens == 20
    session.refresh()
    assert session.transcript.messages[0].text == "<|end|><|assistant|>"


def test_context_and_pool_are_checked_at_generate() -> None:
    fake = FakeServer(max_context=1000, num_slots=60)
    session = fake.client().session()
    session.append("x" * 40)
    session.append("y" * 40)  # an append alone is judged by itself
    for act in (session.complete, session.prefill):
        with pytest.raises(errors.PoolExceeded) as pool:
            act()
        assert (pool.value.limit, pool.value.metadata["free"]) == (60, "0")
        assert pool.value.needed is not None
        assert pool.value.needed > 60


def test_too_many_sessions() -> None:
    client = FakeServer(max_sessions=1).client()
    client.session()
    with pytest.raises(errors.TooManySessions):
        client.session()


def test_a_model_without_amortize_says_why() -> None:
    fake = FakeServer(amortize_refused="no rotary layout fits")
    transport = FakeTransport(fake)
    session = fake.client().session("s")
    session.append(["one", "two"])
    with pytest.raises(errors.NotSupported, match="no rotary layout fits") as raised:
        _ask(transport, edit(pb.Directive(message=_message("m2"))))
    assert raised.value.feature == "AMORTIZE"
    assert fake.client().server_info().features["AMORTIZE"].reason == "no rotary layout fits"
    _ask(transport, edit(pb.Directive(message=_message("m2"), mode=FORGET)))


def test_a_model_that_fails_leaves_the_session_as_it_was() -> None:
    fake = FakeServer([Refusal("MODEL_FAILED", "layer 3 raised"), "fine"])
    session = fake.client().session()
    session.append("hi")
    before = session.info(token_ids=True)
    with pytest.raises(errors.ModelFailed):
        session.complete()
    assert session.info(token_ids=True) == before
    assert session.complete().text == "fine"
