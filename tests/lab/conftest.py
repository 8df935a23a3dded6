"""The lab's bench on small random models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from leyline_server.engine.local import LocalEngine
from leyline_server.lab.laboratory import Lab
from leyline_server.model.load import load
from tests.engine import models
from tests.engine.harness import VOCAB


@dataclass(frozen=True)
class NoStops:
    """All that the bench asks of a chat format."""

    stop_ids: frozenset[int] = frozenset()


@pytest.fixture(scope="session", autouse=True)
def _threads(one_thread: None) -> None:
    """All tests here run on one."""


@pytest.fixture(scope="session")
def lab_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lab]:
    """A bench on a variant of `tests.engine.models`, made once."""

    @cache
    def get(variant: str, dtype: torch.dtype = torch.float32, num_slots: int = 2048) -> Lab:
        path = str(models.save(variant, tmp_path_factory.mktemp(variant)))
        model = load(path, dtype, torch.device("cpu"))
        format: Any = NoStops()
        return Lab(LocalEngine(model, num_slots, 256, 32, VOCAB), format, model)

    return get
