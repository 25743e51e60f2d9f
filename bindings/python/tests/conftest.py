from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import world

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def gpus() -> int:
    """How many GPUs torch sees; it does not use them for that."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


needs_gpu = pytest.mark.skipif(gpus() == 0, reason="there is no GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_torch"):
            item.add_marker(needs_torch)
        if item.path.name.startswith("test_torch_cuda"):
            item.add_marker(needs_gpu)


@pytest.fixture(scope="session")
def worlds() -> Iterator[world.Worlds]:
    all_worlds = world.Worlds()
    yield all_worlds
    all_worlds.close()


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def plain(worlds: world.Worlds, request: pytest.FixtureRequest) -> world.World:
    """Ranks with Switchyard alone."""
    return worlds.get(request.param, world.plain)


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def gloo(worlds: world.Worlds, request: pytest.FixtureRequest) -> world.World:
    """Ranks with torch and gloo."""
    return worlds.get(request.param, world.gloo)


@pytest.fixture(params=[n for n in (2, 4, 8) if n <= max(gpus(), 2)], ids="{}-ranks".format)
def cuda(worlds: world.Worlds, request: pytest.FixtureRequest) -> world.World:
    """Ranks with torch and a GPU each; two that share it where there is one."""
    return worlds.get(request.param, world.cuda)


@pytest.fixture
def backend(worlds: world.Worlds) -> world.World:
    """Two ranks with Switchyard as torch's backend."""
    return worlds.get(2, world.backend)


Run = Callable[..., list[object]]
