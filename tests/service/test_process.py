"""`python -m leyline_server` as its users meet it: help, settings, start-up line, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Leyline, errors
from leyline_server.config import ServerConfig, load_config

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "leyline_server"]
PATIENCE_S = 120


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LEYLINE_")}
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "kernels", "policies"))
    return {**kept, "PYTHONPATH": path, "COLUMNS": "200", **settings}


def run(*args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**settings), cwd=ROOT
    )


# ---------------------------------------------------------------- settings


def test_help_names_every_setting() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    text = " ".join(shown.stdout.split())
    for name, field in ServerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description is not None
        assert field.description.split(";")[0].split(",")[0] in text
    for word in ("LEYLINE_SERVER_", "TOML", "Ctrl-C"):
        assert word in text


@pytest.mark.parametrize(
    ("args", "settings", "named"),
    [
        (["--port", "70000"], {}, "port"),
        (["--slots", "many"], {}, "slots"),
        (["--no-such-flag", "1"], {}, "no-such-flag"),
        ([], {"LEYLINE_SERVER_MEMORY_FRACTION": "1.5"}, "memory_fraction"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
    ],
)
def test_a_bad_setting_is_exit_code_2(args: list[str], settings: Mapping[str, str], named: str) -> None:
    shown = run(*args, **settings)
    assert shown.returncode == 2, shown.stderr
    assert named in shown.stderr
    assert "Traceback" not in shown.stderr


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text('slots = 100\nport = 1\nmax_queue = 7\napi_keys = { k = "t" }\n')
    monkeypatch.setenv("LEYLINE_SERVER_SLOTS", "200")
    monkeypatch.setenv("LEYLINE_SERVER_PORT", "2")
    config = load_config(["--config", str(file), "--port", "3"])
    assert (config.port, config.slots, config.max_queue, config.api_keys) == (3, 200, 7, {"k": "t"})
    assert config.max_sessions == ServerConfig.model_fields["max_sessions"].default
    monkeypatch.setenv("LEYLINE_SERVER_CONFIG", str(file))
    assert load_config([]).max_queue == 7


@pytest.mark.parametrize("line", ["slots = 3", "colour = 'red'", "slots = ", "port = 'x'"])
def test_a_bad_file(tmp_path: Path, line: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(line)
    with pytest.raises((ValidationError, ValueError)):
        load_config(["--config", str(file)])


def test_api_keys_from_flags() -> None:
    assert load_config(["--api-keys", "k=t", "--api-keys", "l=u"]).api_keys == {"k": "t", "l": "u"}


# ---------------------------------------------------------------- models


def test_a_model_that_is_refused_is_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    shown = run("--model", str(tmp_path), "--port", "0")
    assert shown.returncode == 3, shown.stderr
    assert "refused" in shown.stderr
    assert "llama" in shown.stderr
    assert "Traceback" not in shown.stderr


# ---------------------------------------------------------------- life


class Process:
    """A server in a process of its own. Its start-up line has been read."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "--port", "0", "--threads", "1", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline()
        self.address = self.line.rsplit(" ", 1)[-1].strip()

    def signal(self, sign: int) -> None:
        self._process.send_signal(sign)

    def wait(self) -> tuple[int, str]:
        """(exit code, what it wrote to stderr)."""
        _, stderr = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, stderr

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def process(small_model: str) -> Iterator[Process]:
    process = Process("--model", small_model, "--slots", "20000", "--drain", "60")
    yield process
    process.kill()


def test_start_serve_and_drain_at_ctrl_c(process: Process, small_model: str) -> None:
    pattern = r"leyline-server ready: (\S+) \((\S+), (\S+)\) on (\S+), (\d+) slots, context (\d+), at (\S+):(\d+)\n"
    found = re.fullmatch(pattern, process.line)
    assert found is not None, process.line
    assert found.group(1, 2, 3, 4, 5) == (small_model, "deepseek_v2", "float32", "cpu", "20000")

    client = Leyline(target=process.address, timeout_s=PATIENCE_S)
    session = client.session(messages=["hello"])
    with session.generate(max_tokens=400, ignore_eos=True) as stream:
        next(stream)
        process.signal(signal.SIGINT)
        late = _refused(client)
        reply = stream.final()
    assert reply.usage.generated == 400  # the running call ended by itself
    assert isinstance(late, errors.ShuttingDown)
    assert (late.retryable, late.retry_after_s) == (True, 5)
    code, stderr = process.wait()
    assert code == 0, stderr
    assert "draining" in stderr
    assert "Traceback" not in stderr
    client.close()


def _refused(client: Leyline) -> Any:
    """What a new call gets once the server drains; until it has heard the signal, new calls are served."""
    from leyline_sdk.grpc_transport import GrpcTransport

    transport = client._runner.transport
    assert isinstance(transport, GrpcTransport)
    for number in range(1000):
        try:
            transport.unary("CreateSession", pb.CreateSessionRequest(request_id=f"late{number}"), 10, ())
        except errors.APIError as error:
            return error
    return None
