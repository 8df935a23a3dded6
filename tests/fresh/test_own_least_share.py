"""Agents whose prompts are each a session of its own: what `reuse_least_share` takes, leaves, gives and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import pytest

from leyline_sdk import (
    AppliedEdit,
    CacheReport,
    Edit,
    Leyline,
    LeylineError,
    Mode,
    Policy,
    PolicyContext,
    Repair,
    Reply,
    Reuse,
    Session,
    assemble,
    cut_text,
)
from leyline_sdk.errors import ConfigError, SessionNotFound

Connect = Callable[[str], Leyline]

SHARE = 0.75
LEAST = 32
SYSTEM = "You answer questions about files. Read them with read_file."
READ = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
FILES = {"net.ini": "mode = fast\nport = 8123\ntimeout = 30\n", "disk.ini": "quota = 96\nlevel = low\n"}
CREW = "captain = juno\ncook = pavel\nmate = iris\nsails = 4\nport = brest\nflag = green\nberths = 12\n"
SHOP = "street = elm\nopen = nine\nshut = six\nrent = 880\nowner = oskar\nfloor = oak\ntills = 3\n"
PARK = "trees = 310\npond = round\ngates = two\nbench = iron\nowls = 5\nrule = quiet\npaths = gravel\n"
SHARED = [CREW, SHOP, PARK]
NET, DISK = "What is port in net.ini?", "What is quota in disk.ini?"
DRAFT = (
    "draft: the code of the gate is heron-5521-lima-sierra-0903-kilo-7714-oscar-3356, keep it from everybody at all."
)

Prompt = tuple[Sequence[str], str]


def fresh(seed: int, lines: int) -> str:
    """Text that no other seed has."""
    return "".join(f"entry {seed + i * 7} = {(i * 7919 + seed * 131) % 997} of {seed}\n" for i in range(lines))


def opened(client: Leyline, *parts: str, least: float | None, system: str = SYSTEM, **more: Any) -> Session:
    session = client.session(system=system, tools=[READ], reuse=Reuse.CONTENT, reuse_least_share=least, **more)
    session.append(assemble(parts))
    return session


def computed(session: Session) -> CacheReport:
    report = session.prefill().cache
    assert report is not None
    assert report.prefix_hit + report.content_hit + report.kept + report.computed == session.info().num_tokens
    assert sum(end - start for start, end in report.content_spans) == report.content_hit
    return report


def covered(report: CacheReport) -> float:
    """Of what would be computed without hits by content, the share that they cover."""
    return report.content_hit / (report.content_hit + report.computed)


def found(client: Leyline, session: Session, report: CacheReport, part: str) -> int:
    """Tokens of a part, which stands in the session once, that were taken by content."""
    ids, own = list(session.info(token_ids=True).token_ids), client.tokenize(part.strip())
    (at,) = [at for at in range(len(ids)) if ids[at : at + len(own)] == own]
    return sum(max(0, min(end, at + len(own)) - max(start, at)) for start, end in report.content_spans)


@dataclass
class Run:
    """What one agent said and reused, prompt by prompt."""

    answers: list[str]
    replies: list[list[Reply]]
    exact: list[bool]  # at the first reply of each

    @property
    def reused(self) -> int:
        return sum(one.cache.prefix_hit + one.cache.content_hit for replies in self.replies for one in replies)

    @property
    def openings(self) -> list[CacheReport]:
        return [replies[0].cache for replies in self.replies]


def agent(client: Leyline, prompts: Iterable[Prompt], reuse: Reuse = Reuse.CONTENT, least: float | None = None) -> Run:
    """Each prompt in a session of its own, which is closed before the next."""
    run = Run([], [], [])
    for parts, question in prompts:
        session = client.session(system=SYSTEM, tools=[READ], reuse=reuse, reuse_least_share=least)
        session.append(assemble([*parts, question]))
        replies = [session.complete(max_tokens=48)]
        info = session.info()
        run.exact.append(info.exact_upto == info.num_tokens - info.num_pending)
        while replies[-1].tool_calls and len(replies) < 4:
            session.append_results({one.id: FILES.get(one.arguments["path"], "") for one in replies[-1].tool_calls})
            replies.append(session.complete(max_tokens=48))
        run.answers.append(replies[-1].text.strip())
        run.replies.append(replies)
        session.close()
    return run


class Withdraw(Policy):
    """What begins with "draft:" goes from every message, up to the next blank line."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    @property
    def edits_protected(self) -> bool:
        return True

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        for message in context.transcript.of_role("user"):
            at = message.text.find("draft:")
            if at >= 0:
                end = message.text.find("\n\n", at)
                yield cut_text(message, at, end if end >= 0 else None, mode=self.mode)


