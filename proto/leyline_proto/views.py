"""The span table as the wire shows it. Knows the protos and the entries, no rules."""

from __future__ import annotations

from leyline_proto import leyline_pb2 as pb
from leyline_proto.spans import MessageEntry


def span_of(entry: MessageEntry, start: int) -> pb.MessageSpan:
    """The message standing at `start`, without text."""
    parts = [pb.Part(kind=p.kind, start=a, end=b, tool_call_id=p.call_id) for p, a, b in entry.ranges(start)]
    return pb.MessageSpan(
        message_id=entry.id,
        role=entry.role,
        start=start,
        end=start + entry.length,
        parts=parts,
        tool_call_id=entry.tool_call_id,
        tool_name=entry.tool_name,
        turn=entry.turn,
        open=entry.open,
        edit_ids=entry.edit_ids,
        undone_edit_ids=entry.undone_ids,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in entry.calls
            if call.valid
        ],
    )
