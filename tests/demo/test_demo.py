"""The demo from end to end, with few tasks: its own server process, five arms, a killed client, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.__main__ import main
from demo.arms import ARMS


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--tasks", "3", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "demo.json").read_text())
    checks = {check["what"]: check["met"] for check in content["checks"]}
    # With three tasks little is cut: how much that saves is judged in `make demo`, with twelve.
    assert [what for what, met in checks.items() if not met and "%" not in what] == [], said
    assert status == (0 if all(checks.values()) else 1)
    for made in content["results"]:
        for turn in made["turns"]:
            cells = {kind: sum(n for of, n in turn["cells"] if of == kind) for kind in ("kept", "turned", "computed")}
            assert cells["computed"] == turn["computed"] + turn["generated"], (made["name"], turn["index"])
            assert cells["turned"] == turn["turned"]
            assert cells["kept"] == turn["kept"] + turn["prefix_hits"] - turn["turned"]
    assert [made["name"] for made in content["results"]] == [arm.name for arm in ARMS]
    assert (tmp_path / "cache.png").stat().st_size > 10_000
