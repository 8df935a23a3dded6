"""Several agents of one's own at once against one server: a thread and a client for each, edits amid streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from leyline_sdk import AppliedEdit, Leyline, Message, Mode, Reply, Session, clear
from leyline_sdk.errors import Cancelled, NotUndoable, SessionBusy, TooLong

SYSTEM = "You answer questions about files. Read them with read_file."
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ_FILE = {"name": "read_file", "description": "Read a text file.", "parameters": PARAMETERS}
QUESTIONS = ("What is port in net.ini?", "What is host in net.ini?", "What is size in alt.ini?")
WORDS = "port = 8123 and size = 7 and level = high and "


@dataclass
class Agent:
    """Reads files of its own; once it has answered, what it read for that goes, in its own way."""

    answers: tuple[str, str, str]
    mode: Mode | None
    replies: list[Reply] = field(default_factory=list)
    edits: list[AppliedEdit] = field(default_factory=list)
    tokens: int = 0

    def read(self, path: str) -> str:
        port, host, size = self.answers
        net = f"port = {port}\nhost = see alt.ini\nmode = fast\n"
        files = {"net.ini": net, "alt.ini": f"host = {host}\nsize = {size}\n"}
        return files.get(path, "error: no such file")

    def ask(self, session: Session, question: str) -> str:
        session.append(question)
        asked: list[str] = []
        self.replies.append(reply := session.complete(max_tokens=96))
        while reply.tool_calls and len(asked) < 6:
            asked += [call.id for call in reply.tool_calls]
            session.append_results({call.id: self.read(call.arguments["path"]) for call in reply.tool_calls})
            self.replies.append(reply := session.complete(max_tokens=96))
        if self.mode is not None:
            results = [result for call_id in asked if (result := session.transcript.result_of(call_id))]
            self.edits += session.edit(*[clear(one, "[cleared]", mode=self.mode) for one in results]).applied_edits
        return reply.text.strip()

    def work(self, target: str, start: threading.Barrier) -> tuple[str, ...]:
        with Leyline(target=target, timeout_s=120) as client:
            session = client.session(system=SYSTEM, tools=[READ_FILE])
            start.wait()
            answers = tuple(self.ask(session, question) for question in QUESTIONS)
            self.tokens = session.info().num_tokens
            start.wait()
            session.close()
        return answers


@pytest.fixture
def open_session(client: Leyline) -> Iterator[Callable[..., Session]]:
    """Opens sessions in which a tool said `content`. They end with the test."""
    opened: list[Session] = []

    def make(content: str, *after: dict[str, Any]) -> Session:
        call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"net.ini"}'}}
        history: list[dict[str, Any]] = [
            {"role": "user", "content": QUESTIONS[0]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": content},
            {"role": "assistant", "content": "8123"},
            *after,
            {"role": "user", "content": QUESTIONS[2]},
        ]
        opened.append(client.session(system=SYSTEM, tools=[READ_FILE], messages=history))
        return opened[-1]

    yield make
    for session in opened:
        session.close()


def result_of(session: Session) -> Message:
    result = session.transcript.result_of("c1")
    assert result is not None
    return result


def test_agents_at_once_answer_from_their_own_files_and_the_books_add_up(target: str, client: Leyline) -> None:
    before = client.server_info().pool
    values = [("4137", "bravo", "4"), ("5290", "delta", "31"), ("6021", "tango", "57"), ("7718", "kilo", "9")]
    modes = (None, Mode.AMORTIZE, Mode.FORGET, Mode.AMORTIZE)
    agents = [Agent(answers, mode) for answers, mode in zip(values, modes, strict=True)]
    start = threading.Barrier(len(agents), timeout=60)
    with ThreadPoolExecutor(len(agents)) as threads:
        assert list(threads.map(lambda agent: agent.work(target, start), agents)) == values
    after = client.server_info().pool
    assert (after.in_use, after.running, after.queued) == (before.in_use, 0, 0)
    # What the replies reported is what the model was called for; a reply's last token waits for the next call.
    reported = [reply.usage.computed + reply.usage.generated - 1 for agent in agents for reply in agent.replies]
    assert after.rows_computed - before.rows_computed == sum(reported)
    for reply in (reply for agent in agents for reply in agent.replies):
        assert reply.usage.context == reply.usage.reused + reply.usage.computed > 0
        assert reply.usage.reused == reply.cache.prefix_hit + reply.cache.content_hit + reply.cache.kept
    untouched, amortized, forgotten, again = agents
    for edit in amortized.edits + again.edits:
        assert edit.receipt.kept, "what follows keeps its rows"
        assert edit.receipt.influence_remains
        assert 0 < edit.receipt.freed <= edit.removed
    for edit in forgotten.edits:
        assert (edit.receipt.kept, edit.receipt.influence_remains) == (0, False)
        assert edit.receipt.to_compute > edit.inserted
    for agent in (amortized, forgotten, again):
        assert len(agent.edits) >= len(QUESTIONS)
        assert agent.tokens < untouched.tokens


def test_tokens_of_one_keep_coming_while_a_big_forget_of_another_is_computed(
    target: str, client: Leyline, open_session: Callable[..., Session]
) -> None:
    log = "".join(f"key{number} = value{number}\n" for number in range(220))
    big, small = open_session("port = 8123\n", {"role": "user", "content": log}), open_session("port = 8123\n")
    alone = small.fork()
    with alone.generate(max_tokens=40, ignore_eos=True) as stream:
        expected = [token for delta in stream for token in delta.token_ids]
    alone.close()
    big.prefill()
    tokens: list[int] = []
    meanwhile: list[int] = []

    def forget() -> Reply:
        with Leyline(target=target, timeout_s=120) as other:
            session = other.session(big.id)
            pool = other.server_info().pool
            assert pool.running == 1, "the other's stream ended too early"
            (edit,) = session.edit(clear(result_of(session), "it was long", mode=Mode.FORGET)).applied_edits
            # The span's slots and those behind it fell at once; the stream took a few meanwhile.
            assert 0 <= other.server_info().pool.in_use - (pool.in_use - edit.receipt.freed) < 100
            come = len(tokens)
            reply = session.complete(max_tokens=1)
            meanwhile.append(len(tokens) - come)
            return reply

    with ThreadPoolExecutor(1) as thread, small.generate(max_tokens=2_000, ignore_eos=True) as stream:
        pieces = iter(stream)
        tokens += next(pieces).token_ids
        waiting = thread.submit(forget)
        for delta in pieces:
            tokens += delta.token_ids
            if waiting.done() and len(tokens) >= len(expected):
                break
        reply = waiting.result(60)
    receipt = reply.applied_edits[0].receipt
    assert receipt.to_compute > 2_000
    assert (reply.usage.reused, reply.usage.computed) == (receipt.at, receipt.to_compute + 1)  # the reply's opening
    assert meanwhile[0] >= 3, "the stream stood still until the last chunk was computed"
    assert tokens[: len(expected)] == expected, "a neighbour's edit changed what this one says"
    with pytest.raises(Cancelled):
        stream.final()


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize("mode", list(Mode))
def test_slots_fall_at_once_unless_a_fork_reads_them(
    client: Leyline, open_session: Callable[..., Session], mode: Mode, forked: bool
) -> None:
    others = client.server_info().pool.in_use
    session = open_session(f"{mode} {forked} " + WORDS * 12)
    session.prefill()
    before = session.transcript.num_tokens
    assert client.server_info().pool.in_use - others == before
    fork = session.fork() if forked else None
    (edit,) = session.edit(clear(result_of(session), f"{mode} {forked} went", mode=mode)).applied_edits
    assert edit.removed > 100
    held = before - edit.removed if mode is Mode.AMORTIZE else edit.receipt.at
    if fork is not None:
        assert edit.receipt.freed == 0
        assert client.server_info().pool.in_use - others == before, "the fork still reads these rows"
        assert edit.receipt.held_elsewhere == ((fork.id,) if mode is Mode.FORGET else ())
        fork.close()
    else:
        assert edit.receipt.freed == before - held
    assert client.server_info().pool.in_use - others == held
    if mode is Mode.AMORTIZE:
        assert session.undo(edit.edit_id).restored_with_kv == edit.removed
        assert client.server_info().pool.in_use - others == before
        return
    with pytest.raises(NotUndoable):
        session.undo(edit.edit_id)
    report = session.prefill().cache
    assert report is not None
    assert (report.kept, report.prefix_hit + report.computed) == (held, edit.receipt.to_compute)
    assert client.server_info().pool.in_use - others == before - edit.removed + edit.inserted


def test_an_edit_amid_its_own_stream_is_refused_and_after_a_cancel_it_is_made(
    client: Leyline, open_session: Callable[..., Session]
) -> None:
    session = open_session("port = 8123\n")
    ids = client.tokenize(WORDS * 20)
    wipe = clear(result_of(session), "port = 55\n", mode=Mode.FORGET)
    with session.generate(max_tokens=len(ids), force_token_ids=ids, ignore_eos=True) as stream:
        pieces = iter(stream)
        sent = [token for _ in range(4) for token in next(pieces).token_ids]
        for handle in (session, client.session(session.id)):
            with pytest.raises(SessionBusy):
                handle.edit(wipe)
    with pytest.raises(TooLong):
        session.edit(clear(result_of(session), WORDS * client.server_info().limits.max_replacement))
    assert session.info().version == 0, "what is refused changes nothing"
    (edit,) = session.edit(wipe).applied_edits
    cut, num_tokens = session.transcript.messages[-1], session.transcript.num_tokens
    assert cut.open
    assert client.tokenize(cut.text)[: len(sent)] == sent == ids[: len(sent)]
    reply = session.complete(max_tokens=4)
    assert reply.text.startswith(cut.text), "it goes on where it was cut short"
    assert (reply.usage.reused, reply.usage.computed) == (edit.receipt.at, num_tokens - edit.receipt.at)
