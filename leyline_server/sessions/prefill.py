"""The computation of what is pending, for a call that asked for it before its answer.

Owns the rollback of such a call: when the model fails, the session is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_server.engine.engine import EndReason, HitReport, Request
from leyline_server.sessions.session import Serving, Session


def cache_report(report: HitReport) -> pb.CacheReport:
    out = pb.CacheReport(
        prefix_hit=report.prefix_hit,
        content_hit=report.content_hit,
        content_spans=[pb.Span(start=start, end=end) for start, end in report.content_spans],
        kept=report.kept,
        turned=report.turned,
        computed=report.computed,
        reason=pb.CacheReport.Reason.Value(f"REASON_{report.reason.value}"),
    )
    if report.first_divergence is not None:
        out.first_divergence = report.first_divergence
    return out


class PrefillRun:
    """An engine listener that answers once. `done` gets the report, or the refusal."""

    def __init__(self, serving: Serving, session: Session, done: Callable[[pb.CacheReport | Refusal], None]) -> None:
        self._done = done
        self._report = pb.CacheReport()
        self._session = session
        self._request: Request = serving.engine.compute(session.sequence, self)
        session.run = self

    def cancel(self) -> None:
        self._request.cancel()

    def started(self, report: HitReport) -> None:
        self._report = cache_report(report)

    def token(self, token_id: int) -> bool:
        raise AssertionError("a compute samples nothing")

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        self._session.ended_run()
        if error is None and reason is EndReason.CANCELLED:
            error = Refusal("CANCELLED", "the session was closed while the call computed")
        self._done(error or self._report)
