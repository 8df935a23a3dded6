"""Small models, loaded once: as the server drives them, and as Hugging Face does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leyline_server.model.load import LoadedModel, load
from tests.engine import models
from tests.engine.harness import Rig

CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def _threads(one_thread: None) -> None:
    """All tests here run on one."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    @cache
    def save(variant: str, layers: int = 3) -> str:
        return str(models.save(variant, tmp_path_factory.mktemp(variant), num_hidden_layers=layers))

    return save


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., str]) -> Callable[..., LoadedModel]:
    """A variant as the server loads and drives it."""

    @cache
    def get(variant: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> LoadedModel:
        return load(checkpoint(variant, layers), dtype, CPU)

    return get


@pytest.fixture(scope="session")
def unpatched(checkpoint: Callable[..., str]) -> Callable[..., Any]:
    """The same variant as plain Hugging Face."""

    @cache
    def get(variant: str, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint(variant), dtype=dtype).eval()

    return get


@pytest.fixture(params=models.VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(loaded: Callable[..., LoadedModel]) -> Rig:
    """An engine on the smallest variant, for what doesn't depend on the model."""
    return Rig(loaded("v2-qlora-dense"))


@pytest.fixture
def reference(unpatched: Callable[..., Any]) -> Any:
    """Hugging Face's model for `rig`."""
    return unpatched("v2-qlora-dense")
