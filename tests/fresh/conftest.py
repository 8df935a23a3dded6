"""Servers of their own processes, started as the README says, and the files an agent may read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from leyline_sdk import Leyline

ROOT = Path(__file__).parents[2]
Serve = Callable[..., AbstractContextManager[str]]


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[str]:
    """Address of a server with the embedded model, read from its start-up line."""
    paths = [str(ROOT / part) for part in (".", "proto", "kernels", "policies")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    command = [
        sys.executable,
        "-m",
        "leyline_server",
        *["--port", "0", "--threads", "1", "--device", "cpu", "--drain", "1"],
        *flags,
    ]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE, stderr=stderr
        ) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline().decode()
            found = re.search(r"ready: .* at (\S+:\d+)$", line.strip())
            assert found, f"{line!r}\n{log.read_text()}"
            yield found[1]
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[str]]:
    """A server with these flags, for as long as its context is open."""
    return lambda *flags: serving(tmp_path_factory.mktemp("server") / "stderr", *flags)


@pytest.fixture(scope="session")
def target(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The server that tests share which need no flags."""
    with serve() as address:
        yield address


@pytest.fixture
def client(target: str) -> Iterator[Leyline]:
    with Leyline(target=target, timeout_s=120) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Real files of the kind that the embedded model reads."""
    (tmp_path / "net.ini").write_text("mode = fast\nport = 8123\nhost = see alt.ini\ntimeout = 30s\n")
    (tmp_path / "alt.ini").write_text("host = bravo\nsize = 7\nlimit = 450\nlevel = high\n")
    (tmp_path / "app.cfg").write_text("level = low\nport = 4410\nsize = 91\n")
    (tmp_path / "key.ini").write_text("token = sk-abcdefghijklmnopqrstuvwx\nport = 77\n")
    return tmp_path


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[tuple[str, Iterator[str]]]:
    """Its address, and api keys that nobody used yet: what one test registers no other can find."""
    keys = [f"key{number}" for number in range(200)]
    with serve("--api-keys", ",".join(f"{key}=team-{key}" for key in keys)) as address:
        yield address, iter(keys)


@pytest.fixture
def connect(server: tuple[str, Iterator[str]]) -> Iterator[Callable[[str], Leyline]]:
    """A client of the key; its tenant's sessions end with the test."""
    with ExitStack() as stack:

        def make(key: str) -> Leyline:
            client = stack.enter_context(Leyline(target=server[0], api_key=key, timeout_s=120))
            stack.callback(lambda: [client.session(one.id, create=False).close() for one in client.sessions()])
            return client

        yield make


@pytest.fixture
def key(server: tuple[str, Iterator[str]]) -> str:
    return next(server[1])


@pytest.fixture
def team(connect: Callable[[str], Leyline], key: str) -> Leyline:
    return connect(key)
