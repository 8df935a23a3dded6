"""The demo's tasks: those of the embedded model's evaluation, on names and values it was never trained on, with
longer files, so that there is something to cut."""

from __future__ import annotations

from random import Random

from training.tasks import SessionMaker, Task

__all__ = ["Task", "make_tasks"]

KINDS = ("one_hop", "two_files", "multi_hop", "retry", "reread", "one_hop")


class _LongFiles(SessionMaker):
    def _num_lines(self) -> int:
        return self.rng.randint(11, 16)


def make_tasks(num_tasks: int, seed: int) -> list[Task]:
    """Tasks of all five kinds in turn, for one session."""
    maker = _LongFiles(Random(seed))
    return [maker.next_task(KINDS[index % len(KINDS)]) for index in range(num_tasks)]