# (a) an agent's loop, a session a prompt


def test_prompts_that_come_again_reuse_more_with_a_least_share(connect: Connect, server: Any) -> None:
    news = [fresh(100 + number, 14) for number in range(3)]
    first: list[Prompt] = [
        ([CREW, SHOP, PARK], NET),
        ([PARK, CREW, SHOP], DISK),
        *(([PARK, one], NET) for one in news),  # mostly new, behind a document whose place is new
    ]
    again: list[Prompt] = [*first[2:], ([SHOP, PARK, CREW], DISK), *first[2:], first[1]]
    plain = agent(connect(next(server[1])), [*first, *again], reuse=Reuse.PREFIX)
    every = agent(connect(next(server[1])), [*first, *again])
    least = agent(connect(next(server[1])), [*first, *again], least=SHARE)

    # Every hit that is taken while all is exact covers the share; after one, any is taken.
    taken = 0
    for replies in least.replies:
        exact = True
        for reply in replies:
            assert not exact or reply.cache.content_hit == 0 or covered(reply.cache) >= SHARE
            exact = exact and reply.cache.content_hit == 0
            taken += reply.cache.content_hit > 0
    assert taken > 2, "large hits are taken"

    # The shuffled documents are taken by both, at once.
    for run in (every, least):
        assert run.openings[0].content_hit == 0
        assert covered(run.openings[1]) > SHARE
        assert not run.exact[1]
    # Mostly new text: one takes its document, and leaves nothing of it; the other computes all, and gives it all.
    for at in (2, 3, 4):
        assert 0 < covered(every.openings[at]) < SHARE
        assert not every.exact[at]
        assert least.openings[at].content_hit == 0
        assert least.exact[at]
        assert at > 2 or least.openings[at].computed > every.openings[at].computed  # then PARK is a prefix
        for later in (at + 3, at + 7):
            context = least.replies[later][0].usage.context
            assert least.openings[later].prefix_hit == context - 1
            assert least.openings[later].computed == 1
            assert every.openings[later].computed > len(news[0]) / 5, "computed again behind its first hit"

    assert sum(one.content_hit for one in plain.openings) == 0
    assert plain.reused != every.reused
    assert least.reused > every.reused
    assert least.reused > plain.reused
    # What was computed whole is exact: the answer is that of a session that takes nothing by content.
    same = [at for at, exact in enumerate(least.exact) if exact]
    assert len(same) >= 9
    for at in same:
        assert least.replies[at][0].text == plain.replies[at][0].text
        assert least.replies[at][0].tool_calls[0].arguments == plain.replies[at][0].tool_calls[0].arguments
    assert set(plain.answers) == {"8123", "96"}


def test_nothing_and_all_of_the_share(connect: Connect, server: Any) -> None:
    """0 is as unset; a hit that covers the share exactly is taken, a little more than it is left."""
    for least, takes in ((None, True), (0, True), (0.0, True), ("equal", True), ("above", False), (1, False)):
        client = connect(next(server[1]))
        client.session(system=SYSTEM, tools=[READ]).warm([PARK])
        parts = (fresh(7, 4), PARK, NET)
        probe = computed(opened(client, *parts, least=None, system="Be brief. " + SYSTEM))
        assert probe.content_hit > 0
        client = connect(next(server[1]))
        client.session(system=SYSTEM, tools=[READ]).warm([PARK])
        share = covered(probe)
        value = {"equal": share, "above": share + 1e-6}.get(str(least), least)
        report = computed(opened(client, *parts, least=value, system="Be brief. " + SYSTEM))  # type: ignore[arg-type]
        assert report.content_hit == (probe.content_hit if takes else 0), (least, value)


