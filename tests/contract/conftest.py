"""Each contract test runs twice: against the SDK's fake and against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract.scene import Scene
from tests.contract.sides import BOUNDS, NUM_SLOTS, Side, fake_side, real_side
from tests.service.running import RunningServer, small_checkpoint


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    before = torch.get_num_threads()
    server = RunningServer(model=small_checkpoint(tmp_path_factory.mktemp("contract")), slots=NUM_SLOTS, **BOUNDS)
    yield server
    server.check_integrity()
    server.stop()
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sides(real_server: RunningServer) -> dict[str, Side]:
    return {"fake": fake_side(), "real": real_side(real_server)}


@pytest.fixture(params=["fake", "real"])
def side(request: pytest.FixtureRequest, sides: dict[str, Side]) -> Side:
    return sides[request.param]


@pytest.fixture
def scene(side: Side) -> Iterator[Scene]:
    """A session with something of everything, computed; closed again afterwards."""
    scene = Scene(side)
    yield scene
    scene.close()
