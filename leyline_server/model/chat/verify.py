"""Compares a format with the checkpoint's own template at start-up, message by message.

Owns the conversations that are compared. What it finds is worded for `GetServerInfo`; it decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from leyline_proto import leyline_pb2 as pb
from leyline_server.model.chat.format import FamilyFormat
from leyline_server.model.chat.template import Renderer, TemplateFailed
from leyline_server.model.tokenizer import TextTokenizer

_S, _U, _A, _T = pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL
_SHOWN: Final = 60  # characters of a text in a report


def _say(role: pb.Role.ValueType, content: str, **more: Any) -> pb.Message:
    return pb.Message(role=role, content=content, **more)


def _call(number: int) -> pb.ToolCall:
    return pb.ToolCall(id=f"c{number}", name="read_file", arguments_json=f'{{"path":"{number}.ini"}}')


def _result(number: int) -> pb.Message:
    return _say(_T, f"result {number} of a tool", tool_call_id=f"c{number}")


_PLAIN: Final = (_say(_S, "Be brief"), _say(_U, "How many"), _say(_A, "Only two"), _say(_U, "Which ones"))
_NO_SYSTEM: Final = (_say(_U, "How many"),)
_PUNCTUATED: Final = (_say(_S, "Be brief."), _say(_U, "How many?"), _say(_A, "Two!"), _say(_U, "Which?\n"))
_TWO_ROUNDS: Final = (
    *_PLAIN[:2],
    _say(_A, "", tool_calls=[_call(1)]),
    _result(1),
    _say(_A, "Only two"),
    _say(_U, "Which ones"),
    _say(_A, "", tool_calls=[_call(2)]),
    _result(2),
    _say(_A, "These two"),
)
_TWO_CALLS: Final = (*_PLAIN[:2], _say(_A, "Let me see", tool_calls=[_call(1), _call(2)]), _result(1), _result(2))
_REASONED: Final = (*_PLAIN[:2], _say(_A, "Only two", reasoning="one and one"))
_TOOL: Final = pb.Tool(name="read_file", description="Read a file", parameters_json='{"type":"object"}')


def same_plain_conversation(fmt: FamilyFormat, tokenizer: TextTokenizer, renderer: Renderer) -> str:
    """Why this is not the template's format; empty when system, user and assistant have the same ids in both."""
    for messages in (_PLAIN, _NO_SYSTEM):
        try:
            theirs = tokenizer.encode_marked(renderer(_dicts(messages), (), False))
        except TemplateFailed as error:
            return f"the template fails on a plain conversation: {error}"
        ours = [token for ids in _rendered(fmt, messages) for token in ids]
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
            at = min(len(ours), len(theirs)) if at < 0 else at
            return (
                f"at token {at} the template writes {_show(fmt.decode(theirs[at:]))}, it {_show(fmt.decode(ours[at:]))}"
            )
    return ""


def differences(fmt: FamilyFormat, tokenizer: TextTokenizer, renderer: Renderer) -> list[str]:
    """Where the template and this format part, beyond the plain conversation; one sentence each."""
    found = _generation_prompt(fmt, renderer)
    text = renderer(_dicts(_PUNCTUATED), (), False)
    ours = [token for ids in _rendered(fmt, _PUNCTUATED) for token in ids]
    if fmt.decode(ours) == text and ours != tokenizer.encode_marked(text):
        found.append("content and the plain text of a marker are encoded apart; the template's text joins some of them")
    conversations = [(_REASONED, "REASONING"), (_TWO_ROUNDS, "TOOLS"), (_TWO_CALLS, "TOOLS")]
    for messages, feature in conversations:
        if feature not in fmt.lacking:
            found += _message_by_message(fmt, messages, renderer)
    if "TOOLS" not in fmt.lacking:
        found += _tool_list(fmt, renderer)
    return list(dict.fromkeys(found))


def _generation_prompt(fmt: FamilyFormat, renderer: Renderer) -> list[str]:
    closed, opened = (renderer(_dicts(_PLAIN), (), prompt) for prompt in (False, True))
    theirs, ours = opened.removeprefix(closed), fmt.decode(fmt.open_assistant(False).ids)
    if theirs == ours:
        return []
    return [f"before an answer the template writes {_show(theirs)}, this format {_show(ours)}"]


def _message_by_message(fmt: FamilyFormat, messages: Sequence[pb.Message], renderer: Renderer) -> list[str]:
    """Each message alone, against what the template's text grows by when the message joins."""
    found: list[str] = []
    before = ""
    for count, ids in enumerate(_rendered(fmt, messages), start=1):
        what = _describe(messages[:count])
        try:
            after = renderer(_dicts(messages[:count]), (), False)
        except TemplateFailed as error:
            return [*found, f"the template refuses {what}: {error}"]
        ours = fmt.decode(ids)
        if not after.startswith(before):
            found.append(f"the template writes what came before anew when {what} joins")
        elif after == before:
            found.append(f"the template drops {what}; this format writes {_show(ours)}")
        elif after[len(before) :] != ours:
            found.append(f"for {what} the template writes {_show(after[len(before) :])}, this format {_show(ours)}")
        before = after
    return found


def _tool_list(fmt: FamilyFormat, renderer: Renderer) -> list[str]:
    tool = {"name": _TOOL.name, "description": _TOOL.description, "parameters": json.loads(_TOOL.parameters_json)}
    schema = [{"type": "function", "function": tool}]
    found: list[str] = []
    for messages, where in ((_PLAIN[:2], ""), (_NO_SYSTEM, " without a system message")):
        first = fmt.render(messages[0], (), [_TOOL], True).ids
        ours = fmt.decode([*first, *(i for m in messages[1:] for i in fmt.render(m, (), (), False).ids)])
        try:
            theirs = renderer(_dicts(messages), schema, False)
            bare = renderer(_dicts(messages), (), False)
        except TemplateFailed as error:
            return [*found, f"the template refuses tools{where}: {error}"]
        if theirs == bare:
            found.append(f"the template drops tools' schemas{where}; this format lists them after the system prompt")
        elif theirs != ours:
            found.append(f"tools' schemas{where}: the template writes {_show(theirs)}, this format {_show(ours)}")
    return found


def _rendered(fmt: FamilyFormat, messages: Sequence[pb.Message]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for index, message in enumerate(messages):
        out.append(fmt.render(message, [call.id for call in message.tool_calls], (), index == 0).ids)
    return out


def _dicts(messages: Sequence[pb.Message]) -> list[dict[str, Any]]:
    """The form that Jinja templates take."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role = pb.Role.Name(message.role).removeprefix("ROLE_").lower()
        entry: dict[str, Any] = {"role": role, "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_call_id:
            entry |= {"tool_call_id": message.tool_call_id, "name": "read_file"}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments_json}}
                for c in message.tool_calls
            ]
        out.append(entry)
    return out


def _describe(messages: Sequence[pb.Message]) -> str:
    """The last of these messages, in words."""
    last = messages[-1]
    role = pb.Role.Name(last.role).removeprefix("ROLE_").lower()
    more = " with reasoning" if last.reasoning else ""
    more += f" with {len(last.tool_calls)} calls" if last.tool_calls else ""
    rounds = sum(bool(message.tool_calls) for message in messages)
    after = " after a result" if len(messages) > 1 and messages[-2].role == _T else ""
    return f"a message of role {role}{more}{after}" + (f", tool round {rounds}" if rounds else "")


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
