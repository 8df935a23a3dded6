"""The arms at a size that can be counted by hand, and what each does with slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

import leyline_kernels
from benchmarks import agreement, drive, paper_table
from benchmarks.arms import Cut, EagerSplice, InPlace, Reprefilled, edited, play
from benchmarks.bench import WrongResult
from benchmarks.paper_table import EAGER, IDEAL, LEYLINE, REPREFILL, Plan, figures, require_counts, run_cell
from benchmarks.registry import empty

# 10 tokens of system prompt; a turn brings 4 messages of 3 tokens and gets 2; 2 tokens in the place of a message.
PLAN = Plan(system=10, messages=4, message=3, placeholder=2, out=2, turns=3)
BY_HAND = {
    # turn 1: 12 new. Turns 2 and 3: 12 new and the last token of the reply before, which was said and not computed.
    IDEAL: 12 + 13 + 13,
    # and the 2 tokens of the placeholder
    LEYLINE: 12 + 15 + 15,
    EAGER: 12 + 15 + 15,
    # turn 2: of 10 + 12 + 2 + 12 - 1 = 35 tokens the third message, at 16, is the first to differ: 19.
    # turn 3: of 35 + 2 + 12 - 1 = 48 tokens the fifth message, at 10 + 11 + 2 = 23: 25.
    REPREFILL: 12 + 19 + 25,
}


def test_the_plan_counts_as_by_hand():
    assert {arm: PLAN.expected(arm) for arm in BY_HAND} == BY_HAND
    assert [PLAN.cut_start(turn) for turn in (1, 2)] == [16, 23]
    assert [PLAN.length(turn, True) for turn in range(3)] == [22, 35, 48]
    assert PLAN.prompts(False) == 22 + 36 + 50
    assert PLAN.ideal_hit_rate() == 1 - 38 / 108


def test_the_real_plan_is_the_papers():
    plan = Plan()
    assert plan.messages * plan.message == 2048
    assert plan.length(5, False) == 4096 + 6 * 2048 + 5 * 128 == 17_024
    assert plan.length(5, True) == 17_024 - 5 * 248


@pytest.mark.parametrize("arm", BY_HAND)
def test_an_arm_prefills_what_is_counted_by_hand(bed, arm):
    cell = run_cell(bed, arm, PLAN, sessions=2, concurrency=2)
    assert cell.prefilled == 2 * BY_HAND[arm]
    require_counts(arm, cell, PLAN, 2)
    with pytest.raises(WrongResult, match="by hand"):
        require_counts(arm, cell, replace(PLAN, placeholder=1, system=11), 2)
    assert len(cell.turns) == 6
    assert all(0 < turn.ttft <= turn.wall for turn in cell.turns)
    names = {figure.metric for figure in figures("C = 2", arm, cell, cell, PLAN, judged=False)}
    assert {"hit rate", "end to end p50", "end to end p95", "prefilled", "peak slots", "energy"} <= names


def test_judged_figures_are_held_against_the_rival(bed):
    cell = run_cell(bed, LEYLINE, PLAN, sessions=1, concurrency=1)
    slow = replace(cell, turns=[replace(turn, wall=10 * turn.wall) for turn in cell.turns])
    met = {f.metric: f.met for f in figures("C = 1", LEYLINE, cell, slow, PLAN, judged=True)}
    assert met["end to end p50"] is met["end to end p95"] is True
    lost = {f.metric: f.met for f in figures("C = 1", LEYLINE, slow, cell, PLAN, judged=True)}
    assert lost["end to end p50"] is lost["end to end p95"] is False


def test_every_arm_has_run_at_this_concurrency_before_one_is_measured(bed, monkeypatch):
    ran = []
    real = paper_table.run_cell

    def noted(bed, arm, plan, sessions, concurrency):
        ran.append((arm, sessions, concurrency))
        return real(bed, arm, PLAN, sessions, concurrency)

    monkeypatch.setattr(paper_table, "run_cell", noted)
    monkeypatch.setattr(paper_table, "plan_of", lambda bed: PLAN)
    measured = [figure.arm for figure in paper_table.rows(bed, "C = 2") if figure.metric == "hit rate"]
    assert measured == [REPREFILL, EAGER, LEYLINE, IDEAL]
    assert ran == [*((arm, 2, 2) for arm in measured), *((arm, 3, 2) for arm in measured)]


def test_cuts_of_a_turn_are_in_the_coordinates_before_it():
    assert edited([0, 1, 2, 3, 4, 5], [Cut(1, 2, (9, 9)), Cut(4, 5)]) == [0, 9, 9, 2, 3, 5]
    assert edited([0, 1], []) == [0, 1]


def test_the_arms_end_with_the_same_text_when_the_replies_are_given(bed):
    engine = bed.parts().engine
    made = [InPlace(engine), Reprefilled(engine), EagerSplice(engine, bed.model.rotary)]

    def script(one):
        yield from one.turn([], bed.ids(40, seed=1), 2, [300, 301])
        yield from one.turn([Cut(10, 15, (7, 8)), Cut(30, 31)], bed.ids(5, seed=2), 2, [302, 303])
        one.close()

    play(engine, [script(one) for one in made], concurrency=3)
    assert made[0].ids == made[1].ids == made[2].ids
    assert [turn.prompt for turn in made[0].turns] == [40, 43]
    assert made[0].ids[-2:] == [302, 303]
    empty(bed.parts())


def test_keys_that_are_rewritten_and_not_turned_are_noticed(bed, monkeypatch):
    monkeypatch.setattr(agreement, "check", lambda bed: None)  # test_checks has it
    paper_table.check(bed)

    def copied(k_pe, source, target, *more):
        k_pe[:, target.long()] = k_pe[:, source.long()]

    monkeypatch.setattr(leyline_kernels, "rotate", copied)
    with pytest.raises(WrongResult, match="a rewritten key differs"):
        paper_table.check(bed)


def test_an_eager_splice_takes_fresh_slots_and_gives_none_back_before_its_end(bed):
    engine = bed.parts().engine
    eager, ours = EagerSplice(engine, bed.model.rotary), InPlace(engine)
    seen = {}

    def script(name, one):
        yield from one.turn([], bed.ids(40, seed=3), 1)
        before = engine.stats().in_use
        yield from one.turn([Cut(10, 20, (7, 8))], [], 1)
        seen[name] = engine.stats().in_use - before
        one.close()

    play(engine, [script("ours", ours), script("eager", eager)], concurrency=1)
    # R and the reply's last token are computed; 20 of the 40 stand behind the span and are written again.
    assert seen["ours"] == 2 + 1 - 10
    assert seen["eager"] == 2 + 1 + 20
    assert engine.stats().in_use == 0
    engine.check_integrity()


def test_a_session_that_waits_for_nothing_that_comes_is_an_error(bed):
    engine = bed.parts().engine

    def stuck():
        yield drive.Watch()

    with pytest.raises(RuntimeError, match="nothing to do"):
        play(engine, [stuck()], concurrency=1)
