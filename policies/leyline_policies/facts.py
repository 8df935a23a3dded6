"""What policies ask of a transcript: turns, ages, what the model has read, exchanges. Pure.

Turns are Generates, and where a history was appended rather than generated, its assistant messages: so that an
imported conversation ages as the original did.
"""

from __future__ import annotations

from leyline_sdk.policy import PolicyContext
from leyline_sdk.transcript import Message, Transcript


def turns(context: PolicyContext) -> int:
    """Turns behind us."""
    return max(context.turn, len(context.transcript.of_role("assistant")))


def ages(transcript: Transcript) -> dict[str, int]:
    """Turns since each message, by message id."""
    out: dict[str, int] = {}
    later = 0
    for message in reversed(transcript.messages):
        out[message.id] = max(message.age, later)
        later += message.role == "assistant"
    return out


def unread(transcript: Transcript) -> set[str]:
    """Ids of the messages after the last assistant message: the model has not seen them yet."""
    out: set[str] = set()
    for message in reversed(transcript.messages):
        if message.role == "assistant":
            break
        out.add(message.id)
    return out


def exchanges(transcript: Transcript) -> list[list[Message]]:
    """The history in steps: an assistant message with what led to it, and the results of its calls.

    System messages and the task are in none; nor is what waits for the next assistant message.
    """
    task = next((message.id for message in transcript if message.role == "user"), None)
    out: list[list[Message]] = []
    waiting: list[Message] = []
    for message in transcript:
        if message.role == "system" or message.id == task:
            continue
        if message.role == "assistant":
            out.append([*waiting, message])
            waiting = []
        elif message.role == "tool" and out:
            out[-1].append(message)
        else:
            waiting.append(message)
    return out


def tokens_of(message: Message, kind: str) -> int:
    """Tokens of its parts of one kind."""
    return sum(part.length for part in message.parts if part.kind == kind)


def count_parts(message: Message, kind: str) -> int:
    return sum(part.kind == kind for part in message.parts)