def test_once_a_hit_was_taken_small_ones_are_too(team: Leyline) -> None:
    team.session(system=SYSTEM, tools=[READ]).warm(SHARED)
    session = opened(team, SHOP, PARK, least=SHARE)  # a prefix (SHOP), then PARK
    assert covered(computed(session)) >= SHARE
    session.append(assemble([CREW, fresh(21, 12)]))
    report = computed(session)
    assert 0 < covered(report) < SHARE
    assert found(team, session, report, CREW) >= LEAST

    exact = opened(team, fresh(23, 6), least=SHARE)
    assert computed(exact).content_hit == 0
    exact.append(assemble([CREW, fresh(22, 12)]))
    assert computed(exact).content_hit == 0
    assert exact.info().exact_upto == exact.info().num_tokens


def test_new_text_in_front_of_what_is_shared_is_published_either_way(connect: Connect, server: Any) -> None:
    """Then the least share only gives the hit away: it is for new text behind what is shared."""
    prompts: list[Prompt] = [
        ([CREW, SHOP], NET),
        ([fresh(31, 14), SHOP, CREW], NET),
        ([fresh(31, 14), SHOP, CREW], NET),
    ]
    every = agent(connect(next(server[1])), prompts)
    least = agent(connect(next(server[1])), prompts, least=SHARE)
    assert every.openings[2].prefix_hit > len(fresh(31, 14)) / 5
    assert every.reused > least.reused


# (b) policies that edit


@dataclass
class Edited:
    client: Leyline
    session: Session
    at: int
    edit: AppliedEdit
    report: CacheReport
    early: str
    late: str


def edited(client: Leyline, mode: Mode) -> Edited:
    """Small hits are left while all is exact; then the policy takes the draft out in the call that brings more."""
    client.session(system=SYSTEM, tools=[READ]).warm(SHARED)
    early, late = fresh(41, 10), fresh(42, 6)
    session = opened(client, DRAFT, CREW, early, least=SHARE, system="Be brief. " + SYSTEM)
    before = computed(session)
    assert (before.content_hit, before.computed) == (0, session.info().num_tokens - before.prefix_hit)
    session.append(assemble([SHOP, fresh(43, 6)]))
    assert computed(session).content_hit == 0
    assert session.info().exact_upto == session.info().num_tokens

    session.policies.append(Withdraw(mode))
    (edit,) = session.append(assemble([PARK, late])).applied_edits
    assert (edit.policy, edit.receipt.mode) == ("Withdraw", mode)
    assert edit.removed > LEAST
    assert "draft" not in session.transcript.of_role("user")[0].text
    assert session.preview().applied_edits == ()
    return Edited(client, session, edit.receipt.at, edit, computed(session), early, late)


def test_behind_an_amortize_small_hits_are_taken_and_nothing_is_published(team: Leyline) -> None:
    one = edited(team, Mode.AMORTIZE)
    assert one.edit.receipt.influence_remains
    assert one.edit.receipt.kept > 0
    # Its KV is not all exact any more: a hit that covers little is taken.
    assert 0 < covered(one.report) < SHARE
    assert found(team, one.session, one.report, PARK) >= LEAST
    assert one.session.info().exact_upto <= one.at
    # What was exact once, others still find; what was computed behind the edit, nobody does.
    other = opened(team, one.early, least=None, system="No. " + SYSTEM)
    assert found(team, other, computed(other), one.early) > len(team.tokenize(one.early)) * 0.9
    other = opened(team, one.late, least=None, system="No. " + SYSTEM)
    assert found(team, other, computed(other), one.late) == 0
    # An AMORTIZE can be undone; what the session took meanwhile stays approximate, so it still takes small hits.
    one.session.policies.clear()
    one.session.undo(one.edit.edit_id)
    assert "draft" in one.session.transcript.of_role("user")[0].text
    one.session.append(assemble([CREW, fresh(44, 6)]))
    assert 0 < covered(computed(one.session)) < SHARE


def test_a_forget_computes_again_and_small_hits_are_left_again(team: Leyline) -> None:
    one = edited(team, Mode.FORGET)
    assert not one.edit.receipt.influence_remains
    assert (one.edit.receipt.kept, one.edit.receipt.held_elsewhere) == (0, ())
    # What follows is computed, whatever others have; and PARK, which covers little, is left: all is exact.
    assert one.report.content_hit == 0
    assert one.report.kept <= one.at
    assert one.session.info().exact_upto == one.session.info().num_tokens
    # The span is nowhere.
    other = opened(team, fresh(51, 1), DRAFT, least=None, system="No. " + SYSTEM)
    assert found(team, other, computed(other), DRAFT) == 0


