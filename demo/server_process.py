"""Starts `leyline-server` as a process of its own and stops it again. Knows its start-up line and no more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

READY = re.compile(r"^leyline-server ready: (?P<what>.*) at (?P<address>\S+)$")


class ServerProcess:
    """A running server. Leaving the `with` block drains it.

    Attributes:
        address: "host:port".
        banner: model, device and slots, as the server says them.

    Raises:
        RuntimeError: it ended before it was ready; the message has the end of its log.
    """

    def __init__(self, log: Path, flags: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "leyline_server", "--port", "0", *flags]
        # The packages may be on this process's path without being installed.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        self._log = log.open("w+")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env)
        self.address, self.banner = self._wait()

    def _wait(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := READY.match(line.strip()):
                return ready["address"], ready["what"]
        self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"the server ended before it was ready:\n{self._log.read()[-2000:]}")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
