"""The benchmark of content hits, at a small size: both of its cases measure what they say."""

from __future__ import annotations

from benchmarks import content_hits
from benchmarks.content_hits import ARMS, BENCH, COPYING, FULL, SAME, SESSIONS, documents, length, prompt


def test_prompts_are_as_long_as_they_should_be_and_four_fifths_of_them_known(bed):
    known = documents(bed)
    one, other = prompt(bed, known, 1), prompt(bed, known, 2)
    assert len(one) == len(other) == length(bed)
    assert sum(map(len, known)) == length(bed) * 4 // 5
    assert one != other


def test_each_case_has_its_figures(bed, monkeypatch):
    monkeypatch.setattr(content_hits, "REPEATS", 2)
    BENCH.check(bed)
    moved, same, tenant = BENCH.cases(bed)
    assert same == SAME
    rows = {(row.arm, row.metric): row.value for row in BENCH.rows(bed, moved)}
    assert {arm for arm, _ in rows} == set(ARMS)
    assert rows[FULL, "computed"] == length(bed)
    assert rows["content hits", "computed"] == length(bed) // 5
    assert rows["content hits", "computed"] < rows["content hits, 15 % computed", "computed"] < length(bed)
    assert ("content hits", "full prefill over it") in rows
    slots = {row.arm: row.value for row in BENCH.rows(bed, same)}
    # What is new may by chance go on as a document does elsewhere.
    assert abs(slots["content hits"] - (length(bed) * 4 // 5 + SESSIONS * length(bed) // 5)) < SESSIONS
    assert slots[COPYING] == SESSIONS * length(bed)
    figures = list(BENCH.rows(bed, tenant))
    assert [figure.metric for figure in figures] == ["first token", "first token", "sooner"]
    assert 0 <= figures[2].low <= figures[2].value <= figures[2].high <= 100
