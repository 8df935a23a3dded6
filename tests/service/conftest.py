"""Servers for the service tests: the embedded model, and one with random weights where the model doesn't matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leyline_sdk import Leyline
from tests.service.running import RunningServer, small_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _threads(one_thread: None) -> None:
    """All tests here run on one."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def tiny() -> Iterator[RunningServer]:
    """The embedded model, for what a chat says."""
    server = RunningServer(model="tiny")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def small(small_model: str) -> Iterator[RunningServer]:
    """Random weights, shared by tests that close their sessions."""
    server = RunningServer(model=small_model, max_context=500)
    yield server
    server.check_integrity()
    server.stop()


@pytest.fixture
def serve(small_model: str) -> Iterator[Callable[..., RunningServer]]:
    """A server of the test's own, on random weights unless it names a model."""
    running: list[RunningServer] = []

    def start(**settings: Any) -> RunningServer:
        server = RunningServer(**{"model": small_model, **settings})
        running.append(server)
        return server

    yield start
    for server in running:
        server.check_integrity()
        server.stop()


@pytest.fixture
def client(small: RunningServer) -> Leyline:
    return small.client()
