"""The pool of dispatchers of one group on one device: one for each shape, made together with all ranks when a call wants it."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import switchyard
import torch
from switchyard import errors

from ._leases import FEW, FEW_BY_TOKEN, LENT, Made
from ._results import SUMS, Shape
from ._streams import Reads

# How many dispatchers a pool keeps. A call of one shape more gives the one back that was used least recently.
MOST = 32


class Pool:
    """Dispatchers by their shapes. All ranks use it by the same calls in the same order, so each finds, makes and gives back
    what the others do."""

    def __init__(self, group: Any, device: torch.device, hosts: int) -> None:
        # Weak, because the table of engines must not keep a group alive.
        self._group, self.device, self.size = weakref.ref(group), device, int(group.size())
        self.reads = Reads(device)
        #: Dispatchers share memory and order on one host alone.
        self._shares = hosts == 1
        self._made: dict[Shape, Made] = {}
        #: Those that graphs may use, which have no place any more.
        self._replayed: list[Made] = []
        #: How many calls have brought something, which is the same on all ranks: a call that fails does so on all.
        self.calls = 0

    @property
    def group(self) -> Any:
        return self._group()

    def wanted(self, shape: Shape, tokens: int) -> Made:
        """The dispatcher for calls of a shape. One that is open has room for as many tokens as it was made for, at first the
        most of any rank."""
        if not shape.tokens:
            shape = shape._replace(open=True)
            before = self._made.get(self._key(shape))
            shape = shape._replace(tokens=before.tokens if before is not None else max(tokens, 1))
        return self.dispatcher(shape)

    def dispatcher(self, shape: Shape) -> Made:
        """A dispatcher for a shape, which all ranks make together unless one has room. Where some are in a call of another, all
        have the error, and the pool stays as it was."""
        key = self._key(shape)
        before = self._made.get(key)
        if before is not None and before.tokens >= shape.tokens:
            return before
        self.reads.refuse_capture(f"the first call of {shape.tokens} tokens of {shape.hidden} x {shape.dtype}")
        if not shape.slab and not shape.rows:
            shape = shape._replace(tokens=max(64, self.size, 1 << (shape.tokens - 1).bit_length()))
        dispatcher = self._make(shape)
        spare = key if before is not None else self._oldest() if len(self._made) >= MOST else None
        gone = None if spare is None else self._made.pop(spare)
        made = self._made[key] = Made(shape._replace(tokens=dispatcher.max_tokens), dispatcher)
        made.used = self.calls
        if gone is not None:
            self._give_back(gone)
        return made

    def close(self) -> None:
        """Give all dispatchers back that no graph holds, also behind one that cannot be closed. The loss of a rank is no error
        here: whether a dispatcher hears of it while it is closed depends on the moment, and its memory is given back anyway."""
        failed: Optional[errors.Error] = None
        for key in list(self._made):
            try:
                self._give_back(self._made.pop(key))
            except errors.PeerLost:
                pass
            except errors.Error as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _give_back(self, made: Made) -> None:
        """Give a dispatcher back that has no place any more, or keep it where a graph may replay its calls."""
        made.pooled = False
        if made.captured:
            self._replayed.append(made)
        else:
            made.close()

    def _oldest(self) -> Optional[Shape]:
        """By which the dispatcher is found that was used least recently. One in the midst of a call, or in a graph, stays."""
        free = [(made.used, key) for key, made in self._made.items() if not made.captured and not made.between_halves()]
        return min(free, key=lambda each: each[0])[1] if free else None

    def _key(self, shape: Shape) -> Shape:
        """By which the dispatcher for a shape is found."""
        if self.device.type != "cuda":
            shape = shape._replace(max_sms=0)
        return shape if shape.slab else shape._replace(tokens=int(self._few(shape)))

    def _few(self, s: Shape) -> bool:
        """Whether kernels for few tokens take calls of a shape. With a bound of rows, these are of all ranks."""
        if s.slab:
            return s.tokens <= FEW
        most = -(-s.rows // self.size) if s.rows else s.tokens
        return not s.open and 0 < s.tokens <= FEW and most <= FEW_BY_TOKEN

    def _make(self, s: Shape) -> Any:
        # An open one has one more expert on each rank, for pleas.
        more, here = (self.size if s.open else 0), s.experts // self.size
        placement = [[e // here] for e in range(s.experts)] + [[r] for r in range(more)] if more else None
        return switchyard.Dispatcher(
            s.experts + more,
            s.top_k,
            s.hidden,
            max_tokens=s.tokens,
            agree_max_tokens=s.open,
            max_rows=s.rows,
            placement=placement,
            dtype=s.dtype,
            combine_dtype=SUMS[s.dtype],
            layout="slab" if s.slab else "token_major",
            align=1,  # DeepEP's shapes
            low_latency=self._few(s),
            quantize=bool(s.quantize),
            scale_columns=bool(s.quantize),
            scale_per_token=s.scales == "row",
            scale_format=s.quantize or ("ue8m0" if s.scales == "ue8m0" else "float32"),
            sources=True,
            handles=LENT if s.slab else 1,
            share_memory=self._shares and not s.slab,  # results of others are copied at once
            share_order=self._shares,
            host_counts=self.device.type == "cuda" and not s.slab,
            max_sms=s.max_sms,
            group=self.group,
            device=self.device,
        )
