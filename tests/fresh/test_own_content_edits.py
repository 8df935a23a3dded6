"""Sessions of one's own that share documents: repairs, warming, resuming, and edits, of a secret too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_sdk import (
    CacheReport,
    Leyline,
    Mode,
    Repair,
    Reuse,
    Session,
    assemble,
    clear,
)
from leyline_sdk.errors import ConfigError, ContextExceeded, InvalidArgument, NotSupported
from tests.fresh.sharing import (
    DOCUMENTS,
    LEAST,
    READ,
    RULES,
    SECRET,
    SITE,
    SYSTEM,
    TEAM,
    Agent,
    FirstLines,
    Serve,
    Span,
    agrees,
    computed,
    opened,
    places,
    share_taken,
    tokens,
)


def test_repair_computes_part_of_each_hit(team: Leyline) -> None:
    team.session(system="grey " * 40).warm(DOCUMENTS)  # a short one would leave them at the first positions
    (last, *_) = documents = DOCUMENTS[::-1]

    def taken(word: str, repair: Repair | None) -> tuple[Session, CacheReport, list[Span]]:
        """Nothing is shared but the documents. Spans are counted from the first document on."""
        system = f"{word} " * 40
        session = opened(team, system, *documents, reuse=Reuse.CONTENT, reuse_repair=repair, tools=())
        report = computed(session)
        (at,) = places(team.tokenize(last.strip()), tokens(session))
        return session, report, [(start - at, end - at) for start, end in report.content_spans]

    _, plain, spans = taken("red", None)
    assert len(spans) == len(documents)
    _, first, later = taken("blue", Repair(first=16))
    assert later == [(start + 16, end) for start, end in spans]
    assert plain.content_hit - first.content_hit == 16 * len(spans)

    _, half, scattered = taken("green", Repair(share=0.5))
    assert 0.45 < half.content_hit / plain.content_hit < 0.55
    inside = {at for start, end in spans for at in range(start, end)}
    assert {at for start, end in scattered for at in range(start, end)} < inside

    for word, everything in (("black", Repair(share=1)), ("white", Repair(first=4_000))):
        session, report, _ = taken(word, everything)
        assert (report.content_hit, report.content_spans) == (0, ())
        assert session.info().exact_upto == session.info().num_tokens


def test_what_warm_returns(team: Leyline) -> None:
    session = team.session(system=SYSTEM, tools=[READ])
    before, rows = session.info(token_ids=True), team.server_info().pool.rows_computed
    cold = session.warm(DOCUMENTS)
    assert [one.num_tokens for one in cold] == [len(team.tokenize(one)) for one in DOCUMENTS]
    assert all(one.computed + one.reused == one.num_tokens and one.reused < 4 for one in cold)
    assert team.server_info().pool.rows_computed - rows >= sum(one.computed for one in cold)
    assert session.info(token_ids=True) == before, "this session is not touched"
    assert [one.id for one in team.sessions()] == [session.id], "none that it made is left"

    again = session.warm(DOCUMENTS[::-1])
    assert [(one.num_tokens, one.computed) for one in again] == [(one.num_tokens, 1) for one in cold[::-1]]
    assert session.warm(TEAM) == again[-1:]
    assert session.warm([]) == ()

    rows = team.server_info().pool.rows_computed
    bad: list[Any] = [[TEAM + "more", ""], [RULES + "more", 3], None]
    for documents in bad:
        with pytest.raises(InvalidArgument, match="document"):
            session.warm(documents)
    assert team.server_info().pool.rows_computed == rows, "nothing was computed"
    with pytest.raises(ContextExceeded):
        session.warm([SITE + "and so on", "word " * 9_000])
    assert session.warm([SITE + "and so on"])[0].computed == 1, "those before it are warm"


def test_a_session_goes_on_as_it_was_made(connect: Callable[[str], Leyline], team: Leyline, key: str) -> None:
    made = team.session(system=SYSTEM, tools=[READ], reuse=Reuse.CONTENT, reuse_repair=Repair(first=16))
    assert made.created
    made.append("Hello there.")
    made.prefill()
    team.session(system="Be brief. " + SYSTEM, tools=[READ]).warm(DOCUMENTS)

    elsewhere = connect(key)
    resumed = elsewhere.session(made.id, create=False)
    assert (resumed.created, resumed.reuse) == (False, Reuse.CONTENT)
    for session in (resumed, resumed.fork()):
        assert session.reuse is Reuse.CONTENT
        session.append(assemble([*DOCUMENTS[:: 1 if session is resumed else -1], "Well?"]))
        report = computed(session)
        assert report.kept > 0
        starts = [places(elsewhere.tokenize(one.strip()), tokens(session))[0] for one in DOCUMENTS]
        for start, _ in report.content_spans:
            assert start >= max(at for at in starts if at < start) + 14, "each hit's first 16 tokens are computed"
        for document in DOCUMENTS:
            assert 0.4 < share_taken(elsewhere, session, report, document) < 0.7

    assert elsewhere.session(made.id, reuse=Reuse.CONTENT, reuse_repair=Repair(first=16)).id == made.id
    with pytest.raises(ConfigError, match="was created with reuse CONTENT, not PREFIX"):
        elsewhere.session(made.id, reuse=Reuse.PREFIX)
    with pytest.raises(ConfigError, match="another reuse_repair"):
        elsewhere.session(made.id, reuse=Reuse.CONTENT, reuse_repair=Repair(first=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reuse": "content"}, "reuse='content' is none of PREFIX, REGISTER, CONTENT"),
        ({"reuse": 2}, "reuse=2 is none of"),
        ({"reuse_repair": Repair(first=8)}, "reuse_repair is for reuse=Reuse.CONTENT"),
        ({"reuse": Reuse.REGISTER, "reuse_repair": Repair(first=8)}, "reuse_repair is for reuse=Reuse.CONTENT"),
        ({"reuse": Reuse.CONTENT, "reuse_repair": Mode.FORGET}, "is no Repair"),
        ({"reuse": Reuse.CONTENT, "reuse_repair": 0.15}, "reuse_repair=0.15 is no Repair"),
    ],
)
def test_bad_values_say_what_is_wrong_and_make_nothing(team: Leyline, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        team.session("mine", **arguments)
    assert team.sessions() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Repair(), "either first or share"),
        (lambda: Repair(first=2, share=0.1), "either first or share"),
        (lambda: Repair(share=0), r"share=0 must be in \(0, 1\]"),
        (lambda: Repair(share=float("nan")), r"share=nan must be in \(0, 1\]"),
        (lambda: Repair(first=1.5), "first=1.5 is no whole number"),  # type: ignore[arg-type]
        (lambda: assemble(TEAM), "a list of texts, not a str"),
        (lambda: assemble([TEAM, 3]), "part 1 is a int"),  # type: ignore[list-item]
        (lambda: assemble([TEAM, " \n"]), "part 1 is empty"),
    ],
)
def test_bad_repairs_and_parts_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_stands_behind_an_amortized_cut_is_kept_but_not_published(team: Leyline) -> None:
    session = team.session(system=SYSTEM, tools=[READ], reuse=Reuse.REGISTER, policies=[FirstLines()])
    agent = Agent(session)
    assert agent.ask(TEAM, "What is port in net.ini?") == "8123"
    assert agent.ask(SITE, "What is level in disk.ini?") == "low"
    (edit,) = agent.edits
    assert session.info().exact_upto <= edit.receipt.at

    other = opened(team, "Be brief. " + SYSTEM, SITE, TEAM, reuse=Reuse.CONTENT)
    report = computed(other)
    assert share_taken(team, other, report, TEAM) > 0.9, "in front of the cut: exact"
    assert share_taken(team, other, report, SITE) == 0, "behind it: knows what was cut"


def test_a_policy_that_forgets_leaves_what_is_exact(team: Leyline) -> None:
    session = team.session(system=SYSTEM, tools=[READ], reuse=Reuse.CONTENT, policies=[FirstLines(mode=Mode.FORGET)])
    agent = Agent(session)
    assert agent.ask(TEAM, "What is port in net.ini?") == "8123"
    assert agent.ask(SITE, "What is level in disk.ini?") == "low"
    (edit,) = agent.edits
    assert not edit.receipt.influence_remains
    assert session.info().exact_upto == session.info().num_tokens - session.info().num_pending

    other = opened(team, "Be brief. " + SYSTEM, SITE, TEAM, reuse=Reuse.CONTENT)
    report = computed(other)
    assert min(share_taken(team, other, report, one) for one in (SITE, TEAM)) > 0.9


@pytest.mark.parametrize("warmed", [True, False], ids=["warmed", "computed behind the secret"])
def test_forget_in_one_agent_while_others_read_the_same_documents(team: Leyline, warmed: bool) -> None:
    def agent(system: str, *parts: str) -> tuple[Session, CacheReport]:
        session = opened(team, f"{system} {SYSTEM}", *parts, reuse=Reuse.CONTENT)
        return session, computed(session)

    holder = team.session(system=SYSTEM, tools=[READ], reuse=Reuse.CONTENT)
    if warmed:
        holder.warm(DOCUMENTS)
    holder.append(SECRET)
    holder.append(assemble([*DOCUMENTS, "What is port in net.ini?"]))
    assert (computed(holder).content_hit > 0) == warmed

    reader, report = agent("Reader.", *DOCUMENTS[::-1])
    assert min(share_taken(team, reader, report, one) for one in DOCUMENTS) > 0.9
    twin = reader.fork()
    expected = twin.complete(max_tokens=12).text
    twin.close()
    # Who says the same before it is forgotten finds it: what is checked below can fail.
    teller, report = agent("Teller, as it is.", "Mind this.", SECRET)
    assert share_taken(team, teller, report, SECRET) > 0.8
    teller.close()

    secret = holder.transcript.of_role("user")[0]
    (edit,) = holder.edit(clear(secret, "[forgotten]", mode=Mode.FORGET)).applied_edits
    assert edit.removed >= LEAST
    assert (edit.receipt.kept, edit.receipt.influence_remains) == (0, False)
    # Rows that were computed behind the secret, and another took: the receipt names it.
    assert edit.receipt.held_elsewhere == (() if warmed else (reader.id,))

    # The others' rows stay as they are, and so does what they say.
    said = reader.complete(max_tokens=12)
    assert said.text == expected
    assert (said.cache.content_hit, said.cache.reason) == (0, "APPEND")

    late, report = agent("Later.", *DOCUMENTS[::-1])
    for document in DOCUMENTS:
        share = share_taken(team, late, report, document)
        assert share > 0.9 if warmed else share == 0, "only what never stood behind the secret is given"
    echo, report = agent("Echo, as it is.", "Mind this.", SECRET)
    assert share_taken(team, echo, report, SECRET) == 0

    # The holder computes all behind it, though the documents are there to be taken.
    report = computed(holder)
    assert (report.content_hit, report.kept, report.reason) == (0, edit.receipt.at, "EDIT")
    assert report.computed + report.prefix_hit == edit.receipt.to_compute
    assert holder.info().exact_upto == holder.info().num_tokens
    assert SECRET not in team.detokenize(tokens(holder))


def test_a_secret_of_one_takes_nothing_away_that_another_computed_without_it(team: Leyline) -> None:
    holder = team.session(system=SYSTEM, tools=[READ], reuse=Reuse.REGISTER)
    holder.append([SECRET, *DOCUMENTS])
    computed(holder)
    pin = opened(team, "Pin. " + SYSTEM, *DOCUMENTS, reuse=Reuse.REGISTER)
    assert computed(pin).computed > sum(len(team.tokenize(one)) for one in DOCUMENTS)
    secret = holder.transcript.of_role("user")[0]
    (edit,) = holder.edit(clear(secret, "[forgotten]", mode=Mode.FORGET)).applied_edits
    assert edit.receipt.held_elsewhere == ()
    assert pin.info().exact_upto == pin.info().num_tokens, "it never knew the secret"
    late = opened(team, "Later. " + SYSTEM, *DOCUMENTS[::-1], reuse=Reuse.CONTENT)
    report = computed(late)
    assert min(share_taken(team, late, report, one) for one in DOCUMENTS) > 0.9


def test_a_short_stretch_elsewhere_does_not_hide_a_long_one(team: Leyline) -> None:
    """The tool stands at the first positions of one session, where it can't be taken, and later in two others."""

    def tool(system: str) -> tuple[Session, CacheReport]:
        session = team.session(system=system, tools=[READ], reuse=Reuse.CONTENT)
        session.append(system)
        return session, computed(session)

    tool(SYSTEM)
    far, report = tool("Read a." + SYSTEM)
    assert far.info().exact_upto == far.info().num_tokens
    near, report = tool("Read b." + SYSTEM)
    common = agrees(tokens(near)[LEAST:], [tokens(far)[LEAST:]])
    assert len(common) >= LEAST, "both have it behind their first positions"
    assert report.content_hit >= len(common)


