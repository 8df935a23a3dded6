"""Runs a client script of this package in a process of its own, so that it does not share the server's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.bench import require

TIMEOUT_S = 600.0


def run(module: str, *arguments: str) -> str:
    """What `python -m benchmarks.MODULE` printed. Raises CheckFailed when it failed."""
    # The packages may be on this process's path without being installed.
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    out = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    require(out.returncode == 0, f"the client failed: {out.stderr[-2000:]}")
    return out.stdout
