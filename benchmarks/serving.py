"""A real server inside the benchmark's process: event loop, engine's thread, gRPC on a free port.

Owns their threads, and a clock in front of the engine's step. Clients connect to `address`, from here or from
processes of their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from leyline_sdk.grpc_transport import GrpcTransport
from leyline_server.server import Parts, Server

Result = TypeVar("Result")
TIMEOUT_S = 600.0


@dataclass(slots=True)
class StepClock:
    """When each step of an engine began and ended, and whether it did anything."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    acted: list[bool] = field(default_factory=list)


@contextmanager
def clocked(engine: Any) -> Iterator[StepClock]:
    """A clock in front of the engine's step, inside the block."""
    clock, step = StepClock(), engine.step

    def timed() -> bool:
        clock.begun.append(time.perf_counter())
        acted = bool(step())
        clock.ended.append(time.perf_counter())
        clock.acted.append(acted)
        return acted

    engine.step = timed
    try:
        yield clock
    finally:
        del engine.step  # the method shows again


class Serving:
    """A listening server. `call` and `stream` are the SDK's transport: one rpc, typed errors, no retries."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-server", daemon=True)
        self._thread.start()
        self.server: Server = self._run(self._start())
        self.transport = GrpcTransport(self.server.address)

    async def _start(self) -> Server:
        server = Server(self.parts)
        await server.start()
        return server

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    @property
    def address(self) -> str:
        return self.server.address

    def call(self, request: Proto) -> Any:
        method = type(request).__name__.removesuffix("Request")
        return self.transport.unary(method, request, TIMEOUT_S, ())

    def stream(self, request: Proto) -> Any:
        return self.transport.stream("Generate", request, TIMEOUT_S, ())

    def on_engine(self, call: Callable[[], Result]) -> Result:
        """Runs `call` on the engine's thread, between two steps."""
        return self.server._thread.submit(call).result(TIMEOUT_S)

    def stop(self) -> None:
        self.transport.close()
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


@contextmanager
def serving(parts: Parts) -> Iterator[Serving]:
    server = Serving(parts)
    try:
        yield server
    finally:
        server.stop()
        parts.store.closing = False  # the next server of these parts takes calls again
