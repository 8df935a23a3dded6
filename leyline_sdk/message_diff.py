"""From messages before and after to edits. Pure.

Owns which message after is which before (by id; else by tool call; else by being equal), and what can't be said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_sdk.edits import Edit, InMessage, clear, clear_reasoning, remove, replace_content, rerender
from leyline_sdk.errors import APIError, InexpressibleChange
from leyline_sdk.mode import EditMode
from leyline_sdk.transcript import Message, Transcript
from leyline_sdk.wire import content_text

_KEYS = {"role", "content", "id", "reasoning", "tool_calls", "tool_call_id", "name"}


def diff(transcript: Transcript, after: Sequence[Mapping[str, Any]], mode: EditMode, policy: str) -> list[Edit]:
    """The edits that turn the transcript into `after`.

    Raises InexpressibleChange for reordered, inserted, repeated or re-roled messages, and for other tool calls.
    """
    matched = _match(transcript, after, policy)
    places = [index for index, _ in matched]
    if places != sorted(set(places)):
        raise _cant("messages were reordered or repeated", policy)
    new = dict(matched)
    edits: list[Edit] = []
    for index, message in enumerate(transcript):
        if index in new:
            edits.extend(_changes(message, new[index], mode, policy))
        else:
            edits.append(remove(message, mode=mode))
    return edits


def _match(
    transcript: Transcript, after: Sequence[Mapping[str, Any]], policy: str
) -> list[tuple[int, Mapping[str, Any]]]:
    by_id = {message.id: index for index, message in enumerate(transcript)}
    taken: set[int] = set()
    out: list[tuple[int, Mapping[str, Any]]] = []
    for message in after:
        if not isinstance(message, Mapping):
            raise _cant(f"transform returned a {type(message).__name__} among its messages", policy)
        message_id = message.get("id")
        if message_id:
            index = by_id.get(message_id)
            if index is None:
                raise _cant(f"message {message_id!r} was inserted", policy, message_id)
        else:
            index = _find(transcript, message, taken)
            if index is None:
                raise _cant(f"a {message.get('role')} message without a known id was inserted", policy)
        taken.add(index)
        out.append((index, message))
    return out


def _find(transcript: Transcript, message: Mapping[str, Any], taken: set[int]) -> int | None:
    """A message that lost its id: the result of the same call, the same calls, or the same role and content."""
    calls = [call.get("id") for call in message.get("tool_calls") or ()]
    for index, old in enumerate(transcript):
        if index in taken or old.role != message.get("role"):
            continue
        if old.role == "tool" and old.tool_call_id == message.get("tool_call_id"):
            return index
        if calls and calls == [call.id for call in old.tool_calls]:
            return index
        if not calls and not old.tool_calls and old.role != "tool" and old.text == _text(message):
            return index
    return None


def _changes(old: Message, new: Mapping[str, Any], mode: EditMode, policy: str) -> list[Edit]:
    unknown = sorted(key for key in new if key not in _KEYS)
    if unknown:
        raise _cant(f"message {old.id!r} got the unknown key {unknown[0]!r}", policy, old.id)
    if new.get("role") != old.role:
        raise _cant(f"message {old.id!r} changed its role from {old.role} to {new.get('role')}", policy, old.id)
    if old.role == "tool" and new.get("tool_call_id", old.tool_call_id) != old.tool_call_id:
        raise _cant(f"message {old.id!r} answers another tool call", policy, old.id)
    try:
        text = _text(new)
    except APIError as error:
        raise _cant(f"message {old.id!r}: {error}", policy, old.id) from error
    reasoning = new.get("reasoning") or ""
    if _arguments_changed(old, new, policy):
        return [rerender(old, {**new, "role": old.role}, mode=mode)]
    edits: list[Edit] = []
    if reasoning != old.reasoning:
        if reasoning and not old.reasoning:
            raise _cant(f"message {old.id!r} got a reasoning that it never had", policy, old.id)
        edits.append(
            Edit(InMessage(old.id, "reasoning"), reasoning, mode) if reasoning else clear_reasoning(old, mode=mode)
        )
    if text != old.text:
        edits.append(replace_content(old, text, mode=mode) if text else clear(old, mode=mode))
    return edits


def _arguments_changed(old: Message, new: Mapping[str, Any], policy: str) -> bool:
    """Whether the calls, the same in number, id and name, have other arguments."""
    calls = new.get("tool_calls") or []
    functions = [call.get("function") or {} for call in calls]
    was = [(call.id, call.name) for call in old.tool_calls]
    now = [(call.get("id"), function.get("name")) for call, function in zip(calls, functions, strict=True)]
    if was != now:
        raise _cant(f"message {old.id!r} has other tool calls: {was} became {now}", policy, old.id)
    for call, function in zip(old.tool_calls, functions, strict=True):
        arguments = function.get("arguments")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise _cant(f"the arguments of tool call {call.id!r} are not JSON", policy, old.id) from error
        if not isinstance(parsed, Mapping):
            raise _cant(f"the arguments of tool call {call.id!r} are not a JSON object", policy, old.id)
        if parsed != call.arguments:
            return True
    return False


def _text(message: Mapping[str, Any]) -> str:
    return content_text(message.get("content"))


def _cant(what: str, policy: str, message_id: str | None = None) -> InexpressibleChange:
    return InexpressibleChange(f"policy {policy}: {what}; an edit can't say that", policy=policy, message_id=message_id)
