"""Two policies of your own: one plans edits, one is a function from messages to messages.

`python examples/custom_policy.py [HOST:PORT]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from leyline_sdk import Edit, Leyline, MessagePolicy, Policy, PolicyContext, clear


class ShortLogs(Policy):
    """Long tool results go once the model has answered from them. Pure: what is done is not long, so it plans it no
    more. It does not ask for `edited`, which is true as well of a long one in which another policy redacted a word."""

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        answers = context.transcript.of_role("assistant")
        for result in context.tool_results:
            if result.end <= answers[-1].start and result.content_tokens > 20:
                yield clear(result, "[log]")


def without_small_talk(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An existing context-editing function works as it is."""
    return [message for message in messages if message["content"] != "Thanks!"]


def main(target: str | None = None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "tail", "arguments": '{"path": "app.log"}'}}
    tail = {"name": "tail", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Is the disk full?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "disk 93 % full\n" * 12},
        {"role": "assistant", "content": "Nearly: 93 %."},
        {"role": "user", "content": "Thanks!"},
        {"role": "user", "content": "And the memory?"},
    ]
    policies = [ShortLogs(), MessagePolicy.of(without_small_talk)]
    with Leyline(target=target) as client:
        session = client.session(messages=history, tools=[tail], policies=policies)
        for edit in session.preview().applied_edits:
            print(f"would: {edit.policy}, {edit.removed} -> {edit.inserted} tokens")
        for edit in session.complete(max_tokens=8).applied_edits:
            print(f"done:  {edit.policy}, {edit.removed} -> {edit.inserted} tokens")
        print(f"left to do: {len(session.preview().applied_edits)}")
        session.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
