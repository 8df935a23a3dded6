"""A splice over gRPC on loopback: what the call takes, what it frees, and how long the next first token takes.

edit: ApplyDirectives that cuts 1k tokens out of a computed session and puts 8 in their place, by a client in a process
of its own; then an undo, untimed. Beside it a call that does nothing.
first token: a 64-token message and one generated token, from the first call to the token, after an AMORTIZE or a
FORGET in the same Append, without an edit, and with the messages edited by the client and sent to a new session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks import agreement, clients, served_session
from benchmarks.bench import Bench, require
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from benchmarks.served_session import ServedSession, cut
from benchmarks.serving import Serving, serving
from leyline_proto import leyline_pb2 as pb

EDIT_GOALS_MS = {"edit at 32k": 1.0, "edit at 128k": 3.0}
TTFT_CASE = "first token at 32k"
EDITS, SHORT, LONG = 50, 30, 5
"""Samples of an edit, of a first token that computes little, and of one that prefills tens of thousands."""
PLACEHOLDER = 8
_AGAIN = "edited messages, prefilled again"


class Sizes:
    """The cut is one message, an eighth into the session."""

    def __init__(self, bed: Bed, length: int) -> None:
        self.length = length if bed.shape.full else length // 128
        self.message = bed.size(1024, 16)
        self.start = bed.size(4096, 64)
        self.end = self.start + self.message
        self.added = bed.size(64, 8)


def cases(bed: Bed) -> Sequence[str]:
    return [*EDIT_GOALS_MS, TTFT_CASE]


def _sizes(bed: Bed, case: str) -> Sizes:
    return Sizes(bed, int(case.rpartition(" ")[2].removesuffix("k")) * 1024)


def check(bed: Bed) -> None:
    """The receipt and the pool: slots in use fall at once by the span's length, and an undo takes them back."""
    agreement.check(bed)
    size = Sizes(bed, 16 * 1024)
    with serving(bed.parts()) as server:
        session = computed_session(server, bed, size, seed=40)
        before = in_use(server)
        _, answer = session.apply(cut(size.start, size.end, bed.ids(PLACEHOLDER, seed=41)))
        (receipt,) = answer.receipts
        fall = before - in_use(server)
        require(fall == size.message, f"{size.message} tokens were cut, and slots in use fell by {fall}")
        require(receipt.freed == fall, f"the receipt says {receipt.freed} slots were freed; it was {fall}")
        require(receipt.kept == size.length - size.end, "what follows the span did not keep its rows")
        session.undo(receipt.edit_id)
        require(in_use(server) == before, "an undo did not take the slots back")
        _, answer = session.apply(cut(size.start, size.end, bed.ids(PLACEHOLDER, seed=41), forget=True))
        require(before - in_use(server) == size.length - size.start, "a FORGET left rows behind the span")
        session.close()


def computed_session(server: Serving, bed: Bed, size: Sizes, seed: int) -> ServedSession:
    """A session of messages of 1k tokens each, all computed."""
    session = served_session.create(server)
    ids = bed.ids(size.length, seed)
    for start in range(0, size.length, size.message):
        last = start + size.message >= size.length
        session.append(ids[start : start + size.message], prefill=last)
    return session


def in_use(server: Serving) -> int:
    return int(server.call(pb.GetServerInfoRequest()).pool.in_use)


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    size = _sizes(bed, case)
    with serving(bed.parts()) as server:
        session = computed_session(server, bed, size, seed=50)
        yield from _first_tokens(bed, server, session, size) if case == TTFT_CASE else _edits(bed, case, session, size)
        session.close()


def _edits(bed: Bed, case: str, session: ServedSession, size: Sizes) -> Iterable[Measured]:
    numbers = [size.start, size.end, EDITS + 3, *bed.ids(PLACEHOLDER, seed=60)]
    took = json.loads(clients.run("edit_client", session.serving.address, session.id, *map(str, numbers)))
    yield measured(case, "an empty call", "call", took["empty_ms"][3:], "ms")
    yield measured(case, "AMORTIZE", "call", took["call_ms"][3:], "ms").at_most(EDIT_GOALS_MS[case], bed.full)
    yield measured(case, "AMORTIZE", "in the server", took["server_ms"][3:], "ms")
    falls = took["fall"]
    fall = measured(case, "AMORTIZE", "slots in use fall by", falls, "slots")
    yield replace(fall, goal=size.message, met=set(falls) == {size.message}) if bed.full else fall
    wall = []
    for number in range(LONG):
        copy = session.fork()
        seconds, _ = copy.apply(cut(size.start, size.end, bed.ids(PLACEHOLDER, seed=160 + number), forget=True))
        wall.append(seconds * 1e3)
        copy.close()
    yield measured(case, "FORGET, of a fork", "call", wall, "ms")


def _first_tokens(bed: Bed, server: Serving, session: ServedSession, size: Sizes) -> Iterable[Measured]:
    """Unedited and AMORTIZE alternate, each on a fork of the same computed session."""
    case, times = TTFT_CASE, dict[str, list[float]]()
    for number in range(SHORT + 2):
        for arm in ("unedited", "AMORTIZE"):
            copy = session.fork()
            took = _after(copy, bed, size, number, arm)
            copy.close()
            times.setdefault(arm, []).append(took)
    for number in range(LONG + 1):
        times.setdefault(_AGAIN, []).append(_prefilled_again(server, bed, size, number))
    for number in range(LONG + 1):
        other = computed_session(server, bed, size, seed=50)
        times.setdefault("FORGET", []).append(_after(other, bed, size, number + 300, "FORGET"))
        other.close()
    figures = {arm: measured(case, arm, "first token", taken[1:], "ms") for arm, taken in times.items()}
    yield from figures.values()
    plain, ours, again = (figures[arm].value or 0.0 for arm in ("unedited", "AMORTIZE", _AGAIN))
    yield Measured(case, "AMORTIZE", "over unedited", ours / plain, "x").at_most(1.2, bed.full)
    yield Measured(case, _AGAIN, "over AMORTIZE", again / ours, "x").at_least(20, bed.full)


def _after(session: ServedSession, bed: Bed, size: Sizes, number: int, arm: str) -> float:
    """Milliseconds from the Append, which carries the edit, to the first token."""
    message, placeholder = bed.ids(size.added, seed=2000 + number), bed.ids(PLACEHOLDER, seed=4000 + number)
    directives = [] if arm == "unedited" else [cut(size.start, size.end, placeholder, forget=arm == "FORGET")]
    begun = time.perf_counter()
    session.append(message, directives)
    came, done = session.first_token()
    kept = done.cache.kept
    if arm == "AMORTIZE":
        require(kept >= size.length - size.message, f"an AMORTIZE kept {kept} rows of {size.length}")
    return (came - begun) * 1e3


def _prefilled_again(server: Serving, bed: Bed, size: Sizes, number: int) -> float:
    """The same edit and message, made by the client in its own copy, in a new session. The tree has the prefix."""
    ids = bed.ids(size.length, seed=50)
    edited = [*ids[: size.start], *bed.ids(PLACEHOLDER, seed=6000 + number), *ids[size.end :]]
    message = bed.ids(size.added, seed=8000 + number)
    begun = time.perf_counter()
    session = served_session.create(server)
    session.append([*edited, *message])
    came, done = session.first_token()
    hit = done.cache.prefix_hit
    require(size.start <= hit <= size.start + PLACEHOLDER, f"the tree gave {hit} tokens, the edit is at {size.start}")
    session.close()
    return (came - begun) * 1e3


BENCH = Bench("splice", "cpu", check, cases, rows)
