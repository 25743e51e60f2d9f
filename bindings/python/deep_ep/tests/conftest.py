from __future__ import annotations

from collections.abc import Iterator

import pytest
import world


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