def test_a_forget_names_who_took_rows_of_the_span(team: Leyline) -> None:
    donor = opened(team, fresh(61, 4), DRAFT, CREW, least=SHARE, system="Be brief. " + SYSTEM)
    assert computed(donor).content_hit == 0
    leaver = opened(team, fresh(63, 12), DRAFT, least=SHARE, system="No. " + SYSTEM)
    assert computed(leaver).content_hit == 0
    taker = opened(team, DRAFT, CREW, least=SHARE, system="Be brief. " + SYSTEM)  # its system is a prefix
    assert covered(computed(taker)) >= SHARE
    holder = opened(team, fresh(62, 1), DRAFT, CREW, least=None, system="No. " + SYSTEM)
    assert found(team, holder, computed(holder), DRAFT) >= LEAST
    donor.policies.append(Withdraw(Mode.FORGET))
    (edit,) = donor.prefill().applied_edits
    assert set(edit.receipt.held_elsewhere) == {holder.id, taker.id}, "who left the hit holds none of its rows"
    assert donor.info().exact_upto == donor.info().num_tokens


def test_what_stands_in_front_of_a_forget_is_still_found(team: Leyline) -> None:
    """It was computed before the span, is exact, and its session holds it: a FORGET has no business with it."""
    donor = opened(team, CREW, SHOP, PARK, DRAFT, fresh(81, 4), least=SHARE, system="Be brief. " + SYSTEM)
    computed(donor)
    for cut in (False, True):
        if cut:
            donor.policies.append(Withdraw(Mode.FORGET))
            assert computed(donor).kept > sum(len(team.tokenize(one)) for one in SHARED)
        other = opened(team, CREW, SHOP, PARK, least=None, system="No. " + SYSTEM)
        report = computed(other)
        shares = [found(team, other, report, part) / len(team.tokenize(part)) for part in SHARED]
        assert min(shares) > 0.9
        other.close()


def test_what_comes_behind_a_forget_takes_and_gives_as_before(team: Leyline) -> None:
    """What it left to compute was computed; what is appended later may be taken, what was computed anew is found."""
    one = edited(team, Mode.FORGET)
    other = opened(team, one.late, least=None, system="No. " + SYSTEM)
    assert found(team, other, computed(other), one.late) > len(team.tokenize(one.late)) * 0.8
    one.session.append(CREW)
    assert covered(computed(one.session)) >= SHARE


# (c) what is refused


@pytest.mark.parametrize("value", [-0.1, 1.0001, 75, float("nan"), float("inf"), "0.75", [0.75], {}])
@pytest.mark.parametrize("reuse", [*Reuse, None])
def test_bad_values_are_refused_with_their_bounds(team: Leyline, value: Any, reuse: Reuse | None) -> None:
    pool, sessions = team.server_info().pool, team.sessions()
    with pytest.raises(ConfigError, match=r"reuse_least_share=.*\[0, 1\]") as refused:
        team.session("never", system=SYSTEM, reuse=reuse, reuse_least_share=value)
    assert repr(value) in str(refused.value)
    assert isinstance(refused.value, LeylineError)
    assert isinstance(refused.value, ValueError)
    with pytest.raises(SessionNotFound):
        team.session("never", create=False)
    assert (team.server_info().pool, team.sessions()) == (pool, sessions)


@pytest.mark.parametrize("value", [0, 0.5, SHARE, 1])
@pytest.mark.parametrize("reuse", [Reuse.PREFIX, Reuse.REGISTER, None])
def test_without_content_it_is_refused(team: Leyline, value: float, reuse: Reuse | None) -> None:
    with pytest.raises(ConfigError, match=r"reuse_least_share.*CONTENT"):
        team.session("never", system=SYSTEM, reuse=reuse, reuse_least_share=value)
    assert team.sessions() == []
    made = team.session("never", system=SYSTEM, reuse=reuse)
    assert made.created, "nothing was made"
    assert made.reuse == (reuse or Reuse.PREFIX)


