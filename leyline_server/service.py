"""The gRPC front: authenticates, hands requests to the engine's thread, turns refusals into statuses.

Owns nothing but the wire. Runs on the event loop's thread and never touches a session itself.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from leyline_proto import leyline_pb2 as pb
from leyline_proto import leyline_pb2_grpc
from leyline_proto.directives import check_vocabulary
from leyline_proto.refusal import DOMAIN, Refusal, check_length
from leyline_server.sessions.host import Host
from leyline_server.sessions.session import Serving
from leyline_server.sessions.stream import EventStream
from leyline_server.worker import EngineThread

Response = TypeVar("Response")
_MAX_STATUS_CHARS = 1000
_log = logging.getLogger(__name__)


class LeylineService(leyline_pb2_grpc.LeylineServicer):
    """`api_keys` maps a key to its tenant; without keys everybody is tenant "default"."""

    def __init__(
        self,
        thread: EngineThread,
        host: Host,
        serving: Serving,
        info: pb.GetServerInfoResponse,
        api_keys: Mapping[str, str],
    ) -> None:
        self._thread, self._host, self._serving = thread, host, serving
        self._info, self._api_keys = info, dict(api_keys)

    # ------------------------------------------------------------ verbs

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        def act(tenant: str) -> pb.GetServerInfoResponse:
            stats = self._serving.engine.stats()
            out = pb.GetServerInfoResponse()
            out.CopyFrom(self._info)
            pool = pb.PoolStats(
                num_slots=stats.num_slots,
                free=stats.free,
                in_use=stats.in_use,
                cached=stats.cached,
                rows_computed=stats.rows_computed,
                running=stats.running,
                queued=stats.queued,
            )
            out.pool.CopyFrom(pool)
            return out

        return await self._call(context, act)

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Any) -> pb.CreateSessionResponse:
        return await self._call(context, lambda tenant: self._host.create(tenant, request))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        return await self._call(context, lambda tenant: self._host.get(tenant, request))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        return await self._call(context, lambda tenant: self._host.list(tenant, request))

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        return await self._call(context, lambda tenant: self._host.close(tenant, request))

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Any) -> pb.ForkSessionResponse:
        return await self._call(context, lambda tenant: self._host.fork(tenant, request))

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        return await self._call(context, lambda tenant: self._host.append(tenant, request))

    async def ApplyDirectives(self, request: pb.ApplyDirectivesRequest, context: Any) -> pb.ApplyDirectivesResponse:
        return await self._call(context, lambda tenant: self._host.apply(tenant, request))

    async def Undo(self, request: pb.UndoRequest, context: Any) -> pb.UndoResponse:
        return await self._call(context, lambda tenant: self._host.undo(tenant, request))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        made: list[EventStream] = []  # the stream, when this call is its owner

        def act(tenant: str) -> EventStream:
            stream = self._host.generate(tenant, request)
            if stream.claim():
                made.append(stream)
            return stream

        def cancel_made() -> None:
            for left in made:
                left.cancel()

        try:
            stream = await self._call(context, act)
        except asyncio.CancelledError:
            # The client left before the engine's thread took the call; it will, and then nobody reads.
            self._thread.submit(cancel_made)
            raise
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            self._thread.wake(loop, changed.set)

        reader, ended = stream.subscribe(wake), False
        try:
            while True:
                events, ended = reader.read()
                for event in events:
                    yield event
                if ended and not events:
                    break
                if not events:
                    await changed.wait()
                    changed.clear()
        finally:
            stream.unsubscribe(wake)
            if not ended:
                self._thread.submit(cancel_made)
        if stream.error is not None:
            await _abort(context, stream.error)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        def act(tenant: str) -> pb.TokenizeResponse:
            return pb.TokenizeResponse(ids=self._serving.format.encode(request.text))

        return await self._call(context, act, on_engine=False)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        def act(tenant: str) -> pb.DetokenizeResponse:
            check_length("the call", len(request.ids), self._serving.limits.max_context)
            check_vocabulary(request.ids, self._serving.format.vocab_size)
            return pb.DetokenizeResponse(text=self._serving.format.decode(request.ids))

        return await self._call(context, act, on_engine=False)

    # ------------------------------------------------------------ plumbing

    async def _call(
        self, context: Any, act: Callable[[str], Response | Future[Response]], on_engine: bool = True
    ) -> Response:
        """Runs `act` on the engine's thread and waits for its answer. A client that leaves does not undo the call."""
        try:
            tenant = self._tenant(context)
            if not on_engine:
                answer = await asyncio.to_thread(act, tenant)
            else:
                answer = await _settled(self._thread.submit(lambda: act(tenant)))
            return await _settled(answer) if isinstance(answer, Future) else answer
        except Refusal as refusal:
            await _abort(context, refusal)
        except Exception as error:
            await _abort(context, error)

    def _tenant(self, context: Any) -> str:
        if not self._api_keys:
            return "default"
        metadata = dict(context.invocation_metadata() or ())
        given = str(metadata.get("authorization", "")).removeprefix("Bearer ")
        for key, tenant in self._api_keys.items():
            if hmac.compare_digest(key.encode(), given.encode()):
                return tenant
        raise Refusal("UNAUTHENTICATED", "the call needs a known API key: authorization: Bearer KEY")


async def _settled(future: Future[Response]) -> Response:
    """What the engine's thread answers. A caller that is cancelled leaves the future as it is."""
    if not future.done():
        loop, here = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Future[Response]) -> None:
            if not loop.is_closed():  # else nobody waits
                loop.call_soon_threadsafe(here.set)

        future.add_done_callback(tell)
        await here.wait()
    return future.result()


async def _abort(context: Any, error: Exception) -> NoReturn:
    """Ends the call with the refusal's status and google.rpc.ErrorInfo; anything else is INTERNAL and logged."""
    if not isinstance(error, Refusal):
        _log.error("a call failed", exc_info=error)
        error = Refusal("MODEL_FAILED", f"internal error: {type(error).__name__}")
    elif error.reason == "MODEL_FAILED":
        _log.error("the model failed", exc_info=error.__cause__)
    metadata = {key: _header_safe(value) for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = error.status.value[0]
    status = status_pb2.Status(code=code, message=_header_safe(error.message), details=[detail])
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(error.status, _header_safe(error.message), trailing)
    raise AssertionError("abort raises")


def _header_safe(text: str) -> str:
    """Statuses travel as headers, which have a bound of their own."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if len(safe) <= _MAX_STATUS_CHARS else safe[:_MAX_STATUS_CHARS] + ".."
