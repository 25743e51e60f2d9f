"""Shapes of calls, and in torch's memory the rows of a dispatch and the ways of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._dispatchers import Live, Made
    from ._engine import Engine

_FLOAT8 = torch.float8_e4m3fn
#: The types of rows that are sent, and of their sums.
SUMS = {
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
    _FLOAT8: torch.bfloat16,
}


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


class Given:
    """The choices that a low-latency dispatch was given, which are the caller's until the combine."""

    __slots__ = ("_theirs", "_version")

    def __init__(self, theirs: Tensor) -> None:
        self._theirs = theirs
        self._version = -1 if theirs.is_inference() else theirs._version

    def changed(self) -> bool:
        """Whether torch has changed the caller's tensor since. In inference mode nobody knows."""
        return self._version >= 0 and self._theirs._version != self._version

    def says_nothing_new(self, idx: Tensor) -> bool:
        """Whether the choices of a combine are those of the dispatch."""
        return idx is self._theirs and not self.changed()


def lent(got: Any, name: str) -> Tensor:
    """A part of a dispatch that a dispatcher lends."""
    return got._side.lent(got._output, name)  # type: ignore[no-any-return]


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


class Routing:
    """Where the tokens of a dispatch went."""

    made: Optional[Made] = None
    #: Of low latency, where idx is the caller's tensor.
    given: Any = None
    #: The result that is lent, until a later call takes it.
    live: Optional[Live] = None
    #: The routing in torch's memory.
    kept: Any = None
    _by_rank: Optional[Routing] = None
    #: The lists with the copy of the choices, before somebody asks for it.
    _copy: Any = None

    def __init__(self, engine: Engine, shape: Shape, idx: Tensor, counted: bool) -> None:
        self.engine, self.shape, self.tokens, self.counted = engine, shape, idx.shape[0], counted
        self._idx: Optional[Tensor] = idx

    @property
    def idx(self) -> Tensor:
        """The choices of the tokens."""
        if self._idx is None:
            self._idx = self._copy.choices().view(self.tokens, self.shape.top_k)
            self._copy = None
        return self._idx  # type: ignore[return-value]

    def has_copy(self, lists: Any) -> None:
        """Lists of the dispatch have a copy of the choices, which were the caller's."""
        self._idx, self._copy = None, lists

    def sized(self) -> Shape:
        """The shape, with the number of tokens that there is room for."""
        return self.shape if self.made is None else self.made.shape

    def by_rank(self) -> Routing:
        """The same ways where each rank is one expert."""
        size = self.engine.size
        if self.shape.experts == size == self.shape.top_k:
            return self
        if self._by_rank is None:
            _, idx = ranks_of(self.idx, self.shape.experts, size)
            shape = self.sized()._replace(experts=size, top_k=size)
            self._by_rank = Routing(self.engine, shape, idx, self.counted)
        return self._by_rank


def ranks_of(idx: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Whether each token goes to each rank, [tokens, size]; and that as choices of ranks, -1 for none."""
    inside = torch.zeros((idx.shape[0], size + 1), dtype=torch.bool, device=idx.device)
    rank = ranks_of_choices(idx, experts, size)
    inside.scatter_(1, torch.where(rank < 0, size, rank), True)
    return inside[:, :size], choices_of(inside[:, :size])


def ranks_of_choices(idx: Tensor, experts: int, size: int) -> Tensor:
    """The rank of each choice, -1 for none."""
    return torch.where(idx < 0, -1, torch.div(idx, experts // size, rounding_mode="floor"))


def choices_of(inside: Tensor) -> Tensor:
    """A mask [tokens, ranks] as choices of ranks."""
    ranks = torch.arange(inside.shape[1], dtype=torch.int64, device=inside.device)
    return torch.where(inside, ranks, -1)
