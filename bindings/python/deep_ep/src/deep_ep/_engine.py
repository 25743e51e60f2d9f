"""Dispatch and combine for the buffers.

Results and routings are in torch's memory. A dispatch copies them there by one call of the library and gives its output back,
so callers drop results and routings when they like. Only results of low latency are lent: a dispatcher has a few outputs for
them, which its calls take in turn, on all ranks alike. When a later call takes an output, the routing is copied out if somebody
has it yet, and combines go by that copy.

A combine of rows of another size or type than the dispatch, or after the dispatcher was made anew for more tokens, sends empty
rows once more to find its way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Optional

import switchyard
import torch
from switchyard import errors
from switchyard._torch.cuda import raw_stream
from switchyard._torch.moe_bare import bring, deliver
from torch import Tensor

from ._dispatchers import FEW, LENT, Live, Made, taken_up
from ._results import SUMS, Result, Routing, Shape

_engines: weakref.WeakKeyDictionary[Any, dict[torch.device, Engine]] = weakref.WeakKeyDictionary()


class Engines:
    """The engines of a buffer's group, one for each device. Buffers of a group share them; to make the first is collective."""

    def __init__(self, group: Any) -> None:
        comm = switchyard.communicator(group)
        if comm._across:
            raise errors.Unsupported("deep_ep: the ranks of this group are not on one host")
        self._shared = _engines.setdefault(comm, {})
        self._group, self._own = group, {}  # type: Any, dict[torch.device, Engine]
        self._ended = False

    def of(self, device: torch.device) -> Engine:
        engine = self._own.get(device)
        if engine is None:
            if self._ended:
                raise errors.Closed("deep_ep: this buffer was destroyed: make another one of the group")
            engine = self._shared.get(device)
            if engine is None:
                engine = self._shared[device] = Engine(self._group, device)
            self._own[device] = engine
        return engine

    def end(self) -> None:
        """Have later calls raise."""
        self._ended = True
        self._own.clear()


def close_all(group: Any) -> None:
    """Give the memory of a group back, together with all ranks. Routings stay as they are."""
    for engine in _engines.get(switchyard.communicator(group), {}).values():
        engine.close()


