"""The five arms: who keeps the history short, and how. Each is a `Conversation` that writes down its turns.

    none              nobody
    re-prefill        the client edits its messages and sends them all again, to a new session
    re-prefill 4      the same, with edits only every four turns: fewer breaks of the prefix, a longer prompt
    AMORTIZE, FORGET  a policy of the SDK edits the one live session

All of them clear by the same policy object: tool outputs older than two turns become `[cleared]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from demo.cells import LiveList
from demo.record import Cell, Cut, Run, Turn, runs
from leyline_policies import TruncateOlderThan
from leyline_sdk import (
    AppliedEdit,
    Leyline,
    Message,
    Mode,
    Policy,
    PolicyContext,
    Reply,
    Session,
    Stream,
    ToolCall,
    Transcript,
)
from leyline_sdk.edits import InMessage

OLDER_THAN = 2
MAX_TOKENS = 96

OnTurn = Callable[[Turn], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """`every`: turns between edits. `edited` arms are judged."""

    name: str
    kind: Literal["none", "re-prefill", "in place"]
    mode: Mode = Mode.AMORTIZE
    every: int = 1

    @property
    def edited(self) -> bool:
        return self.kind == "in place"

    @property
    def key(self) -> str:
        """Its API key on the server: a tenant of its own, so that no arm finds another one's prefixes."""
        return self.name.replace(" ", "-").replace("=", "-").lower()

    def policies(self) -> list[Policy]:
        if self.kind == "none":
            return []
        return [TruncateOlderThan(older_than=OLDER_THAN, every=self.every, mode=self.mode)]


ARMS = (
    Arm("none", "none"),
    Arm("re-prefill", "re-prefill"),
    Arm("re-prefill every=4", "re-prefill", every=4),
    Arm("AMORTIZE", "in place"),
    Arm("FORGET", "in place", Mode.FORGET),
)


def describe(reply: Reply) -> str:
    """What the model did in a turn."""
    return " ".join(map(call_text, reply.tool_calls)) or f"answers {reply.text!r}"


def call_text(call: ToolCall) -> str:
    return f"{call.name}({', '.join(map(str, call.arguments.values()))})"


def _answered(result: Message, session: Session) -> str:
    """The call that a tool message answers, as text."""
    call = session.transcript.call_of(result)
    return call_text(call) if call else result.role


def first_token(stream: Stream, since: float) -> tuple[Reply, float]:
    """Reads a stream to its end. The reply, and milliseconds to its first token."""
    next(stream, None)
    waited_ms = (time.perf_counter() - since) * 1e3
    return stream.final(), waited_ms


def _turn(index: int, reply: Reply, first_token_ms: float, cuts: tuple[Cut, ...], cells: tuple[Run, ...]) -> Turn:
    cache, usage = reply.cache, reply.usage
    return Turn(
        index=index,
        did=describe(reply),
        cuts=cuts,
        prompt=usage.context,
        prefix_hits=cache.prefix_hit,
        kept=cache.kept,
        turned=cache.turned,
        computed=cache.computed,
        generated=usage.generated,
        first_token_ms=first_token_ms,
        cells=cells,
    )


class InPlace:
    """One live session; its policies, if any, edit it."""

    def __init__(self, session: Session, on_turn: OnTurn) -> None:
        self.session = session
        self.turns: list[Turn] = []
        self._on_turn = on_turn
        self._waiting: list[dict[str, Any]] = []
        self._list = LiveList()

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        self._waiting += messages

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        start = time.perf_counter()
        self.send()
        with self.session.generate(max_tokens=len(forced) or MAX_TOKENS, force_token_ids=forced) as stream:
            reply, waited_ms = first_token(stream, start)
        cells = self._list.turn(reply.applied_edits, reply)
        cuts = tuple(map(self._cut, reply.applied_edits))
        self.turns.append(_turn(len(self.turns) + 1, reply, waited_ms, cuts, cells))
        self._on_turn(self.turns[-1])
        return reply

    def send(self) -> None:
        """Appends what waits: before each reply, and once at the end, so that no call is left without its result."""
        if self._waiting:
            self.session.append(self._waiting)
        self._waiting = []

    def _cut(self, edit: AppliedEdit) -> Cut:
        message = self.session.transcript.get(edit.message_ids[0])
        what = _answered(message, self.session) if message else "a message"
        return Cut(what, edit.removed, edit.inserted, edit.receipt.influence_remains)


@dataclass(slots=True)
class Reprefilled:
    """What everybody does today: edit the messages, send all of them again. The server's prefix cache helps.

    Every reply comes from a new session that is given the whole history; the one before it is closed. The policies
    are the SDK's, run on this side.
    """

    client: Leyline
    system: str
    tools: Sequence[Mapping[str, Any]]
    policies: Sequence[Policy]
    on_turn: OnTurn
    turns: list[Turn] = field(default_factory=list)
    session: Session | None = None
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        self._waiting += messages

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        start = time.perf_counter()
        before = self.session
        history = self._edited(before.transcript) if before else [{"role": "system", "content": self.system}]
        self.session = self.client.session(tools=self.tools, messages=[*history, *self._waiting])
        self._waiting = []
        with self.session.generate(max_tokens=len(forced) or MAX_TOKENS, force_token_ids=forced) as stream:
            reply, waited_ms = first_token(stream, start)
        cuts, removed = _compare(before.transcript if before else Transcript(), self.session)
        states: list[Cell] = ["kept"] * reply.usage.reused
        states += ["computed"] * (reply.usage.computed + reply.usage.generated)
        self.turns.append(_turn(len(self.turns) + 1, reply, waited_ms, cuts, runs(states, removed)))
        self.on_turn(self.turns[-1])
        if before:
            before.close()
        return reply

    def _edited(self, transcript: Transcript) -> list[dict[str, Any]]:
        """The messages as the policies want them, without the ids that they had in their session."""
        contents: dict[str, str] = {}
        for policy in self.policies:
            for edit in policy.plan(PolicyContext(transcript, max_context=0)):
                if isinstance(edit.target, InMessage) and isinstance(edit.replacement, str):
                    contents[edit.target.message_id] = edit.replacement
        messages = [{**m.to_dict(), "content": contents.get(m.id, m.text)} for m in transcript]
        return [{key: value for key, value in message.items() if key != "id"} for message in messages]


def _compare(before: Transcript, session: Session) -> tuple[tuple[Cut, ...], dict[int, int]]:
    """What became shorter from one session to the next: for the line, and where in the new one for the picture."""
    cuts: list[Cut] = []
    removed: dict[int, int] = {}
    for old, new in zip(before, session.transcript, strict=False):
        if old.text != new.text:
            cuts.append(Cut(_answered(new, session), old.content_tokens, new.content_tokens, False))
            removed[new.start + new.parts[0].length] = old.content_tokens
    return tuple(cuts), removed


def converse(
    arm: Arm, client: Leyline, *, system: str, tools: Sequence[Mapping[str, Any]], on_turn: OnTurn
) -> InPlace | Reprefilled:
    """The arm's conversation, newly begun."""
    if arm.kind == "re-prefill":
        return Reprefilled(client, system, tools, arm.policies(), on_turn)
    return InPlace(client.session(system=system, tools=tools, policies=arm.policies()), on_turn)
