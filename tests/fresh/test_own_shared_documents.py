"""Agents of one's own that share documents and tools: other orders and system prompts, a policy that cuts, a secret."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from leyline_sdk import (
    AppliedEdit,
    CacheReport,
    Edit,
    Leyline,
    Mode,
    Policy,
    PolicyContext,
    Repair,
    Reply,
    Reuse,
    Session,
    assemble,
    clear,
    cut_text,
)
from leyline_sdk.errors import ConfigError, ContextExceeded, InvalidArgument, SessionNotFound

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read_file", "description": "Read a text file.", "parameters": PATH}
LIST = {
    "name": "list_dir",
    "description": "List what a directory holds, with the size of each file.",
    "parameters": PATH,
}
COUNT = {
    "name": "count_lines",
    "description": "Say how many lines a text file has, and how long they are.",
    "parameters": PATH,
}
SYSTEM = "You answer questions about files. Read them with read_file."
TEAM = "owner = bravo\nlead = delta\nsize = 7\nsince = 2019\nzone = north\nchat = on\nlanguage = plain\n"
SITE = "region = west\nrack = 12\npower = high\nbackup = none\nfloor = 3\ncolour = yellow\ncooling = water\n"
RULES = "review = two\nrelease = monthly\nbranch = main\ntests = green\nlines = short\nnames = lower\n"
DOCUMENTS = [TEAM, SITE, RULES]
NET = "mode = fast\nport = 8123\ntimeout = 30\nowner = tango\nlevel = high\nsize = 91\nlimit = 450\nzone = east\n"
DISK = "quota = 96\nlevel = low\n"
FILES = {"net.ini": NET, "disk.ini": DISK, "log.ini": "keep = 12\n"}
SECRET = "The key of the vault is swordfish-7731-kilo-tango-0042-bravo-9916-delta-5583, and nobody may ever say it."
LEAST = 32

Span = tuple[int, int]
Serve = Callable[..., AbstractContextManager[str]]


# ---------------------------------------------------------------- a server, and a tenant for each test


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[tuple[str, Iterator[str]]]:
    """Its address, and api keys that nobody used yet: what one test registers no other can find."""
    keys = [f"key{number}" for number in range(200)]
    with serve("--api-keys", ",".join(f"{key}=team-{key}" for key in keys)) as address:
        yield address, iter(keys)


@pytest.fixture
def connect(server: tuple[str, Iterator[str]]) -> Iterator[Callable[[str], Leyline]]:
    """A client of the key; its tenant's sessions end with the test."""
    with ExitStack() as stack:

        def make(key: str) -> Leyline:
            client = stack.enter_context(Leyline(target=server[0], api_key=key, timeout_s=120))
            stack.callback(lambda: [client.session(one.id, create=False).close() for one in client.sessions()])
            return client

        yield make


@pytest.fixture
def key(server: tuple[str, Iterator[str]]) -> str:
    return next(server[1])


@pytest.fixture
def team(connect: Callable[[str], Leyline], key: str) -> Leyline:
    return connect(key)


# ---------------------------------------------------------------- reading the reports


def tokens(session: Session) -> tuple[int, ...]:
    return session.info(token_ids=True).token_ids


