"""The lab's scenes, arms and figures on the embedded model: what must hold of them whatever the model makes of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from leyline_proto.refusal import Refusal
from leyline_server.config import ServerConfig
from leyline_server.lab import following
from leyline_server.lab.arms import ARMS, STEMS, F, R, opening_ids, play
from leyline_server.lab.laboratory import Lab, LabError, Question
from leyline_server.lab.oracle import Oracle
from leyline_server.lab.scenes import KINDS, make_scene
from leyline_server.model.attention import detached
from leyline_server.server import build


@pytest.fixture(scope="module")
def lab() -> Lab:
    parts = build(ServerConfig(model="tiny", device="cpu", slots=8192, threads=1))
    return Lab(parts.engine, parts.serving.format, parts.model)


def quietly(items: Iterable[int], what: str, count: int) -> Iterable[int]:
    return items


@pytest.fixture(scope="module")
def results(lab: Lab) -> list[following.SceneResult]:
    return following.measure(lab, following.choose_stem(lab), KINDS, 3, 0, quietly)


@pytest.mark.parametrize("kind", KINDS)
def test_F_is_the_plain_model_on_the_whole_text_and_R_on_the_edited_one(lab: Lab, kind: str) -> None:
    """By Hugging Face's own attention over the same ids."""
    scene = make_scene(kind, 7)
    opening, _ = opening_ids(lab, scene, STEMS[0])
    with lab.bench():
        played = play(lab, scene, (F, R))
        for one in played:
            one.ask(opening)
        asked = lab.ask([Question(one.sequence) for one in played])
        texts = [lab.engine.ids(one.sequence)[:-1] for one in played]
    assert texts[0] != texts[1]
    for text, listener in zip(texts, asked, strict=True):
        with detached(lab.model.model):
            oracle = Oracle(lab.model.model)
            oracle.append(text)
            want = oracle.compute()[-1]
        torch.testing.assert_close(listener.logits[0], want[: listener.logits.shape[1]], atol=2e-4, rtol=1e-4)


def test_scenes_say_the_told_value_once_and_in_what_is_edited() -> None:
    for kind in KINDS:
        for seed in range(20):
            scene = make_scene(kind, seed)
            edits = {edit.message_id: edit.text for step in scene.steps for edit in step.edits}
            assert scene.num_edits == (8 if "8 edits" in kind else 1)
            said = [m for step in scene.steps for m in step.messages if scene.told in m.content]
            if scene.same_answer:
                assert not {m.message_id for m in said} & set(edits)
            else:
                assert [m.message_id in edits for m in said] == [True]
                assert scene.told not in edits[said[0].message_id]
                assert scene.told[0] != scene.instead[:1]
            if scene.instead:
                now = [edits.get(m.message_id, m.content) for step in scene.steps for m in step.messages]
                assert any(scene.instead in text for text in now)


def test_variants_differ_in_what_is_told_alone() -> None:
    for kind in following.HIDING:
        one, other = make_scene(kind, 5, 0), make_scene(kind, 5, 1)
        assert one.told[0] != other.told[0]
        swapped = str(other.steps).replace(other.told, one.told)
        assert swapped == str(one.steps)


def test_the_edited_arms_stand_for_the_same_text(lab: Lab) -> None:
    """All but G, which has no R, and those that edit nothing."""
    scene = make_scene("removed (8 edits)", 3)
    with lab.bench():
        texts = {one.arm.name: lab.engine.ids(one.sequence) for one in play(lab, scene, ARMS)}
    assert texts["F"] == texts["Z"]
    assert len(texts["E"]) > len(texts["F"]), "it is told to ignore the results"
    same = [name for name in texts if name[0] in "RLN"]
    assert len(same) == 8
    assert all(texts[name] == texts["R"] for name in same)
    assert texts["G"] != texts["R"]


def test_misplaced_rows_are_read_where_the_arm_says(lab: Lab) -> None:
    """N reads moved rows as if they had not moved; G reads what stands before the gap as far away as it was."""
    scene = make_scene("removed", 2)
    deltas = {}
    with lab.bench():
        for one in play(lab, scene, [arm for arm in ARMS if arm.name in "LNG"]):
            rows = lab.engine.sequences[one.sequence].rows
            deltas[one.arm.name] = np.where(rows.slots >= 0, rows.delta(lab.engine.cache.table), 0)
    moved = deltas["L"][deltas["L"] != 0]
    assert len(set(moved.tolist())) == 1
    assert not deltas["N"].any()
    gap = set(deltas["G"].tolist())
    assert len(gap) == 1, "everything keeps its distance from everything else"
    assert gap.pop() < moved[0] <= 0


