"""`python -m leyline_server` as its users meet it: help, settings, start-up line, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Leyline, errors
from leyline_server.config import ServerConfig, SettingsError, load_config
from leyline_server.listening import refused

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
        ([], {"LEYLINE_SERVER_SLOT": "100"}, "LEYLINE_SERVER_SLOT"),
        (["--host", "nowhere.invalid"], {}, "nowhere.invalid"),
        (["--canary", "yes"], {}, "canary: Input should be 'off', 'refuse' or 'warn' (given: 'yes')"),
        (["--device", "tpu"], {}, "device: 'tpu' is none of auto, cpu, cuda"),
        (["--slots", "10000000000"], {}, "the free memory of cpu"),
        (
            ["--slots", "1000", "--max-replacement", "1001"],
            {},
            "max_replacement 1001 is beyond a session's tokens: 1000",
        ),
    ],
)
def test_a_bad_setting_is_exit_code_2(args: list[str], settings: Mapping[str, str], named: str) -> None:
    shown = run(*args, **{"LEYLINE_SERVER_PORT": "0", "LEYLINE_SERVER_DEVICE": "cpu", **settings})
    assert shown.returncode == 2, shown.stderr
    assert named in shown.stderr.splitlines()[-1]
    assert "Traceback" not in shown.stderr
    assert "Loading weights" not in shown.stderr


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline_server import sizing

    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: False)
    assert sizing.choose_device("auto").type == "cpu"
    with pytest.raises(SettingsError, match="no GPU"):
        sizing.choose_device("cuda")
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizing.torch.cuda, "device_count", lambda: 2)
    assert sizing.choose_device("cuda:1").index == 1
    with pytest.raises(SettingsError, match="the last of 2 is cuda:1"):
        sizing.choose_device("cuda:2")


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = run("--port", str(port), "--model", "/nowhere")  # would be exit code 3
        assert refused("127.0.0.1", 0) == ""
    assert shown.returncode == 2
    assert shown.stderr.strip() == f"leyline-server: port: 127.0.0.1:{port} is in use"
    assert refused("127.0.0.1", port) == ""


def test_without_the_servers_packages() -> None:
    """What an installation of the SDK alone says."""
    missing = "import sys; sys.modules['rich'] = None; from leyline_server.__main__ import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", missing], capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), cwd=ROOT
    )
    assert shown.returncode == 2
    assert 'pip install ".[server]"' in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((65_536, 600, 1024, 64), "251.7 MB, 3,840 bytes a token: 109 sessions of 600 tokens; at most 64 requests at"),
        ((65_536, 8192, 1024, 64), ": 8 sessions of 8,192 tokens, or 64 of 1,024; at most 64 requests at once"),
        ((65_536, 8192, 2, 64), ": 2 sessions of 8,192 tokens; at most 2 requests at once"),
        ((65_536, 65_536, 1, 64), ": 1 session of 65,536 tokens; at most 1 request at once"),
        ((1_000_000, 100_000, 1024, 8), "3.8 GB, 3,840 bytes a token: 10 sessions of 100,000 tokens, or 976 of 1,024;"),
    ],
)
def test_what_fits_is_what_can_be(sizes: tuple[int, int, int, int], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline_server import sizing

    monkeypatch.setattr(sizing, "_row_bytes", lambda model: 3840)
    slots, context, sessions, running = sizes
    model: Any = None
    assert told in sizing.what_fits(model, slots, context, (512, 512), sessions, running)


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


def test_what_a_program_makes_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a test, a benchmark or the lab is not another one where somebody has set variables for theirs."""
    monkeypatch.setenv("LEYLINE_SERVER_SLOTS", "200")
    monkeypatch.setenv("LEYLINE_SERVER_MAX_CONTEXT", "not a number")
    monkeypatch.setenv("LEYLINE_SERVER_CANARY", "refuse")
    config = ServerConfig(port=3)
    assert (config.port, config.slots, config.max_context, config.canary) == (3, None, None, "off")


@pytest.mark.parametrize(
    ("args", "canary"),
    [
        (["--canary"], "refuse"),
        (["--canary", "--port", "3"], "refuse"),
        (["--port", "3", "--canary"], "refuse"),
        (["--canary", "warn"], "warn"),
        (["--canary=off"], "off"),
        (["--canary-agreement", "0.5"], "off"),
    ],
)
def test_the_bare_canary_refuses(args: list[str], canary: str) -> None:
    assert load_config(args).canary == canary


@pytest.mark.parametrize("line", ["slots = 3", "colour = 'red'", "slots = ", "port = 'x'"])
def test_a_bad_file(tmp_path: Path, line: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(line)
    with pytest.raises((ValidationError, ValueError)) as caught:
        load_config(["--config", str(file)])
    if line == "slots = ":
        assert str(file) in str(caught.value)


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
    assert "Loading weights" not in stderr  # no bar where no terminal is
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
