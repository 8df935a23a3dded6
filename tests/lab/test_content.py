"""Content hits in the lab: the arms against Hugging Face's model over a cache that is put together in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_proto import leyline_pb2 as pb
from leyline_server.cache.chunks import SINK
from leyline_server.config import ServerConfig
from leyline_server.lab import content
from leyline_server.lab.arms import STEMS
from leyline_server.lab.content import ARMS, KINDS, F, make_moved
from leyline_server.lab.laboratory import Lab, Question
from leyline_server.lab.oracle import Oracle
from leyline_server.model.attention import detached
from leyline_server.server import build


@pytest.fixture(scope="module")
def lab() -> Lab:
    parts = build(ServerConfig(model="tiny", device="cpu", slots=16384, threads=1))
    return Lab(parts.engine, parts.serving.format, parts.model)


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_ask_for_a_key_that_stands_in_every_file_and_the_source_has_the_same_files(kind: str) -> None:
    for seed in range(10):
        moved = make_moved(kind, seed)
        (step,) = moved.scene.steps
        results = [m.content for m in step.messages if m.role == pb.ROLE_TOOL]
        assert sorted(results) == sorted(m.content for m in moved.source if m.role == pb.ROLE_TOOL)
        assert len(results) == content.FILES
        assert all(f"{moved.scene.key} = " in text for text in results)
        assert sum(moved.scene.told in text for text in results) == 1
        assert f"{moved.scene.key} = {moved.scene.told}" in results[-1]
        asked = any(moved.scene.question == m.content for m in moved.source)
        assert asked is ("other questions" not in kind)


def test_a_hit_is_what_the_oracle_makes_of_the_same_rows(lab: Lab) -> None:
    """The asked ids, with the source's rows where the registry finds them, and the rest computed over those."""
    moved = make_moved("one hop, other questions", 3)
    source, _ = content._ids(lab, moved.source)
    ids, marker = content._ids(lab, moved.scene.steps[0].messages)
    ids += marker
    with lab.bench():
        namespace = content._registered(lab, source)
        cache = lab.engine.cache
        found = cache.chunks.match(namespace, np.asarray(ids[SINK:-1], np.int32))
        written = [cache.table.written_at[hit.slots].tolist() for hit in found]
        (asked,) = lab.ask([Question(lab.open(ids, namespace, ARMS[1].reuse))])
    with detached(lab.model.model):
        first, second = Oracle(lab.model.model), Oracle(lab.model.model)
        first.append(source)
        first.compute()
        second.append(ids)
        for hit, at in zip(found, written, strict=True):
            for offset, row in enumerate(at):
                there = SINK + hit.start + offset
                second.restore(first.copy(row, row + 1), there, there + 1)
        want = second.compute()[-1]
    assert asked.report is not None
    assert asked.report.content_hit == sum(map(len, written)) > 300
    torch.testing.assert_close(asked.logits[0], want[: asked.logits.shape[1]], atol=2e-3, rtol=1e-3)


def test_the_arms_are_what_they_say(lab: Lab) -> None:
    with lab.bench():
        found = content.answers(lab, make_moved("two hops", 1), STEMS[0])
    assert list(found) == [arm.name for arm in ARMS]
    plain, hit = found[F.name], found["C"]
    assert (plain.hit, found["Z"].hit, plain.kl) == (0, 0, 0.0)
    assert found["Z"].kl < 1e-9
    assert hit.hit > 400
    assert found["N"].hit == hit.hit
    assert found["N"].kl > 100 * found["Z"].kl
    for name, share in (("C+5%", 0.05), ("C+15%", 0.15), ("C+50%", 0.5)):
        assert hit.hit * share <= hit.hit - found[name].hit <= hit.hit * share + 20
        assert found[name].computed - hit.computed == hit.hit - found[name].hit
    assert hit.hit > found["C+4"].hit > found["C+16"].hit
    assert lab.engine.stats().in_use == 0


def test_figures_have_every_arm_and_their_intervals(lab: Lab) -> None:
    figures = content.measure(lab, STEMS[0], "one hop", 2, 0, lambda items, what, count: items)
    own = [figure for figure in figures if figure.case == "one hop"]
    assert {figure.arm for figure in own} == {arm.name for arm in ARMS}
    found = {figure.arm: figure for figure in own if figure.metric == "needle found"}
    assert found["F"].value == 1.0
    assert found["F"].n == 2
    assert found["F"].low is not None
    assert found["F"].low < 0.5