def test_what_the_embedded_model_does(results: list[following.SceneResult]) -> None:
    """It answers from what it has, so F and R differ; unturned keys do harm; noise is none."""
    own = [result for result in results if result.scene.kind != "removed later"]  # it was not trained on that
    for result in own:
        answers = result.answers
        assert result.answered, (result.scene.kind, answers["F"].text)
        assert answers["Z"].first == answers["F"].first
        assert answers["Z"].kl_from_f < 1e-6
        assert answers["R"].tells == result.scene.same_answer
        assert answers["L"].computed < answers["L+16"].computed <= answers["R"].computed
        if "replaced" in result.scene.kind:
            assert answers["R"].tells_instead
    far = {arm: np.mean([r.answers[arm].kl_from_r for r in own]) for arm in ("R", "L", "L+50%", "N", "E")}
    assert far["R"] == 0 < far["L+50%"] < far["L"] < far["N"] < far["E"]


def test_figures_have_their_intervals_and_counts(results: list[following.SceneResult]) -> None:
    figures = following.figures(results)
    by_key = {(f.case, f.arm, f.metric): f for f in figures}
    assert len(by_key) == len(figures)
    for kind in KINDS:
        answered = by_key[kind, "F", "answers unedited"]
        assert answered.n == 3
        if kind == "removed later":
            assert answered.value < 1
            assert by_key.get((kind, "F", "first token as F"), answered).n < 4
            continue
        own = by_key[kind, "F", "first token as F"]
        assert (own.value, own.n, own.high) == (1.0, 3, 1.0)
        assert own.low is not None
        assert 0.3 < own.low < 0.5
        assert by_key[kind, "R", "greedy prefix with R"].value == 1
        assert by_key[kind, "L", "computed again"].value < by_key[kind, "R", "computed again"].value
    assert by_key["removed", "F", "follows F, where F and R differ"].value == 1
    assert by_key["removed", "R", "follows F, where F and R differ"].value == 0


def test_told_apart_is_a_coin_for_R_and_certain_for_a_list_that_still_says_it(lab: Lab) -> None:
    figures = {f.arm: f for f in following.told_apart(lab, STEMS[0], ["removed"], 4, 0, quietly)}
    assert figures["R"].value == 0.5
    assert figures["L"].n == 4
    scenes = [make_scene("removed", 1, variant) for variant in (0, 1)]
    with lab.bench():
        assert following.which_was_told(lab, scenes, STEMS[0], (F, R)) == {"F": 1.0, "R": 0.5}


def test_the_opening_ends_where_answers_differ(lab: Lab) -> None:
    """So the token that is compared is one of the value, whatever a format or a stem puts in front of it."""
    for kind in KINDS:
        for stem in STEMS:
            scene = make_scene(kind, 3)
            opening, told = opening_ids(lab, scene, stem)
            assert lab.format.decode(told[:1]).strip()
            assert lab.format.decode([*opening, *told]).count(scene.told) == 1
            other = opening_ids(lab, make_scene(kind, 3, 1), stem)
            assert other[0] == opening
            assert other[1][0] != told[0]
    assert following.choose_stem(lab) == STEMS[0]


def test_a_model_that_answers_nothing_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "STEMS", ("I don't know: ",))
    with lab.bench(), pytest.raises(LabError, match=r"answers \d of 8 questions"):
        following.choose_stem(lab)


def test_a_pool_that_evicts_is_refused_and_not_measured() -> None:
    """Evicted rows are computed honestly: an AMORTIZE would look like R."""
    parts = build(ServerConfig(model="tiny", device="cpu", slots=1024, threads=1))
    lab = Lab(parts.engine, parts.serving.format, parts.model)
    with pytest.raises(LabError, match="pool of 1024 slots is too small"), lab.bench():
        following.answers(lab, make_scene("removed (8 edits)", 1), STEMS[0])
    stats = lab.engine.stats()
    assert (stats.free, stats.running) == (stats.num_slots, 0)


def test_a_short_queue_takes_longer_and_gives_the_same(lab: Lab) -> None:
    parts = build(ServerConfig(model="tiny", device="cpu", slots=8192, threads=1, max_queue=1, max_running=1))
    narrow = Lab(parts.engine, parts.serving.format, parts.model)
    scene = make_scene("replaced", 1)
    with lab.bench(), narrow.bench():
        wide, one_by_one = (following.answers(at, scene, STEMS[0]).answers for at in (lab, narrow))
    assert {arm: a.tokens for arm, a in wide.items()} == {arm: a.tokens for arm, a in one_by_one.items()}


def test_a_request_that_is_refused_leaves_the_bench_clean(lab: Lab) -> None:
    parts = build(ServerConfig(model="tiny", device="cpu", slots=8192, threads=1, max_context=200))
    small = Lab(parts.engine, parts.serving.format, parts.model)
    with pytest.raises(Refusal, match="context"), small.bench():
        small.prefill(small.open(range(10, 60)), small.open(range(10, 300)))
    stats = small.engine.stats()
    assert (stats.free, stats.running, stats.queued) == (stats.num_slots, 0, 0)