@pytest.mark.parametrize("share", [SHARE, 0.7, 1 / 3])
def test_a_resumed_session_has_its_own(connect: Connect, key: str, share: float) -> None:
    team, second = connect(key), connect(key)
    team.session(system=SYSTEM, tools=[READ]).warm(SHARED)
    session = opened(team, fresh(71, 10), least=share, id="mine")
    assert computed(session).content_hit == 0
    was = session.info(token_ids=True)
    for more in (
        {"reuse_least_share": 0.5},
        {"reuse_least_share": 0},
        {"reuse": Reuse.CONTENT, "reuse_least_share": 1},
        {"reuse": Reuse.PREFIX},
        {"reuse_least_share": share, "reuse_repair": Repair(first=4)},
    ):
        with pytest.raises(ConfigError, match=r"'mine'.* resume it without"):
            second.session("mine", **more)  # type: ignore[arg-type]
    assert session.info(token_ids=True) == was

    for resumed in (
        second.session("mine"),
        second.session("mine", reuse_least_share=share, create=False),
        second.session("mine", reuse=Reuse.CONTENT, reuse_least_share=share),
    ):
        assert not resumed.created
        assert resumed.reuse is Reuse.CONTENT
    # It still leaves what covers too little, and so does a fork; each takes what covers enough.
    resumed.append(assemble([SHOP, fresh(72, 10)]))
    assert computed(resumed).content_hit == 0
    fork = resumed.fork()
    fork.append(assemble([PARK, fresh(73, 10)]))
    assert computed(fork).content_hit == 0
    for one in (resumed, fork):
        one.append(CREW)
        assert covered(computed(one)) >= share


def test_unset_is_zero_for_who_resumes(team: Leyline) -> None:
    team.session("plain", system=SYSTEM, reuse=Reuse.CONTENT)
    assert not team.session("plain", reuse_least_share=0).created
    with pytest.raises(ConfigError, match="reuse_least_share"):
        team.session("plain", reuse_least_share=SHARE)
    with pytest.raises(SessionNotFound):
        team.session("gone", create=False, reuse_least_share=SHARE)


# (d) warm first, then sixteen at once


def at_once(clients: Sequence[Leyline], work: Callable[[int, Leyline], CacheReport]) -> list[CacheReport]:
    barrier = Barrier(len(clients))

    def one(number: int) -> CacheReport:
        barrier.wait(timeout=30)
        return work(number, clients[number])

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(one, range(len(clients))))


def test_sixteen_at_once_find_what_was_warmed(connect: Connect, key: str) -> None:
    clients = [connect(key) for _ in range(16)]
    warmed = clients[0].session(system=SYSTEM, tools=[READ]).warm(SHARED)
    size = sum(one.num_tokens for one in warmed)
    assert all(one.computed >= LEAST for one in warmed)
    assert sum(one.computed for one in clients[0].session(system=SYSTEM, tools=[READ]).warm(SHARED)) == len(SHARED)
    before = clients[0].server_info().pool.rows_computed

    def work(number: int, client: Leyline) -> CacheReport:
        order = [SHARED[(number + i) % 3] for i in range(3)]
        session = opened(client, *order, f"Question {number}?", least=SHARE)
        report = computed(session)
        assert session.info().exact_upto < session.info().num_tokens
        return report

    reports = at_once(clients, work)
    for report in reports:
        # Behind the same system message the first document is a prefix, the others are hits.
        assert covered(report) >= SHARE
        assert report.prefix_hit + report.content_hit > size
        assert report.computed < size / 4
    assert clients[0].server_info().pool.rows_computed - before == sum(one.computed for one in reports)


def test_sixteen_at_once_with_mostly_their_own_text_compute_it_and_find_it_again(connect: Connect, key: str) -> None:
    clients = [connect(key) for _ in range(16)]
    clients[0].session(system=SYSTEM, tools=[READ]).warm(SHARED)

    def work(number: int, client: Leyline) -> CacheReport:
        session = opened(client, PARK, SHOP, fresh(200 + number, 12), least=SHARE)
        report = computed(session)
        assert session.info().exact_upto == session.info().num_tokens
        session.close()
        return report

    first = at_once(clients, work)
    assert all(one.content_hit == 0 for one in first), "SHOP is warm, and left: it covers too little"
    again = at_once(clients, work)
    assert [one.prefix_hit for one in again] == [one.prefix_hit + one.computed - 1 for one in first]
    assert [one.computed for one in again] == [1] * 16
