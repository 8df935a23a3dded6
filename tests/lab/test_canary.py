"""The canary finds what it is there for: keys turned wrongly, and edits that are not what they should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leyline_server.config import ServerConfig
from leyline_server.edit.plan import Plan, plan
from leyline_server.engine import local
from leyline_server.lab import canary
from leyline_server.lab.laboratory import Lab
from leyline_server.model.attention import attach
from leyline_server.model.fused import fuse
from leyline_server.model.load import LoadedModel
from leyline_server.model.rotary_probe import probe
from leyline_server.server import TINY, Parts, build

CONFIG = ServerConfig(model="tiny", device="cpu", slots=4096, threads=1)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return build(CONFIG)


@pytest.fixture
def lab(parts: Parts) -> Lab:
    return Lab(parts.engine, parts.serving.format, parts.model)


def test_it_passes_and_leaves_model_and_engine_as_they_were(lab: Lab) -> None:
    before = lab.model.model.config._attn_implementation
    first = canary.run(lab, 0.9, probes=4)
    assert first.passed
    assert lab.model.model.config._attn_implementation == before
    assert canary.run(lab, 0.9, probes=4) == first
    stats = lab.engine.stats()
    assert (stats.free, stats.in_use, stats.cached) == (stats.num_slots, 0, 0)


def test_keys_turned_in_another_layout(parts: Parts) -> None:
    wrong = replace(parts.model, rotary=replace(parts.model.rotary, layout="halves"))
    assert wrong != parts.model
    other = build(CONFIG, wrong)
    report = canary.run(Lab(other.engine, other.serving.format, wrong), 0.0, probes=1)
    assert report.rotation_error > 0.1
    assert len(report.failures) == 2, "rotation, and with it AMORTIZE"
    assert "relative error" in report.failures[0]


def test_an_edit_that_takes_one_entry_too_many(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(rows: object, edits: list[object]) -> Plan:
        return plan(rows, [replace(edit, end=edit.end + 1, ids=(*edit.ids, 9)) for edit in edits])  # type: ignore

    monkeypatch.setattr(local, "plan", off_by_one)
    report = canary.run(lab, 0.0, probes=1)
    assert report.rotation_error < canary.ROTATION_BOUND[lab.model.dtype]
    (failure,) = report.failures
    assert "Hugging Face" in failure


def test_it_asks_the_modules_that_are_served_also_where_they_are_fused() -> None:
    """As on a GPU: norms, routers, experts and rotation are swapped, and Hugging Face's attention runs on them."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    rotary = probe(model)
    fuse(model)
    attach(model)
    loaded = LoadedModel(model, TINY, "digest", rotary)
    parts = build(CONFIG, loaded)
    assert canary.run(Lab(parts.engine, parts.serving.format, loaded), 0.9, probes=2).passed


@pytest.mark.parametrize(("kl", "passed"), [(0.39, True), (0.41, False)])
def test_a_model_that_differs_from_itself_may_differ_four_times_that(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kl: float, passed: bool
) -> None:
    monkeypatch.setattr(canary, "_unedited_kl", lambda lab, ids: 0.1)
    monkeypatch.setitem(canary.UNEDITED_BOUND, torch.float32, 1.0)
    monkeypatch.setattr(canary, "_oracle_kl", lambda lab, ids: kl)
    report = canary.run(lab, 0.0, probes=1)
    assert report.passed is passed
    assert (report.oracle_kl, report.unedited_kl) == (kl, 0.1)
    assert passed or "above 0.4" in report.failures[0]


def test_a_model_that_is_far_from_hugging_faces_unedited_fails(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_unedited_kl", lambda lab, ids: 0.5)
    (failure,) = canary.run(lab, 0.0, probes=1).failures
    assert "an unedited text differs" in failure
