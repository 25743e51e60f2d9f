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
from functools import partial
from typing import Any, Optional

import switchyard
import torch
from switchyard import errors
from switchyard._core.dispatched import OF_TOKENS
from switchyard._torch.cuda import capturing, raw_stream
from switchyard._torch.moe_bare import bring, lease
from torch import Tensor

from ._leases import Live, Made, earlier, taken_up
from ._pool import Pool
from ._results import SUMS, Result, Shape
from ._routings import LentRouting, Routing

#: A dispatch of few tokens, its routing, and the choices of each expert.
Sent = tuple[Any, LentRouting, Tensor]


class Shared:
    """The things that buffers of a group share: its engines, and how many of the buffers are in use."""

    def __init__(self) -> None:
        self.engines: dict[torch.device, Engine] = {}
        self.users = 0


_shared: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()


class Engines:
    """The engines of a buffer's group, one for each device. Buffers of a group share them; to make the first is collective."""

    def __init__(self, group: Any) -> None:
        try:
            comm = switchyard.communicator(group)
        except errors.Unsupported as err:
            raise errors.Unsupported(f"deep_ep: the ranks of this group have no memory in common: {err}") from err
        #: On how many hosts the ranks are.
        self.hosts: int = comm._hosts
        self._shared = _shared.setdefault(comm, Shared())
        self._shared.users += 1
        #: Those that this buffer has used.
        self.own: dict[torch.device, Engine] = {}
        #: The engines and shapes of calls of few tokens, by what their arguments have in common.
        self.few: dict[Any, tuple[Engine, Shape]] = {}
        self._group = group
        self._ended = False

    def of(self, device: torch.device) -> Engine:
        engine = self.own.get(device)
        if engine is None:
            if self._ended:
                raise errors.Closed("deep_ep: this buffer was destroyed: make another one of the group")
            engines = self._shared.engines
            engine = engines.get(device)
            if engine is None:
                if self.hosts > 1 and device.type == "cuda":
                    about = f"the ranks of this group are on {self.hosts} hosts, between which only tensors of the host cross"
                    raise errors.Unsupported(f"deep_ep: a tensor is on {device}: {about}")
                engine = engines[device] = Engine(self._group, device, self.hosts)
            self.own[device] = engine
        return engine

    def has(self, engine: Engine) -> bool:
        """Whether this buffer has used an engine, and not ended."""
        return self.own.get(engine.device) is engine

    def end(self) -> None:
        """Have later calls raise. With the last buffer of the group that is in use its memory is given back, together with all
        ranks; routings stay as they are."""
        if self._ended:
            return
        self._ended = True
        self.own.clear()
        self.few.clear()
        self._shared.users -= 1
        if self._shared.users:
            return
        failed: Optional[errors.Error] = None
        for engine in self._shared.engines.values():
            try:
                engine.close()
            except errors.Error as error:
                failed = failed or error
        if failed is not None:
            raise failed


