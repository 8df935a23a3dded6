"""One session over gRPC, by the SDK's transport alone, so that what is timed is the wire and the server.

Texts are ids (RAW messages), so that their lengths are exact whatever tokenizer stands before the model.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving import Serving
from leyline_proto import leyline_pb2 as pb


@dataclass(slots=True)
class ServedSession:
    serving: Serving
    id: str

    def append(self, ids: Sequence[int], directives: Sequence[pb.Directive] = (), prefill: bool = False) -> None:
        self.serving.call(
            pb.AppendRequest(
                request_id=fresh(),
                session_id=self.id,
                token_ids=pb.TokenIds(ids=ids),
                directives=directives,
                prefill=prefill,
            )
        )

    def apply(self, directive: pb.Directive) -> tuple[float, pb.ApplyDirectivesResponse]:
        """Seconds of the call, and its answer."""
        request = pb.ApplyDirectivesRequest(request_id=fresh(), session_id=self.id, directives=[directive])
        begun = time.perf_counter()
        answer = self.serving.call(request)
        return time.perf_counter() - begun, answer

    def undo(self, edit_id: str) -> None:
        self.serving.call(pb.UndoRequest(request_id=fresh(), session_id=self.id, edit_id=edit_id))

    def fork(self) -> ServedSession:
        answer = self.serving.call(pb.ForkSessionRequest(request_id=fresh(), session_id=self.id))
        return ServedSession(self.serving, answer.session.session_id)

    def first_token(self) -> tuple[float, pb.GenerateDone]:
        """Generates one token: the moment it was here, and the end of the call."""
        request = pb.GenerateRequest(request_id=fresh(), session_id=self.id, max_tokens=1, raw=True, ignore_eos=True)
        came, done = 0.0, pb.GenerateDone()
        for event in self.serving.stream(request):
            kind = event.WhichOneof("event")
            if kind == "delta" and not came:
                came = time.perf_counter()
            elif kind == "done":
                done = event.done
        return came, done

    def close(self) -> None:
        self.serving.call(pb.CloseSessionRequest(request_id=fresh(), session_id=self.id))


def create(serving: Serving) -> ServedSession:
    answer = serving.call(pb.CreateSessionRequest(request_id=fresh()))
    return ServedSession(serving, answer.session.session_id)


def fresh() -> str:
    return uuid.uuid4().hex


def cut(start: int, end: int, replacement: Sequence[int], forget: bool = False) -> pb.Directive:
    return pb.Directive(
        span=pb.Span(start=start, end=end),
        token_ids=pb.TokenIds(ids=replacement),
        mode=pb.MODE_FORGET if forget else pb.MODE_AMORTIZE,
    )
