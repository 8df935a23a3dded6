"""A client in a process of its own: cuts a span out of a session again and again, and times the calls.

    python -m benchmarks.edit_client ADDRESS SESSION START END COUNT ID..

ID.. takes the span's place. Prints one JSON object of lists, one entry a round. `empty_ms`: a call that does nothing
(GetServerInfo). `call_ms`: the ApplyDirectives. `server_ms`: what the server says it took. These are on forks, so that
each is a session's first edit. `fall`: by how much slots in use fell when the session itself was edited.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from typing import Any

from leyline_proto import leyline_pb2 as pb
from leyline_sdk.grpc_transport import GrpcTransport

TIMEOUT_S = 60.0


FALLS = 5


class Client:
    """One session's calls. `call` gives milliseconds and the answer."""

    def __init__(self, address: str) -> None:
        self._transport = GrpcTransport(address)

    def call(self, request: Any) -> tuple[float, Any]:
        method = type(request).__name__.removesuffix("Request")
        begun = time.perf_counter()
        answer = self._transport.unary(method, request, TIMEOUT_S, ())
        return (time.perf_counter() - begun) * 1e3, answer

    def apply(self, session_id: str, directive: pb.Directive) -> tuple[float, Any]:
        return self.call(pb.ApplyDirectivesRequest(request_id=fresh(), session_id=session_id, directives=[directive]))

    def in_use(self) -> int:
        return int(self.call(pb.GetServerInfoRequest())[1].pool.in_use)

    def close(self) -> None:
        self._transport.close()


def fresh() -> str:
    return uuid.uuid4().hex


def main(address: str, session_id: str, start: int, end: int, count: int, ids: list[int]) -> dict[str, list[float]]:
    client = Client(address)
    directive = pb.Directive(span=pb.Span(start=start, end=end), token_ids=pb.TokenIds(ids=ids), mode=pb.MODE_AMORTIZE)
    out: dict[str, list[float]] = {"empty_ms": [], "call_ms": [], "server_ms": [], "fall": []}
    for _ in range(count):
        fork = client.call(pb.ForkSessionRequest(request_id=fresh(), session_id=session_id))[1].session.session_id
        out["empty_ms"].append(client.call(pb.GetServerInfoRequest())[0])
        call_ms, answer = client.apply(fork, directive)
        out["call_ms"].append(call_ms)
        out["server_ms"].append(answer.wall_ms)
        client.call(pb.CloseSessionRequest(request_id=fresh(), session_id=fork))
    for _ in range(FALLS):
        before = client.in_use()
        answer = client.apply(session_id, directive)[1]
        out["fall"].append(before - client.in_use())
        client.call(pb.UndoRequest(request_id=fresh(), session_id=session_id, edit_id=answer.receipts[0].edit_id))
    client.close()
    return out


if __name__ == "__main__":
    where, session, *numbers = sys.argv[1:]
    first, last, rounds, *replacement = map(int, numbers)
    print(json.dumps(main(where, session, first, last, rounds, replacement)))
