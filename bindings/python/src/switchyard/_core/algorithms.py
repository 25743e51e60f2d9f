"""Algorithms that the process has registered."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from .. import errors
from .arguments import flag, integer, text, type_of
from .native import library
from .options import one_of

#: The collectives of plans.
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
#: The devices for whose calls an algorithm can be, with the library's names of them.
DEVICES = {"cpu": "", "cuda": "cuda"}
#: An exchange has orders of peers in place of a plan, since its messages have any sizes.
EXCHANGE = "exchange"

# The sizes of a rank's input, in bytes, for which costs are asked. The library interpolates between them.
SIZES = [1 << k for k in range(6, 31)]

# A time that no other way of a call takes, where the cost is infinite.
NEVER = 1e15

# By the name and the device of an algorithm: the library's options of groups, with what the algorithm is for each number of
# ranks.
_algorithms: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}


def register(name: Any, cost: Any, schedule: Any, collective: Any, ranks: Any, device: Any) -> None:
    """Check and keep the plans or the orders of an algorithm, for each number of ranks."""
    if not text("name", name):
        raise errors.InvalidArgument("switchyard: name is '', want a name")
    one_of((*COLLECTIVES, EXCHANGE))("collective", collective)
    one_of(tuple(DEVICES))("device", device)
    on = DEVICES[device]
    for argument, value in (("cost", cost), ("schedule", schedule)):
        if not callable(value):
            raise errors.InvalidType(f"switchyard: {argument} is {type_of(value)}, want a function")
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise errors.InvalidType(f"switchyard: ranks is {type_of(ranks)}, want numbers of ranks")
    sizes = sorted({integer("a number of ranks", size, 2) for size in ranks})
    times = {size: [_time(cost, n, size) for n in SIZES] for size in sizes}
    if collective == EXCHANGE:
        options = {
            "Exchanges": [
                {"Name": name, "Device": on, "Bytes": SIZES, "Microseconds": times[size], **_order(schedule, size)}
                for size in sizes
            ],
        }  # fmt: skip
    else:
        options = {
            "Plans": [
                {
                    "Registered": True,
                    "Device": on,
                    "Text": {
                        **_steps(schedule, size),
                        "name": name, "collective": collective, "ranks": size, "bytes": SIZES, "us": times[size],
                    },
                }
                for size in sizes
            ],
        }  # fmt: skip
    lib = library()
    lib.check(lib.check_algorithms(json.dumps(options).encode()))
    _algorithms[name, on] = options


def _scheduled(schedule: Callable[[int], Any], size: int, needed: str, others: tuple[str, ...]) -> dict[str, Any]:
    """The answer of the user's function for a number of ranks."""
    found = schedule(size)
    if not isinstance(found, Mapping):
        raise errors.InvalidType(f"switchyard: schedule({size}) returns {type_of(found)}, want a dict")
    if needed not in found or any(key not in (needed, *others) for key in found):
        *most, last = needed, *others
        raise errors.InvalidArgument(
            f"switchyard: schedule({size}) returns a dict with {sorted(map(str, found))}, want {', '.join(most)} and {last}"
        )
    return dict(found)


def _steps(schedule: Callable[[int], Any], size: int) -> dict[str, Any]:
    plan = _scheduled(schedule, size, "programs", ("chunks", "scratch"))
    try:
        return {"chunks": 1, **json.loads(json.dumps(plan, allow_nan=False))}
    except (TypeError, ValueError) as err:
        raise errors.InvalidArgument(f"switchyard: schedule({size}) returns what is no JSON: {err}") from None


def _order(schedule: Callable[[int], Any], size: int) -> dict[str, Any]:
    found = _scheduled(schedule, size, "orders", ("window", "staged", "chunk_bytes"))
    try:
        orders = [list(peers) for peers in found["orders"]]
    except TypeError:
        raise errors.InvalidType(
            f"switchyard: schedule({size}) has the orders {found['orders']!r}, want a list of peers for every rank"
        ) from None
    if len(orders) != size:
        raise errors.InvalidArgument(f"switchyard: schedule({size}) has orders of {len(orders)} ranks, want {size}")
    return {
        "Orders": [[integer("a peer in orders", peer, 0) for peer in peers] for peers in orders],
        "Window": integer("window", found.get("window", 0), 0),
        "Staged": flag("staged", found.get("staged", False)),
        "ChunkBytes": integer("chunk_bytes", found.get("chunk_bytes", 0), 0),
    }


def _time(cost: Callable[[int, int], Any], n: int, size: int) -> float:
    us = cost(n, size)
    try:
        us = float(us + 0)
    except (TypeError, ValueError):
        raise errors.InvalidType(f"switchyard: cost({n}, {size}) is {us!r}, want microseconds") from None
    if math.isnan(us) or us <= 0:
        raise errors.InvalidArgument(f"switchyard: cost({n}, {size}) is {us!r}, want positive microseconds")
    return min(us, NEVER)


def registered() -> dict[str, list[dict[str, Any]]]:
    """The options of groups that have the algorithms. The library leaves those that are for other numbers of ranks."""
    options: dict[str, list[dict[str, Any]]] = {}
    for algorithm in _algorithms.values():
        for option, values in algorithm.items():
            options.setdefault(option, []).extend(values)
    return options
