"""Shapes of calls, and the rows of a dispatch in torch's memory."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FLOAT8 = torch.float8_e4m3fn
#: The types of rows that are sent, and of their sums.
SUMS = {
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
    _FLOAT8: torch.bfloat16,
}
#: The types of rows that are combined.
SUMMED = frozenset(SUMS.values())


class Shape(NamedTuple):
    """The sizes of a call, the same on all ranks."""

    experts: int
    top_k: int
    hidden: int
    #: Of the tokens that are sent; sums are of the type in SUMS.
    dtype: torch.dtype
    #: The most tokens of a rank. 0: as many as one has, which the others hear of when it is more than ever before.
    tokens: int
    #: The most rows that come to a rank, 0 for all that can.
    rows: int = 0
    #: One row for each choice, in room for all tokens of all ranks, and not one for each token.
    slab: bool = False
    #: Rows arrive as float8, with scales of this format: "float32", "power_of_two" or "ue8m0".
    quantize: str = ""
    #: Tokens of float8 come with scales: "float32", "ue8m0" (four in a word of int32) or "row" (one for a token).
    scales: str = ""
    max_sms: int = 0
    #: A rank may come with more tokens than there is room for, and then all make more together.
    open: bool = False


def remember(found: dict[Any, T], key: Any, value: T) -> None:
    """Keep what checks have found for a call, such as its shape, by what all calls like it have in common."""
    if key is not None:
        if len(found) >= 256:
            found.clear()
        found[key] = value


class Came:
    """Sources and counts of the rows of a dispatch, in torch's memory."""

    __slots__ = ("_experts", "_lists")

    def __init__(self, lists: Any, experts: int) -> None:
        self._lists, self._experts = lists, experts

    @property
    def sources(self) -> Tensor:
        """[rows, 2], rank and token."""
        return self._lists.part("sources")  # type: ignore[no-any-return]

    @property
    def counts(self) -> Tensor:
        """Choices of each local expert, int32."""
        return self._lists.part("counts")[: self._experts]  # type: ignore[no-any-return]

    @property
    def rank_counts(self) -> Tensor:
        """Rows from each rank, int32."""
        return self._lists.part("rank_counts")  # type: ignore[no-any-return]


class Result:
    """The rows that a dispatch brought, in torch's memory."""

    __slots__ = ("came", "indices", "left", "rows", "scales", "weights")

    def __init__(self, left: Any, weighs: bool, experts: int) -> None:
        self.rows: Tensor = left.rows
        self.scales: Optional[Tensor] = left.scales
        #: [rows, top_k], the local expert of each choice, -1 elsewhere and behind the last row.
        self.indices: Tensor = left.indices
        self.weights: Optional[Tensor] = left.row_weights if weighs else None
        self.came, self.left = Came(left.lists, experts), left

    @property
    def chosen(self) -> list[int]:
        """The choices of each local expert, where the host waited for them."""
        host = self.left.host
        return [] if host is None else host.counts[: self.came._experts]

    def tensors(self) -> tuple[Any, ...]:
        return self.rows, self.scales, self.indices, self.weights, self.left.lists.memory
