"""The options of a dispatcher: what Python calls them, what Go calls them, and what they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import errors
from .arguments import flag, integer, text
from .dtypes import DTYPES

#: Bytes of an element of tokens, and of expert indices.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
INDEX_BYTES = {"int32": 4, "int64": 8}
#: The types in which sums are made, and cross.
WIDE = ("float32", "bfloat16", "float16")
LAYOUTS = ("flat", "padded", "slab", "token_major", "rank_padded")
SCALE_FORMATS = ("float32", "ue8m0", "power_of_two")


def dtype_of(*names: str) -> Callable[[str, Any], str]:
    """A check for data types of torch or numpy, or their names. It returns the name."""

    def check(argument: str, dtype: Any) -> str:
        name = str(dtype).removeprefix("torch.")
        if name.startswith("<class "):  # numpy.float32 and the like
            name = dtype.__name__
        if name not in names:
            raise errors.InvalidType(f"switchyard: {argument} is {dtype}, want {', '.join(names[:-1])} or {names[-1]}")
        return name

    return check


def one_of(values: Sequence[str]) -> Callable[[str, Any], str]:
    """A check for one of a few words."""

    def check(name: str, value: Any) -> str:
        if value not in values:
            *most, last = (f'"{v}"' for v in values)
            raise errors.InvalidArgument(f"switchyard: {name} {value!r}, want {', '.join(most)} or {last}")
        return str(value)

    return check


def placement_of(name: str, placement: Any) -> list[list[int]] | None:
    """A check for lists of ranks, one for each expert."""
    if placement is None:
        return None
    try:
        lists = [list(ranks) for ranks in placement]
    except TypeError:
        raise errors.InvalidType(f"switchyard: {name} is {placement!r}, want a list of ranks for every expert") from None
    return [[integer(name, rank) for rank in ranks] for ranks in lists]


class Option(NamedTuple):
    """An option of a dispatcher."""

    name: str
    go: str  #: Its field of dispatch.Options.
    check: Callable[[str, Any], Any]  #: The value in Python, from its name and what was given.
    encode: Callable[[Any], Any] = lambda value: value  #: The value in Go.


TABLE = (
    Option("layout", "Layout", one_of(LAYOUTS), LAYOUTS.index),
    Option("dtype", "DType", dtype_of(*BYTES), DTYPES.__getitem__),
    Option("combine_dtype", "CombineDType", dtype_of(*WIDE), DTYPES.__getitem__),
    Option("index_dtype", "IndexType", dtype_of(*INDEX_BYTES), DTYPES.__getitem__),
    Option("experts", "Experts", integer),
    Option("top_k", "TopK", integer),
    Option("hidden", "Hidden", integer),
    Option("max_tokens", "MaxTokens", integer),
    Option("agree_max_tokens", "AgreeMaxTokens", flag),
    Option("quantize", "Quantize", flag),
    Option("scale_per_token", "ScalePerToken", flag),
    Option("scale_format", "ScaleFormat", one_of(SCALE_FORMATS), SCALE_FORMATS.index),
    Option("scale_columns", "ScaleColumns", flag),
    Option("float8_combine", "Float8Combine", flag),
    Option("align", "Align", integer),
    Option("capacity", "Capacity", integer),
    Option("max_rows", "MaxRows", integer),
    Option("handles", "Handles", integer),
    Option("low_latency", "LowLatency", flag),
    Option("row_weights", "RowWeights", flag),
    Option("sources", "Sources", flag),
    Option("landed", "Landed", flag),
    Option("masks", "Masks", flag),
    Option("share_memory", "ShareMemory", flag),
    Option("share_order", "ShareOrder", flag),
    Option("host_counts", "HostCounts", flag),
    Option("max_sms", "MaxSMs", integer),
    Option("layer", "Layer", text),
    Option("placement", "Placement", placement_of, lambda ranks: None if ranks is None else {"Ranks": ranks}),
)


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """The options by their names in Python, with every value checked."""
    values = dict(given)
    if values["combine_dtype"] is None:
        name = dtype_of(*BYTES)("dtype", values["dtype"])
        values["combine_dtype"] = name if name in WIDE else "bfloat16"
    return {option.name: option.check(option.name, values[option.name]) for option in TABLE}


def encoded(values: dict[str, Any]) -> dict[str, Any]:
    """The options as Go reads them."""
    found = {option.go: option.encode(values[option.name]) for option in TABLE}
    if values["layout"] not in ("flat", "slab"):
        found["Align"] = 0  # which others do not have
    return {name: value for name, value in found.items() if value is not None}
