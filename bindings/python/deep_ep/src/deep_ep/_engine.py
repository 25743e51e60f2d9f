"""Dispatch and combine for the buffers: all that the package asks of switchyard.Dispatcher is here.

A routing lives as long as somebody wants it, in torch's memory. A dispatcher has few outputs; the latest calls of each
dispatcher, which all ranks make in the same order, have theirs. When a later call takes an output, its routing is copied out
if somebody has it yet, and combines go by that copy. Results are copied out of the outputs into torch's memory, so callers drop
results and routings when they like.

A combine of rows of another size or type than the dispatch, or after the dispatcher was made anew for more tokens, sends empty
rows once more to find its way.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import switchyard
import torch
from switchyard import errors
from torch import Tensor

# How many outputs a dispatcher keeps. Two micro-batches of a server are between dispatch and combine at a time.
OUTPUTS = 2
# The most tokens that kernels for few take.
FEW = 1024

_NO_EXPERT = re.compile(r"has expert (\d+) as choice (\d+), there are \d+ experts")

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
    #: Weights lie next to the rows of a slab.
    weighed: bool = False
    max_sms: int = 0
    #: A rank may come with more tokens than there is room for, and then all make more together.
    open: bool = False


class Result(NamedTuple):
    """The rows that a dispatch brought, in torch's memory."""

    rows: Tensor
    scales: Optional[Tensor]
    #: [rows, top_k], the local expert of each choice, -1 elsewhere and behind the last row.
    indices: Tensor
    weights: Optional[Tensor]
    #: [rows, 2], rank and token.
    sources: Tensor
    #: Choices of each local expert and rows from each rank, int32.
    counts: Tensor
    rank_counts: Tensor
    #: The same for the host and the number of rows, where the host waited for it.
    host: Any

    def tensors(self) -> tuple[Any, ...]:
        return self[:-1]


class Routing:
    """Where the tokens of a dispatch went."""

    def __init__(self, engine: Engine, shape: Shape, idx: Tensor, counted: bool) -> None:
        self.engine, self.shape, self.idx, self.counted = engine, shape, idx, counted
        self.made: Optional[Made] = None
        self.live: Optional[Live] = None
        #: The routing out of the output, once a later call took that.
        self.kept: Any = None
        #: The error of a dispatch whose host did not wait for it.
        self.failed: Optional[errors.Error] = None
        self._by_rank: Optional[Routing] = None

    def by_rank(self) -> Routing:
        """The same ways where each rank is one expert."""
        size = self.engine.size
        if self.shape.experts == size == self.shape.top_k:
            return self
        if self._by_rank is None:
            _, idx = ranks_of(self.idx, self.shape.experts, size)
            shape = self.shape._replace(experts=size, top_k=size)
            self._by_rank = Routing(self.engine, shape, idx, self.counted)
        return self._by_rank


