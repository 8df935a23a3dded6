"""`FakeServer`: every rpc of the contract in memory, by the same rules as the real server.

Owns what stands around a verb: who calls, what was answered before, which sessions there are. Thread-safe: one call
at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_proto.once import Once, check_id
from leyline_proto.refusal import Refusal
from leyline_sdk.aio import AsyncLeyline
from leyline_sdk.client import Leyline
from leyline_sdk.testing import rows as kv
from leyline_sdk.testing.byte_format import ByteFormat
from leyline_sdk.testing.fake_session import FakeSession, World
from leyline_sdk.testing.generating import Generating
from leyline_sdk.testing.script import Script, ScriptedReply
from leyline_sdk.testing.transports import AsyncFakeTransport, FakeTransport
from leyline_sdk.testing.verbs import VERBS, admit
from leyline_sdk.transport import Metadata

LIMITS: Mapping[str, int] = {
    "max_context": 100_000,
    "num_slots": 200_000,
    "max_replacement": 4_096,
    "max_directives": 64,
    "max_sessions": 64,
    "max_queue": 64,
    "max_id_bytes": 128,
    "max_message_bytes": 64 << 20,
    "sink_tokens": 4,
    "max_stop_strings": 16,
}


class FakeServer:
    """A server without a model, for tests of policies and agent loops.

    Args:
        replies: what Generate says, in order: text, `call(..)`, `Say(..)`, a Refusal, ids, or a callable that gets
            the messages. Then "ok".
        api_keys: key -> tenant; None takes everybody.
        amortize_refused: why the model does not support AMORTIZE.
        limits: bounds by their names in `Limits`, e.g. max_context=500.
    """

    def __init__(
        self,
        replies: Iterable[ScriptedReply] = (),
        *,
        api_keys: Mapping[str, str] | None = None,
        amortize_refused: str = "",
        **limits: int,
    ) -> None:
        self.format = ByteFormat()
        self.limits = pb.Limits(**{**LIMITS, **limits})
        self.calls: list[str] = []  # methods, in the order of their arrival
        self.script = Script(replies)
        self._api_keys = api_keys
        self.amortize_refused = amortize_refused
        self.sessions: dict[tuple[str, str], FakeSession] = {}
        self.rows_computed = 0
        self.once: Once[Sequence[Proto]] = Once(10_000)
        self._made = 0
        self.lock = threading.RLock()

    def client(self, **settings: Any) -> Leyline:
        """A client of this server. `settings` as for Leyline."""
        return Leyline(**{"transport": FakeTransport(self), **settings})

    def async_client(self, **settings: Any) -> AsyncLeyline:
        return AsyncLeyline(**{"transport": AsyncFakeTransport(self), **settings})

    # ------------------------------------------------------------ the seam

    def unary(self, method: str, request: Proto, metadata: Metadata) -> Proto:
        """One rpc. Raises Refusal."""
        with self.lock:
            self.calls.append(method)
            tenant = self._authenticate(metadata)
            mutating = "request_id" in request.DESCRIPTOR.fields_by_name
            if mutating:
                known = self.once.find(tenant, cast(Any, request))
                if known is not None:
                    return known[0]
            answer = VERBS[method](self, tenant, request)
            if mutating and not getattr(request, "dry_run", False):
                self.once.record(tenant, cast(Any, request), [answer])
            return answer

    def generate(self, request: pb.GenerateRequest, metadata: Metadata) -> Generating:
        """An admitted Generate, to be read. Raises Refusal."""
        with self.lock:
            self.calls.append("Generate")
            tenant = self._authenticate(metadata)
            known = self.once.find(tenant, request)
            if known is not None:
                return Generating.replay(cast(Sequence[pb.GenerateResponse], known))
            return admit(self, tenant, request)

    def _authenticate(self, metadata: Metadata) -> str:
        if self._api_keys is None:
            return ""
        key = dict(metadata).get("authorization", "").removeprefix("Bearer ")
        if key not in self._api_keys:
            raise Refusal("UNAUTHENTICATED", "the api key is missing or unknown")
        return self._api_keys[key]

    # ------------------------------------------------------------ what verbs need

    def find(self, tenant: str, session_id: str, wait: bool | None = None) -> FakeSession:
        """The session; with `wait` given, once it is idle. Raises SESSION_NOT_FOUND, BUSY."""
        check_id("session_id", session_id, required=True)
        session = self.sessions.get((tenant, session_id))
        if session is None:
            raise Refusal("SESSION_NOT_FOUND", f"no session {session_id!r}", session_id=session_id)
        session.idle_since = time.monotonic()
        if wait is not None and session.busy:
            if not wait:
                raise Refusal("BUSY", f"a Generate is running in session {session_id!r}", session_id=session_id)
            assert session.running is not None
            session.running.drain()
        return session

    def world(self, tenant: str, session: FakeSession) -> World:
        """What the session sees of its server."""
        others = [(key, other) for key, other in self.sessions.items() if other is not session]

        def held_by(slots: set[int]) -> list[str]:
            return [key[1] for key, other in others if key[0] == tenant and slots & kv.slots(other.state.rows)]

        def in_use(slots: set[int]) -> int:
            return len(slots.union(*(kv.slots(other.state.rows) for _, other in others)))

        return World(self.format, self.limits, self.amortize_refused, held_by, in_use)

    def new_id(self, tenant: str, wanted: str) -> str:
        """An id for a new session. Raises SESSION_EXISTS, TOO_MANY_SESSIONS."""
        if (tenant, wanted) in self.sessions:
            raise Refusal("SESSION_EXISTS", f"session {wanted!r} exists", session_id=wanted)
        limit = self.limits.max_sessions
        if len(self.sessions) >= limit:
            raise Refusal(
                "TOO_MANY_SESSIONS", f"there are {limit} sessions; that is the limit", limit=limit, retry_after_s=5
            )
        self._made += 1
        return wanted or f"s{self._made}"