def test_an_open_session_of_register_is_a_pin(serve: Serve) -> None:
    with serve("--content-share", "0.02", "--slots", "20000") as address, Leyline(target=address) as client:
        pin = opened(client, "Pin. " + SYSTEM, *DOCUMENTS, reuse=Reuse.REGISTER)
        computed(pin)
        for number in range(12):
            lines = "".join(f"zeta{number} = omega{line}\n" for line in range(12))
            passing = opened(client, f"{number} is it. {SYSTEM}", lines, reuse=Reuse.REGISTER)
            computed(passing)
            passing.close()
        assert client.server_info().pool.free > 10_000, "there is room for all"
        late = opened(client, "Later. " + SYSTEM, *DOCUMENTS[::-1], reuse=Reuse.CONTENT)
        report = computed(late)
        assert min(share_taken(client, late, report, one) for one in DOCUMENTS) > 0.9


def test_without_a_share_of_the_pool_content_is_refused_with_the_reason(serve: Serve) -> None:
    with serve("--content-share", "0") as address, Leyline(target=address, timeout_s=120) as client:
        feature = client.server_info().features["CONTENT_REUSE"]
        assert (feature.supported, "--content-share" in feature.reason) == (False, True)
        for reuse in (Reuse.REGISTER, Reuse.CONTENT):
            with pytest.raises(NotSupported, match="--content-share"):
                opened(client, SYSTEM, *DOCUMENTS, reuse=reuse)
        # Prefixes are as they were.
        computed(opened(client, SYSTEM, *DOCUMENTS, reuse=Reuse.PREFIX))
        assert computed(opened(client, SYSTEM, *DOCUMENTS, reuse=Reuse.PREFIX)).computed == 1
