"""The two implementations of the contract behind one interface: the SDK's fake, and a real server over gRPC.

What differs between them is the tokens alone: `call_ids` and `end` forge what a model would say in each one's own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Leyline
from leyline_sdk.testing import ByteFormat, FakeServer, FakeTransport, Special
from leyline_sdk.transport import Transport
from tests.service.running import TIMEOUT_S, RunningServer, call_ids, special, tiny_tokenizer

BOUNDS = {"max_context": 500, "max_replacement": 60, "max_directives": 8, "max_sessions": 24, "max_queue": 4}
NUM_SLOTS = 4096


@dataclass(frozen=True)
class Side:
    name: str
    client: Leyline
    transport: Transport
    encode: Callable[[str], list[int]]
    call_ids: Callable[[str, str], list[int]]
    end: int
    vocab_size: int
    limits: pb.Limits
    hold: Callable[[], AbstractContextManager[Any]]
    release: Callable[[], None]

    def call(self, request: Proto) -> Any:
        method = type(request).__name__.removesuffix("Request")
        return self.transport.unary(method, request, TIMEOUT_S, ())

    def stream(self, request: pb.GenerateRequest) -> Any:
        return self.transport.stream("Generate", request, TIMEOUT_S, ())

    def generate(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return list(self.stream(request))

    def send(self, request: Proto) -> Any:
        """Any rpc, a Generate to its end."""
        return self.generate(request) if isinstance(request, pb.GenerateRequest) else self.call(request)

    def state(self, session_id: str) -> pb.SessionState:
        request = pb.GetSessionRequest(session_id=session_id, include_tokens=True, include_content=True)
        state: pb.SessionState = self.call(request).session
        return state

    def slots_in_use(self) -> int:
        return int(self.call(pb.GetServerInfoRequest()).pool.in_use)

    def says(self, text: str = "", calls: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Ids to force: text, then calls, then the end of the message."""
        forged = [self.call_ids(name, arguments) for name, arguments in calls]
        return [*self.encode(text), *(token for ids in forged for token in ids), self.end]


def fake_side(server: FakeServer | None = None) -> Side:
    server = server or FakeServer(**BOUNDS, num_slots=NUM_SLOTS)
    format = ByteFormat()
    return Side(
        "fake",
        server.client(),
        FakeTransport(server),
        format.encode,
        format.call_ids,
        int(Special.END),
        format.vocab_size,
        server.limits,
        nullcontext,
        lambda: None,
    )


def real_side(server: RunningServer) -> Side:
    @contextmanager
    def hold() -> Iterator[None]:
        with server.hold(after=3):
            yield

    return Side(
        "real",
        server.client(),
        server.transport,
        tiny_tokenizer().encode,
        call_ids,
        special("<|end|>"),
        server.parts.serving.format.vocab_size,
        server.limits,
        hold,
        server.release,
    )
