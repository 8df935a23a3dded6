"""Recorded conversations of real agents, as OpenAI-style messages: system, user, assistant, tool.

Reads three formats and knows no server: tau-bench (a JSON list of chats with native tool calls), SWE-agent (.traj),
and lmcache-agent-trace's miniswe (.jsonl, one flattened prompt and its answer a line). An agent that wrote its
commands as text is read as one that called a tool `shell`, so that spans and policies see results as results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]
_BASH = re.compile(r"```(?:bash|sh)?\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` without ids; each result follows the message that called for it, and only the last message may have
    a call without a result. `tools` have the names and arguments that occur."""

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]

    def turns(self) -> Iterator[Messages]:
        """The messages in steps: what comes before an assistant message, then that message, and so on."""
        waiting: Messages = []
        for message in self.messages:
            if message["role"] == "assistant":
                if waiting:
                    yield waiting
                yield [message]
                waiting = []
            else:
                waiting.append(message)
        if waiting:
            yield waiting


def read_trace(path: str | Path, index: int = 0) -> Conversation:
    """The conversation in a file; `index` picks one of tau-bench's.

    Raises:
        ValueError: the file is none of the three formats, or has no such conversation.
    """
    conversations = read_traces(path)
    if not 0 <= index < len(conversations):
        raise ValueError(f"{path} has {len(conversations)} conversations, none at {index}")
    return conversations[index]


def read_traces(path: str | Path) -> list[Conversation]:
    """All conversations of a file. Raises ValueError as `read_trace`."""
    path = Path(path)
    text = path.read_text()
    try:
        if path.suffix == ".jsonl":
            return [_conversation(path.stem, _miniswe([json.loads(line) for line in text.splitlines() if line]))]
        data = json.loads(text)
        if isinstance(data, dict):
            return [_conversation(path.stem, _swe_agent(data["history"]))]
        return [_conversation(f"{path.stem}-{i}", map(_native, chat["traj"])) for i, chat in enumerate(data)]
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no recorded conversation in a known format: {error!r}") from error


def _native(message: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI-style message with the keys that matter."""
    out: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        out["tool_calls"] = [dict(call) for call in message["tool_calls"]]
    if message["role"] == "tool":
        ids = message.get("tool_call_ids") or [message.get("tool_call_id")]
        out["tool_call_id"] = ids[0]
    return out


def _swe_agent(history: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A history with native calls passes; in one without, an assistant's `action` is a call, the next user message its
    result."""
    if any(message.get("tool_calls") for message in history):
        yield from map(_native, history)
        return
    call_id = ""
    for number, message in enumerate(history):
        action = message.get("action")
        if message["role"] == "assistant" and action and not message.get("is_demo"):
            call_id = f"action{number}"
            text = message.get("thought") or ""
            yield {"role": "assistant", "content": text, "tool_calls": [_shell(call_id, action)]}
        elif message["role"] == "user" and call_id:
            yield {"role": "tool", "content": message["content"], "tool_call_id": call_id}
            call_id = ""
        else:
            yield _native(message)


def _miniswe(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each prompt extends the one before by what the last command printed."""
    lines = sorted(lines, key=lambda line: len(line["input"]))
    yield {"role": "user", "content": lines[0]["input"]}
    for number, line in enumerate(lines):
        answer = line["output"]
        block = _BASH.search(answer)
        call_id = f"command{number}"
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if block is not None:
            message["content"] = answer[: block.start()].rstrip()
            message["tool_calls"] = [_shell(call_id, block[1])]
        yield message
        if number + 1 == len(lines):
            return
        added = lines[number + 1]["input"].removeprefix(line["input"]).strip().removeprefix(answer.strip()).strip()
        role = {"role": "tool", "tool_call_id": call_id} if block is not None else {"role": "user"}
        yield {**role, "content": added}


def _shell(call_id: str, command: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command.strip()}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": "shell", "arguments": arguments}}


def _conversation(name: str, messages: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> Conversation:
    """With tool-call ids that are unique in it, and the tools that it used."""
    out: Messages = []
    tools: dict[str, dict[str, Any]] = {}
    renamed: dict[str, str] = {}
    taken: set[str] = set()
    for message in messages:
        for call in message.get("tool_calls", ()):
            new = call["id"] if call["id"] not in taken else f"{call['id']}-{len(out)}"
            taken.add(new)
            renamed[call["id"]] = new
            call["id"] = new
            arguments = json.loads(call["function"]["arguments"] or "{}")
            seen = tools.setdefault(call["function"]["name"], {})
            seen.update({key: {"type": _TYPES.get(type(value), "string")} for key, value in arguments.items()})
        if message["role"] == "tool":
            message["tool_call_id"] = renamed[message["tool_call_id"]]
        out.append(message)
    return Conversation(name, tuple(out), tuple(_tool(*item) for item in tools.items()))


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