class Engine:
    """Calls of one group on one device."""

    def __init__(self, group: Any, device: torch.device) -> None:
        # Weak, because the table of engines must not keep a group alive.
        self._group, self.device, self.size = weakref.ref(group), device, int(group.size())
        self._made: dict[Shape, Made] = {}
        #: Dispatchers by the shapes of calls that they have served.
        self._found: dict[Shape, Made] = {}
        self._replayed: list[Made] = []
        with torch.inference_mode(False):  # it is written in calls of either mode
            self._most = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._event: Any = None
        self._stream: Any = None
        self._raw, self._now = -1, None  # type: int, Any

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
        self, shape: Shape, x: Tensor, scales: Optional[Tensor], idx: Tensor, weights: Optional[Tensor], length: int = 0,
        theirs: bool = False,
    ) -> tuple[Result, Routing]:  # fmt: skip
        """Send tokens. Without a length the host waits for the counts, and the result has as many rows as came; otherwise it
        has this many rows. theirs says that the caller may change idx after the call."""
        sent = idx if shape.tokens else self._shifted(idx, shape.experts)
        routing = Routing(self, shape, sent, not length)
        return self.redispatch(x, scales, weights, routing, shape, length, theirs and sent is idx), routing

    def _shifted(self, idx: Tensor, experts: int) -> Tensor:
        """Indices in which no expert of the caller's is none of the dispatcher's, see _restated."""
        if self.device.type == "cpu" and (not idx.numel() or int(idx.max()) < experts):
            return idx
        return torch.add(idx, idx >= experts, alpha=self.size)

    def redispatch(
        self, x: Tensor, scales: Optional[Tensor], weights: Optional[Tensor], routing: Routing, shape: Shape, length: int = 0,
        copies: bool = False,
    ) -> Result:  # fmt: skip
        """Send other tokens the ways of a routing, into fresh memory. With copies the routing has a copy of its indices
        after it."""
        if not shape.tokens or shape.open:
            self._refuse_capture("a call whose number of tokens the host does not know")
        made = self._ready(shape, x.shape[0])
        try:
            left = self._send(made, x, scales, routing.idx, weights, length or None, copies)
            if made.shape.open and left.host.counts[-1]:
                # Some rank has more tokens than there is room for, and sent a plea in their place.
                made = self._dispatcher(made.shape._replace(tokens=self.agree(x.shape[0])))
                left = self._send(made, x, scales, routing.idx, weights, length or None, copies)
        except errors.InvalidArgument as error:
            raise (self._restated(error, shape.experts) if made.shape.open else error) from None
        routing.made, routing.kept = made, left.routing
        if copies:
            routing.has_copy(left.lists)
        return Result(left, weights is not None, shape.experts // self.size)

    def _restated(self, error: errors.InvalidArgument, experts: int) -> errors.InvalidArgument:
        """The error of an index that is no expert, in the caller's numbers: the dispatcher has one more expert a rank."""
        choice = error.choice
        if choice is None:
            return error
        expert = choice.expert
        if expert >= experts:
            expert -= self.size
        elif expert < self.size - (1 << 63):  # which _shifted has brought here from the other end of 64 bits
            expert += (1 << 64) - self.size
        return errors.InvalidArgument(
            f"deep_ep: dispatch: token {choice.token} of rank {choice.rank} has expert {expert} as choice {choice.number}, "
            f"there are {experts} experts (-1 masks a choice)"
        )

    def _ready(self, shape: Shape, tokens: int) -> Made:
        """The dispatcher for calls of a shape. One that is open has room for as many tokens as it was made for, on which all
        ranks agree at first."""
        made = self._found.get(shape)
        if made is None:
            wanted = shape
            if not shape.tokens:
                wanted = shape._replace(open=True)
                before = self._made.get(self._key(wanted))
                wanted = wanted._replace(tokens=before.shape.tokens if before is not None else self.agree(tokens))
            made = self._dispatcher(wanted)
            self._found[shape] = made
        made.captured = made.captured or self._capturing()
        return made

    def combine(
        self, x: Tensor, routing: Routing, weights: Optional[Tensor] = None, bias: Sequence[Tensor] = (),
    ) -> Any:  # fmt: skip
        """The sums of rows over the ranks that each token went to, [tokens, hidden]. With weights [rows, top_k] also those of
        each choice, from the rank of the choice."""
        made = routing.made
        if made is None or made.shape.hidden != x.shape[1] or SUMS[made.shape.dtype] is not x.dtype or made.closed:
            made = self._find(routing, x.shape[1], x.dtype)
        kept = routing.kept
        rows = self._fitted("x", x, kept, routing)
        if weights is not None:
            weights = self._fitted("topk_weights", weights, kept, routing)
        if self.device.type == "cuda":
            kept.memory.record_stream(self._current())
        return taken_up(bring, made.dispatcher, rows, kept, weights=weights, biases=bias)

    def sum_over_ranks(self, weights: Tensor, routing: Routing) -> Tensor:
        """The sums of weights [rows, top_k] over all ranks that each token went to, choice by choice."""
        top_k = weights.shape[1]
        wide = torch.zeros((weights.shape[0], -(-top_k // 4) * 4), dtype=torch.float32, device=weights.device)
        wide[:, :top_k] = weights
        return self.combine(wide, routing.by_rank())[:, :top_k]  # type: ignore[no-any-return]

    def send_slab(self, shape: Shape, x: Tensor, idx: Tensor, first: bool) -> tuple[Any, Routing]:
        """Send few tokens to their experts. The rows lie in the dispatcher's memory until LENT more calls were made."""
        routing = Routing(self, shape, idx if idx.dtype is torch.int64 else idx.to(torch.int64), False)
        got = self._lend(shape, x, routing, first=first).got
        self._mark()
        return got, routing

    def combine_slab(self, x: Tensor, routing: Routing, weights: Tensor, first: bool, out: Optional[Tensor]) -> Any:
        """The sums of weight times row over the experts of each token, or the first half; weights [tokens, top_k] are this
        rank's."""
        live = self._alive(routing, x.shape[1], x.dtype)
        made = taken_up(bring, live.made.dispatcher, x, live.got, token_weights=weights, out=out, async_op=first)
        self._mark()
        return made

    def ended(self, combining: Any) -> Tensor:
        """The sums of a combine whose first half was made."""
        y: Tensor = combining.wait()
        self._mark()
        return y

    def _send(
        self, made: Made, x: Tensor, scales: Optional[Tensor], idx: Tensor, weights: Optional[Tensor], length: Optional[int],
        copies: bool = False,
    ) -> Any:  # fmt: skip
        """Make a dispatch, and take what it leaves; with copies also a copy of the indices."""
        if idx.shape[0] > made.shape.tokens:
            x, scales, idx, weights = self._plea(made.shape, x, scales, weights)
        return taken_up(deliver, made.dispatcher, x, idx, weights, scales, length, copies)

    def _lend(self, shape: Shape, x: Tensor, routing: Routing, first: bool = False) -> Live:
        """Make a dispatch whose result stays where it is until LENT more of the same dispatcher have been made."""
        made = self._ready(shape, 0)
        self._follow()
        routing.made, routing.kept = made, None
        call = made.dispatcher.dispatch
        return made.lend(routing, call, x, routing.idx, async_op=first)

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
            self._found.clear()
            made = self._made[key] = Made(shape._replace(tokens=tokens), self._make(shape._replace(tokens=tokens)))
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
            align=1,  # DeepEP's shapes
            low_latency=s.slab and s.tokens <= FEW,
            quantize=bool(s.quantize),
            scale_columns=bool(s.quantize),
            scale_per_token=s.scales == "row",
            scale_format=s.quantize or ("ue8m0" if s.scales == "ue8m0" else "float32"),
            sources=True,
            handles=LENT if s.slab else 1,
            share_memory=not s.slab,  # results of others are copied at once
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
        self._found.clear()

    # Ways back

    def _find(self, routing: Routing, hidden: int, dtype: torch.dtype) -> Made:
        """Send empty rows of a type the ways of a routing, for one that combines of that type go by."""
        made = self._dispatcher(routing.sized()._replace(hidden=hidden, dtype=dtype, scales="", quantize=""))
        empty = torch.empty((routing.tokens, hidden), dtype=dtype, device=self.device)
        left = self._send(made, empty, None, routing.idx, None, None if routing.counted else 0)
        routing.made, routing.kept = made, left.routing
        return made

    def _alive(self, routing: Routing, hidden: int, dtype: torch.dtype) -> Live:
        """An output that goes by the routing of a slab: of its dispatch, for the kept routing, or of empty rows that go its
        ways."""
        live, made, kept = routing.live, routing.made, routing.kept
        if made is not None and SUMS[made.shape.dtype] is dtype and not made.closed:
            self._follow()
            if live is not None:
                made.ring.remove(live)
                made.ring.append(live)
                return live
            if kept is not None:
                return made.lend(routing, made.dispatcher.route, kept)
        if routing.given.changed():
            raise errors.InvalidArgument(
                "deep_ep: low_latency_combine: topk_idx was changed since the dispatch, and a combine of rows of another type, "
                "or after destroy, sends by it once more"
            )
        shape = routing.shape._replace(hidden=hidden, dtype=dtype, scales="", quantize="")
        empty = torch.empty((routing.tokens, hidden), dtype=dtype, device=self.device)
        return self._lend(shape, empty, routing)

    def _fitted(self, name: str, x: Tensor, kept: Any, routing: Routing) -> Tensor:
        """Rows as a combine takes them: as many as came where the host knows, else at most all that there is room for."""
        counts = kept.counts
        if counts is None:
            most = routing.made.dispatcher.max_rows  # type: ignore[union-attr]
            return x if x.shape[0] <= most else x[:most]
        if x.shape[0] < counts.rows or (routing.counted and x.shape[0] != counts.rows):
            raise errors.InvalidArgument(f"deep_ep: combine: {name} has {x.shape[0]} rows, the dispatch brought {counts.rows}")
        return x if x.shape[0] == counts.rows else x[: counts.rows]

    # Streams

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._capturing():
            raise errors.Unsupported(f"deep_ep: {what} cannot be made while a CUDA graph is captured: make one like it before")

    def _current(self) -> Any:
        """The current stream of the device, which mostly is that of the last call: an object for it is made once."""
        raw = raw_stream(self.device.index)
        if raw != self._raw:
            self._raw, self._now = raw, torch.cuda.current_stream(self.device)
        return self._now

    def _mark(self) -> None:
        """Remember that outputs have been read so far, for calls on other streams."""
        if self.device.type == "cuda" and not self._capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
            self._stream = self._current()
            self._event.record(self._stream)

    def _follow(self) -> None:
        """Have this call's stream wait until outputs that it may take have been read."""
        if self._stream is not None and not self._capturing():
            stream = self._current()
            if stream != self._stream:
                stream.wait_event(self._event)
