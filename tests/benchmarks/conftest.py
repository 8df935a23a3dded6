"""A bed at the toy's sizes for the tests of the benchmarks, and rows to draw."""

from __future__ import annotations

import pytest
import torch

from benchmarks import agreement
from benchmarks.record import Row
from benchmarks.registry import SHAPES, Bed


@pytest.fixture(scope="session", autouse=True)
def _threads(one_thread: None) -> None:
    """All tests here run on one."""


@pytest.fixture(scope="session")
def bed() -> Bed:
    return Bed(SHAPES["toy"], torch.device("cpu"), torch.float32)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no benchmark had compared the engine yet."""
    monkeypatch.setattr(agreement, "_checked", set())


@pytest.fixture
def rows() -> list[Row]:
    def row(case: str, arm: str, metric: str, value: float | None, **more: float | bool | None) -> Row:
        fields = {"low": None, "high": None, "goal": None, "met": None, **more}
        return Row(
            "splice", case, arm, metric, value, "ms", 30, **fields,  # type: ignore[arg-type]
            device="a GPU", dtype="bfloat16", versions={"model": "random weights"}, commit="abc", command="run",
        )  # fmt: skip

    return [
        row("edit at 32k", "AMORTIZE", "call", 0.8, low=0.7, high=1.1, goal=1.0, met=True),
        row("edit at 32k", "FORGET", "call", 2.5, low=2.0, high=3.0),
        row("edit at 128k", "AMORTIZE", "call", 3.5, low=3.1, high=4.0, goal=3.0, met=False),
        row("edit at 128k", "FORGET", "call", None),
    ]
