"""A policy of one's own for sessions that share documents, by `leyline_sdk.testing`: one token is one byte.

The fake keeps no caches: what is reused, `test_own_shared_documents.py` asks a server.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from leyline_sdk import Edit, Mode, Policy, PolicyContext, Reuse, Session, ToolCall, assemble, clear, cut_text
from leyline_sdk.errors import ConfigError, SessionNotFound
from leyline_sdk.testing import FakeServer, call

READ = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
TEAM = "owner = bravo\nlead = delta\n"
SITE = "region = west\nrack = 12\n"
TASK = "What do they say?"


class DropRereadDocuments(Policy):
    """A tool result that says what a shared document said already, in a message of the user, goes; once it was
    answered. Lines of it that begin with `secret` are forgotten at once, wherever they stand."""

    def __init__(self, documents: Iterable[str], secret: str = "password") -> None:
        self.documents, self.secret = [one.strip() for one in documents], secret

    @property
    def edits_protected(self) -> bool:
        return True

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        transcript = context.transcript
        given = "\n".join(one.text for one in transcript.of_role("user"))
        answers = [one.start for one in transcript.of_role("assistant") if not one.tool_calls]
        for message in transcript.messages:
            start = message.text.find(self.secret)
            if message.role == "tool" and message.text.strip() in self.documents and message.text.strip() in given:
                if any(at >= message.end for at in answers):
                    yield clear(message, "[above]")
            elif message.role in ("user", "tool") and start >= 0:
                end = message.text.find("\n", start)
                yield cut_text(message, start, None if end < 0 else end, "[-]", mode=Mode.FORGET)


def scripted(*results: str, first: str, reuse: Reuse = Reuse.CONTENT) -> Session:
    """A session that was given `first`, read these results one after another, and answered."""
    replies: list[ToolCall | str] = [
        *(call("read_file", path=f"{number}.ini") for number in range(len(results))),
        "done",
        "done again",
    ]
    fake = FakeServer(replies=replies)
    session = fake.client().session(tools=[READ], policies=[DropRereadDocuments([TEAM, SITE])], reuse=reuse)
    session.append(first)
    for result in results:
        (wanted,) = session.complete().tool_calls
        session.tool_result(wanted, result)
    assert session.complete().text == "done"
    return session


def results(session: Session) -> list[str]:
    return [one.text for one in session.transcript.of_role("tool")]


@pytest.mark.parametrize("order", [[TEAM, SITE], [SITE, TEAM]])
@pytest.mark.parametrize("reuse", list(Reuse))
def test_what_was_given_goes_in_any_order_and_under_any_reuse(order: list[str], reuse: Reuse) -> None:
    session = scripted(TEAM, "port = 1\n", SITE, first=assemble([*order, TASK]), reuse=reuse)
    assert session.reuse is session.info().reuse is reuse
    would = session.preview().applied_edits
    assert [(edit.removed, edit.inserted) for edit in would] == [(len(TEAM), 7), (len(SITE), 7)]
    did = session.append("And now?").applied_edits
    assert [edit.receipt.removed for edit in did] == [len(TEAM), len(SITE)]
    assert {edit.policy for edit in did} == {"DropRereadDocuments"}
    assert {edit.receipt.mode for edit in did} == {Mode.AMORTIZE}
    assert results(session) == ["[above]", "port = 1\n", "[above]"]
    assert session.preview().applied_edits == ()
    assert session.info().exact_upto <= did[0].receipt.at, "what follows was computed from what went"
    assert session.complete().applied_edits == did


def test_what_was_not_given_stays() -> None:
    session = scripted(TEAM, SITE, first=assemble([SITE, TASK]))
    (edit,) = session.append("And now?").applied_edits
    assert edit.removed == len(SITE)
    assert results(session) == [TEAM, "[above]"]


def test_nothing_goes_before_it_was_answered() -> None:
    fake = FakeServer(replies=[call("read_file", path="0.ini"), "done"])
    session = fake.client().session(tools=[READ], policies=[DropRereadDocuments([TEAM])], reuse=Reuse.CONTENT)
    session.append(assemble([TEAM, TASK]))
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, TEAM)
    assert session.preview().applied_edits == ()
    assert session.complete().applied_edits == ()
    assert len(session.preview().applied_edits) == 1


def test_a_secret_between_documents_is_forgotten_and_they_stay() -> None:
    secret = "password = swordfish"
    session = scripted("port = 1\n" + secret + "\n", first=assemble([TEAM, secret, SITE, TASK]))
    told = session.transcript.of_role("user")[0]
    assert told.text == assemble([TEAM, "[-]", SITE, TASK])
    assert results(session) == ["port = 1\n[-]\n"]
    assert secret.encode() not in bytes(one for one in session.info(token_ids=True).token_ids if one < 256)
    edits = session.info().edits
    assert {edit.mode for edit in edits} == {Mode.FORGET}
    assert len(edits) == 2
    assert session.info().exact_upto == session.info().num_tokens - session.info().num_pending
    assert session.preview().applied_edits == ()


def test_an_undone_session_is_resumed_as_it_was_made() -> None:
    fake = FakeServer(replies=[call("read_file", path="0.ini"), "done"], api_keys={"ours": "us", "theirs": "them"})
    client = fake.client(api_key="ours")
    session = client.session(tools=[READ], reuse=Reuse.CONTENT)
    session.append(assemble([TEAM, TASK]))
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, TEAM)
    session.complete()
    (edit,) = session.edit(clear(wanted, "[above]")).applied_edits
    assert session.undo(edit.edit_id).restored == len(TEAM)

    resumed = client.session(session.id, create=False)
    assert (resumed.reuse, resumed.created) == (Reuse.CONTENT, False)
    assert results(resumed) == [TEAM]
    with pytest.raises(ConfigError, match="was created with reuse CONTENT, not REGISTER"):
        client.session(session.id, reuse=Reuse.REGISTER)
    with pytest.raises(SessionNotFound):
        fake.client(api_key="theirs").session(session.id, create=False)


def test_documents_stand_alike_in_any_order() -> None:
    parts = [TEAM, "  " + SITE + "\n", TASK]
    for order in (parts, parts[::-1]):
        text = assemble(order, marker="### \n")
        assert text.split("\n\n") == [f"### \n{one.strip()}" for one in order]
