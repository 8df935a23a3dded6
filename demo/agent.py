"""The agent loop: asks, runs the tools that the model calls, tells it what they printed, until it answers.

It reads `reply.tool_calls` and never the model's text. Whoever keeps the conversation (`Conversation`) decides what
becomes of the history; the loop is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from demo.tasks import Task
from leyline_sdk import Reply, ToolCall

MAX_STEPS = 6
READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
SYSTEM = "You answer questions about files. Read them with read_file."


class Conversation(Protocol):
    """Where the agent speaks."""

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """OpenAI-style messages. They wait until a reply is asked for."""

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        """Lets the model speak; `forced` are ids that it is made to say."""


class Disk(Protocol):
    """What the agent's tool reads."""

    def prepare(self, task: Task) -> None:
        """Writes what the task needs; a file that is there already changes."""

    def run(self, call: ToolCall) -> str:
        """What a call prints."""


class Files:
    """The tool: reads real files below a real directory. Its next call fails if it was told to."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._failure: str | None = None

    def prepare(self, task: Task) -> None:
        for path, content in task.files.items():
            target = self._root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        self._failure = task.fail_first

    def run(self, call: ToolCall) -> str:
        failure, self._failure = self._failure, None
        if failure is not None:
            return failure
        return self.read(call.arguments)

    def read(self, arguments: Mapping[str, Any]) -> str:
        path = (self._root / str(arguments.get("path", ""))).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            return "error: no such file"
        return path.read_text()

    def remove(self, path: str) -> None:
        (self._root / path).unlink()


def result_of(call: ToolCall, output: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": output}


def run_task(conversation: Conversation, task: Task, files: Disk) -> str:
    """The model's answer to one task; empty when it never stops calling tools."""
    files.prepare(task)
    conversation.add([{"role": "user", "content": task.question}])
    for _ in range(MAX_STEPS):
        reply = conversation.reply()
        if not reply.tool_calls:
            return reply.text
        conversation.add([result_of(call, files.run(call)) for call in reply.tool_calls])
    return ""
