"""Cutters, the oracle against a plain one, the arms, and a check that fails when something false is found."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks import content_arms, content_memory, content_recovery
from benchmarks.bench import WrongResult
from benchmarks.content_arms import OURS, Oracle, Prefix, Registry, Tally, arms, count, marked
from benchmarks.content_cutters import LEAST, MOST, NEAR, WINDOW, blocks, least_nearby, local_minimum, threshold
from benchmarks.content_input import PATTERNS, Text, pattern
from benchmarks.content_served import ARMS
from leyline_server.cache.chunks import SINK, Hit
from leyline_server.cache.fingerprints import SHORTEST

NONE = Prefix(0, 0)


def random_ids(count, seed=0, vocab=5000):
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def pieces(seed, vocab=40, kinds=6, most=70):
    """A few stretches again and again, in another order each time: matches of all lengths."""
    rng = np.random.default_rng(seed)
    pool = [rng.integers(0, vocab, rng.integers(5, most)) for _ in range(kinds)]
    return np.concatenate([pool[one] for one in rng.integers(0, kinds, 12)]).astype(np.int32)


# ---------------------------------------------------------------- cutters


@pytest.mark.parametrize("cutter", [blocks, threshold, local_minimum])
@pytest.mark.parametrize("length", [1, 31, 64, 129, 5000])
def test_cuts_go_from_one_end_to_the_other(cutter, length):
    cuts = cutter(random_ids(length))
    assert cuts[0] == 0
    assert cuts[-1] == length
    assert all(low < high for low, high in pairwise(cuts))


@pytest.mark.parametrize("text", [random_ids(40_000), np.zeros(5000, np.int32)])
def test_the_thresholds_chunks_keep_to_its_clamps(text):
    sizes = np.diff(threshold(text))
    assert sizes.max() <= MOST
    assert sizes[:-1].min() >= LEAST
    if text.any():
        assert 120 < sizes.mean() < 190, "128 expected, and those that fall below 32 join the next"


def test_the_thresholds_cut_hangs_on_the_one_before():
    """Which is what it loses by: behind some header a cut of the same content is elsewhere."""
    text = random_ids(4000)
    cuts = {cut for cut in threshold(text) if cut > WINDOW}

    def moved(length):
        cuts_there = threshold(np.concatenate([random_ids(length, seed=length), text]))
        return {cut - length for cut in cuts_there if cut - length > WINDOW} != cuts

    assert any(moved(length) for length in range(10, 200, 10))


def test_a_local_minimum_hangs_on_nearby_content_alone():
    text = random_ids(20_000)
    cuts = set(least_nearby(text).tolist())
    assert 1 / 60 < len(cuts) / len(text) < 1 / 40
    for start, end in ((500, 3000), (7001, 7400), (12_345, 19_000)):
        inside = {start + cut for cut in least_nearby(text[start:end]).tolist()}
        low, high = start + WINDOW + NEAR, end - NEAR
        assert {cut for cut in inside if low < cut <= high} == {cut for cut in cuts if low < cut <= high}


def test_chunks_of_local_minima_keep_to_their_bounds_and_line_up_again():
    text = np.concatenate([random_ids(3000), np.zeros(2000, np.int32), random_ids(3000, 1)])
    cuts, made = local_minimum(text), set(least_nearby(text).tolist())
    sizes = np.diff(cuts)
    assert LEAST <= sizes[:-1].min() < 40
    assert sizes.max() <= MOST
    assert len(set(cuts) - made - {0, len(text)}) >= 2, "some are forced"
    later = {777 + cut for cut in local_minimum(text[777:])}
    assert {cut for cut in later if cut > 1777} == {cut for cut in cuts if cut > 1777}


def test_marks_part_a_text():
    parts = [random_ids(size, size) for size in (333, 700, 90)]
    text = Text(np.concatenate(parts), (333, 1033))
    cuts = marked(text)
    assert {0, 333, 1033, 1123} <= set(cuts)
    alone = marked(Text(np.concatenate([random_ids(91), parts[1], parts[2]]), (91, 791)))
    assert [cut - 333 for cut in cuts if 333 <= cut <= 1033] == [cut - 91 for cut in alone if 91 <= cut <= 791]


# ---------------------------------------------------------------- the oracle


def covered_plainly(ids, earlier):
    out = np.zeros(len(ids), bool)
    there = {tuple(text[at : at + SHORTEST]) for text in earlier for at in range(SINK, len(text) - SHORTEST + 1)}
    for at in range(SINK, len(ids) - SHORTEST + 1):
        if tuple(ids[at : at + SHORTEST]) in there:
            out[at : at + SHORTEST] = True
    return out


@pytest.mark.parametrize("seed", range(8))
def test_the_oracle_is_a_plain_search_for_every_match(seed):
    rng = np.random.default_rng(seed)
    texts = [pieces(seed), random_ids(20), pieces(seed)[::-1].copy(), np.roll(pieces(seed), rng.integers(400))]
    oracle = Oracle()
    for number, ids in enumerate(texts):
        assert np.array_equal(oracle.covered(ids), covered_plainly(ids, texts[:number]))
        oracle.add(ids)


# ---------------------------------------------------------------- the arms


@pytest.mark.parametrize("seed", range(6))
def test_no_arm_says_what_is_not_so(seed):
    """Few ids, many near matches. `count` compares each hit with the text; ours never has an entry twice."""
    rng = np.random.default_rng(seed)
    texts = [
        Text(np.concatenate([pieces(seed, 4), random_ids(50, one), np.roll(pieces(seed), rng.integers(300))]))
        for one in range(5)
    ]
    tally = Tally()
    count(texts, tally)
    assert tally.oracle > 0
    assert tally.found[OURS] <= tally.oracle
    registry = Registry(sum(len(text.ids) for text in texts))
    for text in texts:
        upto = SINK
        for start, ids in registry.find(text, NONE):
            assert np.array_equal(ids, text.ids[start : start + len(ids)])
            # What is shorter goes on from the hit before it: together they are long enough.
            assert len(ids) >= SHORTEST or start == upto
            assert start >= upto
            upto = start + len(ids)
        registry.add(text, NONE)
        registry.chunks.check_integrity()


def test_what_is_counted_stands_above_the_prefix_and_below_the_last_id():
    shared, other = random_ids(500), random_ids(500, 1)
    texts = [Text(np.concatenate([shared, other])), Text(np.concatenate([shared, random_ids(9, 2), other]))]
    tally = Tally()
    count(texts, tally)
    assert tally.prefix == 500
    assert tally.oracle == tally.found[OURS] == 499
    assert tally.found["blocks of 128"] == 0
    assert tally.tokens == 2009


def test_equal_texts_are_all_prefix():
    tally = Tally()
    count([Text(random_ids(300))] * 2, tally)
    assert (tally.prefix, tally.oracle, tally.found[OURS]) == (299, 0, 0)


@pytest.mark.parametrize("name", PATTERNS)
def test_ours_finds_what_is_there(name):
    tally = Tally()
    count(pattern(name, 4, 0), tally)
    assert tally.share(OURS) >= content_recovery.GOAL
    assert set(tally.found) == set(arms(8))


# ---------------------------------------------------------------- the benchmark


def test_it_runs_without_recordings(bed):
    content_recovery.check(bed)
    cases = content_recovery.cases(bed)
    assert len([case for case in cases if case.startswith("pattern")]) == len(PATTERNS)
    assert not [case for case in cases if case.startswith("recorded")]
    assert content_recovery.BENCH.host


def test_a_hit_that_is_other_content_is_noticed(bed, monkeypatch):
    real = content_arms.ChunkRegistry.match

    def shifted(self, namespace, ids):
        return [Hit(hit.start + 1, hit.slots[:-1]) for hit in real(self, namespace, ids)]

    monkeypatch.setattr(content_arms.ChunkRegistry, "match", shifted)
    with pytest.raises(WrongResult, match="is other content"):
        content_recovery.check(bed)


def test_hits_that_overlap_are_noticed(bed, monkeypatch):
    real = content_arms.ChunkRegistry.match

    def twice(self, namespace, ids):
        return [hit for hit in real(self, namespace, ids) for _ in range(2)]

    monkeypatch.setattr(content_arms.ChunkRegistry, "match", twice)
    with pytest.raises(WrongResult, match="overlap"):
        content_recovery.check(bed)


def test_a_registry_that_finds_too_little_is_noticed(bed, monkeypatch):
    monkeypatch.setattr(content_arms.ChunkRegistry, "match", lambda *args: [])
    with pytest.raises(WrongResult, match=r"0\.0 % of what is there"):
        content_recovery.check(bed)


def test_figures_of_a_pattern(bed, monkeypatch):
    monkeypatch.setattr(content_recovery, "PROMPTS", 4)
    monkeypatch.setattr(content_recovery, "SEEDS", 1)
    figures = {(one.arm, one.metric): one for one in content_recovery.rows(bed, "pattern: tool variants")}
    ours = figures[OURS, content_recovery.SHARE]
    assert ours.met is True
    reused = [figures[arm, content_recovery.REUSED].value for arm in ("exact prefix", OURS, "all that is there")]
    assert reused == sorted(reused)
    assert figures[content_recovery.MARKED, "ids of markers"].value > 0
    served = {arm: figures[f"served: {arm}", content_recovery.SERVED].value for arm in ARMS}
    assert served["PREFIX"] == reused[0]
    assert reused[0] < served["CONTENT"] <= reused[2] + 0.1


def test_sessions_name_the_same_slots(monkeypatch):
    monkeypatch.setattr(content_memory, "OPEN", 4)
    copied, named, rate = content_memory.open_together("memory")
    assert named.value < copied.value / 2
    assert 50 < rate.value < 100


def test_what_is_held_keeps_to_its_budget(monkeypatch):
    monkeypatch.setattr(content_memory, "SHUFFLES", 60)
    figures = {one.metric: one for one in content_memory.one_after_another("memory", 0.5)}
    assert figures["most rows registered"].met is True
    rates = [one.value for metric, one in figures.items() if metric.startswith("hit rate")]
    assert min(rates) > 30
    assert max(rates) - min(rates) < 5
