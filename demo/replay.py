"""Replays a recorded conversation: its messages, its tool outputs, and as many decoded tokens as it had.

What the recorded model said is forced on this one, token by token, so that every reply is really decoded. The ids
are the server's own rendering of the recorded message, read from a session that is never computed. A recording that
is longer than the model's context is cut down, and `Recording.cut` says how.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.agent import Conversation
from demo.arms import Arm
from demo.record import Answer
from demo.traces import read_trace
from leyline_sdk import Leyline

NUM_TURNS = 16
NUM_TOKENS = 2048
"""What two CPU cores replay five times over in a minute or two."""
_MIN_CHARS = 12


@dataclass(frozen=True, slots=True)
class Step:
    """What is said to the model, and what it is then made to say. `call_ids` are its calls, as recorded."""

    messages: tuple[dict[str, Any], ...]
    forced: tuple[int, ...]
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """`cut`: how it differs from the file, in words."""

    name: str
    system: str
    tools: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]
    cut: str


def load(path: Path, client: Leyline, max_tokens: int = NUM_TOKENS, max_turns: int = NUM_TURNS) -> Recording:
    """Reads a file, cuts it down and has the server render it. Raises ValueError for a file in no known format."""
    trace = read_trace(path)
    messages = [dict(message) for message in trace.messages]
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    kept = replies[:max_turns]
    messages = messages[: kept[-1] + 1]
    num_tokens = len(client.tokenize("\n".join(map(_all_text, messages))))
    share = min(1.0, max_tokens / num_tokens)
    messages = [shortened(message, share) for message in messages]
    system = ""
    if messages[0]["role"] == "system":
        system = str(messages.pop(0)["content"])
    cut = f"{len(kept)} of its {len(replies)} turns"
    if share < 1:
        cut += f", {num_tokens:,} tokens cut to about {max_tokens:,}: of every text its first {share:.0%}"
    return Recording(trace.name, system, trace.tools, tuple(_steps(messages, system, trace.tools, client)), cut)


def _all_text(message: Mapping[str, Any]) -> str:
    return " ".join(
        [str(message["content"]), *(call["function"]["arguments"] for call in message.get("tool_calls", ()))]
    )


def shortened(message: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The message with the first part of its text, and of each text among its calls' arguments."""
    out = {**message, "content": _head(str(message["content"]), share)}
    if message.get("tool_calls"):
        out["tool_calls"] = [_shortened_call(call, share) for call in message["tool_calls"]]
    return out


def _shortened_call(call: Mapping[str, Any], share: float) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"] or "{}")
    short = {key: _head(value, share) if isinstance(value, str) else value for key, value in arguments.items()}
    return {**call, "function": {**call["function"], "arguments": json.dumps(short, ensure_ascii=False)}}


def _head(text: str, share: float) -> str:
    return text[: max(_MIN_CHARS, round(len(text) * share))]


def _steps(
    messages: Sequence[dict[str, Any]], system: str, tools: Sequence[Mapping[str, Any]], client: Leyline
) -> list[Step]:
    session = client.session(system=system, tools=tools, messages=messages)
    ids = session.info(token_ids=True).token_ids
    steps: list[Step] = []
    waiting: list[dict[str, Any]] = []
    for message, rendered in zip(messages, session.transcript.messages[1:], strict=True):
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        body = ids[rendered.start + rendered.parts[0].length : rendered.end]  # all but the role's marker
        steps.append(Step(tuple(waiting), body, tuple(call["id"] for call in message.get("tool_calls", ()))))
        waiting = []
    session.close()
    return steps


def play(recording: Recording) -> Callable[[Arm, Conversation, Callable[[str], None]], list[Answer]]:
    """The work of an arm: all steps in order. There are no right answers."""

    def do(arm: Arm, conversation: Conversation, say: Callable[[str], None]) -> list[Answer]:
        new_ids: dict[str, str] = {}
        for number, step in enumerate(recording.steps, 1):
            say(f"turn {number} of {len(recording.steps)}")
            conversation.add([_renamed(message, new_ids) for message in step.messages])
            reply = conversation.reply(step.forced)
            new_ids.update(zip(step.call_ids, (call.id for call in reply.tool_calls), strict=True))
        return []

    return do


def _renamed(message: dict[str, Any], new_ids: Mapping[str, str]) -> dict[str, Any]:
    """A result names the call as this session knows it."""
    if message["role"] != "tool":
        return message
    return {**message, "tool_call_id": new_ids[message["tool_call_id"]]}
