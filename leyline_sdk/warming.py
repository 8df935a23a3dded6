"""Documents computed ahead of their use, as an operation without I/O: `session.warm`.

Owns the sessions that it opens for that, one a document, one at a time. None outlives the call by more than a minute:
it is closed whatever happens, and expires where nobody is left to close it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk.calls import Op, ask, new_request_id
from leyline_sdk.core import SessionCore
from leyline_sdk.reports import Warmed
from leyline_sdk.wire import building, invalid

_TTL_S = 60.0
_CLEAN_UP_S = 5.0


def warm(core: SessionCore, documents: str | Sequence[str], timeout_s: float | None) -> Op[tuple[Warmed, ...]]:
    """Each document behind the session's header, in a session of its own: none is computed behind another."""
    texts = [documents] if isinstance(documents, str) else documents
    if not isinstance(texts, Sequence):
        raise invalid(f"documents are a str or a list of them, not a {type(texts).__name__}", field="documents")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            what = "empty" if isinstance(text, str) else f"a {type(text).__name__}, not a str"
            raise invalid(f"document {index} is {what}", field="documents")
    with building():
        appends = [pb.AppendRequest(text=text, prefill=True) for text in texts]
    if not appends:
        return ()
    header = yield from core.header()
    warmed: tuple[Warmed, ...] = ()
    for append in appends:
        warmed += ((yield from _warm_one(core, header, append, timeout_s)),)
    return warmed


def _warm_one(
    core: SessionCore, header: Sequence[pb.Message], append: pb.AppendRequest, timeout_s: float | None
) -> Op[Warmed]:
    session_id = f"warm-{new_request_id()}"  # named here: it can be closed although nobody heard that it was created
    append.request_id, append.session_id = new_request_id(), session_id
    create = pb.CreateSessionRequest(
        request_id=new_request_id(),
        session_id=session_id,
        tools=core.tools,
        messages=header,
        ttl_s=_TTL_S,
        reuse=pb.REUSE_REGISTER,
    )
    close = pb.CloseSessionRequest(request_id=new_request_id(), session_id=session_id)
    try:
        yield from ask(create, pb.CreateSessionResponse)
        got = yield from ask(append, pb.AppendResponse, timeout_s)
    except errors.APIError:
        with suppress(errors.APIError):
            yield from ask(close, pb.CloseSessionResponse, _CLEAN_UP_S)
        raise
    with suppress(errors.SessionNotFound):
        yield from ask(close, pb.CloseSessionResponse)
    span = got.messages[-1]
    reused = max(0, got.cache.prefix_hit - span.start)
    return Warmed(num_tokens=span.end - span.start, computed=span.end - span.start - reused, reused=reused)
