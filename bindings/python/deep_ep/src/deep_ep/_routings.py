"""Routings: where the tokens of a dispatch went, kept for as long as somebody has a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from switchyard._core.arguments import Bound
from torch import Tensor

from ._results import Shape

if TYPE_CHECKING:
    from ._engine import Engine
    from ._leases import Live, Made


class Routing(Bound):
    """Where the tokens of a dispatch went."""

    made: Optional[Made] = None
    #: The routing in torch's memory, and on a GPU the CUstream that it was made on.
    kept: Any = None
    stream: int = -1
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


class LentRouting(Routing):
    """Where the tokens of a low-latency dispatch went, whose result is lent."""

    #: The result, until a later call takes it.
    live: Optional[Live] = None

    def __init__(self, engine: Engine, shape: Shape, idx: Tensor, theirs: Tensor) -> None:
        """theirs are the choices as they were given, which are the caller's until the combine."""
        self.engine, self.shape, self.tokens, self.counted, self._idx = engine, shape, idx.shape[0], False, idx
        self.theirs = theirs
        #: torch's count of their changes. -1: in inference mode nobody knows.
        self.version = -1 if theirs.is_inference() else theirs._version

    def changed(self) -> bool:
        """Whether torch has changed the caller's choices since."""
        return self.version >= 0 and self.theirs._version != self.version


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
