"""The JSON of tool calls and tool schemas. Knows text only; positions and ids are the parser's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ParsedCall
from leyline_proto.refusal import Refusal
from leyline_server.model.chat.family import ToolList

_FENCE = "```"


def compact(arguments_json: str) -> str:
    """The same object without white space, its keys in the order given.

    Raises INVALID_ARGUMENT when it is not a JSON object.
    """
    value, error = read_object(arguments_json)
    if error:
        raise Refusal("INVALID_ARGUMENT", f"the arguments of a tool call {error}", field="arguments_json")
    return _write(value, None)


def _write(value: dict[str, Any], indent: int | None, sort_keys: bool = False) -> str:
    separators = (",", ": ") if indent else (",", ":")
    try:
        return json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, ensure_ascii=False)
    except RecursionError:
        raise Refusal("INVALID_ARGUMENT", "the JSON is nested too deeply", field="arguments_json") from None


def read_object(text: str) -> tuple[dict[str, Any], str]:
    """(the object, "") or ({}, what is wrong with it). Never raises."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return {}, f"are not JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"are not a JSON object but a {type(value).__name__}"
    return value, ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_call(name: str, arguments: str, text: str) -> ParsedCall:
    """A call from the texts on both sides of its separator. What is wrong with it stands in its `error`."""
    name, arguments = name.strip(), arguments.strip()
    error = "the call has no name" if not name else ""
    if not error:
        _, why = read_object(arguments)
        error = f"the arguments {why}" if why else ""
    return ParsedCall(name, arguments, text, error)


def unfence(tail: str) -> tuple[str, str]:
    """(name, arguments) of `name`, a line break and a fenced block, any of its decoration left out."""
    name, _, block = tail.strip().partition("\n")
    if _FENCE in name:
        name, mark, rest = name.partition(_FENCE)
        block = mark + rest + "\n" + block
    block = block.strip()
    if block.startswith(_FENCE):
        block = block.removeprefix(_FENCE).removeprefix("json")
    return name, block.strip().removesuffix(_FENCE)


def list_tools(tools: Sequence[pb.Tool], style: ToolList) -> str:
    """What follows the system prompt. Raises INVALID_ARGUMENT for parameters that are no JSON object."""
    out = style.head
    for tool in tools:
        parameters, error = read_object(tool.parameters_json or "{}")
        if error:
            raise Refusal("INVALID_ARGUMENT", f"the parameters of tool {tool.name!r} {error}", field="parameters_json")
        schema = {"name": tool.name, "description": tool.description, "parameters": parameters}
        text = _write({key: schema[key] for key in style.keys}, style.indent, sort_keys=style.indent is None)
        out += style.each.format(name=tool.name, json=text)
    return out
