"""Policies of a user's own: over a real server, and without one by `leyline_sdk.testing`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from leyline_sdk import AppliedEdit, Edit, Leyline, MessagePolicy, Policy, PolicyContext, Session, clear
from leyline_sdk.errors import ConfigError, InexpressibleChange, NotUndoable, PolicyError, UnknownEdit
from leyline_sdk.testing import FakeServer, call

SYSTEM = "You answer questions about files. Read them with read_file."
READ_FILE = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


class DropBigOnceAnswered(Policy):
    """A tool result of more than `limit` tokens goes once an assistant message without calls came after it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    def name(self) -> str:
        return f"big>{self.limit}"

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        said = [message.start for message in context.transcript.of_role("assistant") if not message.tool_calls]
        for result in context.tool_results:
            if result.content_tokens > self.limit and not result.edited and any(at >= result.end for at in said):
                yield clear(result, "[big]")


def short_errors(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an existing agent may have: the first line of a failed call is enough."""
    for message in messages:
        if message["role"] == "tool" and message["content"].startswith("error: "):
            message["content"] = message["content"].split("\n")[0]
    return messages


def ask(session: Session, question: str, read: Any) -> tuple[str, list[AppliedEdit]]:
    """The answer, and the edits that were made on the way."""
    session.append(question)
    edits: list[AppliedEdit] = []
    for _ in range(6):
        reply = session.complete(max_tokens=96)
        edits += reply.applied_edits
        if not reply.tool_calls:
            return reply.text, edits
        session.append_results({wanted.id: read(wanted.arguments["path"]) for wanted in reply.tool_calls})
    raise AssertionError("gave up")


def results_of(session: Session) -> list[str]:
    return [message.text for message in session.transcript.of_role("tool")]


def test_on_the_server(client: Leyline, folder: Path) -> None:
    def read(path: str) -> str:
        return (folder / path).read_text()

    seen: list[AppliedEdit] = []
    session = client.session(system=SYSTEM, tools=[READ_FILE], policies=[DropBigOnceAnswered(20)], on_edit=seen.append)
    assert ask(session, "What is port in net.ini?", read) == ("8123", [])

    # Due now: preview says what the next call does, and changes nothing.
    before = session.info(token_ids=True)
    (would,) = session.preview().applied_edits
    assert session.info(token_ids=True) == before
    answer, (did,) = ask(session, "What is size in app.cfg?", read)
    assert answer == "91"
    assert (would.policy, would.removed, would.inserted) == (did.policy, did.removed, did.inserted)
    assert did.policy == "big>20"
    assert did.removed > 20 > did.inserted
    assert did.message_ids == (session.transcript.of_role("tool")[0].id,)
    assert seen == [did]
    assert results_of(session) == ["[big]", (folder / "app.cfg").read_text()]
    assert did.receipt.influence_remains

    # Once only: the second result is below the limit.
    assert ask(session, "What is level in app.cfg?", read) == ("low", [])
    assert session.preview().applied_edits == ()
    assert session.prefill().applied_edits == ()
    assert [edit.edit_id for edit in session.info().edits] == [did.edit_id]

    # A second client with a fresh policy object has nothing to do.
    fresh = client.session(session.id, policies=[DropBigOnceAnswered(20)])
    assert fresh.preview().applied_edits == ()
    assert ask(fresh, "What is port in app.cfg?", read) == ("4410", [])
    fresh.close()


def test_undo_on_the_server(client: Leyline, folder: Path) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE], policies=[DropBigOnceAnswered(20)])
    ask(session, "What is port in net.ini?", lambda path: (folder / path).read_text())
    before = session.info(token_ids=True).token_ids
    (edit,) = session.prefill().applied_edits
    assert "[big]" in client.detokenize(session.info(token_ids=True).token_ids)

    undone = session.undo(edit.edit_id)
    assert undone.restored == undone.restored_with_kv == edit.removed
    assert session.info(token_ids=True).token_ids == before
    assert results_of(session) == [(folder / "net.ini").read_text()]
    assert session.preview().applied_edits == (), "undone by hand: left alone"
    with pytest.raises(NotUndoable):
        session.undo(edit.edit_id)
    with pytest.raises(UnknownEdit):
        session.undo("e99")
    session.close()


def test_existing_function_on_the_server(client: Leyline, folder: Path) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE], policies=[MessagePolicy.of(short_errors)])
    answers = iter(["error: busy, try again\nat line 3\nat line 4\nat line 5", "mode = fast\nport = 8123\n"])
    answer, (edit,) = ask(session, "What is port in net.ini?", lambda path: next(answers))
    assert answer == "8123"
    assert edit.policy == "short_errors"
    assert results_of(session)[0] == "error: busy, try again"
    fresh = client.session(session.id, policies=[MessagePolicy.of(short_errors)])
    assert fresh.preview().applied_edits == session.preview().applied_edits == ()
    session.close()


# ---------------------------------------------------------------- without a server: one token is one byte


def scripted(*policies: Policy, content: str = "x" * 40) -> Session:
    """A session of the fake in which a tool result was answered."""
    fake = FakeServer(replies=[call("read_file", path="a.ini"), "done"])
    session = fake.client().session(tools=[READ_FILE], policies=policies)
    session.append("What does a.ini say?")
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, content)
    assert session.complete().text == "done"
    return session


def test_counts_by_hand() -> None:
    session = scripted(DropBigOnceAnswered(39))
    (edit,) = session.preview().applied_edits
    assert (edit.removed, edit.inserted) == (40, len("[big]"))
    (appended,) = session.append("next").applied_edits
    assert (appended.removed, appended.inserted) == (40, len("[big]"))
    assert session.preview().applied_edits == ()
    # `applied_edits` of a reply are all since the last reply, those of the append too.
    assert session.complete().applied_edits == (appended,)


def test_at_the_limit_it_stays() -> None:
    assert scripted(DropBigOnceAnswered(40)).preview().applied_edits == ()


def test_undone_by_hand_it_stays() -> None:
    session = scripted(DropBigOnceAnswered(39))
    (edit,) = session.prefill().applied_edits
    assert session.undo(edit.edit_id).restored == 40
    assert session.preview().applied_edits == ()
    assert results_of(session) == ["x" * 40]


def test_the_chain_sees_what_went_before() -> None:
    """Shortened first, the result is below the limit of the second."""
    session = scripted(
        MessagePolicy.of(short_errors), DropBigOnceAnswered(20), content="error: busy\n" + "trace\n" * 20
    )
    assert results_of(session) == ["error: busy"]
    assert session.preview().applied_edits == ()
    assert len(session.info().edits) == 1


class Raises(Policy):
    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        raise KeyError("bug")


class Junk(Policy):
    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return ["clear it"]  # type: ignore[list-item]


class EditsTheTask(Policy):
    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return [clear(context.transcript.of_role("user")[0], "x")]


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (Raises(), PolicyError),
        (Junk(), PolicyError),
        (EditsTheTask(), PolicyError),
        (MessagePolicy.of(lambda messages: messages[::-1]), InexpressibleChange),
        (MessagePolicy.of(lambda messages: [*messages, {"role": "user", "content": "more"}]), InexpressibleChange),
        (MessagePolicy.of(lambda messages: [m for m in messages if not m.get("tool_calls")]), PolicyError),
    ],
)
def test_a_bad_policy_stops_the_call_before_anything_is_sent(policy: Policy, error: type[Exception]) -> None:
    session = scripted()
    session.policies.append(policy)
    before = session.info(token_ids=True)
    for blocked in (session.preview, session.prefill, session.complete, lambda: session.append("next")):
        with pytest.raises(error):
            blocked()
    assert session.info(token_ids=True) == before
    session.policies.clear()
    session.append("next")


def test_a_resumed_session_has_its_tools() -> None:
    client = FakeServer().client()
    session = client.session(tools=[READ_FILE])
    assert client.session(session.id).id == session.id
    with pytest.raises(ConfigError, match="other tools"):
        client.session(session.id, tools=[{"name": "write_file"}])
