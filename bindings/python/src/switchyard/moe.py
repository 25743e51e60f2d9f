"""Tokens to their experts and back: :class:`Dispatcher`, for torch tensors with gradients and for numpy arrays."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _sides, errors
from ._core import options
from ._core.dispatched import Combining, Dispatched, HostCounts, Result, Routing, named
from ._core.dispatcher import Calls, Counters

if TYPE_CHECKING:
    from ._types import Device, DType, Group, Numbers

__all__ = ["Combining", "Counters", "Dispatched", "Dispatcher", "HostCounts", "Result", "Routing"]

_numbers = itertools.count()


class Dispatcher(Calls):
    """Carries tokens to their experts and back, for one group of ranks.

    Making one is collective, and all ranks pass the same arguments:

    - ``experts`` in all, of which a token can have ``top_k``; ``hidden`` elements a row, of ``dtype`` (float32, bfloat16,
      float16 or float8_e4m3fn, of torch or numpy or as a name);
    - ``max_tokens``: the most tokens that one rank has in a call; with ``agree_max_tokens`` the largest that any rank passes;
    - ``layout``: "flat" puts each expert's rows after those of the one before, at multiples of ``align`` rows, in at most
      ``max_rows`` in all; "padded" gives each expert ``capacity`` rows. Padding is zero. "slab" gives each expert room for all
      tokens of all ranks, in a multiple of ``align`` rows, with undefined padding; tokens that have an expert twice need more,
      and can be an :class:`switchyard.errors.Overflow`. "token_major" has one row for a token and rank, at most
      ``max_rows``, those from each rank after those from the rank before; "rank_padded" has ``max_tokens`` rows for each
      rank. There the caller applies the experts of ``indices`` with ``row_weights``, and hands back one row a token;
    - ``align``: 0 is 1, and 64 for a slab of rows with scales: products of float8 store whole blocks of 64 rows, and with less
      room would write over the rows of the next expert;
    - ``placement``: which ranks have each expert, a list of ranks for every expert; by default the first experts are on
      rank 0, the next on rank 1 and so on;
    - ``handles``: how many dispatches can be alive at a time. Training needs one for every MoE layer;
    - ``device``: the host, or a CUDA device whose tensors are carried; ``None`` is torch's default device;
    - ``index_dtype``: of expert indices, int64 or int32. Others are converted;
    - ``combine_dtype``: of what is combined, and of gradients; by default ``dtype``, or bfloat16 where that is float8;
    - ``quantize``: rows arrive as float8_e4m3fn with ``scales``, one for 128 elements, or for a row with ``scale_per_token``.
      They are float32 or, with ``scale_format="ue8m0"``, exponents of powers of two, four in an int32, or with
      ``"power_of_two"`` powers of two in float32; with ``scale_columns`` in column-major order. Tokens of float8 come with
      such scales, row-major;
    - ``float8_combine``: sums cross as float8 with scales;
    - ``low_latency``: kernels for few tokens on GPUs: ``max_tokens`` to 1,024;
    - ``row_weights``, ``sources`` and ``landed``: what :class:`Dispatched` has of that name;
    - ``masks``: calls go on without ranks that are lost, or left out by :meth:`mask`, in the same group, with tokens at the
      copies of experts that ``placement`` has: for at most 16 ranks of one host, without gradients, :meth:`redispatch` and
      ``share_memory``; on GPUs with ``low_latency``, ``handles=1`` and rows by expert. Rows that a lost rank had not sent are
      zero, with no source. Calls of other kinds wait for it until the timeout: :func:`switchyard.shrink` makes a group
      without it, at a quiet moment;
    - ``share_memory``: its dispatches lie where those of the group's other dispatchers on this device lie that have it, in as
      much memory as the largest of them wants. Making a larger one lets it grow. A call of another overwrites ``rows`` and what
      lies next to them, and they are refused from then on: :meth:`Dispatched.take` them before. Combines go by an earlier
      dispatch all the same. There is no ``async_op``;
    - ``share_order``: its calls and those of the group's other dispatchers on this device that have it, or ``share_memory``,
      come in one order on all ranks. On the host, ranks in calls of two of them all get a
      :class:`switchyard.errors.Mismatch` with both at once, and the next call works; so do ranks of which some make one
      meanwhile. On GPUs it says nothing;
    - ``host_counts``: a GPU tells the host how many rows came, see :meth:`Dispatched.host_counts`;
    - ``max_sms``: how many multiprocessors of a GPU a call takes at most; on the host it says nothing;
    - ``layer``: the name of the model's layer, by which :func:`switchyard.metrics` and status tell its tokens by expert. Layers
      that share a dispatcher are told as one. On a GPU they are what :meth:`counters` found when it was last called.

    What it was made with is in ``experts``, ``top_k``, ``hidden``, ``max_tokens``, ``layout``, and by name in ``dtype``,
    ``index_dtype`` and ``combine_dtype``. There are also:

    - ``local_experts``: this rank's experts;
    - ``max_rows``: the most rows of a dispatch, and ``row_dtype``, their data type by name;
    - ``routing_bytes``: how large what :meth:`Dispatched.keep` makes is;
    - ``by_token``: whether a row is for a token and not for one of its experts;
    - ``comm``: the communicator; ``name``: what compiled graphs know the dispatcher by.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        *,
        max_tokens: int = 4096,
        agree_max_tokens: bool = False,
        dtype: DType = "float32",
        layout: str = "flat",
        align: int = 0,
        capacity: int = 0,
        max_rows: int = 0,
        placement: Sequence[Sequence[int]] | None = None,
        handles: int = 4,
        group: Group = None,
        device: Device = None,
        index_dtype: DType = "int64",
        combine_dtype: DType = None,
        quantize: bool = False,
        scale_per_token: bool = False,
        scale_format: str = "float32",
        scale_columns: bool = False,
        float8_combine: bool = False,
        low_latency: bool = False,
        row_weights: bool = False,
        sources: bool = False,
        landed: bool = False,
        masks: bool = False,
        share_memory: bool = False,
        share_order: bool = False,
        host_counts: bool = False,
        max_sms: int = 0,
        layer: str = "",
    ) -> None:
        given = locals()
        values = options.checked({option.name: given[option.name] for option in options.TABLE})
        place, stream = _sides.place_of(group, device)
        super().__init__(place, values, stream)
        self.name = f"switchyard:dispatcher:{next(_numbers)}"
        named[self.name] = self
        if not self.local_experts:
            rank, size = self.comm.rank, self.comm.size
            text = f"switchyard: rank {rank} of {size} has no expert of {self.experts}: it sends tokens and gets none"
            warnings.warn(text, stacklevel=2)

    def __repr__(self) -> str:
        return (
            f"<switchyard.Dispatcher rank {self.comm.rank} of {self.comm.size}: {self.experts} experts, top_k {self.top_k}, "
            f'hidden {self.hidden}, {self.dtype}, layout "{self.layout}">'
        )

    def _of_arrays(self, name: str) -> Any:
        """The dispatcher for arrays, of which an argument is one."""
        if self._index >= 0:
            raise errors.InvalidType(f"switchyard: {name} is not a tensor, and the dispatcher is on cuda:{self._index}")
        return _sides.array_moe().Arrays(self)

    def dispatch(
        self, x: Numbers, experts: Numbers, weights: Numbers | None = None, *, scales: Numbers | None = None,
        async_op: bool = False,
    ) -> Dispatched:  # fmt: skip
        """Send each token's row of ``x`` to its experts.

        ``x`` is [tokens, hidden]; ``experts`` [tokens, top_k] are the numbers of each token's experts, -1 for none;
        ``weights``, of that shape too, are what :meth:`combine` multiplies their rows by, ``None`` for 1. Tokens may be none
        and differ from rank to rank. ``scales`` go with tokens of float8. The gradient of ``x`` is the sum of those of its
        rows; that of ``weights`` comes with :meth:`combine`, and where ``row_weights`` is used with that.

        CUDA tensors are sent on the current stream, and CUDA graphs can capture it. With ``async_op`` only the first half is
        made, and :meth:`Dispatched.wait` is the second: what is enqueued between them runs while rows are on their way. Other
        dispatches may be made between them too. On the host the first half waits until all ranks have begun it.
        """
        operated = _sides.operated(self)
        if operated is not None:  # what is asked most, soonest
            got: Dispatched | None = operated.dispatch(x, experts, weights, scales, async_op)
            if got is not None:
                return got
        if _sides.is_tensor(x):
            return _sides.tensor_moe().dispatch(self, x, experts, weights, scales, async_op)
        return self._of_arrays("x").dispatch(x, experts, weights, scales, async_op)

    def redispatch(
        self, x: Numbers, dispatched: Dispatched, *, scales: Numbers | None = None, async_op: bool = False
    ) -> Dispatched:
        """Send other rows the ways of a dispatch: ``x``, and ``scales`` for float8, are for its tokens. They take the place of
        the rows that came with it, and all else in it stays. The result has the new ``rows``."""
        self._check_dispatched(dispatched)
        if _sides.is_tensor(x):
            return _sides.tensor_moe().redispatch(self, x, dispatched, scales, async_op)
        return self._of_arrays("x").redispatch(x, dispatched, scales, async_op)

    def route(self, routing: Routing) -> Dispatched:
        """Take an output whose calls go by a routing that :meth:`Dispatched.keep` made: :meth:`combine`, :meth:`redispatch`
        and gradients work with it as with the dispatch, in halves and in CUDA graphs too.

        All ranks call it where the others do, as they would :meth:`dispatch`, and it is one of the ``handles`` that can be
        alive until it is given back. ``rows`` are undefined until :meth:`redispatch` has sent some; ``indices``,
        ``row_weights``, ``scales``, ``sources`` and ``landed`` are those of the dispatch only."""
        self._check_routing(routing)
        output = self._route(routing)
        return Dispatched(self, routing._side, output, routing.tokens, routing._weights, {})

    def combine(
        self,
        rows: Numbers,
        dispatched: Dispatched | Routing,
        *,
        weights: Numbers | Sequence[float] | None = None,
        weighted: bool = True,
        token_weights: Numbers | None = None,
        bias: Numbers | Sequence[Numbers] | None = None,
        sum_weights: bool = False,
        ready: Numbers | None = None,
        out: Numbers | None = None,
        release: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Bring rows back: the result is [tokens, hidden], for each token the sum of weight times row over its experts.

        ``dispatched`` is the dispatch, or its routing, by which an output is taken for the call and given back with it.
        ``rows`` is laid out like ``dispatched.rows``, which it may be, and of ``combine_dtype``. Sums are made in float32. With
        rows by token a row is what its rank made of the token, and nothing is weighted.

        - ``weights``: float32 for each row, like ``row_weights``, instead of those of the dispatch; ``weighted=False``: none
          at all;
        - ``token_weights``: float32 [tokens, top_k], like ``weights`` of :meth:`dispatch`, instead of those of the dispatch:
          all ranks give them, each for its own tokens. With rows by expert only, and without gradients;
        - ``bias``: a tensor like the result, or two of them, which each sum begins with;
        - ``sum_weights``: return also the entries of ``weights`` for each token's choices, [tokens, top_k], 0 for those
          without an expert;
        - ``ready``: int32 words on the device, one for each of this rank's experts (with rows by token for each rank), zero at
          first. A kernel adds to one, with release semantics at system scope, as many as it has written rows. They are
          sent back as their word says so;
        - ``out``: where the result is written, [tokens, hidden] of ``combine_dtype`` on the dispatcher's device, contiguous; it
          is what is returned;
        - ``release``: give the output back with the call. Rows stay as they are until a later dispatch, and ranks wait for one
          another less;
        - ``async_op``: make the first half, and return a :class:`Combining`, whose ``wait`` is the second and returns the
          result.

        The gradient of ``rows`` is undefined where padding is, and behind the last row: mask it, or do not read it.
        ``sum_weights``, ``ready``, ``out``, ``release`` and a combine by a routing have none.
        """
        operated = _sides.operated(self)
        if (
            operated is not None and weights is None and bias is None and not sum_weights and ready is None and out is None
        ):  # fmt: skip
            y = operated.combine(rows, dispatched, weighted, token_weights, release, async_op)  # what is asked most, soonest
            if y is not None:
                return y
        self._check_way(dispatched)
        arguments = (rows, dispatched, weights, weighted, token_weights, bias, sum_weights, ready, out, release, async_op)
        if _sides.is_tensor(rows):
            return _sides.tensor_moe().combine(self, *arguments)
        return self._of_arrays("rows").combine(*arguments)

    def dispatch_backward(self, d_rows: Numbers, dispatched: Dispatched) -> Any:
        """The gradient of the tokens of a dispatch from that of its rows, both tensors of ``combine_dtype``. Autograd does this
        by itself, but for tokens that become float8, which have no gradients in torch."""
        self._check_dispatched(dispatched)
        from ._torch import moe

        return moe.tokens_gradient(self, d_rows, dispatched)
