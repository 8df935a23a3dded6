"""A policy of one's own that keeps tool results within a budget of tokens and edits seldom: what it does, and when."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from leyline_policies import Redact
from leyline_sdk import (
    Edit,
    Leyline,
    Message,
    Mode,
    Policy,
    PolicyContext,
    PolicyError,
    Receipt,
    Reply,
    Session,
    cut_text,
)
from leyline_sdk.testing import FakeServer, call

SYSTEM = "You answer questions about files. Read them with read_file."
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ_FILE = {"name": "read_file", "description": "Read a text file.", "parameters": PARAMETERS}
FILLER = "mode = 11\nlevel = 12\nlimit = 13\ntimeout = 14\ndepth = 15\n"
FILES = {
    f"{stem}.ini": f"port = {port}\n{FILLER}" for stem, port in (("net", 8123), ("alt", 4410), ("app", 91), ("web", 77))
}
FILES["key.ini"] = "token = sk-abcdefghijklmnopqrstuvwx\n" + FILES["net.ini"]


class Budget(Policy):
    """Tool results together take at most `tokens`: the largest are cut to their first line.

    It acts only in every `every`-th turn, and only when that frees `at_least` tokens: one edit in the cache is better
    than three. What it cut once it leaves alone.
    """

    def __init__(self, tokens: int, *, every: int = 1, at_least: int = 0, mode: Mode = Mode.AMORTIZE) -> None:
        self.tokens, self.every, self.at_least, self.mode = tokens, every, at_least, mode

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        results = context.tool_results
        over = sum(result.content_tokens for result in results) - self.tokens
        if context.turn % self.every or over <= 0:
            return []
        freed, chosen = 0, []
        read = context.transcript.of_role("assistant")[-1].start
        whole = [result for result in results if result.end <= read and self.rest(result)]
        for result in sorted(whole, key=lambda result: result.content_tokens, reverse=True):
            if freed >= over:
                break
            freed += context.estimate_tokens(result.text[self.rest(result) :])
            chosen.append(result)
        if freed < self.at_least:
            return []
        return [cut_text(result, self.rest(result), None, "..", mode=self.mode) for result in chosen]

    @staticmethod
    def rest(result: Message) -> int:
        """Where its second line begins; 0 when there is none, or nothing but what an earlier cut left."""
        start = result.text.find("\n", 0, -1) + 1
        return 0 if result.text[start:] == ".." else start


def read_all(session: Session, *stems: str) -> list[Reply]:
    """One question about each file; the replies in which the model had read it."""
    answers = []
    for stem in stems:
        session.append(f"What is port in {stem}.ini?")
        while (reply := session.complete(max_tokens=96)).tool_calls:
            session.append_results({one.id: FILES[one.arguments["path"]] for one in reply.tool_calls})
        answers.append(reply)
    return answers


def results(session: Session) -> list[str]:
    return [message.text for message in session.transcript.of_role("tool")]


def fake(*stems: str) -> FakeServer:
    return FakeServer([one for stem in stems for one in (call("read_file", path=f"{stem}.ini"), "It is there.")])


def turns_of_edits(budget: Budget, *stems: str) -> list[int]:
    """Generates that were finished when each edit was made, in a session about these files."""
    turns: list[int] = []
    client = fake(*stems).client()
    with client.session(
        tools=[READ_FILE], policies=[budget], on_edit=lambda _: turns.append(session.transcript.turn)
    ) as session:
        read_all(session, *stems)
        session.prefill()
    return turns


@pytest.mark.parametrize(
    ("every", "at_least", "turns"),
    [
        (1, 0, [3, 5, 7, 8]),  # as soon as it is over its budget
        (4, 0, [4, 8, 8, 8]),  # no sooner than in turn 4, then all that has come by turn 8
        (1, 80, [5, 5, 8, 8]),  # two results together free 80 tokens, one does not
        (3, 120, []),  # when it may act, there is too little to free
        (1, 500, []),
    ],
)
def test_it_waits_for_its_turn_and_for_enough_to_free(every: int, at_least: int, turns: list[int]) -> None:
    assert turns_of_edits(Budget(100, every=every, at_least=at_least), "net", "alt", "app", "web") == turns


def test_a_plan_that_was_made_is_planned_no_more_and_an_undo_is_respected() -> None:
    stems = ("net", "alt", "app")
    with fake(*stems).client().session(tools=[READ_FILE], policies=[Budget(100)]) as session:
        read_all(session, *stems)
        session.prefill()
        assert not session.preview().applied_edits
        cut = [message for message in session.transcript.of_role("tool") if message.edited]
        assert [message.text for message in cut] == [
            f"{FILES[f'{stem}.ini'].splitlines()[0]}\n.." for stem in stems[:2]
        ]
        session.undo(cut[0].edit_ids[0])
        assert results(session)[0] == FILES["net.ini"]
        assert not session.preview().applied_edits, "what a person brought back stays"


def test_a_policy_that_fails_stops_the_call_and_leaves_the_session_as_it_was() -> None:
    with fake("net", "alt").client().session(tools=[READ_FILE], policies=[Budget(60)]) as session:
        read_all(session, "net")
        version, num_tokens = session.info().version, session.info().num_tokens
        broken = Budget(0, every=1)
        broken.every = 0
        session.policies[:] = [broken]
        with pytest.raises(PolicyError) as failed:
            session.append("What is port in alt.ini?")
        assert failed.value.policy == "Budget"
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        assert (session.info().version, session.info().num_tokens) == (version, num_tokens)


def test_agents_at_once_under_a_budget_are_right_and_batches_compute_less_again(target: str) -> None:
    stems = ("net", "alt", "app", "web", "net", "app")
    budgets = [
        Budget(70, mode=Mode.FORGET),
        Budget(70, every=4, at_least=60, mode=Mode.FORGET),
        Budget(70, every=4, at_least=60),
        Budget(10_000),
    ]

    def run(budget: Budget) -> tuple[list[Receipt], int]:
        receipts: list[Receipt] = []
        with Leyline(target=target, timeout_s=120) as client:
            session = client.session(
                system=SYSTEM, tools=[READ_FILE], policies=[budget], on_edit=lambda edit: receipts.append(edit.receipt)
            )
            replies = read_all(session, *stems)
            assert [reply.text.strip() for reply in replies] == ["8123", "4410", "91", "77", "8123", "91"]
            num_tokens = session.info().num_tokens
            session.close()
        return receipts, num_tokens

    with ThreadPoolExecutor(len(budgets)) as threads:
        (single, least), (batched, fewer), (amortized, same), (unused, most) = threads.map(run, budgets)
    assert [receipt.edit_id for receipt in single] == ["e1", "e2", "e3", "e4", "e5"]
    assert [receipt.edit_id for receipt in batched] == ["e1.1", "e1.2", "e1.3"], "one call"
    assert [receipt.removed for receipt in batched] == [receipt.removed for receipt in amortized]
    assert not unused
    assert least < fewer == same < most
    assert most - fewer == sum(-receipt.shift for receipt in batched)
    assert most - least == sum(-receipt.shift for receipt in single)
    # Receipts of one call share what it left to compute.
    assert batched[0].to_compute < sum(receipt.to_compute for receipt in single) / 2
    assert {receipt.to_compute for receipt in batched} == {batched[0].to_compute}
    assert not any(receipt.kept for receipt in [*single, *batched])
    assert all(receipt.kept > batched[0].to_compute / 4 for receipt in amortized)
    assert amortized[0].to_compute < 3 * len(amortized) + 4, "placeholders, and what had just come"


def test_after_a_redaction_the_budget_cuts_the_same_message(client: Leyline) -> None:
    policies = [Redact(r"sk-\w{20,}"), Budget(70)]
    with client.session(system=SYSTEM, tools=[READ_FILE], policies=policies) as session:
        redacted, cut = (reply.applied_edits[0] for reply in read_all(session, "key", "alt"))
        assert (redacted.policy, redacted.receipt.mode) == ("Redact", Mode.FORGET)
        assert not redacted.receipt.freed, "it went before any row was computed from it"
        assert (cut.policy, cut.receipt.mode) == ("Budget", Mode.AMORTIZE)
        assert cut.message_ids == redacted.message_ids
        assert results(session) == ["token = [redacted]\n..", FILES["alt.ini"]]
        session.refresh()
        assert results(session)[0] == "token = [redacted]\n..", "as the server has it"
        session.close()
