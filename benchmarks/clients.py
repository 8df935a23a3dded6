"""Runs client scripts of this package in processes of their own, so that they don't share the server's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.bench import WrongResult, require

TIMEOUT_S = 600.0


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments]


def _environment() -> dict[str, str]:
    # The packages may be on this process's path without being installed.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}


def run(module: str, *arguments: str) -> str:
    """What `python -m benchmarks.MODULE` printed. Raises WrongResult when it failed."""
    out = subprocess.run(
        _command(module, arguments), env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    require(out.returncode == 0, f"the client failed: {out.stderr[-2000:]}")
    return out.stdout


def lines(module: str, clients: Sequence[Sequence[str]]) -> Iterator[str]:
    """What several clients print, line by line as it comes; `clients` are their arguments. Raises WrongResult as soon
    as one has failed, and then the others end too."""
    queue: SimpleQueue[str | int] = SimpleQueue()  # a line, or the index of a client that has ended

    def read(index: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            queue.put(line)
        process.stdout.close()
        queue.put(index)

    logs = [tempfile.TemporaryFile("w+") for _ in clients]  # noqa: SIM115 closed below
    processes: list[subprocess.Popen[str]] = []
    try:
        for index, (arguments, log) in enumerate(zip(clients, logs, strict=True)):
            command = _command(module, arguments)
            processes.append(
                subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=log, text=True)
            )
            threading.Thread(target=read, args=(index, processes[-1]), daemon=True).start()
        ended = 0
        while ended < len(processes):
            try:
                got = queue.get(timeout=TIMEOUT_S)
            except Empty:
                raise WrongResult(f"no client has said anything for {TIMEOUT_S:g} s") from None
            if isinstance(got, str):
                yield got
                continue
            ended += 1
            if processes[got].wait():
                logs[got].seek(0)
                raise WrongResult(f"the client failed: {logs[got].read()[-2000:]}")
    finally:
        for process, log in zip(processes, logs, strict=False):
            process.kill()
            process.wait()
            log.close()
