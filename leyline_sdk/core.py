"""One session's state and operations, without I/O: the mirror, the policies, what was edited since the last reply.

Owns what every operation needs before and after its call; `operations` has the operations. One owner at a time: not
thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk import reports as r
from leyline_sdk import types as t
from leyline_sdk.calls import Answer, Op, Pause, ask, new_request_id, outcome_unknown
from leyline_sdk.config import DEFAULT_TIMEOUT_S
from leyline_sdk.edits import to_directive
from leyline_sdk.foresee import touched
from leyline_sdk.planning import Plan, chunks, with_pins
from leyline_sdk.planning import plan as run_policies
from leyline_sdk.policy import Policy
from leyline_sdk.reuse import Reuse
from leyline_sdk.transcript import Transcript
from leyline_sdk.wire import (
    cache_from_pb,
    message_from_pb,
    messages_to_pb,
    receipt_from_pb,
    transcript_from_pb,
)

OnEdit = Callable[[r.AppliedEdit], None]
_IDLE_WAIT_S = 0.05


class SessionCore:
    """See the module. `limits` are the server's."""

    def __init__(
        self,
        session_id: str,
        transcript: Transcript,
        limits: r.Limits,
        policies: Sequence[Policy] = (),
        on_edit: OnEdit | None = None,
        created: bool = True,
        tools: Sequence[pb.Tool] = (),
        reuse: Reuse = Reuse.PREFIX,
    ) -> None:
        self.id = session_id
        self.transcript = transcript
        self.limits = limits
        self.policies = list(policies)
        self.on_edit = on_edit
        self.created = created
        self.tools = tuple(tools)
        self.reuse = reuse
        self.timeout_s = DEFAULT_TIMEOUT_S  # of the client, for waiting
        self.streaming = False
        self._stale = False
        self.unreported: list[r.AppliedEdit] = []

    # ------------------------------------------------------------ mirror

    def refresh(self, timeout_s: float | None = None) -> Op[None]:
        """Fetches the session anew; after a call whose end is unknown, not before the Generate that runs has ended.

        Raises SessionBusy when that takes longer than the timeout.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + timeout_s
        request = pb.GetSessionRequest(session_id=self.id, include_content=True)
        while True:
            got = yield from ask(request, pb.GetSessionResponse, max(0.001, end - time.monotonic()))
            if self.streaming or not (self._stale and got.session.busy):
                break
            if time.monotonic() + _IDLE_WAIT_S > end:
                raise errors.SessionBusy(
                    f"a Generate is still running in the session after {timeout_s:g} seconds",
                    status="ABORTED",
                    reason="BUSY",
                )
            yield Pause(_IDLE_WAIT_S)
        self.transcript = with_pins(transcript_from_pb(got.session, self.transcript.pinned))
        self._stale = False

    def ready(self, timeout_s: float | None = None) -> Op[None]:
        """Before every call: no stream is open, and the mirror is what the server has."""
        if self.streaming:
            raise errors.SessionBusy(
                "the session has an unfinished stream: take stream.final(), or leave its with block",
                status="ABORTED",
                reason="BUSY",
            )
        unknown = bool(self.policies) and any(not message.text_known for message in self.transcript)
        if self._stale or unknown:
            yield from self.refresh(timeout_s)

    def send(
        self,
        request: pb.AppendRequest | pb.ApplyDirectivesRequest | pb.UndoRequest | pb.ForkSessionRequest,
        answer: type[Answer],
        timeout_s: float | None = None,
    ) -> Op[Answer]:
        """One mutating call. When nobody knows whether it acted, the next call looks first."""
        try:
            return (yield from ask(request, answer, timeout_s))
        except errors.APIError as error:
            unseen = isinstance(error, errors.UnansweredToolCall)  # perhaps of calls that this side never saw
            self._stale = self._stale or unseen or outcome_unknown(error)
            raise
        except GeneratorExit:
            self._stale = True
            raise

    def lost(self) -> None:
        """A stream ended without its last event: what the server kept of it is unknown."""
        self.streaming = False
        self._stale = True

    def header(self) -> Op[list[pb.Message]]:
        """The system message that the session begins with, as it now reads; an empty one where it has only tools."""
        first = next(iter(self.transcript), None)
        if self._stale or (first is not None and not first.text_known):
            yield from self.refresh()
            first = next(iter(self.transcript), None)
        system = first.text if first is not None and first.role == "system" else ""
        return messages_to_pb([{"role": "system", "content": system}]) if system or self.tools else []

    # ------------------------------------------------------------ edits

    def plan(self, call: str) -> Plan:
        """What the policies would do now. Raises PolicyError."""
        return run_policies(self.policies, self.transcript, self.limits.max_context, call)

    def planned(self, call: str, wait: bool) -> Op[Plan]:
        """What the policies want, less what had to be sent ahead because one call can't hold it."""
        todo = self.plan(call)
        groups = chunks(todo.edits, self.transcript, max(1, self.limits.max_directives))
        for group in groups[:-1]:
            yield from self.apply(_part(todo, group), wait=wait)
        return _part(todo, groups[-1])

    def apply(
        self,
        todo: Plan,
        *,
        dry_run: bool = False,
        prefill: bool = False,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Op[t.EditResult]:
        """One ApplyDirectives. A dry run leaves the mirror alone and reports nothing."""
        request = pb.ApplyDirectivesRequest(
            request_id=new_request_id(),
            session_id=self.id,
            directives=map(to_directive, todo.edits),
            expected_version=self.transcript.version,
            dry_run=dry_run,
            prefill=prefill,
            wait=wait,
        )
        got = yield from self.send(request, pb.ApplyDirectivesResponse, timeout_s)
        if dry_run:
            applied = self._applied(todo, got.receipts)
        else:
            applied = self.absorb(todo, got.receipts, got.edited, got.version)
            self.check_length(got.num_tokens)
            self.report(applied)
        cache = cache_from_pb(got.cache) if got.HasField("cache") else None
        return t.EditResult(got.version, got.num_tokens, applied, cache, got.wall_ms)

    def _applied(self, todo: Plan, receipts: Sequence[pb.Receipt]) -> tuple[r.AppliedEdit, ...]:
        out: list[r.AppliedEdit] = []
        for edit, policy, receipt in zip(todo.edits, todo.policies, receipts, strict=True):
            ids = tuple(message.id for message in touched(edit, self.transcript) or ())
            out.append(r.AppliedEdit(policy, ids, receipt_from_pb(receipt)))
        return tuple(out)

    def absorb(
        self, todo: Plan, receipts: Sequence[pb.Receipt], edited: Iterable[pb.MessageSpan], version: int
    ) -> tuple[r.AppliedEdit, ...]:
        """Takes the answer to `todo` into the mirror."""
        applied = self._applied(todo, receipts)
        self.transcript = self.transcript.after_edit(
            [message_from_pb(span) for span in edited],
            [message_id for receipt in receipts for message_id in receipt.removed_message_ids],
            {message.id: message for message in todo.after},
            version,
        )
        return applied

    def report(self, applied: Sequence[r.AppliedEdit]) -> None:
        """Tells whoever wants to know, at once and with the next reply. The mirror must be whole: a hook may raise."""
        self.unreported.extend(applied)
        if self.on_edit is not None:
            for edit in applied:
                self.on_edit(edit)

    def check_length(self, num_tokens: int) -> None:
        """A mirror that disagrees with the server is fetched anew before the next call."""
        self._stale = self._stale or num_tokens != self.transcript.num_tokens


def _part(todo: Plan, indices: Sequence[int]) -> Plan:
    return Plan(tuple(todo.edits[i] for i in indices), tuple(todo.policies[i] for i in indices), todo.after)
