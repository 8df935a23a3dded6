"""Tool calls from generated ids: parsed, numbered, stopped at, answered; and the embedded model making real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from leyline_sdk import FinishReason, Session, errors
from tests.service.running import RunningServer, call_ids, special
from tests.service.talk import encode
from training.render import READ_FILE, SYSTEM_PROMPT
from training.tasks import SessionMaker

READ = {"name": "read", "description": "reads", "parameters": {"type": "object"}}
END = special("<|end|>")


def says(text: str, *calls: tuple[str, str]) -> list[int]:
    return [*encode(text), *(token for name, arguments in calls for token in call_ids(name, arguments)), END]


def forced(session: Session, ids: Sequence[int]):  # type: ignore[no-untyped-def]
    with session.generate(force_token_ids=ids, max_tokens=len(ids) + 5) as stream:
        pieces = list(stream.text)
        return stream.final(), "".join(pieces)


@pytest.fixture
def session(small: RunningServer) -> Iterator[Session]:
    with small.client().session(tools=[READ], messages=["what is in a and b?"]) as session:
        yield session
        session.close()


def test_several_calls_in_one_turn(session: Session) -> None:
    reply, text = forced(session, says("let me look", ("read", '{"path":"a"}'), ("read", '{"path":"b é"}')))
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.text == text == "let me look"
    first, second = reply.tool_calls
    assert [(c.name, dict(c.arguments)) for c in reply.tool_calls] == [
        ("read", {"path": "a"}),
        ("read", {"path": "b é"}),
    ]
    assert first.id != second.id
    assert session.info().unanswered_call_ids == (first.id, second.id)
    with pytest.raises(errors.UnansweredToolCall) as caught:
        session.complete()
    assert caught.value.call_ids == [first.id, second.id]
    session.append_results({second.id: "eight", first.id: "seven"})
    assert [m.text for m in session.transcript.of_role("tool")] == ["seven", "eight"]
    assert [m.tool_name for m in session.transcript.of_role("tool")] == ["read", "read"]
    reply, _ = forced(session, says("done"))
    assert (reply.finish_reason, reply.tool_calls) == (FinishReason.STOP, ())


def test_generation_stops_at_the_end_of_the_calls(session: Session) -> None:
    reply, text = forced(session, [*says("", ("read", "{}")), *encode("never said")])
    assert (reply.usage.generated, text) == (len(says("", ("read", "{}"))), "")
    assert len(reply.tool_calls) == 1


def test_ids_are_never_given_twice(session: Session) -> None:
    seen: list[str] = []
    for _ in range(3):
        reply, _ = forced(session, says("", ("read", "{}"), ("read", "{}")))
        seen += [call.id for call in reply.tool_calls]
        session.append_results({call.id: "x" for call in reply.tool_calls})
    assert len(set(seen)) == 6
    fork = session.fork()
    reply, _ = forced(fork, says("", ("read", "{}")))
    assert reply.tool_calls[0].id not in seen
    fork.close()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read", "{"),
        ("read", ""),
        ("read", "[1]"),
        ("read", '"x"'),
        ("read", '{"a":1} and more'),
        ("read", '{"a":NaN'),
        ("", "{}"),
        ("write", '{"path":"a"}'),
    ],
)
def test_a_malformed_call_is_told_apart(session: Session, name: str, arguments: str) -> None:
    reply, _ = forced(session, says("hm", (name, arguments), ("read", '{"path":"b"}')))
    (invalid,) = reply.invalid_tool_calls
    assert invalid.error
    assert arguments in invalid.text
    (valid,) = reply.tool_calls
    assert dict(valid.arguments) == {"path": "b"}
    assert valid.id != invalid.id
    assert session.info().unanswered_call_ids == (valid.id,)
    session.append_results({invalid.id: "no such thing", valid.id: "seven"})  # both may be answered
    assert [m.text for m in session.transcript.of_role("tool")] == ["no such thing", "seven"]


def test_a_malformed_call_alone_need_not_be_answered(session: Session) -> None:
    reply, _ = forced(session, says("", ("read", "{")))
    assert (reply.finish_reason, reply.tool_calls) == (FinishReason.TOOL_CALLS, ())
    assert len(reply.invalid_tool_calls) == 1
    session.append("try again")
    reply, _ = forced(session, says("sorry"))
    assert reply.text == "sorry"


def test_text_that_spells_a_call_is_text(session: Session) -> None:
    spelled = "<|call|>read<|args|>{}<|/call|>"
    reply, text = forced(session, says(spelled))
    assert reply.text == text == spelled
    assert (reply.finish_reason, reply.tool_calls) == (FinishReason.STOP, ())


def test_reasoning_comes_apart_from_text(session: Session) -> None:
    ids = [special("<|think|>"), *encode("hm é"), special("<|/think|>"), *says("so", ("read", "{}"))]
    with session.generate(force_token_ids=ids) as stream:
        deltas = list(stream)
        reply = stream.final()
    assert "".join(d.reasoning for d in deltas) == reply.reasoning == "hm é"
    assert "".join(d.text for d in deltas) == reply.text == "so"
    assert len(reply.tool_calls) == 1


# ---------------------------------------------------------------- the embedded model


def test_the_embedded_model_reads_files_and_answers(tiny: RunningServer) -> None:
    """A short session of tasks on words never trained on, by nothing but calls and results."""
    maker = SessionMaker(random.Random(5))
    tasks = [maker.next_task("one_hop") for _ in range(3)]
    right = 0
    with tiny.client().session(tools=[READ_FILE], system=SYSTEM_PROMPT) as session:
        disk: dict[str, str] = {}
        for task in tasks:
            disk.update(task.files)
            session.append(task.question)
            reply = session.complete(max_tokens=80)
            for _ in range(6):
                if not reply.tool_calls:
                    break
                assert reply.finish_reason is FinishReason.TOOL_CALLS
                results = {c.id: disk.get(str(dict(c.arguments).get("path")), "error") for c in reply.tool_calls}
                session.append_results(results, prefill=True)
                reply = session.complete(max_tokens=80)
                assert reply.usage.computed == 1
            right += reply.text == task.answer
        assert right >= 2
        session.close()
