"""What has to hold before any test module is imported."""

from __future__ import annotations

import os

import pytest

# Triton decides at its first import whether it interprets, and transformers imports it.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings

    # The same examples every time, on any machine: a failure is a change, not luck.
    settings.register_profile(
        "leyline",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("leyline")
