"""What can be done with a session, as operations without I/O. `Session` and `AsyncSession` run the same ones.

Owns the requests and what each answer does to the mirror. Every call names the version and length it knows, so that
a second writer is found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import types as t
from leyline_sdk.calls import Op, ask, new_request_id
from leyline_sdk.core import SessionCore
from leyline_sdk.edits import Edit, to_directive
from leyline_sdk.foresee import foresee_all
from leyline_sdk.planning import Plan
from leyline_sdk.wire import (
    appended_from_pb,
    building,
    cache_from_pb,
    invalid,
    message_from_pb,
    messages_to_pb,
    reuse_from_pb,
    session_info_from_pb,
    tool_message,
)


def append(
    core: SessionCore,
    *,
    messages: t.MessageLike | Sequence[t.MessageLike] = (),
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    prefill: bool,
    wait: bool,
    timeout_s: float | None = None,
) -> Op[t.Appended]:
    """Messages, or raw text, or ids; after the policies' edits, in the same call."""
    request = pb.AppendRequest(request_id=new_request_id(), session_id=core.id, prefill=prefill, wait=wait)
    with building():
        if text is not None:
            request.text = text
        elif token_ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(token_ids)
        else:
            request.messages.SetInParent()
            request.messages.messages.extend(messages_to_pb(messages))
    yield from core.ready(timeout_s)
    todo = yield from core.planned("append", wait)
    request.directives.extend(map(to_directive, todo.edits))
    request.expected_version = core.transcript.version
    request.expected_len = core.transcript.num_tokens
    got = yield from core.send(request, pb.AppendResponse, timeout_s)
    applied = core.absorb(todo, got.receipts, got.edited, got.version)
    new = appended_from_pb(got.messages, request.messages.messages, text or "")
    core.transcript = core.transcript.appended(new)
    core.check_length(got.num_tokens)
    core.report(applied)
    cache = cache_from_pb(got.cache) if got.HasField("cache") else None
    return t.Appended(tuple(m.id for m in new), got.num_tokens, applied, cache, got.dropped_half_call)


def append_results(core: SessionCore, results: Mapping[str, str], *, prefill: bool, wait: bool) -> Op[t.Appended]:
    """The answers to several calls, by call id."""
    if not isinstance(results, Mapping):
        raise invalid(f"results are {{call id: content}}, not a {type(results).__name__}", field="results")
    for call_id, content in results.items():
        if not isinstance(content, str):
            raise invalid(
                f"the content for tool call {call_id!r} is a {type(content).__name__}, not a str", field="content"
            )
    messages = [tool_message(call_id, content) for call_id, content in results.items()]
    return (yield from append(core, messages=messages, prefill=prefill, wait=wait))


def edit(
    core: SessionCore, edits: Sequence[Edit], *, dry_run: bool, prefill: bool, wait: bool, timeout_s: float | None
) -> Op[t.EditResult]:
    """Edits by hand, as one transaction: nothing is protected."""
    for one in edits:
        if not isinstance(one, Edit):
            raise invalid(f"edit takes Edits, not a {type(one).__name__}", field="edits")
    yield from core.ready(timeout_s)
    todo = Plan(tuple(edits), ("",) * len(edits), foresee_all(core.transcript, edits))
    return (yield from core.apply(todo, dry_run=dry_run, prefill=prefill, wait=wait, timeout_s=timeout_s))


def preview(core: SessionCore) -> Op[t.EditResult]:
    """A dry run of what the policies want now."""
    yield from core.ready()
    todo = core.plan("preview")
    if not todo.edits:
        return t.EditResult(core.transcript.version, core.transcript.num_tokens, ())
    return (yield from core.apply(todo, dry_run=True))


def prefill(core: SessionCore, *, wait: bool, timeout_s: float | None) -> Op[t.EditResult]:
    """The policies' edits, and KV for all that is pending."""
    yield from core.ready(timeout_s)
    todo = yield from core.planned("prefill", wait)
    return (yield from core.apply(todo, prefill=True, wait=wait, timeout_s=timeout_s))


def undo(core: SessionCore, edit_id: str, *, wait: bool) -> Op[t.UndoResult]:
    """What comes back is pinned: policies leave it alone."""
    yield from core.ready()
    request = pb.UndoRequest(
        request_id=new_request_id(),
        session_id=core.id,
        edit_id=edit_id,
        expected_version=core.transcript.version,
        wait=wait,
    )
    got = yield from core.send(request, pb.UndoResponse)
    core.lost()  # the answer has no texts
    yield from core.refresh()
    return t.UndoResult(got.version, got.num_tokens, got.restored, got.restored_with_kv, got.exact_upto)


def fork(core: SessionCore, new_id: str | None) -> Op[SessionCore]:
    """A second session over the same slots, with the same policies."""
    yield from core.ready()
    request = pb.ForkSessionRequest(
        request_id=new_request_id(),
        session_id=core.id,
        new_session_id=new_id or "",
        expected_version=core.transcript.version,
    )
    got = yield from core.send(request, pb.ForkSessionResponse)
    child = SessionCore(
        got.session.session_id,
        core.transcript,
        core.limits,
        core.policies,
        core.on_edit,
        tools=core.tools,
        reuse=reuse_from_pb(got.session.reuse),
    )
    child.check_length(got.session.num_tokens)
    return child


def close(core: SessionCore) -> Op[int]:
    """Slots freed."""
    request = pb.CloseSessionRequest(request_id=new_request_id(), session_id=core.id)
    got = yield from ask(request, pb.CloseSessionResponse)
    return got.freed


def info(core: SessionCore, *, token_ids: bool) -> Op[t.SessionInfo]:
    got = yield from ask(pb.GetSessionRequest(session_id=core.id, include_tokens=token_ids), pb.GetSessionResponse)
    return session_info_from_pb(got.session)


def generate(
    core: SessionCore,
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: str | Sequence[str],
    wait: bool,
    raw: bool,
    stop_token_ids: Sequence[int],
    ignore_eos: bool,
    force_token_ids: Sequence[int],
) -> Op[tuple[pb.GenerateRequest, Plan]]:
    """The request to open a stream with; its events go to a `StreamCore`."""
    for name, value in (("max_tokens", max_tokens), ("top_k", top_k), ("seed", seed)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise invalid(f"{name} is an int or None, not a {type(value).__name__}", field=name)
    with building():
        request = pb.GenerateRequest(
            request_id=new_request_id(),
            session_id=core.id,
            max_tokens=max_tokens,
            sampling=pb.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
            stop=[stop] if isinstance(stop, str) else stop,
            wait=wait,
            raw=raw,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            force_token_ids=force_token_ids,
        )
    yield from core.ready()
    todo = yield from core.planned("generate", wait)
    request.directives.extend(map(to_directive, todo.edits))
    request.expected_version = core.transcript.version
    request.expected_len = core.transcript.num_tokens
    return request, todo


def generated(core: SessionCore, done: pb.GenerateDone) -> None:
    """Takes the end of a Generate into the mirror. A Generate cancelled before its first token made no message."""
    message = message_from_pb(done.message, content=True)
    messages = [m for m in core.transcript if m.id != message.id]
    if message.id:  # the session keeps the stop string that its text is given without
        messages.append(replace(message, text_known=not done.stop_string))
    core.transcript = core.transcript.placed(messages, version=done.version, turn=done.turn)
    core.check_length(done.num_tokens)