class Engine:
    """Calls of one group on one device."""

    def __init__(self, group: Any, device: torch.device, hosts: int) -> None:
        self.pool, self.device, self.size = Pool(group, device, hosts), device, int(group.size())
        self._cuda, self._reads = device.type == "cuda", self.pool.reads
        #: Dispatchers by the shapes of calls that they have served.
        self._found: dict[Shape, Made] = {}

    @property
    def group(self) -> Any:
        return self.pool.group

    def most(self, n: int) -> int:
        """The most that any rank has, by a round of the host."""
        if self.size > 1:
            with torch.inference_mode(False):
                of_all = torch.tensor([n], device="cpu")
            switchyard.all_reduce(of_all, "max", self.group)
            n = int(of_all[0])
        return n

    def totals(self, counts: Tensor) -> list[int]:
        """The sums over all ranks of counts [experts], for the experts of this rank, by a round of the host."""
        mine = counts.to("cpu", torch.int64).contiguous()
        came = torch.empty_like(mine)
        switchyard.all_to_all_single(came, mine, group=self.group)
        return came.view(self.size, -1).sum(0).tolist()  # type: ignore[no-any-return]

    def refuse_capture(self, what: str) -> None:
        self._reads.refuse_capture(what)

    def close(self) -> None:
        """Give the memory back, together with all ranks."""
        self._found.clear()
        self.pool.close()

    # Calls

    def dispatch(
        self, shape: Shape, x: Tensor, scales: Optional[Tensor], idx: Tensor, weights: Optional[Tensor], length: int = 0,
        theirs: bool = False, in_range: bool = False, by: Optional[Routing] = None,
    ) -> tuple[Result, Routing]:  # fmt: skip
        """Send tokens. Without a length the host waits for the counts, and the result has as many rows as came; otherwise it
        has this many rows. theirs says that the caller may change idx after the call, in_range that all choices are experts or
        none. By a routing, whose choices idx has, other tokens go the same ways."""
        pool, tokens, chosen = self.pool, x.shape[0], idx
        # In an open dispatcher no expert of the caller's may be none of the dispatcher's, see _restated.
        unknown = by is None and not shape.tokens and not in_range
        if unknown and (self._cuda or (idx.numel() and int(idx.max()) >= shape.experts)):
            chosen = torch.add(idx, idx >= shape.experts, alpha=self.size)
        copies = theirs and chosen is idx
        made = self._found.get(shape)
        if made is None or not made.pooled or (self._cuda and capturing()):
            made = self._ready(shape, tokens)
        while True:
            try:
                if tokens > made.tokens:
                    left = made.deliver(*self._plea(made.shape, x, chosen, weights, scales), length or None, False)
                else:
                    left = made.deliver(x, chosen, weights, scales, length or None, copies)
            except errors.Error as error:
                # On a GPU a call tells of an earlier one, for which the host did not wait, and has not been made then.
                if made.shape.open and isinstance(error, errors.InvalidArgument) and not error.earlier:
                    raise self._restated(error, shape.experts) from None
                earlier(error)
                continue
            pool.calls = made.used = pool.calls + 1
            if not made.shape.open or not left.host.counts[-1]:  # type: ignore[union-attr]
                break
            # Some rank has more tokens than there is room for, and sent a plea in their place.
            made = self._found[shape] = pool.dispatcher(made.shape._replace(tokens=max(tokens, made.tokens + 1)))
        routing = Routing(self, shape, chosen, not length) if by is None else by
        routing.made, routing.kept = made, left.routing
        if self._cuda:
            routing.stream = raw_stream(self.device.index)
        if copies:
            routing.has_copy(left.lists)
        return Result(left, weights is not None, shape.experts // self.size), routing

    def redispatch(
        self, x: Tensor, scales: Optional[Tensor], weights: Optional[Tensor], routing: Routing, shape: Shape, length: int = 0
    ) -> Result:
        """Send other tokens the ways of a routing, into fresh memory."""
        return self.dispatch(shape, x, scales, routing.idx, weights, length, by=routing)[0]

    def _ready(self, shape: Shape, tokens: int) -> Made:
        """The dispatcher for calls of a shape."""
        if not shape.tokens or shape.open:
            self.refuse_capture("a call whose number of tokens the host does not know")
        made = self._found.get(shape)
        if made is None or not made.pooled:
            made = self.pool.wanted(shape, tokens)
            self._found = {of: one for of, one in self._found.items() if one.pooled}
            self._found[shape] = made
        made.captured = made.captured or self._reads.capturing()
        return made

    def _plea(self, s: Shape, x: Tensor, idx: Tensor, weights: Optional[Tensor], scales: Optional[Tensor]) -> Any:
        """Tokens in place of more than there is room for: one for each rank, whose last expert says that this rank has more."""
        n = self.size
        idx = torch.full((n, s.top_k), -1, dtype=torch.int64, device=self.device)
        idx[:, 0] = torch.arange(s.experts, s.experts + n, device=self.device)
        beside = [None if t is None else t.new_zeros((n, *t.shape[1:])) for t in (weights, scales)]
        return x.new_zeros((n, s.hidden)), idx, beside[0], beside[1]

    def _restated(self, error: errors.InvalidArgument, experts: int) -> errors.InvalidArgument:
        """The error of an index that is no expert, in the caller's numbers: the dispatcher has one more expert a rank."""
        choice = error.choice
        if choice is None:
            return error
        expert = choice.expert
        if expert >= experts:
            expert -= self.size
        elif expert < self.size - (1 << 63):  # which dispatch has brought here from the other end of 64 bits
            expert += (1 << 64) - self.size
        return errors.InvalidArgument(
            f"deep_ep: dispatch: token {choice.token} of rank {choice.rank} has expert {expert} as choice {choice.number}, "
            f"there are {experts} experts (-1 masks a choice)"
        )

    def combine(
        self, x: Tensor, routing: Routing, weights: Optional[Tensor] = None, bias: Sequence[Tensor] = (),
    ) -> Any:  # fmt: skip
        """The sums of rows over the ranks that each token went to, [tokens, hidden]. With weights [rows, top_k] also those of
        each choice, from the rank of the choice."""
        made = self.combines(routing, x.shape[1], x.dtype)
        pool, kept = self.pool, routing.kept
        counts, n = kept.counts, x.shape[0]
        fits = n <= made.dispatcher.max_rows if counts is None else n == counts.rows  # what is asked most, soonest
        rows = x if fits else self._fitted("x", x, kept, routing)
        if weights is not None:
            weights = self._fitted("topk_weights", weights, kept, routing)
        if self._cuda and raw_stream(self.device.index) != routing.stream:
            kept.memory.record_stream(self._reads.current())
        try:
            y = bring(made.dispatcher, rows, kept, weights=weights, biases=bias)
        except errors.Error as error:
            earlier(error)
            y = bring(made.dispatcher, rows, kept, weights=weights, biases=bias)
        pool.calls = made.used = pool.calls + 1
        return y

    def combines(self, routing: Routing, hidden: int, dtype: torch.dtype) -> Made:
        """The dispatcher that combines rows of a type by a routing. If it is not that of the dispatch, all ranks find it
        together."""
        made = routing.made
        if made is None or made.closed or made.shape.hidden != hidden or SUMS[made.shape.dtype] is not dtype:
            made = self._find(routing, hidden, dtype)
        return made

    def sum_over_ranks(self, weights: Tensor, routing: Routing) -> Tensor:
        """The sums of weights [rows, top_k] over all ranks that each token went to, choice by choice."""
        top_k = weights.shape[1]
        wide = torch.zeros((weights.shape[0], -(-top_k // 4) * 4), dtype=torch.float32, device=weights.device)
        wide[:, :top_k] = weights
        return self.combine(wide, routing.by_rank())[:, :top_k]  # type: ignore[no-any-return]

    # Few tokens

    def send_few(
        self, shape: Shape, x: Tensor, given: Tensor, first: bool, checked: Optional[Tensor] = None
    ) -> Optional[Sent]:
        """Send few tokens to their experts, or make the first half of that. checked are the choices as checks have left those
        that were given. Where nobody has checked the tensors, it is None if anything about the call is unusual, and nothing has
        happened. The rows lie in the dispatcher's memory until LENT more calls were made, and the choices of each expert in
        memory of their own. The stream waits until what may be overwritten was read."""
        made, idx = self._found.get(shape), given
        if made is None or not made.pooled or (self._cuda and capturing()):
            if checked is None:
                return None
            made = self._ready(shape, 0)
        if self._cuda and raw_stream(self.device.index) != self._reads.raw:
            self._reads.follow()
        if checked is not None:
            idx = checked.to(torch.int64)
        sent = made.lend_usual(x, idx, first)
        if sent is None:
            if checked is None:
                return None
            sent = made.lend(lease, made.dispatcher, x, idx, first)
        got, counts = sent
        routing = LentRouting(self, shape, idx, given)
        Live(made, got, routing)
        self.pool.calls = made.used = self.pool.calls + 1
        if self._reads.several:
            self._reads.mark()
        return got, routing, counts

    def combine_few(
        self, x: Tensor, routing: LentRouting, weights: Tensor, first: bool, out: Optional[Tensor], checked: bool
    ) -> Any:
        """The sums of weight times row over the experts of each token, or the first half; weights [tokens, top_k] are this
        rank's. Where nobody has checked more than how many rows there are, it is None if anything about the call is unusual,
        and nothing has happened."""
        live = self._alive(routing, x.dtype) if checked else self._usual(routing)
        if live is None:
            return None
        made, by = live.made, live.made.dispatcher
        if checked:
            call: Any = partial(bring, by, x, live.got, token_weights=weights, out=out, async_op=first)
        else:
            call = partial(by._operated.bring, x, live.got, -1, OF_TOKENS, weights, False, out, first)
        try:
            y = call()
        except errors.Error as error:
            earlier(error)
            y = call()
        if y is None:
            return None
        self.pool.calls = made.used = self.pool.calls + 1
        if self._reads.several:
            self._reads.mark()
        return y

    def ended(self, combining: Any) -> Tensor:
        """The sums of a combine whose first half was made."""
        y: Tensor = combining.wait()
        if self._cuda and (self._reads.several or raw_stream(self.device.index) != self._reads.raw):
            self._reads.mark()
        return y

    # Ways back

    def _find(self, routing: Routing, hidden: int, dtype: torch.dtype) -> Made:
        """Send empty rows of a type the ways of a routing, for one that combines of that type go by."""
        made = self.pool.dispatcher(routing.sized()._replace(hidden=hidden, dtype=dtype, scales="", quantize=""))
        empty = torch.empty((routing.tokens, hidden), dtype=dtype, device=self.device)
        left = taken_up(made.deliver, empty, routing.idx, None, None, None if routing.counted else 0, False)
        routing.made, routing.kept = made, left.routing
        if self._cuda:
            routing.stream = raw_stream(self.device.index)
        return made

    def _last(self, live: Live) -> None:
        """Have a lent result be the last that a call takes."""
        live.made.ring.remove(live)
        live.made.ring.append(live)

    def _usual(self, routing: LentRouting) -> Optional[Live]:
        """The lent output of a routing whose choices are as they were, if operators combine by it."""
        live = routing.live
        if live is None or live.made.dispatcher._operated is None or routing.changed():
            return None
        if self._cuda and raw_stream(self.device.index) != self._reads.raw:
            self._reads.follow()
        if live.made.ring[-1] is not live:
            self._last(live)
        return live

    def _alive(self, routing: LentRouting, dtype: torch.dtype) -> Live:
        """An output that goes by the routing of a slab: of its dispatch, for the kept routing, or of empty rows that go its
        ways."""
        live, made, kept = routing.live, routing.made, routing.kept
        if made is not None and SUMS[made.shape.dtype] is dtype and not made.closed:
            self._reads.follow()
            if live is not None:
                self._last(live)
                return live
            if kept is not None:
                return Live(made, made.lend(made.dispatcher.route, kept), routing)
        if routing.changed():
            raise errors.InvalidArgument(
                "deep_ep: low_latency_combine: topk_idx was changed since the dispatch, and a combine of rows of another type, "
                "or after destroy, sends by it once more"
            )
        shape = routing.shape._replace(dtype=dtype, scales="", quantize="")
        empty = torch.empty((routing.tokens, shape.hidden), dtype=dtype, device=self.device)
        made = self._ready(shape, 0)
        self._reads.follow()
        return Live(made, made.lend(lease, made.dispatcher, empty, routing.idx, False)[0], routing)

    def _fitted(self, name: str, x: Tensor, kept: Any, routing: Routing) -> Tensor:
        """Rows as a combine takes them: as many as came where the host knows, else at most all that there is room for."""
        counts = kept.counts
        if counts is None:
            most = routing.made.dispatcher.max_rows  # type: ignore[union-attr]
            return x if x.shape[0] <= most else x[:most]
        if x.shape[0] < counts.rows or (routing.counted and x.shape[0] != counts.rows):
            raise errors.InvalidArgument(f"deep_ep: combine: {name} has {x.shape[0]} rows, the dispatch brought {counts.rows}")
        return x if x.shape[0] == counts.rows else x[: counts.rows]
