"""Algorithms that the process has registered."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from .. import errors
from .arguments import integer, text, type_of
from .options import one_of

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")

# The sizes of a rank's input, in bytes, for which costs are asked. The library interpolates between them.
SIZES = [1 << k for k in range(6, 31)]

# A time that no other way of a call takes, where the cost is infinite.
NEVER = 1e15

_plans: dict[str, list[dict[str, Any]]] = {}


def register(name: Any, cost: Any, schedule: Any, collective: Any, ranks: Any) -> None:
    """Keep the plans of an algorithm, one for each number of ranks."""
    if not text("name", name):
        raise errors.InvalidArgument("switchyard: name is '', want a name")
    one_of(COLLECTIVES)("collective", collective)
    for argument, value in (("cost", cost), ("schedule", schedule)):
        if not callable(value):
            raise errors.InvalidType(f"switchyard: {argument} is {type_of(value)}, want a function")
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise errors.InvalidType(f"switchyard: ranks is {type_of(ranks)}, want numbers of ranks")
    sizes = [integer("a number of ranks", size, 1) for size in ranks]
    _plans[name] = [
        {
            **_steps(schedule, size),
            "name": name, "collective": collective, "ranks": size,
            "bytes": SIZES, "us": [_time(cost, n, size) for n in SIZES],
        }
        for size in sorted(set(sizes))
    ]  # fmt: skip


def _steps(schedule: Callable[[int], Any], size: int) -> dict[str, Any]:
    plan = schedule(size)
    if not isinstance(plan, Mapping):
        raise errors.InvalidType(f"switchyard: schedule({size}) returns {type_of(plan)}, want a dict")
    wrong = [key for key in plan if key not in ("programs", "chunks", "scratch")]
    if wrong or "programs" not in plan:
        raise errors.InvalidArgument(
            f"switchyard: schedule({size}) returns a dict with {sorted(map(str, plan))}, want programs, chunks and scratch"
        )
    try:
        return {"chunks": 1, **json.loads(json.dumps(dict(plan), allow_nan=False))}
    except (TypeError, ValueError) as err:
        raise errors.InvalidArgument(f"switchyard: schedule({size}) returns what is no JSON: {err}") from None


def _time(cost: Callable[[int, int], Any], n: int, size: int) -> float:
    us = cost(n, size)
    try:
        us = float(us + 0)
    except (TypeError, ValueError):
        raise errors.InvalidType(f"switchyard: cost({n}, {size}) is {us!r}, want microseconds") from None
    if math.isnan(us) or us <= 0:
        raise errors.InvalidArgument(f"switchyard: cost({n}, {size}) is {us!r}, want positive microseconds")
    return min(us, NEVER)


def registered() -> list[dict[str, Any]]:
    """The plans as the library takes them. It leaves those that are for other numbers of ranks."""
    return [{"Text": plan, "Registered": True} for plans in _plans.values() for plan in plans]
