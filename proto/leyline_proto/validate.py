"""Checks of a request's own fields and of the bounds that a call has to fit into. Pure.

Owns what can be refused without the session (`check_<verb>`, called right after `Once.find` and before the
session is looked up) and the two size bounds (`check_appended`, `token_budget`, called last, before the call
commits). What depends on the span table is refused by `directives` and `conversation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ChatFormat
from leyline_proto.directives import check_vocabulary
from leyline_proto.messages import check_tools
from leyline_proto.once import check_id
from leyline_proto.refusal import Refusal, check_length

MAX_TEMPERATURE: Final = 100.0
MAX_STOP_BYTES: Final = 1024
MAX_PAGE_SIZE: Final = 1000
MAX_LABEL_BYTES: Final = 256


def check_create(request: pb.CreateSessionRequest, limits: pb.Limits, format: ChatFormat) -> None:
    """Raises INVALID_ARGUMENT or TOO_LONG for a bad id, tool list or ttl_s."""
    check_id("session_id", request.session_id)
    check_tools(request.tools)
    if request.HasField("ttl_s") and not (math.isfinite(request.ttl_s) and request.ttl_s > 0):
        raise _bound("ttl_s", request.ttl_s, "a finite number of seconds above 0")
    _check_size([], request.messages, limits, format)


def check_fork(request: pb.ForkSessionRequest) -> None:
    """Raises INVALID_ARGUMENT or TOO_LONG for a bad id."""
    check_id("session_id", request.session_id, required=True)
    check_id("new_session_id", request.new_session_id)


def check_append(request: pb.AppendRequest, limits: pb.Limits, format: ChatFormat) -> None:
    """Raises INVALID_ARGUMENT without content, TOKEN_OUT_OF_RANGE, CONTEXT_EXCEEDED for ids that can never fit."""
    check_id("session_id", request.session_id, required=True)
    content = request.WhichOneof("content")
    if content is None:
        raise Refusal("INVALID_ARGUMENT", "the append has no content: messages, text or token_ids", field="content")
    if content == "token_ids":
        check_appended(len(request.token_ids.ids), limits)
        check_vocabulary(request.token_ids.ids, format.vocab_size)
    _check_size([request.text], request.messages.messages, limits, format)
    _check_directives(request.directives, limits)


def check_apply(request: pb.ApplyDirectivesRequest, limits: pb.Limits) -> None:
    """Raises INVALID_ARGUMENT for a call that asks for nothing, or for prefill in a dry run; TOO_LONG.

    No directives with `prefill` is legal: it computes what is pending and leaves the version as it is.
    """
    check_id("session_id", request.session_id, required=True)
    if not request.directives and not request.prefill:
        raise Refusal("INVALID_ARGUMENT", "the call has no directives", field="directives")
    if request.dry_run and request.prefill:
        raise Refusal("INVALID_ARGUMENT", "a dry run computes nothing: prefill must be off", field="prefill")
    _check_directives(request.directives, limits)


def check_undo(request: pb.UndoRequest) -> None:
    """Raises INVALID_ARGUMENT or TOO_LONG for a bad id."""
    check_id("session_id", request.session_id, required=True)
    check_id("edit_id", request.edit_id, required=True)


def check_generate(request: pb.GenerateRequest, limits: pb.Limits, vocab_size: int) -> None:
    """Raises INVALID_ARGUMENT naming the field and its bound, TOO_LONG, TOKEN_OUT_OF_RANGE, NOT_SUPPORTED."""
    check_id("session_id", request.session_id, required=True)
    sampling = request.sampling
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise _bound("max_tokens", request.max_tokens, "at least 1")
    if sampling.HasField("temperature") and not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise _bound("temperature", sampling.temperature, f"in [0, {MAX_TEMPERATURE:g}]")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise _bound("top_p", sampling.top_p, "in (0, 1]")
    if sampling.HasField("top_k") and sampling.top_k < 1:
        raise _bound("top_k", sampling.top_k, "at least 1")
    check_length("stop", len(request.stop), limits.max_stop_strings, "strings")
    for stop in request.stop:
        if not stop:
            raise Refusal("INVALID_ARGUMENT", "a stop string is empty", field="stop")
        check_length("a stop string", len(stop.encode()), MAX_STOP_BYTES, "bytes")
    check_vocabulary(request.stop_token_ids, vocab_size)
    check_vocabulary(request.force_token_ids, vocab_size)
    if request.constraint:
        raise Refusal(
            "NOT_SUPPORTED",
            "constrained output is not supported: sampling has no grammar",
            feature="CONSTRAINED_OUTPUT",
        )
    _check_directives(request.directives, limits)


def check_list(request: pb.ListSessionsRequest) -> None:
    """Raises INVALID_ARGUMENT for a page_size outside its bounds."""
    if not 0 <= request.page_size <= MAX_PAGE_SIZE:
        raise _bound("page_size", request.page_size, f"in [0, {MAX_PAGE_SIZE}]")


def check_appended(num_ids: int, limits: pb.Limits) -> None:
    """Raises CONTEXT_EXCEEDED when one append alone is larger than a session may be."""
    if num_ids > limits.max_context:
        raise Refusal(
            "CONTEXT_EXCEEDED",
            f"the append alone has {num_ids} tokens; a session holds at most {limits.max_context}",
            needed=num_ids,
            limit=limits.max_context,
        )


def token_budget(num_tokens: int, max_tokens: int | None, limits: pb.Limits) -> int:
    """How many tokens a Generate may add to a session of `num_tokens`, its opening marker included.

    A prefill asks with `max_tokens` 0. Raises CONTEXT_EXCEEDED or POOL_EXCEEDED, with what is needed, the limit
    and what is free, when they can never fit.
    """
    needed = num_tokens + (1 if max_tokens is None else max_tokens)
    for reason, what, limit in (
        ("CONTEXT_EXCEEDED", "context", limits.max_context),
        ("POOL_EXCEEDED", "pool", limits.num_slots),
    ):
        if needed > limit:
            raise Refusal(
                reason,
                f"{needed} tokens are needed ({num_tokens} in the session); the {what} holds {limit}",
                needed=needed,
                limit=limit,
                free=max(0, limit - num_tokens),
            )
    return min(limits.max_context, limits.num_slots) - num_tokens if max_tokens is None else max_tokens


def _check_size(texts: Sequence[str], messages: Sequence[pb.Message], limits: pb.Limits, format: ChatFormat) -> None:
    """Refuses by bytes what can't fit in tokens, before anybody spends seconds on encoding it."""
    texts = [*texts, *(text for message in messages for text in (message.content, message.reasoning))]
    num_bytes = sum(len(text.encode()) for text in texts)
    check_appended(num_bytes // format.longest_token, limits)


def _check_directives(directives: Sequence[pb.Directive], limits: pb.Limits) -> None:
    check_length("the call", len(directives), limits.max_directives, "directives")
    for directive in directives:
        check_length("a label", len(directive.label.encode()), MAX_LABEL_BYTES, "bytes")
        check_id("message_id", directive.message.message_id)
        check_id("tool_call_id", directive.tool_call_id)
        check_id("edit_id", directive.edit_id)


def _bound(field: str, value: object, bound: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", f"{field} is {value}; it must be {bound}", field=field, value=value, bound=bound)
