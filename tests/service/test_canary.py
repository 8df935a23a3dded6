"""The canary at load: what GetServerInfo says of it, and what a server refuses after it failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Mode, clear, errors
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
    assert server.parts.engine.stats().in_use == server.parts.engine.stats().cached == 0, "it leaves nothing behind"
    edited(server, Mode.AMORTIZE)


def test_after_a_failure_AMORTIZE_is_refused_with_the_figure_and_FORGET_is_not(serve: Serve) -> None:
    """Random weights hang on every token: where AMORTIZE doesn't matter to an agent it does to them."""
    server = serve(canary="refuse", canary_agreement=1.0)
    canary = server.parts.info.canary
    assert not canary.passed
    assert canary.agreement < 1
    (failure,) = canary.failures
    assert f"{canary.agreement:.0%} of 24 probes, below 100%" in failure
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


def test_a_server_that_is_told_to_warn_goes_on(serve: Serve) -> None:
    server = serve(canary="warn", canary_agreement=1.0)
    assert not server.parts.info.canary.passed
    assert features(server.parts.info)["AMORTIZE"] == ""
    edited(server, Mode.AMORTIZE)


def test_without_it_nothing_is_said(serve: Serve) -> None:
    server = serve()
    assert not server.parts.info.HasField("canary")
    with server.client() as client:
        assert client.server_info().canary is None
