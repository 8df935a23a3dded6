"""Agents of one's own that share documents and tools, and a policy that cuts: who finds what of whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leyline_sdk import (
    Leyline,
    Reuse,
)
from leyline_sdk.errors import SessionNotFound
from tests.fresh.sharing import (
    COUNT,
    DOCUMENTS,
    FILES,
    LEAST,
    LIST,
    NET,
    READ,
    RULES,
    SITE,
    SYSTEM,
    TEAM,
    Agent,
    FirstLines,
    agrees,
    check,
    computed,
    opened,
    places,
    share_taken,
    tokens,
    total,
)


def test_sub_agents_share_documents_and_tools_and_their_policy_cuts(team: Leyline) -> None:
    lead = team.session(system=SYSTEM, tools=[READ, LIST, COUNT], reuse=Reuse.REGISTER)
    assert all(one.computed > LEAST for one in lead.warm(DOCUMENTS))
    lead.append("Hello there.")
    lead.prefill()
    donors = [tokens(lead), *(team.tokenize(one.strip() + "\n\n") for one in DOCUMENTS)]

    plans: list[tuple[str, list[Any], list[str], str, str]] = [
        ("You answer questions about files.", [LIST, READ, COUNT], [RULES, TEAM, SITE], "port in net.ini", "8123"),
        ("Be brief. " + SYSTEM, [COUNT, LIST, READ], [SITE, RULES, TEAM], "quota in disk.ini", "96"),
        (SYSTEM + " Say the value alone.", [READ, COUNT, LIST], [TEAM, SITE, RULES], "keep in log.ini", "12"),
    ]
    for system, tools, documents, what, answer in plans:
        session = team.session(system=system, tools=tools, reuse=Reuse.CONTENT, policies=[FirstLines()])
        agent = Agent(session)
        assert agent.ask(*documents, f"What is {what}?") == answer
        opening, ids = agent.replies[0]
        check(session, opening.cache, opening.usage.context)
        known = agrees(ids, donors)
        for start, end in opening.cache.content_spans:  # hits that touch are one span
            assert known.issuperset(range(start, end)), team.detokenize(ids[start:end])
        for document in documents:
            assert share_taken(team, session, opening.cache, document) > 0.95
        assert opening.cache.content_hit > sum(len(team.tokenize(one)) for one in DOCUMENTS) * 0.9
        assert opening.cache.computed < opening.usage.context / 2
        assert opening.cache.reason == "COLD"
        for reply, _ in agent.replies[1:]:
            assert reply.cache.kept >= opening.usage.context, "what was taken once is the session's own"
        donors.append(ids)

        # The second question: what was read for the first goes, the documents in front of it stay.
        first = len(agent.replies)
        assert agent.ask("What is level in disk.ini?") == "low"
        cut = [edit for edit in agent.edits if edit.policy == "FirstLines"]
        assert len(cut) == (what != "keep in log.ini"), "a result of one line stays"
        for edit in cut:
            assert edit.removed > edit.inserted
            assert edit.receipt.influence_remains
            assert edit.receipt.at > max(end for _, end in opening.cache.content_spans)
        told = [one.text for one in session.transcript.of_role("tool")]
        assert told[0] == FILES[what.split()[-1]].splitlines(keepends=True)[0]
        assert agent.replies[first][0].cache.kept > total(opening.cache.content_spans)


def test_what_one_agent_read_with_its_tool_another_finds_behind_its_own_call(team: Leyline) -> None:
    first = Agent(team.session(system=SYSTEM, tools=[READ, LIST], reuse=Reuse.CONTENT))
    second = Agent(team.session(system="Be brief. " + SYSTEM, tools=[LIST, READ], reuse=Reuse.CONTENT))
    assert first.ask("What is port in net.ini?") == second.ask("What is port in net.ini?") == "8123"
    reply, ids = second.replies[-1]
    check(second.session, reply.cache, reply.usage.context)
    assert reply.cache.kept > reply.cache.content_spans[0][0] - LEAST, "its own rows go first"
    assert share_taken(team, second.session, reply.cache, NET) > 0.9
    for start, end in reply.cache.content_spans:
        assert places(ids[start:end], first.replies[-1][1])


@pytest.mark.parametrize("donor", list(Reuse))
@pytest.mark.parametrize("taker", list(Reuse))
def test_who_gives_and_who_takes(team: Leyline, donor: Reuse, taker: Reuse) -> None:
    giving = opened(team, SYSTEM, *DOCUMENTS, reuse=donor)
    assert computed(giving).computed == giving.info().num_tokens == giving.info().exact_upto

    moved = opened(team, "Be brief. " + SYSTEM, *DOCUMENTS[::-1], reuse=taker)
    report = computed(moved)
    if donor is not Reuse.PREFIX and taker is Reuse.CONTENT:
        assert min(share_taken(team, moved, report, one) for one in DOCUMENTS) > 0.9
        assert moved.info().exact_upto == report.content_spans[0][0]
        assert report.turned >= report.content_hit - LEAST
    else:
        assert (report.content_hit, report.content_spans) == (0, ())
        assert moved.info().exact_upto == moved.info().num_tokens

    # The same text from its beginning on is exact for all, and found as a prefix.
    again = opened(team, SYSTEM, *DOCUMENTS, reuse=taker)
    report = computed(again)
    size = again.info().num_tokens
    assert (report.prefix_hit, report.content_hit, report.computed) == (size - 1, 0, 1)
    assert again.info().exact_upto == size
    assert [one.reuse for one in (giving, moved, again)] == [donor, taker, taker]
    assert [one.info().reuse for one in (giving, moved, again)] == [donor, taker, taker]


def test_an_exact_prefix_goes_first_and_what_follows_it_is_found_by_content(team: Leyline) -> None:
    computed(opened(team, SYSTEM, TEAM, SITE, reuse=Reuse.REGISTER))
    computed(opened(team, "Be brief. " + SYSTEM, RULES, reuse=Reuse.REGISTER))
    session = opened(team, SYSTEM, TEAM, RULES, SITE, reuse=Reuse.CONTENT)
    report = computed(session)
    (behind,) = places(team.tokenize(RULES.strip()), tokens(session))
    assert report.prefix_hit >= behind - 4
    assert report.content_spans[0][0] >= report.prefix_hit
    assert share_taken(team, session, report, TEAM) == 0
    assert min(share_taken(team, session, report, one) for one in (RULES, SITE)) > 0.9


def test_nothing_behind_a_hit_is_published(team: Leyline) -> None:
    own = (
        "alpha = one\nbeta = two\ngamma = three\nkappa = four\nsigma = five\nomega = six\ntheta = seven\nzeta = eight\n"
    )
    computed(opened(team, SYSTEM, TEAM, reuse=Reuse.REGISTER))
    other = "Be brief. " + SYSTEM
    approximate = opened(team, other, TEAM, own, reuse=Reuse.CONTENT)
    hit = computed(approximate).content_spans[0][0]
    assert share_taken(team, opened(team, "No. " + SYSTEM, own, reuse=Reuse.CONTENT), computed(approximate), own) == 0

    exact = opened(team, other, TEAM, own, reuse=Reuse.PREFIX)
    report = computed(exact)
    assert report.prefix_hit <= hit
    assert exact.info().exact_upto == exact.info().num_tokens
    # PREFIX leaves nothing that is found by content, so that nobody has `own` to give yet.
    stranger = opened(team, "No. " + SYSTEM, own, reuse=Reuse.CONTENT)
    assert share_taken(team, stranger, computed(stranger), own) == 0
    # That one computed it exactly, or it would not be found now.
    last = opened(team, "Yes. " + SYSTEM, own, reuse=Reuse.CONTENT)
    assert share_taken(team, last, computed(last), own) > 0.9


def test_short_stretches_and_the_first_positions_are_not_found(team: Leyline) -> None:
    short = "release = monthly\nbranch = main\n"
    assert len(team.tokenize(short)) < LEAST - 8
    computed(opened(team, SYSTEM, short, TEAM, reuse=Reuse.REGISTER))
    session = opened(team, "Be brief. " + SYSTEM, "Say it.", short, "Or not.", TEAM, reuse=Reuse.CONTENT)
    report = computed(session)
    assert share_taken(team, session, report, short) == 0
    assert share_taken(team, session, report, TEAM) > 0.9

    # Where it stands at the first positions it neither gives nor takes them.
    bare = team.session(reuse=Reuse.CONTENT)
    bare.append(TEAM)
    assert computed(bare).content_hit == 0
    first = team.session(reuse=Reuse.REGISTER)
    first.append(RULES + "\n" + SITE)
    computed(first)
    later = opened(team, SYSTEM, RULES, SITE, reuse=Reuse.CONTENT)
    report = computed(later)
    assert share_taken(team, later, report, SITE) > 0.9
    assert share_taken(team, later, report, RULES) < 0.5


def test_another_tenant_gets_none(connect: Callable[[str], Leyline], server: tuple[str, Iterator[str]]) -> None:
    ours = connect(next(server[1]))
    lead = ours.session(system=SYSTEM, tools=[READ], reuse=Reuse.CONTENT)
    lead.warm(DOCUMENTS)
    computed(opened(ours, SYSTEM, *DOCUMENTS, reuse=Reuse.REGISTER))
    for system, documents in ((SYSTEM, DOCUMENTS), ("Be brief. " + SYSTEM, DOCUMENTS[::-1])):
        theirs = connect(next(server[1]))
        stranger = opened(theirs, system, *documents, reuse=Reuse.CONTENT)
        report = computed(stranger)
        assert report.content_hit == 0
        assert report.prefix_hit < 8, "the same text of ours is no prefix of theirs"
        mine = opened(ours, "Mine. " + system, *documents, reuse=Reuse.CONTENT)
        assert computed(mine).content_hit > 0
        with pytest.raises(SessionNotFound):
            theirs.session(lead.id, create=False)
