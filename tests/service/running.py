"""A real server inside the test process: model, engine's thread, gRPC on a free port, and a client for it.

Owns the event loop's thread. `hold` stops the engine between two steps, so that a test can look at a Generate that is
half done without racing it.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import Message as Proto

import leyline_server.server as wiring
from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Leyline
from leyline_sdk.grpc_transport import GrpcTransport
from leyline_server.config import ServerConfig
from leyline_server.model.load import LoadedModel, load
from leyline_server.model.tokenizer import TextTokenizer
from leyline_server.server import TINY, Parts, Server, build
from tests.engine import models

TIMEOUT_S = 60.0


@cache
def _loaded(*args: Any) -> LoadedModel:
    return load(*args)


def small_checkpoint(directory: Path, **config: Any) -> str:
    """Random weights behind the tiny model's tokenizer and template: for tests in which the model doesn't matter."""
    config = {"num_hidden_layers": 2, "vocab_size": 1280, "bos_token_id": 1, "eos_token_id": 6, **config}
    models.save("v2-qlora-dense", directory, **config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory / name)
    return str(directory)


class RunningServer:
    """Started by its constructor, ended by `stop`. `settings` are those of the server's configuration."""

    def __init__(self, **settings: Any) -> None:
        settings = {"port": 0, "slots": 4096, "threads": 1, "drain": 5, **settings}
        with mock.patch.object(wiring, "load", _loaded):
            self.parts: Parts = build(ServerConfig(**settings))
        self._gate = Gate(self.parts.engine)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_without_noise)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: Server = self._run(self._start())
        self._clients: list[Leyline] = []
        self.transport = GrpcTransport(self.address)

    async def _start(self) -> Server:
        server = Server(self.parts)
        await server.start()
        return server

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def limits(self) -> pb.Limits:
        return self.parts.serving.limits

    def client(self, **settings: Any) -> Leyline:
        client = Leyline(**{"target": self.address, "timeout_s": TIMEOUT_S, **settings})
        self._clients.append(client)
        return client

    def call(self, request: Proto, key: str = "") -> Any:
        """One unary rpc as the SDK's transport does it: typed errors, no retries."""
        method = type(request).__name__.removesuffix("Request")
        return self.transport.unary(method, request, TIMEOUT_S, metadata(key))

    def stream(self, request: pb.GenerateRequest, key: str = "") -> Any:
        return self.transport.stream("Generate", request, TIMEOUT_S, metadata(key))

    def pool(self) -> pb.PoolStats:
        return self.call(pb.GetServerInfoRequest()).pool if not self.parts.config.api_keys else self.stats()

    def stats(self) -> Any:
        return self.on_engine(self.parts.engine.stats)

    def state(self, session_id: str, key: str = "") -> pb.SessionState:
        request = pb.GetSessionRequest(session_id=session_id, include_tokens=True, include_content=True)
        state: pb.SessionState = self.call(request, key).session
        return state

    def on_engine(self, call: Callable[[], Any]) -> Any:
        """Runs `call` on the engine's thread, between two steps."""
        return self.server._thread.submit(call).result(TIMEOUT_S)

    @contextmanager
    def hold(self, after: int = 0) -> Iterator[Gate]:
        """The engine makes at most `after` more steps that compute, until the block ends or the gate is opened."""
        self._gate.close(after)
        try:
            yield self._gate
        finally:
            self.release()

    def release(self) -> None:
        self._gate.open()
        self.server._thread.submit(lambda: None)

    def check_integrity(self) -> None:
        self.on_engine(self.parts.engine.check_integrity)

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.transport.close()
        self.release()
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


def _without_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Several loops in one process make grpc.aio's poller trip over its own wake-ups; it goes on, and says so."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


class Gate:
    """Stands in front of the engine's `step`: lets so many computing steps through, or all."""

    def __init__(self, engine: Any) -> None:
        self._step = engine.step
        self._left: int | None = None
        engine.step = self.step

    def close(self, after: int) -> None:
        self._left = after

    def open(self) -> None:
        self._left = None

    def step(self) -> bool:
        if self._left == 0:
            return False
        computed = bool(self._step())
        if computed and self._left is not None:
            self._left -= 1
        return computed


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


@cache
def tiny_tokenizer() -> TextTokenizer:
    return TextTokenizer.from_dir(TINY)


def special(text: str) -> int:
    token_id = tiny_tokenizer().special_id(text)
    assert token_id is not None, text
    return token_id


def call_ids(name: str, arguments_json: str) -> list[int]:
    """A tool call as the tiny model's format writes it."""
    encode = tiny_tokenizer().encode
    return [special("<|call|>"), *encode(name), special("<|args|>"), *encode(arguments_json), special("<|/call|>")]
