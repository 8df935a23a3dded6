"""`leyline-lab` as its users meet it: rows and pictures, what is skipped, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline_server import sizing
from leyline_server.lab import __main__ as command
from leyline_server.lab import measures
from leyline_server.lab.arms import ARMS
from leyline_server.lab.figures import Figure
from tests.service.running import small_checkpoint

FOREIGN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


def plain(directory: Path, **config: Any) -> str:
    """Random weights, and a chat template that is none of ours: text and ids, no messages."""
    path = small_checkpoint(directory, **config)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": FOREIGN}))
    return path


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs it in this process: (exit code, stdout, stderr). Its files are in tmp_path / "out"."""

    def run(*args: str) -> tuple[int, str, str]:
        given = ["leyline-lab", "--threads", "1", "--device", "cpu", "--out", str(tmp_path / "out"), *args]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as end:
            command.main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out" / "lab.jsonl").read_text().splitlines()]


def test_a_kind_on_the_embedded_model(lab: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever variables somebody has set for their server."""
    for name, value in (("MAX_CONTEXT", "16"), ("CANARY", "refuse"), ("PREFILL_CHUNK", "none"), ("NOTHING", "1")):
        monkeypatch.setenv(f"LEYLINE_SERVER_{name}", value)
    code, out, err = lab("--scenes", "1", "--kinds", "removed", "--measures", "fidelity")
    assert code == 0, err
    assert "fidelity: removed, whom it follows (n = 1)" in out
    assert "…" not in out, "a file gets whole tables, whatever width a terminal would have"
    done, written = err.splitlines()
    assert done.startswith("fidelity: removed, 1 scene (")
    names = ["lab.jsonl", "dial.png"]
    found = rows(tmp_path)
    if any(row["metric"].startswith("follows") for row in found):
        names.insert(1, "following.png")
    assert written == f"written: {', '.join(str(tmp_path / 'out' / name) for name in names)}"
    assert {row["arm"] for row in found if row["case"] == "removed"} == {arm.name for arm in ARMS}
    for row in found:
        assert (row["bench"], row["model"], row["device"], row["n"]) == ("fidelity", "tiny", "cpu", 1)
        assert row["command"].startswith("leyline-lab --threads 1 ")
        assert len(row["digest"]) > 8


def test_without_a_chat_format_texts_are_still_measured(lab: Run, tmp_path: Path) -> None:
    model = plain(tmp_path, max_position_embeddings=2048)
    code, out, err = lab("--model", model)
    assert code == 0, err
    assert {row["bench"] for row in rows(tmp_path)} == {"drift", "invariance"}
    assert "drift: 1000 edits" in out
    first, second, third, drift, invariance, written = err.splitlines()
    told = "this model takes text and token ids only: its chat template is not one of ours"
    assert first.startswith(f"leyline-lab: skipped: fidelity: {told}")
    assert second.startswith(f"leyline-lab: skipped: told-apart: {told}")
    assert third.startswith(f"leyline-lab: skipped: content: {told}")
    assert first.endswith("<|end|><|ass…'"), "all of the reason"
    assert drift.startswith("drift (")
    assert invariance.startswith("invariance (")
    assert written.endswith("drift.png, " + str(tmp_path / "out" / "invariance.png"))


def test_nothing_to_measure_is_exit_code_3(lab: Run, tmp_path: Path) -> None:
    code, out, err = lab("--model", plain(tmp_path))  # of 512 positions
    assert (code, out) == (3, "")
    *skipped, last = err.splitlines()
    assert [line.split(": ")[2] for line in skipped] == ["fidelity", "told-apart", "content", "drift", "invariance"]
    assert "the context holds 512" in skipped[3]
    assert "beyond the context of 512" in skipped[4]
    assert last == "leyline-lab: nothing could be measured"
    assert not list((tmp_path / "out").iterdir())


def test_a_crash_leaves_what_was_measured(lab: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any) -> list[Figure]:
        assert [row["metric"] for row in rows(tmp_path)] == ["error of keys"]
        raise KeyError("nobody expects this")

    monkeypatch.setattr(
        measures, "drift", lambda *args, **kw: [Figure("drift", "1 edit", "leyline", "error of keys", 0)]
    )
    monkeypatch.setattr(measures, "invariance", crash)
    with pytest.raises(KeyError, match="nobody expects"):
        lab("--measures", "drift,invariance")
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["--scenes", "0"], 2, "scenes: Input should be greater than or equal to 1 (given: '0')"),
        (["--kinds", "[red]"], 2, "kinds.0: none of untouched, removed, "),
        (["--device", "cuda"], 2, "device: 'cuda' was asked for, and there is no GPU that torch can use"),
        (["--slots", "10000000000"], 2, "slots: 10,000,000,000 of 3,840 bytes take "),
        (["--out", "/dev/null"], 2, "out: "),
        (["--model", "/nowhere[red]"], 3, "the model is refused: NOT_FOUND: /nowhere[red] is not a directory"),
    ],
)
def test_what_can_not_be_run_is_one_line(
    args: list[str], code: int, told: str, lab: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "60")
    found, out, err = lab(*args)
    assert (found, out) == (code, "")
    (line,) = err.splitlines()
    assert line.startswith(f"leyline-lab: {told}")


def test_it_is_a_program() -> None:
    """Bad settings are told before torch is loaded."""
    code = "import sys, leyline_server.lab.__main__ as lab; sys.argv[1:] = ['--scenes', '0']\n"
    code += "try: lab.main()\nfinally: print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert (shown.returncode, shown.stdout) == (2, "False\n")
    assert len(shown.stderr.splitlines()) == 1
