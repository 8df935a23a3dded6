"""What makes a message and a tool well-formed, whatever session it comes to. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_proto.once import check_id
from leyline_proto.refusal import Refusal


def check_message(message: pb.Message) -> None:
    """Raises INVALID_ARGUMENT or TOO_LONG for fields that do not go with the role, bad ids, or arguments that are not a
    JSON object."""
    if message.role not in (pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL):
        raise Refusal(
            "INVALID_ARGUMENT", "a message needs a role: system, user, assistant or tool", field="message.role"
        )
    if message.role != pb.ROLE_ASSISTANT and (message.tool_calls or message.reasoning):
        raise Refusal("INVALID_ARGUMENT", "only an assistant message has calls or reasoning", field="tool_calls")
    if message.role != pb.ROLE_TOOL and message.tool_call_id:
        raise Refusal("INVALID_ARGUMENT", "only a tool message has a tool_call_id", field="tool_call_id")
    check_id("message_id", message.message_id)
    check_id("tool_call_id", message.tool_call_id)
    for call in message.tool_calls:
        check_id("tool call id", call.id)
        check_id("tool_calls.name", call.name, required=True)
        error = json_object_error(call.arguments_json)
        if error:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the arguments of tool call {call.name!r} are not a JSON object: {error}",
                field="arguments_json",
                call_id=call.id,
            )


def check_tools(tools: Sequence[pb.Tool]) -> None:
    """Raises INVALID_ARGUMENT for a nameless or repeated tool, or a schema that is not a JSON object."""
    names: set[str] = set()
    for tool in tools:
        check_id("tool name", tool.name, required=True)
        if tool.name in names:
            raise Refusal("INVALID_ARGUMENT", f"tool {tool.name!r} is given twice", field="tools", tool=tool.name)
        names.add(tool.name)
        error = json_object_error(tool.parameters_json or "{}")
        if error:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the parameters of tool {tool.name!r} are not a JSON object: {error}",
                field="parameters_json",
                tool=tool.name,
            )


def json_object_error(text: str) -> str:
    """Why `text` is not a JSON object; empty when it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "" if isinstance(value, dict) else f"it is a {type(value).__name__}"
