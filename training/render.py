"""The chat format of `tiny`, as ids with loss weights; the twin of `chat_template.jinja`. Knows messages, not tasks.

Every text between special tokens is encoded by itself, so the ids of a text never depend on its neighbours.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

SPECIAL_NAMES = ["pad", "bos", "system", "user", "assistant", "tool", "end", "call", "args", "/call", "think", "/think"]
SPECIAL_TOKENS = [f"<|{name}|>" for name in SPECIAL_NAMES]
PAD, BOS, SYSTEM, USER, ASSISTANT, TOOL, END, CALL, ARGS, END_CALL, THINK, END_THINK = range(len(SPECIAL_TOKENS))
ROLE_IDS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
SYSTEM_PROMPT = "You answer questions about files. Read them with read_file."

IGNORED, CONTEXT, TRAINED = range(3)
LOSS_WEIGHTS = [0.0, 0.05, 1.0]
"""The loss weight of each class; context keeps a little so that the model learns what files look like."""


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` keep their order."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `trained` is False where the answer can't be known from the text before it."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    trained: bool = True


def compact_json(value: Any, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)


def tools_text(tools: list[dict[str, Any]]) -> str:
    """What follows the system prompt: one line for each tool."""
    return "".join("\n" + compact_json(tool, sort_keys=True) for tool in tools)


def pieces(message: Message, tools: list[dict[str, Any]]) -> list[int | str]:
    """The message as special ids and plain texts, its role marker first. Tools belong to the system message alone."""
    listing = tools_text(tools) if message.role == "system" else ""
    parts: list[int | str] = [ROLE_IDS[message.role], message.content + listing]
    for call in message.calls:
        parts += [CALL, call.name, ARGS, compact_json(call.arguments), END_CALL]
    return [*parts, END]


def encode(messages: list[Message], tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and loss classes of consecutive messages, without `<|bos|>`."""
    all_ids: list[int] = []
    classes: list[int] = []
    for message in messages:
        by_assistant = TRAINED if message.trained else IGNORED
        for index, piece in enumerate(pieces(message, tools)):
            ids = [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False).ids
            is_output = message.role == "assistant" and index > 0
            all_ids += ids
            classes += [by_assistant if is_output else CONTEXT] * len(ids)
    return all_ids, classes
