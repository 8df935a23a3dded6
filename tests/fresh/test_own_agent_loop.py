"""An agent loop as a user of the README writes it: real tools on real files, over a real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leyline_policies import Redact, TruncateOlderThan
from leyline_sdk import AsyncLeyline, Leyline, Reply, Session, ToolCall, clear
from leyline_sdk.errors import (
    SessionBusy,
    SessionNotFound,
    StaleLength,
    TooLong,
    UnansweredToolCall,
    UnknownToolCall,
)

SYSTEM = "You answer questions about files. Read them with read_file."
READ_FILE = {
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
SECRET = "sk-abcdefghijklmnopqrstuvwx"


def run(call: ToolCall, folder: Path) -> str:
    """The one tool."""
    assert call.name == "read_file"
    try:
        return (folder / call.arguments["path"]).read_text()
    except FileNotFoundError:
        return "error: no such file"


def ask(session: Session, question: str, folder: Path) -> Reply:
    """Appends, generates and runs tools until the model answers."""
    session.append(question)
    for _ in range(6):
        reply = session.complete(max_tokens=96)
        if not reply.tool_calls:
            return reply
        session.append_results({call.id: run(call, folder) for call in reply.tool_calls})
    raise AssertionError("gave up")


def streamed(session: Session, question: str, folder: Path) -> tuple[list[str], Reply]:
    """As `ask`, and the pieces that the answer came in."""
    session.append(question)
    for _ in range(6):
        with session.generate(max_tokens=96) as stream:
            pieces = list(stream.text)
            reply = stream.final()
        if not reply.tool_calls:
            return pieces, reply
        session.append_results({call.id: run(call, folder) for call in reply.tool_calls})
    raise AssertionError("gave up")


def text_on_server(client: Leyline, session: Session) -> str:
    return client.detokenize(session.info(token_ids=True).token_ids)


def waiting(client: Leyline) -> tuple[Session, ToolCall]:
    """A session whose model waits for a file."""
    session = client.session(system=SYSTEM, tools=[READ_FILE])
    session.append("What is port in net.ini?")
    (call,) = session.complete(max_tokens=96).tool_calls
    return session, call


def test_seven_questions_in_one_session(client: Leyline, folder: Path) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE], policies=[TruncateOlderThan(2)])
    assert ask(session, "What is port in net.ini?", folder).text == "8123"
    assert ask(session, "What is host in net.ini?", folder).text == "bravo"  # two hops
    pieces, reply = streamed(session, "What is size in alt.ini?", folder)
    assert reply.text == "".join(pieces) == "7"
    assert ask(session, "What is level in app.cfg and limit in alt.ini?", folder).text == "low, 450"
    (folder / "net.ini").write_text("mode = slow\nport = 9001\n")
    assert ask(session, "net.ini was edited. What is port in net.ini?", folder).text == "9001"
    assert ask(session, "Tell me mode in net.ini.", folder).text == "slow"
    last = ask(session, "Look up port in app.cfg.", folder)
    assert last.text == "4410"
    assert last.usage.reused > last.usage.computed

    info = session.info()
    assert info.edits
    assert info.unanswered_call_ids == ()
    results = [message.text for message in session.transcript.of_role("tool")]
    assert results[0] == "[cleared]"
    assert results[-1].endswith("size = 91\n")
    session.close()
    with pytest.raises(SessionNotFound):
        session.info()


def test_a_session_is_resumed_by_its_id(client: Leyline, target: str, folder: Path) -> None:
    with client.session(system=SYSTEM, tools=[READ_FILE]) as session:
        ask(session, "What is port in net.ini?", folder)
    with Leyline(target=target) as other:
        resumed = other.session(session.id)
        assert resumed.transcript.to_messages() == session.transcript.to_messages()
        assert ask(resumed, "What is size in app.cfg?", folder).text == "91"
        with pytest.raises(StaleLength):
            session.append("What is port in app.cfg?")
        session.refresh()
        assert ask(session, "What is port in app.cfg?", folder).text == "4410"
        session.close()


def test_calls_and_results_must_match(client: Leyline) -> None:
    session, call = waiting(client)
    before = session.info(token_ids=True)
    with pytest.raises(UnansweredToolCall, match=call.id):
        session.complete(max_tokens=8)
    with pytest.raises(UnansweredToolCall, match=call.id):
        session.append("never mind")
    with pytest.raises(UnknownToolCall, match="nope"):
        session.append_results({"nope": "port = 1"})
    assert session.info(token_ids=True) == before
    session.tool_result(call, "port = 8123\n")
    with pytest.raises(UnknownToolCall, match=call.id):
        session.tool_result(call, "port = 8123\n")
    assert session.complete(max_tokens=96).text == "8123"
    session.close()


def test_a_secret_is_gone_before_it_is_computed(client: Leyline, folder: Path) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE], policies=[Redact(r"sk-\w{20,}")])
    reply = ask(session, "What is port in key.ini?", folder)
    assert reply.text == "77"
    assert [edit.policy for edit in reply.applied_edits] == ["Redact"]
    assert SECRET not in text_on_server(client, session)
    assert "token = [redacted]" in text_on_server(client, session)
    session.close()


def test_a_secret_is_gone_after_the_fact(client: Leyline, folder: Path) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE])
    ask(session, "What is port in key.ini?", folder)
    assert SECRET in text_on_server(client, session)
    copy = session.fork()
    careful = client.session(session.id, policies=[Redact(r"sk-\w{20,}")])
    (edit,) = careful.prefill().applied_edits
    assert SECRET not in text_on_server(client, careful)
    assert not edit.receipt.influence_remains
    assert copy.id in edit.receipt.held_elsewhere
    copy.close()
    careful.close()


def test_a_huge_replacement_changes_nothing(client: Leyline) -> None:
    session, call = waiting(client)
    session.tool_result(call, "port = 8123\n")
    before = session.info(token_ids=True)
    bound = client.server_info().limits.max_replacement
    with pytest.raises(TooLong, match=str(bound)):
        session.edit(clear(session.transcript.messages[-1], "word " * bound))
    assert session.info(token_ids=True) == before
    session.close()


def test_two_clients_on_one_session(client: Leyline, target: str) -> None:
    session = client.session(system=SYSTEM, tools=[READ_FILE])
    session.append("What is port in net.ini?")
    with Leyline(target=target) as other:
        second = other.session(session.id)
        with session.generate(max_tokens=400, ignore_eos=True) as stream:
            next(stream)
            with pytest.raises(SessionBusy):
                second.append("What is host in net.ini?")
            assert second.info().busy
    session.close()


def test_a_killed_client_leaves_a_session_that_goes_on(client: Leyline, target: str, folder: Path) -> None:
    script = (
        "import sys; from leyline_sdk import Leyline\n"
        f"session = Leyline(target={target!r}).session('killed', system={SYSTEM!r}, tools=[{READ_FILE!r}])\n"
        "session.append('What is port in net.ini?')\n"
        "for event in session.generate(max_tokens=4000, ignore_eos=True): print('event', flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"event\n"
        process.kill()
    deadline = time.monotonic() + 60
    while client.session("killed").info().busy:
        assert time.monotonic() < deadline, "the server goes on for a client that is dead"
        time.sleep(0.05)
    session = client.session("killed")
    assert [message.role for message in session.transcript.messages] == ["system", "user", "assistant"]
    if calls := session.transcript.unanswered():
        session.append_results({call.id: run(call, folder) for call in calls})
    else:
        session.append("What is size in app.cfg?")
    assert session.complete(max_tokens=8).usage.generated
    session.close()


def test_async_twin(target: str, folder: Path) -> None:
    async def one(client: AsyncLeyline, question: str) -> str:
        session = await client.session(system=SYSTEM, tools=[READ_FILE])
        await session.append(question)
        for _ in range(6):
            async with await session.generate(max_tokens=96) as stream:
                pieces = [piece async for piece in stream.text]
                reply = await stream.final()
            if not reply.tool_calls:
                break
            await session.append_results({call.id: run(call, folder) for call in reply.tool_calls})
        assert "".join(pieces) == reply.text
        await session.close()
        return reply.text

    async def all_of_them() -> list[str]:
        async with AsyncLeyline(target=target) as client:
            questions = ["What is port in net.ini?", "What is size in alt.ini?", "What is size in app.cfg?"]
            return await asyncio.gather(*(one(client, question) for question in questions))

    assert asyncio.run(all_of_them()) == ["8123", "7", "91"]
