"""The tool and the tasks: real files, no way out of their folder, the same tasks for the same seed."""

from __future__ import annotations

from pathlib import Path

from demo.agent import Files
from demo.tasks import KINDS, make_tasks
from leyline_sdk import ToolCall


def read(files: Files, path: str) -> str:
    return files.run(ToolCall("c1", "read_file", {"path": path}))


def test_reads_what_a_task_wrote_and_fails_once_when_told_to(tmp_path: Path) -> None:
    task = next(task for task in make_tasks(12, 1) if task.fail_first and task.reads[0] == task.reads[1])
    files = Files(tmp_path)
    files.prepare(task)
    path, content = next(iter(task.files.items()))
    assert read(files, path) == task.fail_first
    assert read(files, path) == content == (tmp_path / path).read_text()
    files.remove(path)
    assert read(files, path) == "error: no such file"


def test_reads_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("no")
    (tmp_path / "inside").mkdir()
    files = Files(tmp_path / "inside")
    for path in ("../secret", str(tmp_path / "secret"), "", "."):
        assert read(files, path) == "error: no such file"


def test_tasks_are_of_every_kind_and_the_same_for_a_seed() -> None:
    tasks = make_tasks(12, 3)
    assert {task.kind for task in tasks} == set(KINDS)
    assert tasks == make_tasks(12, 3)
    assert tasks != make_tasks(12, 4)
