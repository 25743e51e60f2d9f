from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_cuda.py":
            item.add_marker(pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[world.Worlds]:
    all_worlds = world.Worlds()
    yield all_worlds
    all_worlds.close()


@pytest.fixture
def pair(worlds: world.Worlds) -> world.World:
    """Two ranks with torch and gloo."""
    return worlds.get(2, world.gloo)


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def gloo(worlds: world.Worlds, request: pytest.FixtureRequest) -> world.World:
    """Ranks with torch and gloo."""
    return worlds.get(request.param, world.gloo)
