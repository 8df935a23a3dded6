"""Parts of a run: which failures skip a part, which skip its measure, and which end the run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leyline_proto.refusal import Refusal
from leyline_server.lab import content
from leyline_server.lab.config import LabConfig, Measure
from leyline_server.lab.figures import Figure
from leyline_server.lab.following import HIDING
from leyline_server.lab.laboratory import Lab, LabError
from leyline_server.lab.measures import Part, parts, run
from leyline_server.lab.scenes import KINDS


def fails(measure: Measure, detail: str, error: Exception) -> Part:
    def run() -> list[Figure]:
        raise error

    return Part(measure, detail, run)


def works(measure: Measure, detail: str = "") -> Part:
    return Part(measure, detail, lambda: [Figure(measure, detail, "L", "m", 1.0)])


def outcome(*chosen: Part) -> tuple[list[str], list[str], list[str]]:
    """(cases that were measured, what was told, what was skipped)."""
    told: list[str] = []
    skipped: list[str] = []
    measured = [figure.case for figures in run(chosen, told.append, skipped.append) for figure in figures]
    return measured, [line.partition(" (")[0] for line in told], skipped


def test_a_part_that_fails_is_skipped_and_the_others_stay() -> None:
    memory = torch.OutOfMemoryError("CUDA out of memory")
    found = outcome(
        works("fidelity", "one"),
        fails("fidelity", "two", LabError("a blank token")),
        fails("fidelity", "three", memory),
        fails("fidelity", "four", Refusal("CONTEXT_EXCEEDED", "too long")),
        works("fidelity", "five"),
        fails("drift", "", ValueError("too short")),
        works("invariance"),
    )
    assert found == (
        ["one", "five", ""],
        ["fidelity: one", "fidelity: five", "invariance"],
        [
            "fidelity: two: a blank token",
            "fidelity: three: the device has too little memory: CUDA out of memory",
            "fidelity: four: too long",
            "drift: too short",
        ],
    )


def test_what_a_chat_format_can_not_say_is_told_once_a_measure() -> None:
    def refusal() -> Refusal:
        return Refusal("NOT_SUPPORTED", "text only", feature="MESSAGES", why="no template")

    kinds = [fails("fidelity", kind, refusal()) for kind in KINDS]
    found = outcome(*kinds, fails("told-apart", "removed", refusal()), works("drift"))
    assert found == ([""], ["drift"], ["fidelity: text only", "told-apart: text only"])


@pytest.mark.parametrize(
    "part",
    [fails("fidelity", "removed", ValueError("a bug")), fails("drift", "", KeyError("a bug"))],
    ids=lambda part: part.measure,
)
def test_other_failures_end_the_run(part: Part) -> None:
    with pytest.raises((ValueError, KeyError), match="a bug"):
        outcome(works("fidelity"), part)


def test_parts_are_what_the_settings_say() -> None:
    lab: Any = SimpleNamespace()

    def names(**settings: Any) -> list[str]:
        return [part.name for part in parts(LabConfig(**settings), lab, 4096, lambda items, what, count: items)]

    fidelity = [f"fidelity: {kind}, 60 scenes" for kind in KINDS]
    apart = [f"told-apart: {kind}, 60 scenes" for kind in HIDING]
    moved = [f"content: {kind}, 60 scenes" for kind in content.KINDS]
    assert names() == [*fidelity, *apart, *moved, "drift", "invariance"]
    assert names(measures=["drift"]) == ["drift"]
    twice = names(kinds=["removed", "replaced", "removed"], scenes=1, measures=["told-apart", "fidelity"])
    assert twice == ["fidelity: removed, 1 scene", "fidelity: replaced, 1 scene", "told-apart: removed, 1 scene"]


def test_kinds_that_hide_nothing_can_not_be_told_apart(lab_of: Callable[..., Lab]) -> None:
    config = LabConfig(kinds=["replaced"], measures=["told-apart"])
    chosen = parts(config, lab_of("v2-qlora-dense"), 4096, lambda items, what, count: items)
    measured, _, (skipped,) = outcome(*chosen)
    assert not measured
    assert skipped == f"told-apart: it needs one of the kinds {', '.join(HIDING)}"
