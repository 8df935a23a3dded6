"""The canary at load: what GetServerInfo says of it, and what a server refuses after it failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Mode, clear, errors
from leyline_server.lab import canary as lab_canary
from tests.service.running import RunningServer

Serve = Callable[..., RunningServer]


def edited(server: RunningServer, mode: Mode) -> None:
    """An edit of a session, in this mode."""
    with server.client() as client, client.session(system="You answer questions about files.") as session:
        session.append(["one", {"role": "assistant", "content": "two"}, "three"], prefill=True)
        session.edit(clear(session.transcript.of_role("assistant")[0], mode=mode))


def features(info: pb.GetServerInfoResponse) -> dict[str, str]:
    return {support.feature: support.reason for support in info.supports}


def test_the_embedded_model_passes(serve: Serve) -> None:
    server = serve(model="tiny", canary="refuse")
    canary = server.parts.info.canary
    assert canary.passed
    assert not canary.failures
    assert (canary.agreement, canary.probes, canary.threshold) == (1.0, 24, 0.9)
    assert 0 < canary.rotation_error < 1e-5
    assert 0 <= canary.oracle_kl < 1e-8
    assert 0 < canary.unedited_kl < 1e-8
    assert server.parts.engine.stats().in_use == server.parts.engine.stats().cached == 0, "it leaves nothing behind"
    edited(server, Mode.AMORTIZE)


def test_after_a_failure_AMORTIZE_is_refused_with_the_figure_and_FORGET_is_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for what was edited instead of what was not, nobody can agree with the unedited session."""
    monkeypatch.setattr(lab_canary, "PROBED", "replaced")
    server = serve(model="tiny", canary="refuse")
    canary = server.parts.info.canary
    assert not canary.passed
    assert canary.agreement < 0.5
    (failure,) = canary.failures
    assert f"{canary.agreement:.0%} of {canary.probes} probes, below 90%" in failure
    assert failure in features(server.parts.info)["AMORTIZE"]
    with pytest.raises(errors.NotSupported, match="probes") as refused:
        edited(server, Mode.AMORTIZE)
    assert isinstance(refused.value, errors.FailedPrecondition)
    assert failure in refused.value.metadata["why"]
    edited(server, Mode.FORGET)
    with server.client() as client:
        info = client.server_info()
    assert failure in info.features["AMORTIZE"].reason
    assert info.canary is not None
    assert (info.canary.passed, info.canary.failures, info.canary.agreement) == (False, (failure,), canary.agreement)


def test_a_server_that_is_told_to_warn_goes_on(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_canary, "PROBED", "replaced")
    server = serve(model="tiny", canary="warn")
    assert not server.parts.info.canary.passed
    assert features(server.parts.info)["AMORTIZE"] == ""
    edited(server, Mode.AMORTIZE)


def test_a_model_that_answers_nothing_passes_by_the_other_two_and_says_so(serve: Serve) -> None:
    canary = serve(canary="refuse").parts.info.canary
    assert canary.passed
    assert not canary.HasField("agreement")
    assert "answers 0 of 8 questions" in canary.skipped
    assert canary.oracle_kl < 1e-8


@pytest.mark.parametrize("small", [{"slots": 128}, {"max_context": 200}], ids=["slots", "context"])
def test_a_canary_that_does_not_fit_has_failed_and_the_server_runs(serve: Serve, small: dict[str, int]) -> None:
    server = serve(model="tiny", canary="refuse", **small)
    canary = server.parts.info.canary
    assert not canary.passed
    assert "it could not run" in canary.failures[0]
    stats = server.parts.engine.stats()
    assert (stats.free, stats.queued) == (stats.num_slots, 0)
    with pytest.raises(errors.NotSupported, match="could not run"):
        edited(server, Mode.AMORTIZE)
    edited(server, Mode.FORGET)


def test_without_it_nothing_is_said(serve: Serve) -> None:
    server = serve()
    assert not server.parts.info.HasField("canary")
    with server.client() as client:
        assert client.server_info().canary is None
