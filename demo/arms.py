"""The five arms: who keeps the history short, and how. Each is a `Conversation` that writes down its turns.

    none              nobody
    re-prefill        the client edits its messages and sends them all again, to a new session
    re-prefill 4      the same, with edits only every four turns: fewer breaks of the prefix, a longer prompt
    AMORTIZE, FORGET  a policy of the SDK edits the one live session

All of them clear the same tool outputs by the same rule: those older than two turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from demo.cells import LiveList
from demo.record import Cell, Cut, Run, Turn, runs
from leyline_policies import TruncateOlderThan
from leyline_sdk import AppliedEdit, Leyline, Message, Mode, Policy, Reply, Session, Stream

OLDER_THAN = 2
PLACEHOLDER = "[cleared]"
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
        if self.kind != "in place":
            return []
        return [TruncateOlderThan(OLDER_THAN, placeholder=PLACEHOLDER, mode=self.mode)]


ARMS = (
    Arm("none", "none"),
    Arm("re-prefill", "re-prefill"),
    Arm("re-prefill every=4", "re-prefill", every=4),
    Arm("AMORTIZE", "in place"),
    Arm("FORGET", "in place", Mode.FORGET),
)


def describe(reply: Reply) -> str:
    """What the model did in a turn."""
    calls = [f"{call.name}({', '.join(map(str, call.arguments.values()))})" for call in reply.tool_calls]
    return " ".join(calls) or f"answers {reply.text!r}"


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

    def say(self, text: str) -> None:
        self._waiting.append({"role": "user", "content": text})

    def results(self, results: Mapping[str, str]) -> None:
        self._waiting += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items()]

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        start = time.perf_counter()
        self.session.append(self._waiting)
        self._waiting = []
        with self.session.generate(max_tokens=len(forced) or MAX_TOKENS, force_token_ids=forced) as stream:
            reply, waited_ms = first_token(stream, start)
        cuts = tuple(Cut(self._what(edit), edit.removed, edit.inserted) for edit in reply.applied_edits)
        cells = self._list.turn(reply.applied_edits, reply)
        self.turns.append(_turn(len(self.turns) + 1, reply, waited_ms, cuts, cells))
        self._on_turn(self.turns[-1])
        return reply

    def _what(self, edit: AppliedEdit) -> str:
        message = self.session.transcript.get(edit.message_ids[0]) if edit.message_ids else None
        return what(message, self.session) if message else "?"


def what(result: Message, session: Session) -> str:
    """The call that a tool message answers, as text."""
    call = session.transcript.call_of(result)
    return f"{call.name}({', '.join(map(str, call.arguments.values()))})" if call else result.role


@dataclass(slots=True)
class _Kept:
    """A message of the client's own history. `turn`: when it was added."""

    message: dict[str, Any]
    turn: int
    cleared: bool = False


@dataclass(slots=True)
class Reprefilled:
    """What everybody does today: edit the messages, send all of them again. The server's prefix cache helps.

    Every reply comes from a new session that is given the whole history; the one before it is closed.
    """

    client: Leyline
    system: str
    tools: Sequence[Mapping[str, Any]]
    every: int
    on_turn: OnTurn
    turns: list[Turn] = field(default_factory=list)
    session: Session | None = None
    _history: list[_Kept] = field(default_factory=list)

    def say(self, text: str) -> None:
        self._history.append(_Kept({"role": "user", "content": text}, len(self.turns)))

    def results(self, results: Mapping[str, str]) -> None:
        for call_id, text in results.items():
            message = {"role": "tool", "tool_call_id": call_id, "content": text}
            self._history.append(_Kept(message, len(self.turns)))

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        start = time.perf_counter()
        cleared = self._clear()
        before, old = self.session, {}
        if before is not None:  # sizes of what was cleared, for the record alone
            old = {index: before.transcript.messages[index + 1] for index in cleared}
        messages = [kept.message for kept in self._history]
        self.session = self.client.session(system=self.system, tools=self.tools, messages=messages)
        with self.session.generate(max_tokens=len(forced) or MAX_TOKENS, force_token_ids=forced) as stream:
            reply, waited_ms = first_token(stream, start)
        if before is not None:
            before.close()
        self._history.append(_Kept(_sendable(self.session.transcript.messages[-1]), len(self.turns)))
        new = self.session.transcript.messages
        cuts, removed = [], {}
        for index, was in old.items():
            now = new[index + 1]
            cuts.append(Cut(what(now, self.session), was.content_tokens, now.content_tokens))
            removed[now.start + now.parts[0].length] = was.content_tokens
        states: list[Cell] = ["kept"] * reply.usage.reused + ["computed"] * (reply.usage.computed + reply.usage.generated)
        cells = runs(states, removed)
        self.turns.append(_turn(len(self.turns) + 1, reply, waited_ms, tuple(cuts), cells))
        self.on_turn(self.turns[-1])
        return reply

    def _clear(self) -> list[int]:
        """Clears old tool outputs, when it is time to. Indices of what was cleared."""
        turn = len(self.turns)
        if turn % self.every:
            return []
        cleared = []
        for index, kept in enumerate(self._history):
            if kept.message["role"] == "tool" and not kept.cleared and turn - kept.turn > OLDER_THAN:
                kept.message = {**kept.message, "content": PLACEHOLDER}
                kept.cleared = True
                cleared.append(index)
        return cleared


def _sendable(message: Message) -> dict[str, Any]:
    """An assistant message as the next session is given it: without its id in this one."""
    return {key: value for key, value in message.to_dict().items() if key != "id"}


def converse(
    arm: Arm, client: Leyline, *, system: str, tools: Sequence[Mapping[str, Any]], on_turn: OnTurn
) -> InPlace | Reprefilled:
    """The arm's conversation, newly begun."""
    if arm.kind == "re-prefill":
        return Reprefilled(client, system, tools, arm.every, on_turn)
    return InPlace(client.session(system=system, tools=tools, policies=arm.policies()), on_turn)
