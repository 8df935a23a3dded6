"""What has to hold before any test module is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Triton decides at its first import whether it interprets, and transformers imports it.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Models this small are slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
