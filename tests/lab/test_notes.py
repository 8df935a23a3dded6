"""The second embedded model, trained with edits, follows what was removed; tiny follows what never was there."""

from __future__ import annotations

import pytest

from leyline_server.config import ServerConfig
from leyline_server.lab.arms import F, L, R
from leyline_server.lab.following import SceneResult, answers, choose_stem
from leyline_server.lab.laboratory import Lab
from leyline_server.lab.scenes import make_scene
from leyline_server.server import EMBEDDED, build


def results(model: str, kind: str) -> list[SceneResult]:
    parts = build(ServerConfig(model=model, device="cpu", slots=8192, threads=1))
    lab = Lab(parts.engine, parts.serving.format, parts.model)
    stem = choose_stem(lab)
    with lab.bench():
        return [answers(lab, make_scene(kind, seed), stem, (F, R, L)) for seed in range(100, 108)]


def test_the_package_has_two_models() -> None:
    assert sorted(EMBEDDED) == ["notes", "tiny"]


@pytest.mark.parametrize(("model", "followed"), [("tiny", "R"), ("notes", "F")])
def test_whom_a_removal_follows_is_a_matter_of_training(model: str, followed: str) -> None:
    found = results(model, "removed")
    assert all(result.answered for result in found)
    differ = [r.answers for r in found if r.answers["F"].first != r.answers["R"].first]
    assert len(differ) >= 6
    assert all(answer["L"].first == answer[followed].first for answer in differ)
