"""One Generate: listens to the engine, turns ids into events, and writes the finished message into the conversation.

What was sent stays: a cancelled or failed Generate leaves its tokens in an open message, which the next Append closes.
One that sent nothing leaves no message. Runs on the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from leyline_proto import leyline_pb2 as pb
from leyline_proto.conversation import Conversation
from leyline_proto.refusal import Refusal
from leyline_proto.validate import token_budget
from leyline_server.engine.engine import EndReason, GenerateParams, HitReport, Request
from leyline_server.sampling import SamplingParams
from leyline_server.sessions.editing import Edited
from leyline_server.sessions.prefill import cache_report
from leyline_server.sessions.session import Serving, Session
from leyline_server.sessions.stream import EventStream, StopStrings


@dataclass(frozen=True, slots=True)
class Opening:
    """A checked Generate that has changed nothing yet: the conversation with its open message, and the marker's ids."""

    request: pb.GenerateRequest
    conversation: Conversation
    marker: tuple[int, ...]
    max_tokens: int


def open_turn(serving: Serving, conversation: Conversation, request: pb.GenerateRequest) -> Opening:
    """Raises EMPTY_SESSION, UNANSWERED_TOOL_CALL, CONTEXT_EXCEEDED, POOL_EXCEEDED, QUEUE_FULL."""
    opened, marker = conversation.begin_turn(serving.format, request.raw)
    wanted = request.max_tokens if request.HasField("max_tokens") else None
    budget = token_budget(len(conversation.table) + len(marker), wanted, serving.limits)
    if wanted is None:
        budget = min(budget, serving.default_max_tokens)
    serving.engine.check_queue()
    return Opening(request, opened, marker, budget)


class GenerateRun:
    """An engine listener for one Generate, on a session whose edits have been carried out.

    `ended_with(error, kept, told)` is called once, when the session is free again. `kept` is false when the client was
    not even told that it began, so that the call's directives have to go too; `told` when it got a token.
    """

    def __init__(
        self,
        serving: Serving,
        session: Session,
        opening: Opening,
        edited: Edited,
        stream: EventStream,
        ended_with: Callable[[Refusal | None, bool, bool], None],
    ) -> None:
        self._serving, self._session, self._stream = serving, session, stream
        self._edited, self._ended_with = edited, ended_with
        self._born = time.monotonic()
        self._admitted = self._first = 0.0
        self._report: HitReport | None = None
        self._generated: list[int] = []
        engine, request = serving.engine, opening.request
        self._stops = StopStrings(request.stop)
        self._body = serving.raw_stream() if request.raw else serving.format.stream()
        self._before, self._length_before = session.conversation, engine.length(session.sequence)
        self._body_start = opening.conversation.body_start(serving.format)
        engine.append(session.sequence, opening.marker)
        # A message that was cut short goes on: its text so far belongs to no delta of this call.
        ids_before = engine.ids(session.sequence, self._body_start)
        self._chars_before = sum(len(self._body.push(token_id).text) for token_id in ids_before)
        session.conversation, session.run = opening.conversation, self
        stops = frozenset(request.stop_token_ids)
        params = GenerateParams(
            max_tokens=opening.max_tokens,
            sampling=_sampling(request.sampling),
            stop_ids=stops if request.ignore_eos else stops | serving.format.stop_ids,
            force_ids=tuple(request.force_token_ids),
        )
        self._request: Request = engine.generate(session.sequence, params, self)

    def cancel(self) -> None:
        self._request.cancel()

    # ------------------------------------------------------------ engine listener

    def started(self, report: HitReport) -> None:
        self._report, self._admitted = report, time.monotonic()
        started = pb.GenerateStarted(
            version=self._session.conversation.version,
            num_tokens=self._serving.engine.length(self._session.sequence),
            receipts=self._edited.receipts,
            edited=self._edited.messages,
        )
        self._stream.put(pb.GenerateResponse(started=started))

    def token(self, token_id: int) -> bool:
        self._first = self._first or time.monotonic()
        self._generated.append(token_id)
        delta = self._body.push(token_id)
        text = self._stops.push(delta.text)
        self._send(text, delta.reasoning, [token_id])
        return bool(self._stops.found)

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        session = self._session
        session.ended_run()
        if not self._generated:
            session.conversation = self._before
            self._serving.engine.truncate(session.sequence, self._length_before)
            if error is None:
                self._stream.put(pb.GenerateResponse(done=self._nothing()))
            self._ended_with(error, error is None and self._report is not None, False)
            return
        rest = self._body.flush()
        if not self._stops.found:
            self._send(self._stops.push(rest.text) + self._stops.flush(), rest.reasoning, [])
        done = self._finish(reason)
        if error is None:
            self._stream.put(pb.GenerateResponse(done=done))
        self._ended_with(error, True, True)

    def _send(self, text: str, reasoning: str, ids: list[int]) -> None:
        if text or reasoning or ids:
            self._stream.put(pb.GenerateResponse(delta=pb.Delta(text=text, reasoning=reasoning, token_ids=ids)))

    # ------------------------------------------------------------ the end

    def _finish(self, reason: EndReason) -> pb.GenerateDone:
        serving, session = self._serving, self._session
        engine = serving.engine
        body_ids = engine.ids(session.sequence, self._body_start)
        session.conversation, turn = session.conversation.end_turn(serving.format, body_ids)
        (span,) = session.conversation.spans({turn.entry.id})
        span.text, span.reasoning = turn.body.text, turn.body.reasoning
        finish = {
            EndReason.STOP: pb.FINISH_REASON_STOP,
            EndReason.LISTENER: pb.FINISH_REASON_STOP_STRING,
            EndReason.LENGTH: pb.FINISH_REASON_LENGTH,
        }.get(reason, pb.FINISH_REASON_CANCELLED)
        if finish == pb.FINISH_REASON_STOP and (span.tool_calls or turn.invalid):
            finish = pb.FINISH_REASON_TOOL_CALLS
        if self._stops.found:
            at = span.text.find(self._stops.found, self._chars_before)
            span.text = span.text if at < 0 else span.text[:at]
        return pb.GenerateDone(
            finish_reason=finish,
            message=span,
            invalid_tool_calls=turn.invalid,
            usage=self._usage(),
            cache=cache_report(self._report) if self._report else None,
            version=session.conversation.version,
            num_tokens=engine.length(session.sequence),
            turn=session.conversation.turn,
            stop_string=self._stops.found,
        )

    def _nothing(self) -> pb.GenerateDone:
        """Cancelled before the first token: no message."""
        session = self._session
        return pb.GenerateDone(
            finish_reason=pb.FINISH_REASON_CANCELLED,
            usage=self._usage(),
            version=session.conversation.version,
            num_tokens=self._serving.engine.length(session.sequence),
            turn=session.conversation.turn,
        )

    def _usage(self) -> pb.Usage:
        report, now = self._report, time.monotonic()
        usage = pb.Usage(generated=len(self._generated), total_ms=(now - self._born) * 1e3)
        if report is not None:
            usage.context = report.reused + report.computed
            usage.computed, usage.reused = report.computed, report.reused
            usage.queued_ms = (self._admitted - self._born) * 1e3
        if self._first:
            usage.ttft_ms = (self._first - self._born) * 1e3
        return usage


def _sampling(sampling: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else None,
    )