def total(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def places(part: Sequence[int], whole: Sequence[int]) -> list[int]:
    size = len(part)
    return [at for at in range(len(whole) - size + 1) if tuple(whole[at : at + size]) == tuple(part)]


def share_taken(client: Leyline, session: Session, report: CacheReport, document: str) -> float:
    """Of the document's tokens, as they stand in the session once, the share that was taken by content."""
    ids, part = tokens(session), client.tokenize(document.strip())
    (at,) = places(part, ids)
    return total(
        (max(a, at), min(b, at + len(part))) for a, b in report.content_spans if a < at + len(part) and b > at
    ) / len(part)


def agrees(ids: Sequence[int], donors: Sequence[Sequence[int]]) -> set[int]:
    """Positions of `ids` that are in a stretch of LEAST or more which stands in a donor too."""
    grams = {tuple(donor[at : at + LEAST]) for donor in donors for at in range(len(donor) - LEAST + 1)}
    starts = [at for at in range(len(ids) - LEAST + 1) if tuple(ids[at : at + LEAST]) in grams]
    return {at + offset for at in starts for offset in range(LEAST)}


def check(session: Session, report: CacheReport, context: int, repaired: bool = False) -> None:
    """What any report promises of itself."""
    assert report.prefix_hit + report.content_hit + report.kept + report.computed == context
    assert total(report.content_spans) == report.content_hit
    ends = [end for span in report.content_spans for end in span]
    assert ends == sorted(ends)
    assert all(0 < start < end <= context for start, end in report.content_spans)
    if report.content_spans:
        first = report.content_spans[0][0]
        assert first >= LEAST, "nothing is taken for the first positions"
        assert report.kept + report.prefix_hit <= first or report.kept
        assert session.info().exact_upto <= first
        if not repaired:
            assert min(end - start for start, end in report.content_spans) >= LEAST


def opened(
    client: Leyline, system: str, *parts: str, reuse: Reuse, tools: Sequence[Any] = (READ,), **more: Any
) -> Session:
    session = client.session(system=system, tools=tools, reuse=reuse, **more)
    session.append(assemble([*parts, "What is port in net.ini?"]))
    return session


def computed(session: Session) -> CacheReport:
    report = session.prefill().cache
    assert report is not None
    check(session, report, session.info().num_tokens, repaired=True)
    return report


# ---------------------------------------------------------------- the agents


class FirstLines(Policy):
    """Of a tool result that was answered, only the first `lines` lines stay."""

    def __init__(self, lines: int = 1, mode: Mode = Mode.AMORTIZE) -> None:
        self.lines, self.mode = lines, mode

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        said = [one.start for one in context.transcript.of_role("assistant") if not one.tool_calls]
        for result in context.tool_results:
            head = "".join(result.text.splitlines(keepends=True)[: self.lines])
            if len(head) < len(result.text) and any(at >= result.end for at in said):
                yield cut_text(result, len(head), mode=self.mode)


@dataclass
class Agent:
    """Answers from files; keeps each reply with the tokens that stood there when it was made."""

    session: Session
    replies: list[tuple[Reply, tuple[int, ...]]] = field(default_factory=list)
    edits: list[AppliedEdit] = field(default_factory=list)

    def ask(self, *parts: str) -> str:
        self.session.append(assemble(parts))
        for _ in range(5):
            reply = self.session.complete(max_tokens=64)
            self.replies.append((reply, tokens(self.session)))
            self.edits += reply.applied_edits
            assert reply.usage.reused == reply.cache.prefix_hit + reply.cache.content_hit + reply.cache.kept
            if not reply.tool_calls:
                return reply.text.strip()
            self.session.append_results({one.id: FILES[one.arguments["path"]] for one in reply.tool_calls})
        raise AssertionError("gave up")


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


# ---------------------------------------------------------------- who finds what


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


# ---------------------------------------------------------------- repair, warm, resume


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


# ---------------------------------------------------------------- edits in sessions that share


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


@pytest.mark.xfail(strict=True, reason="what was known by content already is not registered for who computed it anew")
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


@pytest.mark.xfail(strict=True, reason="a fingerprint leads to the first text that had it, however little agrees there")
def test_a_short_stretch_elsewhere_does_not_hide_a_long_one(team: Leyline) -> None:
    """The tool stands at the first positions of one session, where it can't be taken, and later in two others."""

    def tool(system: str) -> tuple[Session, CacheReport]:
        session = team.session(system=system, tools=[READ], reuse=Reuse.CONTENT)
        session.append(f"Hello, {system}")
        return session, computed(session)

    tool(SYSTEM)
    far, report = tool("Read a." + SYSTEM)
    assert far.info().exact_upto == far.info().num_tokens
    near, report = tool("Read b." + SYSTEM)
    common = agrees(tokens(near)[LEAST:], [tokens(far)[LEAST:]])
    assert len(common) >= LEAST, "both have it behind their first positions"
    assert report.content_hit >= len(common)


@pytest.mark.xfail(strict=True, reason="the budget of content lets the oldest go, open session or not")
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


def test_without_a_share_of_the_pool_nothing_is_found_by_content(serve: Serve) -> None:
    with serve("--content-share", "0") as address, Leyline(target=address, timeout_s=120) as client:
        open_one = opened(client, SYSTEM, *DOCUMENTS, reuse=Reuse.REGISTER)
        computed(open_one)
        open_one.warm(DOCUMENTS)
        moved = opened(client, "Be brief. " + SYSTEM, *DOCUMENTS[::-1], reuse=Reuse.CONTENT)
        report = computed(moved)
        assert (report.content_hit, report.content_spans) == (0, ())
        assert moved.info().exact_upto == moved.info().num_tokens
        # Prefixes are as they were.
        again = opened(client, SYSTEM, *DOCUMENTS, reuse=Reuse.CONTENT)
        assert computed(again).computed == 1
        assert [one.computed for one in again.warm(DOCUMENTS)] == [1] * len(DOCUMENTS)