def ranks_of(idx: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Whether each token goes to each rank, [tokens, size]; and that as choices of ranks, -1 for none."""
    inside = torch.zeros((idx.shape[0], size + 1), dtype=torch.bool, device=idx.device)
    rank = torch.div(idx, experts // size, rounding_mode="floor")
    inside.scatter_(1, torch.where(idx < 0, size, rank), True)
    return inside[:, :size], choices_of(inside[:, :size])


def choices_of(inside: Tensor) -> Tensor:
    """A mask [tokens, ranks] as choices of ranks."""
    ranks = torch.arange(inside.shape[1], dtype=torch.int64, device=inside.device)
    return torch.where(inside, ranks, -1)


class Live:
    """A dispatch whose output has not been taken by a later call."""

    def __init__(self, made: Made, got: Any, routing: Routing) -> None:
        self.made, self.got, self._routing = made, got, weakref.ref(routing)
        routing.live = self

    def retire(self) -> None:
        """Give the output back, and keep the routing for who has it yet."""
        routing = self._routing()
        if routing is not None and routing.live is self:
            routing.live = None
            if routing.kept is None and not self.got.between_halves:
                try:
                    routing.kept = self.got.keep()
                except errors.Error as error:  # of this routing, and not of the call that takes the output
                    routing.failed = error
        self.drop()

    def drop(self) -> None:
        """Give the output back."""
        got, self.got = self.got, None
        got.release()


class Made:
    """A dispatcher and the latest dispatches that it made."""

    def __init__(self, shape: Shape, dispatcher: Any) -> None:
        self.shape, self.dispatcher = shape, dispatcher
        self.ring: list[Live] = []
        self.captured = self.closed = False

    def close(self) -> None:
        for live in self.ring:
            live.drop()  # a routing of a closed dispatcher says nothing
        self.ring.clear()
        self.dispatcher.close()
        self.closed = True

    def take(self, call: Any, routing: Routing) -> Live:
        """Make a call that takes an output, for the longest of which others wait no more."""
        if len(self.ring) == OUTPUTS:
            self.ring.pop(0).retire()
        live = Live(self, call(), routing)
        self.ring.append(live)
        return live


_engines: weakref.WeakKeyDictionary[Any, dict[torch.device, Engine]] = weakref.WeakKeyDictionary()


def engine_of(group: Any, device: torch.device) -> Engine:
    """The engine of a group's ranks on a device. Buffers of a group share it."""
    engines = _engines.setdefault(communicator(group), {})
    engine = engines.get(device)
    if engine is None:
        engine = engines[device] = Engine(group, device)
    return engine


def communicator(group: Any) -> Any:
    """The dispatchers that the ranks of a group share. The first call for a group is collective."""
    return switchyard.communicator(group)


def close_all(group: Any) -> None:
    """Give the memory of a group back, together with all ranks. Routings stay as they are."""
    for engine in _engines.get(communicator(group), {}).values():
        engine.close()


class Engine:
    """Calls of one group on one device."""

    def __init__(self, group: Any, device: torch.device) -> None:
        # Weak, because the table of engines must not keep a group alive.
        self._group, self.device, self.size = weakref.ref(group), device, int(group.size())
        self._made: dict[Shape, Made] = {}
        self._replayed: list[Made] = []
        self._most = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._event: Any = None
        self._stream: Any = None

    @property
    def group(self) -> Any:
        return self._group()

    # Rounds of the host

    def agree(self, tokens: int) -> int:
        """The most tokens of any rank."""
        if self.size > 1:
            self._most[0] = tokens
            switchyard.all_reduce(self._most, "max", self.group)
            tokens = int(self._most[0])
        return tokens

    def totals(self, counts: Tensor) -> list[int]:
        """The sums over all ranks of counts [experts], for the experts of this rank."""
        mine = counts.to("cpu", torch.int64).contiguous()
        came = torch.empty_like(mine)
        switchyard.all_to_all_single(came, mine, group=self.group)
        return came.view(self.size, -1).sum(0).tolist()  # type: ignore[no-any-return]

    # Calls

    def dispatch(
        self, shape: Shape, x: Tensor, scales: Optional[Tensor], idx: Tensor, weights: Optional[Tensor], length: int = 0
    ) -> tuple[Result, Routing]:
        """Send tokens. Without a length the host waits for the counts, and the result has as many rows as came; otherwise it
        has this many rows."""
        if not shape.tokens:  # what is no expert of the caller's must be none of the dispatcher's, see _restated
            idx = torch.where(idx < shape.experts, idx, idx + self.size)
        routing = Routing(self, shape, idx, not length)
        return self.redispatch(x, scales, weights, routing, shape, length), routing

    def redispatch(
        self, x: Tensor, scales: Optional[Tensor], weights: Optional[Tensor], routing: Routing, shape: Shape, length: int = 0
    ) -> Result:
        """Send other tokens the ways of a routing, into fresh memory."""
        if not shape.tokens:
            self._refuse_capture("a call whose number of tokens the host does not know")
            shape = self._sized(shape, x.shape[0])
        try:
            live = self.send(shape, x, scales, routing, weights)
            if shape.open and live.got.host_counts().counts[-1]:
                # Some rank has more tokens than there is room for, and sent a plea in their place.
                live = self.send(shape._replace(tokens=self.agree(x.shape[0])), x, scales, routing, weights)
        except errors.InvalidArgument as error:
            routing.live = None  # nobody goes by it
            raise (self._restated(error, shape.experts) if shape.open else error) from None
        routing.shape = routing.shape._replace(tokens=live.made.shape.tokens, open=shape.open)
        result = self._result(live.got, live.made, weights is not None, length)
        self._mark()
        return result

    def _restated(self, error: errors.InvalidArgument, experts: int) -> errors.InvalidArgument:
        """The error of an index that is no expert, in the caller's numbers: the dispatcher has one more expert a rank."""
        said = _NO_EXPERT.search(str(error))
        if said is None:
            return error
        number, choice = int(said[1]) - self.size, said[2]
        text = f"has expert {number} as choice {choice}, there are {experts} experts"
        return errors.InvalidArgument(str(error).replace(said[0], text))

    def _sized(self, shape: Shape, tokens: int) -> Shape:
        """A shape of any number of tokens as one of the tokens that there is room for. The first is agreed on."""
        shape = shape._replace(open=True)
        made = self._made.get(self._key(shape))
        return shape._replace(tokens=made.shape.tokens if made is not None else self.agree(tokens))

    def combine(
        self, x: Tensor, routing: Routing, weights: Optional[Tensor] = None, bias: Sequence[Tensor] = (),
    ) -> Any:  # fmt: skip
        """The sums of rows over the ranks that each token went to, [tokens, hidden]. With weights [rows, top_k] also those of
        each choice, from the rank of the choice."""
        live = self._alive(routing, x.shape[1], x.dtype)
        rows = self._fitted("x", x, live, routing)
        if weights is not None:
            weights = self._fitted("topk_weights", weights, live, routing)
        y = live.made.dispatcher.combine(rows, live.got, weights=weights, sum_weights=weights is not None, bias=bias or None)
        self._mark()
        return y

    def sum_over_ranks(self, weights: Tensor, routing: Routing) -> Tensor:
        """The sums of weights [rows, top_k] over all ranks that each token went to, choice by choice."""
        top_k = weights.shape[1]
        wide = torch.zeros((weights.shape[0], -(-top_k // 4) * 4), dtype=torch.float32, device=weights.device)
        wide[:, :top_k] = weights
        return self.combine(wide, routing.by_rank())[:, :top_k]  # type: ignore[no-any-return]

    def send_slab(self, shape: Shape, x: Tensor, idx: Tensor, first: bool) -> tuple[Any, Routing]:
        """Send few tokens to their experts. The rows lie in the dispatcher's memory until OUTPUTS more calls were made."""
        routing = Routing(self, shape, idx, False)
        got = self.send(shape, x, None, routing, first=first).got
        self._mark()
        return got, routing

    def combine_slab(self, x: Tensor, routing: Routing, weights: Tensor, first: bool) -> Any:
        """The sums of weight times row over the experts of each token; weights [tokens, top_k] are this rank's."""
        live = self._alive(routing, x.shape[1], x.dtype)
        small = routing.shape._replace(hidden=16, dtype=torch.bfloat16, quantize="", weighed=True)
        empty = torch.empty((weights.shape[0], 16), dtype=torch.bfloat16, device=weights.device)
        beside = self.send(small, empty, None, Routing(self, small, routing.idx, False), weights).got.row_weights
        made = live.made.dispatcher.combine(x, live.got, weights=beside, async_op=first)
        self._mark()
        return made

    def ended(self, combining: Any) -> Tensor:
        """The sums of a combine whose first half was made."""
        y: Tensor = combining.wait()
        self._mark()
        return y

    def send(
        self, shape: Shape, x: Tensor, scales: Optional[Tensor], routing: Routing, weights: Optional[Tensor] = None,
        first: bool = False,
    ) -> Live:  # fmt: skip
        """Make a dispatch whose output stays where it is until OUTPUTS more of the same dispatcher have been made."""
        made = self._dispatcher(shape)
        self._follow()
        idx = routing.idx
        if idx.shape[0] > made.shape.tokens:
            x, scales, idx, weights = self._plea(made.shape, x, scales, weights)
        routing.made, routing.kept = made, None
        return made.take(lambda: made.dispatcher.dispatch(x, idx, weights, scales=scales, async_op=first), routing)

    def _plea(self, s: Shape, x: Tensor, scales: Optional[Tensor], weights: Optional[Tensor]) -> Any:
        """Tokens in place of more than there is room for: one for each rank, whose last expert says that this rank has more."""
        n = self.size
        idx = torch.full((n, s.top_k), -1, dtype=torch.int64, device=self.device)
        idx[:, 0] = torch.arange(s.experts, s.experts + n, device=self.device)
        beside = [None if t is None else t.new_zeros((n, *t.shape[1:])) for t in (scales, weights)]
        return x.new_zeros((n, s.hidden)), beside[0], idx, beside[1]

    # Dispatchers

    def _dispatcher(self, shape: Shape) -> Made:
        """A dispatcher for a shape, which all ranks make together unless one has room."""
        key = self._key(shape)
        made = self._made.get(key)
        if made is None or made.shape.tokens < shape.tokens:
            self._refuse_capture(f"the first call of {shape.tokens} tokens of {shape.hidden} x {shape.dtype}")
            if made is not None:
                self._drop(made)
            tokens = shape.tokens
            if not shape.slab and not shape.rows:
                tokens = max(64, self.size, 1 << (tokens - 1).bit_length())
            made = self._made[key] = Made(shape._replace(tokens=tokens), self._make(shape._replace(tokens=tokens)))
        made.captured = made.captured or self._capturing()
        return made

    def _key(self, shape: Shape) -> Shape:
        """By which the dispatcher for a shape is found."""
        if self.device.type != "cuda":
            shape = shape._replace(max_sms=0)
        return shape if shape.slab else shape._replace(tokens=0)

    def _make(self, s: Shape) -> Any:
        # An open one has one more expert on each rank, see _plea.
        more, here = (self.size if s.open else 0), s.experts // self.size
        placement = [[e // here] for e in range(s.experts)] + [[r] for r in range(more)] if more else None
        return switchyard.Dispatcher(
            s.experts + more,
            s.top_k,
            s.hidden,
            max_tokens=s.tokens,
            max_rows=s.rows,
            placement=placement,
            dtype=s.dtype,
            combine_dtype=SUMS[s.dtype],
            layout="slab" if s.slab else "token_major",
            low_latency=s.slab and s.tokens <= FEW,
            quantize=bool(s.quantize),
            scale_columns=bool(s.quantize),
            scale_per_token=s.scales == "row",
            scale_format=s.quantize or ("ue8m0" if s.scales == "ue8m0" else "float32"),
            row_weights=s.weighed,
            sources=True,
            handles=OUTPUTS,
            host_counts=self.device.type == "cuda" and not s.slab,
            max_sms=s.max_sms,
            group=self.group,
            device=self.device,
        )

    def _drop(self, made: Made) -> None:
        """Close a dispatcher, or keep it where a graph may replay its calls."""
        if made.captured:
            self._replayed.append(made)
        else:
            made.close()

    def close(self) -> None:
        """Close all dispatchers that no graph holds."""
        for made in self._made.values():
            self._drop(made)
        self._made.clear()

    # Outputs

    def _alive(self, routing: Routing, hidden: int, dtype: torch.dtype) -> Live:
        """An output that goes by a routing, for rows of a type: of its dispatch, for the kept routing, or of empty
        rows that go its ways."""
        if routing.failed is not None:
            raise routing.failed
        live, made, kept = routing.live, routing.made, routing.kept
        if made is not None and made.shape.hidden == hidden and SUMS[made.shape.dtype] is dtype and not made.closed:
            self._follow()
            if live is not None:
                made.ring.remove(live)
                made.ring.append(live)
                return live
            if kept is not None:
                return made.take(lambda: made.dispatcher.route(kept), routing)
        shape = routing.shape._replace(hidden=hidden, dtype=dtype, scales="", quantize="")
        empty = torch.empty((routing.idx.shape[0], hidden), dtype=dtype, device=self.device)
        return self.send(shape, empty, None, routing)

    def _fitted(self, name: str, x: Tensor, live: Live, routing: Routing) -> Tensor:
        """Rows as a combine takes them: as many as came where the host knows, else all that there is room for."""
        if routing.counted or self.device.type != "cuda":
            came = live.got.host_counts().rows
            if x.shape[0] < came or (routing.counted and x.shape[0] != came):
                raise errors.InvalidArgument(f"deep_ep: combine: {name} has {x.shape[0]} rows, the dispatch brought {came}")
            return x[:came]
        room = live.made.dispatcher.max_rows
        if x.shape[0] >= room:
            return x[:room]
        wide = torch.empty((room, x.shape[1]), dtype=x.dtype, device=x.device)
        wide[: x.shape[0]] = x
        return wide

    def _result(self, got: Any, made: Made, weighed: bool, length: int) -> Result:
        host = got.host_counts() if not length or self.device.type != "cuda" else None
        parts = [got.rows, got.scales if made.shape.scales else None, got.indices, got.row_weights if weighed else None]
        parts = [None if x is None else self._copy(x, host, length) for x in (*parts, got.sources)]
        if length:
            end = host.rows if host is not None else got.offsets[-1:]
            behind = torch.arange(length, device=self.device) >= end
            parts[2].masked_fill_(behind[:, None], -1)  # type: ignore[union-attr]
            if weighed:
                parts[3].masked_fill_(behind[:, None], 0)
        counts = torch.as_tensor(got.counts, dtype=torch.int32, device=self.device)
        if made.shape.open:
            counts = counts[:-1]
            host = None if host is None else host._replace(counts=host.counts[:-1])
        from_ranks = torch.as_tensor(got.rank_counts, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":
            counts, from_ranks = counts.clone(), from_ranks.clone()
        rows, scales, indices, weights, sources = parts
        return Result(rows, scales, indices, weights, sources, counts, from_ranks, host)  # type: ignore[arg-type]

    def _copy(self, x: Tensor, host: Any, length: int) -> Tensor:
        """A part of an output in torch's memory: as many rows as came, or a length."""
        n = x.shape[0] if host is None else host.rows
        if not length or n >= length:
            return x[: length or n].clone(memory_format=torch.contiguous_format)
        wide = torch.empty((length, *x.shape[1:]), dtype=x.dtype, device=x.device)
        wide[:n] = x[:n]
        return wide

    # Streams

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._capturing():
            raise errors.Unsupported(f"deep_ep: {what} cannot be made while a CUDA graph is captured: make one like it before")

    def _mark(self) -> None:
        """Remember that outputs have been read so far, for calls on other streams."""
        if self.device.type == "cuda" and not self._capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
            self._stream = torch.cuda.current_stream(self.device)
            self._event.record(self._stream)

    def _follow(self) -> None:
        """Have this call's stream wait until outputs that it may take have been read."""
        if self._stream is not None and not self._capturing():
            stream = torch.cuda.current_stream(self.device)
            if stream != self._stream:
                stream.wait_event(self._event)
