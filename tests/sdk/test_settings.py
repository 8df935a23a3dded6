"""Imports, settings, and that the two clients are twins."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import leyline_sdk
from leyline_sdk import AsyncLeyline, AsyncSession, AsyncStream, Leyline, Session, Stream, errors
from leyline_sdk.config import Config


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_import_is_light() -> None:
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    heavy = "('torch', 'numpy', 'transformers', 'leyline_server', 'leyline_kernels')"
    names = "Leyline, AsyncLeyline, Policy, clear"
    code = f"{path} from leyline_sdk import {names}; print([m for m in {heavy} if m in sys.modules])"
    assert _python(code).strip() == "[]"
    code = f"{path} import time; t = time.perf_counter(); import leyline_sdk; print(time.perf_counter() - t)"
    assert min(float(_python(code)) for _ in range(3)) < 0.3


def test_every_export_is_there() -> None:
    assert set(leyline_sdk.__all__) == set(leyline_sdk._WHERE) | {"edits", "errors"}
    for name in leyline_sdk.__all__:
        assert getattr(leyline_sdk, name) is not None
    with pytest.raises(AttributeError):
        leyline_sdk.nothing  # noqa: B018  # the access is the test


def _surface(cls: type) -> dict[str, list[str]]:
    out = {}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name != "__init__":
            continue
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            out[name] = [f"{p.kind.name} {p.name}={p.default}" for p in parameters]
    return out


@pytest.mark.parametrize(("sync", "twin"), [(Leyline, AsyncLeyline), (Session, AsyncSession)])
def test_twins_have_the_same_surface(sync: type, twin: type) -> None:
    assert _surface(sync) == _surface(twin)


def test_streams_have_the_same_surface() -> None:
    ours = _surface(Stream).keys() - {"__init__"}
    assert ours == _surface(AsyncStream).keys() - {"__init__", "open"}


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEYLINE_TARGET", "LEYLINE_API_KEY", "LEYLINE_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    config = Config.read(None, None, None, None)
    assert (config.target, config.api_key, config.timeout_s) == ("127.0.0.1:50051", None, 300.0)
    monkeypatch.setenv("LEYLINE_TARGET", "gpu:1")
    monkeypatch.setenv("LEYLINE_API_KEY", "secret")
    monkeypatch.setenv("LEYLINE_TIMEOUT", "2.5")
    config = Config.read(None, None, None, None)
    assert (config.target, config.timeout_s, config.metadata) == ("gpu:1", 2.5, (("authorization", "Bearer secret"),))
    assert "secret" not in repr(config)
    assert Config.read("other:2", None, 1.0, None).target == "other:2"
    monkeypatch.setenv("LEYLINE_TIMEOUT", "soon")
    with pytest.raises(errors.ConfigError, match="LEYLINE_TIMEOUT"):
        Leyline()
    with pytest.raises(errors.ConfigError, match="timeout_s"):
        Leyline(timeout_s=0)
