"""Calls and their results stay together: in what is appended, and in what an edit leaves.

Owns the rules of pairing, over a span table. The chat formats give a result no id in its tokens, so that results stand
in the order of their calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_proto.spans import Call, SpanTable


def answering(table: SpanTable, call_id: str) -> Call:
    """The call that a result for `call_id` answers. Raises UNKNOWN_TOOL_CALL, and INVALID_ARGUMENT out of order."""
    waiting = table.unanswered()
    call = table.calls().get(call_id)
    if call is None or call_id in table.answered():
        names = ", ".join(c.id for c in waiting) or "none"
        raise Refusal(
            "UNKNOWN_TOOL_CALL",
            f"no tool call {call_id!r} waits for a result; waiting: {names}",
            call_id=call_id,
            waiting=",".join(c.id for c in waiting),
        )
    if waiting and waiting[0].id != call_id and call.valid:
        raise Refusal(
            "INVALID_ARGUMENT",
            f"the result of {call_id!r} comes before that of {waiting[0].id!r}; results stand in the order of "
            "their calls, send them together or in that order",
            call_id=call_id,
            next_call_id=waiting[0].id,
        )
    return call


def refuse_unanswered(table: SpanTable, what: str) -> None:
    """Raises UNANSWERED_TOOL_CALL, naming the calls, when `what` would come between a call and its result."""
    waiting = table.unanswered()
    if waiting:
        names = ", ".join(call.id for call in waiting)
        raise Refusal(
            "UNANSWERED_TOOL_CALL",
            f"{what} can't follow unanswered tool calls: {names}",
            call_ids=",".join(call.id for call in waiting),
        )


def in_call_order(messages: Sequence[pb.Message], table: SpanTable) -> list[pb.Message]:
    """Results of one call arrive in any order; in the list they stand in the order of their calls."""
    order = {call_id: index for index, call_id in enumerate(table.calls())}
    for message in messages:
        for call in message.tool_calls:
            order.setdefault(call.id, len(order))
    out: list[pb.Message] = []
    results: list[pb.Message] = []
    for message in messages:
        if message.role == pb.ROLE_TOOL:
            results.append(message)
        else:
            out += sorted(results, key=lambda m: order.get(m.tool_call_id, -1))
            results = []
            out.append(message)
    return out + sorted(results, key=lambda m: order.get(m.tool_call_id, -1))


def check_pairs(before: SpanTable, after: SpanTable) -> None:
    """Raises UNPAIRED_TOOL_CALL when going from `before` to `after` parts a call from its result."""
    calls = after.calls()
    answered = after.answered()
    had = {call.id for call in before.unanswered()}
    for call in after.unanswered():
        if call.id not in had:
            raise Refusal(
                "UNPAIRED_TOOL_CALL",
                f"the edit would leave tool call {call.id!r} without its result; give the result an R, or remove the "
                "call's message too",
                call_id=call.id,
            )
    orphans = answered - calls.keys() - (before.answered() - before.calls().keys())
    if orphans:
        call_id = min(orphans)
        raise Refusal(
            "UNPAIRED_TOOL_CALL",
            f"the edit would leave a result without its tool call {call_id!r}; remove the result too",
            call_id=call_id,
        )
