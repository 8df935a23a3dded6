"""The embedded model's tokenizer, for rows and batches."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from leyline_server.server import TINY


@pytest.fixture(scope="session", autouse=True)
def _threads(one_thread: None) -> None:
    """All tests here run on one."""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))
