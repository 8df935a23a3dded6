"""Recorded conversations of real agents, replayed: what policies cost with re-prefill, with an eager splice, with ours.

Messages, tool outputs, lengths of replies and waits are the recorded ones; what the recorded model said is forced. Of
a reply the first tokens are decoded and the rest comes with the next message, so that lengths are real and a run takes
minutes. Waits are scaled; the case says by how much. Policies edit before every call; the fair rival batches its edits
(every four turns, and only when a thousand tokens go). Before an arm's first case of a set is measured it runs once
unmeasured, so that none pays for what is compiled once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import agreement
from benchmarks.arms import Conversation, Script, play
from benchmarks.bench import Bench, require
from benchmarks.paper_table import EAGER, IDEAL, LEYLINE, REPREFILL, Cell, maker
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed, empty
from benchmarks.timing import Energy
from benchmarks.trace_input import SETS, Encoder, History, Recording, load
from leyline_policies import KeepLast, TruncateOlderThan
from leyline_policies.batching import Batching

WAIT_FACTOR = 0.02
CONCURRENCY = 8
BATCHED = "re-prefill, edits batched"
POLICIES: dict[str, Batching] = {
    "TruncateOlderThan(2)": TruncateOlderThan(2),
    "KeepLast(3)": KeepLast(3),
    "KeepLast(5)": KeepLast(5),
}
NOBODY = "nobody edits"


def _recordings(bed: Bed, name: str) -> list[Recording]:
    assert bed.traces is not None
    keep = 1.0 if bed.shape.full else 1 / 64
    return load(bed.traces, name, _encoder(bed), bed.size(8, 1), bed.size(40, 8), keep)


def _encoder(bed: Bed) -> Encoder:
    return Encoder(int(bed.model.config.vocab_size))


def missing(bed: Bed) -> str:
    if bed.traces is None:
        return "no recorded conversations: --traces DIR or LEYLINE_TRACES"
    if not bed.traces.is_dir():
        return f"{bed.traces} is no directory"
    return "" if _sets(bed.traces) else f"{bed.traces} has none of {', '.join(SETS.values())}"


def _sets(traces: Path) -> list[str]:
    return [name for name, pattern in SETS.items() if any(traces.glob(pattern))]


def cases(bed: Bed) -> Sequence[str]:
    """One for each set that is there and policy; the first of a set is the one without edits."""
    assert bed.traces is not None
    return [f"{name}, {policy}" for name in _sets(bed.traces) for policy in (NOBODY, *POLICIES)]


def script(
    conversation: Conversation, recording: Recording, policy: Batching | None, encoder: Encoder, decoded: int
) -> Script:
    """One conversation from its first message to its last reply."""
    history, rest = History(policy, encoder), list[int]()
    for number, step in enumerate(recording.steps):
        if wait := step.wait_s * WAIT_FACTOR:
            yield time.perf_counter() + wait
        history.add([said.message for said in step.messages], number)
        cuts = history.cuts()  # all in front of the new messages: what was not read yet is never cut
        reply = step.reply.all_ids
        # The reply's opening marker is the prompt's last token; its rest, where it is long, comes with the next turn.
        message = [*rest, *(one for said in step.messages for one in said.all_ids), reply[0]]
        forced, rest = reply[1 : 1 + decoded], reply[1 + decoded :]
        yield from conversation.turn(cuts, message, len(forced), forced)
        history.add([step.reply.message], number + 1)
    conversation.close()


def run_arm(bed: Bed, arm: str, recordings: Sequence[Recording], policy: Batching | None) -> Cell:
    parts = bed.parts()
    if arm == BATCHED:
        assert policy is not None
        policy = replace(policy, every=4, clear_at_least=1024 if bed.shape.full else 8)
    make, encoder, energy = (
        maker(REPREFILL if arm == BATCHED else arm, bed, parts.engine),
        _encoder(bed),
        Energy(bed.device),
    )
    conversations = [make() for _ in recordings]
    decoded = bed.size(32, 2)
    pairs = zip(conversations, recordings, strict=True)
    scripts = [script(one, recording, policy, encoder, decoded) for one, recording in pairs]
    before = energy.joules()
    played = play(parts.engine, scripts, CONCURRENCY)
    after = energy.joules()
    empty(parts)
    joules = None if before is None or after is None else after - before
    return Cell([t for one in conversations for t in one.turns], played, joules, [one.ids for one in conversations])


def check(bed: Bed) -> None:
    """What was said is forced, so the arms must end with the very same ids, and ours prefills the fewest."""
    agreement.check(bed)
    name = cases(bed)[0].partition(",")[0]
    recordings = [replace(one, steps=one.steps[:8]) for one in _recordings(bed, name)[:2]]
    require(len(recordings) > 0, f"{name} has no conversation of three replies")
    policy = KeepLast(1)
    cells = {arm: run_arm(bed, arm, recordings, policy) for arm in (REPREFILL, EAGER, LEYLINE)}
    for arm, cell in cells.items():
        require(cell.texts == cells[LEYLINE].texts, f"{arm} ends with other ids than {LEYLINE}")
    fewest = min(cell.prefilled for cell in cells.values())
    require(cells[LEYLINE].prefilled == fewest, "an arm prefilled less than rows that are kept")


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    name, _, policy_name = case.partition(", ")
    recordings = _recordings(bed, name)
    policy = POLICIES.get(policy_name)
    told = f"{case}; {len(recordings)} conversations, waits x {WAIT_FACTOR:g}, {_encoder(bed).about}"
    arms = (IDEAL,) if policy is None else (REPREFILL, BATCHED, EAGER, LEYLINE)
    for arm in arms:
        if (name, arm) not in bed.warmed:
            run_arm(bed, arm, recordings, policy)
            bed.warmed.add((name, arm))
    for arm in arms:
        cell = run_arm(bed, arm, recordings, policy)
        yield Measured(told, arm, "prompts", sum(turn.prompt for turn in cell.turns), "tokens", len(cell.turns))
        yield Measured(told, arm, "prefilled", cell.prefilled, "tokens", len(cell.turns))
        yield measured(told, arm, "first token", [turn.ttft * 1e3 for turn in cell.turns], "ms")
        yield Measured(told, arm, "engine busy", cell.played.busy_s, "s")
        yield Measured(told, arm, "peak slots", cell.played.peak_slots, "slots")
        yield Measured(told, arm, "energy", cell.joules, "J")


BENCH = Bench("traces", "cpu", check, cases, rows, missing)
