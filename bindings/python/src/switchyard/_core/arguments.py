"""Checks of arguments that are no tensors, with Python's words."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .. import errors


def type_of(value: Any) -> str:
    """The kind of a value, for a sentence: "None", "a str", "an int"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def integer(name: str, value: Any, least: int | None = None) -> int:
    """An integer of any kind."""
    try:
        number = operator.index(value)
    except TypeError:
        raise errors.InvalidType(f"switchyard: {name} is {value!r}, want an integer") from None
    if least is not None and number < least:
        raise errors.InvalidArgument(f"switchyard: {name} is {number}, want at least {least}")
    if not -(1 << 63) <= number < 1 << 63:
        raise errors.InvalidArgument(f"switchyard: {name} is {number}, want an integer of 64 bits")
    return number


def seconds(name: str, value: Any) -> float:
    """A duration that is neither nothing nor forever."""
    try:
        number = float(value + 0)
    except (TypeError, ValueError):
        raise errors.InvalidType(f"switchyard: {name} is {value!r}, want a number of seconds") from None
    if not 0 < number < 1e9:
        raise errors.InvalidArgument(f"switchyard: {name} is {value!r}, want a positive number of seconds")
    return number


def microseconds(name: str, value: float | None) -> int:
    """A time in microseconds that a caller may leave open, which is 0."""
    return 0 if value is None else max(int(seconds(name, value) * 1e6), 1)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise errors.InvalidType(f"switchyard: {name} is {type_of(value)}, want a string")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise errors.InvalidType(f"switchyard: {name} is {value!r}, want True or False")
    return value


def address(name: str, value: Any) -> str:
    """Where ranks meet. The library looks at what is behind the prefixes."""
    host, colon, port = text(name, value).rpartition(":")
    known = value.startswith(("@", "file://", "id:"))
    if not known and not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise errors.InvalidArgument(f'switchyard: {name} is {value!r}, want "host:port", "@name", "file:///path" or an id')
    return str(value)


def plans(value: Any) -> list[dict[str, Any]]:
    """Plans as the library takes them: files, or what their JSON says."""
    if isinstance(value, (str, bytes, os.PathLike, Mapping)) or not isinstance(value, Iterable):
        raise errors.InvalidType(f"switchyard: plans is {type_of(value)}, want a list of paths and of plans as dicts")
    return [_plan(one) for one in value]


def _plan(value: Any) -> dict[str, Any]:
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if not isinstance(path, str) or not path:
            raise errors.InvalidArgument(f"switchyard: plans has the path {path!r}, want a file")
        return {"Path": path}
    if not isinstance(value, Mapping):
        raise errors.InvalidType(f"switchyard: plans has {type_of(value)}, want a path, or a plan as a dict")
    try:
        return {"Text": json.loads(json.dumps(dict(value), allow_nan=False))}
    except (TypeError, ValueError) as err:
        raise errors.InvalidArgument(f"switchyard: plans has a dict that is no JSON: {err}") from None


def reductions(given_plans: Any, algorithm: Any) -> dict[str, Any]:
    """The options of a reducer that were given."""
    options: dict[str, Any] = {}
    if given_plans is not None:
        options["Plans"] = plans(given_plans)
    if algorithm is not None:
        options["Algorithm"] = text("algorithm", algorithm)
    return options


class Bound:
    """An object that lives in its process, such as a name of the library's. A copy of its holder holds the same one."""

    __slots__ = ()

    def __copy__(self) -> Bound:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        it = type_of(self)
        raise errors.InvalidType(
            f"switchyard: {it} lives in its process, and cannot be pickled or sent to another: save the state_dict() of "
            f"a module that has one, and load it where the module has been made with {it} of that process"
        )
