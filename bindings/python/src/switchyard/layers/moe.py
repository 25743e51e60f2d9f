"""The layer: router, dispatch, experts, combine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

import switchyard

from .. import errors
from . import plain

#: Gets "gate_up" or "down" and this rank's matrices, and returns what to multiply by.
Adapt = Callable[[str, Tensor], Tensor]

#: How long overlapped products wait for rows while none lands and the dispatch has not ended: longer than a dispatch waits
#: for a rank, whose end ends them too, and which names the rank. It bounds the wait for a dispatch that does not run at all.
PATIENCE_NS = 600_000_000_000


class Router(nn.Module):
    """Chooses experts: the largest of a softmax over a linear map. Weights add up to 1 with ``normalize``, and are float32."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, *, normalize: bool = True, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.linear = nn.Linear(hidden, experts, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights."""
        share = self.linear(x.to(self.linear.weight.dtype)).float().softmax(-1)
        weights, experts = share.topk(self.top_k)
        return experts, weights / weights.sum(-1, keepdim=True) if self.normalize else weights


class MoE(nn.Module):
    """A layer of experts over a :class:`switchyard.Dispatcher`. Each is ``down (silu(gate x) * (up x))``.

    - ``dispatcher``: it says how many experts there are, where, and which types and layout tokens have. Layers that take turns
      can share one; training needs ``handles`` for each layer. With rows by token (``layout="token_major"``) products gather
      their rows by a list, and no kernel sorts them. On a GPU ``host_counts=True`` bounds memory by what came, else it is
      the worst case, as graphs need;
    - ``inner``: how many columns gate and up have;
    - ``router``: a module that returns the experts and weights of tokens, such as :class:`Router`; ``None`` where
      :meth:`forward` is given them;
    - ``shared``: columns of an expert that all tokens have on their own rank, 0 for none. It runs while tokens are sent;
    - ``adapt``: a module or function such as :class:`LoRA`;
    - ``overlap``: on a GPU, how many multiprocessors calls without gradients leave to the dispatcher. Products then run next to
      its kernels and wait for rows as they land, and rows go back as they are made. The dispatcher has rows by expert,
      ``landed=True`` and a ``max_sms`` of at most that;
    - ``results``: a tensor of :func:`switchyard.empty` for what experts make, [max_rows, hidden], which layers of a
      dispatcher can share; by default the layer makes one, which is a collective call, and :meth:`close` gives it back.

    Parameters are ``gate_up`` [experts here, 2 * inner, hidden], the gate's rows first, and ``down`` [experts here, hidden,
    inner], of the dispatcher's ``combine_dtype``. Where its rows are float8 they are buffers of float8 with scales for 128 by
    128 elements, set by :meth:`load`, and there are no gradients.
    """

    def __init__(
        self, dispatcher: switchyard.Dispatcher, inner: int, *, router: nn.Module | None = None, shared: int = 0,
        adapt: Adapt | None = None, overlap: int = 0, results: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        d = self.dispatcher = dispatcher
        self.inner, self.router, self.adapt, self.overlap = inner, router, adapt, overlap
        local, hidden, kind = len(d.local_experts), d.hidden, getattr(torch, d.combine_dtype)
        self.device = torch.device("cuda", d._index) if d._index >= 0 else torch.device("cpu")
        self.float8 = d.row_dtype == "float8_e4m3fn"
        for name, value, unit in (("hidden", hidden, 16), ("inner", inner, 128 if self.float8 else 16)):
            if self.device.type == "cuda" and value % unit:
                raise errors.InvalidArgument(f"switchyard: layers: {name} is {value}, want a multiple of {unit} on a GPU")
        if self.float8 and hidden % 128:
            raise errors.InvalidArgument(f"switchyard: layers: hidden is {hidden}, want a multiple of 128 for float8")
        if self.float8 and (d._scale_per_token or d._exponents):
            raise errors.InvalidArgument("switchyard: layers: scales are for a row or exponents, want float32 for 128 columns")
        if overlap and (self.device.type != "cuda" or d.by_token or not d._tells_landed):
            raise errors.InvalidArgument("switchyard: layers: overlap is for a GPU, rows by expert and landed=True")
        shapes = {"gate_up": (local, 2 * inner, hidden), "down": (local, hidden, inner)}
        for name, (n, rows, columns) in shapes.items():
            if self.float8:
                self.register_buffer(name, torch.zeros(n, rows, columns, dtype=torch.float8_e4m3fn, device=self.device))
                self.register_buffer(f"{name}_scales", torch.ones(n, rows // 128, columns // 128, device=self.device))
            else:
                start = torch.randn(n, rows, columns, dtype=kind, device=self.device) * columns**-0.5
                self.register_parameter(name, nn.Parameter(start))
        self.shared = nn.ParameterList()
        if shared:
            for rows, columns in ((2 * shared, hidden), (hidden, shared)):
                self.shared.append(torch.randn(rows, columns, dtype=kind, device=self.device) * columns**-0.5)
        self._owned = results is None and self.device.type == "cuda"
        if self._owned:
            results = switchyard.empty(d.max_rows, hidden, dtype=kind, device=self.device, group=d.comm)
        self._results: tuple[Any, ...] = (results,)  # no buffer: it is no state
        self._side: Optional[torch.cuda.Stream] = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with parameters of its own over the same dispatcher. Both use the results' memory; this one gives it back."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = value if name in ("_results", "_side") else copy.deepcopy(value, memo)
        made._owned = False
        return made

    def load(self, gate_up: Tensor, down: Tensor) -> None:
        """Take matrices of this rank's experts, quantised where rows are float8."""
        with torch.no_grad():
            for name, w in (("gate_up", gate_up), ("down", down)):
                if not self.float8:
                    getattr(self, name).copy_(w)
                    continue
                for mine, new in zip((getattr(self, name), getattr(self, f"{name}_scales")), plain.quantized(w)):
                    mine.copy_(new)

    def close(self) -> None:
        """Give back the memory of the symmetric heap, together with all ranks."""
        if self._owned:
            self._owned = False
            switchyard.free(self._results[0])
            self._results = ()

    def extra_repr(self) -> str:
        return f"{self.dispatcher!r}, inner={self.inner}"

    def forward(
        self, x: Tensor, experts: Tensor | None = None, weights: Tensor | None = None, *, scales: Tensor | None = None
    ) -> Tensor:
        """x is [..., hidden]. experts and weights are [tokens, top_k], as for the dispatcher, where there is no router."""
        d, tokens = self.dispatcher, x.reshape(-1, x.shape[-1])
        if experts is None:
            if self.router is None:
                raise errors.InvalidArgument("switchyard: layers: experts is None, and the layer has no router")
            experts, weights = self.router(tokens)
        if self.float8:
            tokens, weights = tokens.detach(), None if weights is None else weights.detach()
        gradients = torch.is_grad_enabled() and not self.float8
        if self.overlap and not gradients:
            return self._overlapped(tokens, experts, weights, scales).view(x.shape)
        got = d.dispatch(tokens, experts, weights, scales=scales, async_op=bool(self.shared))
        beside = plain.swiglu(tokens, *self.shared) if self.shared else None
        got.wait()
        weigh = d.by_token or d._weighs_rows
        made = self._made(got, weigh, gradients)
        return d.combine(made, got, weighted=not weigh, bias=beside).view(x.shape)

    def matrices(self) -> tuple[Tensor, ...]:
        """The matrices that the experts multiply by in this call, and the scales of float8."""
        pair = (self.gate_up, self.down)
        if pair[0].device != self.device:
            raise errors.InvalidArgument(
                f"switchyard: layers: gate_up is on {pair[0].device}, and the layer's dispatcher on {self.device}: move it "
                "there (meta: to_empty)"
            )
        if self.float8:
            return (*pair, self.gate_up_scales, self.down_scales)
        if self.adapt is None:
            return pair
        return self.adapt("gate_up", pair[0]), self.adapt("down", pair[1])

    def _made(self, got: switchyard.Dispatched, weigh: bool, gradients: bool) -> Tensor:
        """The experts' products of a dispatch's rows."""
        d, m = self.dispatcher, self.matrices()
        rows, weights = got.rows, got.row_weights if weigh else None
        if self.device.type == "cpu":
            wide = [plain.widened(w, s) for w, s in zip(m[:2], m[2:])] if self.float8 else m
            kind = getattr(torch, d.combine_dtype)
            rows = plain.widened(rows, got.scales).to(kind) if self.float8 else rows
            wide = [w.to(kind) for w in wide]
            if d.by_token:
                return plain.by_token(rows, got.indices, weights, got.offsets, got.rank_counts, *wide)
            made = plain.by_expert(rows, got.offsets, got.counts, *wide)
            return made if weights is None else made * weights[:, None].to(made.dtype)
        from . import experts, lists

        plan = self._plan(got.tokens)
        if d._counted and not torch.cuda.is_current_stream_capturing():
            room = lists.room_of(got.host_counts().counts, plan.block)
        else:
            room = self._most(plan.block)
        offsets, counts = (got.offsets, got.rank_counts) if d.by_token else (got.offsets, got.counts)
        came = experts.Came(offsets, counts, got.indices if d.by_token else None, room)
        out = self._results[0]
        if gradients:
            if not weigh:  # combine keeps the rows for the gradients of weights
                out = torch.empty_like(out)
            return experts.apply(rows, weights, m[0], m[1], came, plan, out)
        scales = got.scales if self.float8 else None
        if self._deep(got.tokens, rows):
            from . import deepgemm

            return deepgemm.forward(rows, scales, weights, experts.Matrices(*m), came, out)
        return experts.forward(rows, scales, weights, experts.Matrices(*m), came, plan, out)[0]

    def _rows_an_expert(self, tokens: int) -> float:
        d = self.dispatcher
        return tokens * d.comm.size * d.top_k / d.experts

    def _plan(self, tokens: int) -> Any:
        from . import tables

        hopper = torch.cuda.get_device_capability(self.device) >= (9, 0)
        return tables.plan(self._rows_an_expert(tokens), self.float8, self.dispatcher.combine_dtype == "float32", hopper)

    def _deep(self, tokens: int, rows: Tensor) -> bool:
        """Whether DeepGEMM makes the products of these rows."""
        d = self.dispatcher
        if not (self.float8 and d.layout == "flat" and d._align == 128 and d.combine_dtype == "bfloat16"):
            return False
        if rows.shape[0] % 128 or not len(rows) or torch.cuda.get_device_capability(self.device) != (9, 0):
            return False
        from . import deepgemm

        return self._rows_an_expert(tokens) >= deepgemm.FEWEST and deepgemm.product() is not None

    def _most(self, block: int) -> int:
        from . import lists

        d = self.dispatcher
        local = max(len(d.local_experts), 1)
        choices = d.comm.size * d.max_tokens * min(d.top_k, local)
        return lists.room_for(choices if d.by_token else min(choices, d.max_rows), local, block)

    def _overlapped(self, tokens: Tensor, chosen: Tensor, weights: Tensor | None, scales: Tensor | None) -> Tensor:
        """The same on two streams: products on the current one, the dispatcher's second halves on another."""
        from . import experts, lists

        d, m, main = self.dispatcher, self.matrices(), torch.cuda.current_stream(self.device)
        side = self._side = self._side or torch.cuda.Stream(self.device)
        plan = self._plan(tokens.shape[0])
        words = torch.zeros(len(d.local_experts) + 2, dtype=torch.int32, device=self.device)
        ready, over, failed = words[:-2], words[-2:-1], words[-1:]
        got = d.dispatch(tokens, chosen, weights, scales=scales, async_op=True)
        beside = plain.swiglu(tokens, *self.shared) if self.shared else None
        came = experts.Came(got.offsets, got.counts, None, self._most(plan.block))
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count - self.overlap
        side.wait_stream(main)
        with torch.cuda.stream(side):
            got.wait()
            over.fill_(1)
        out = self._results[0]
        row_scales = got.scales if self.float8 else None
        waits = lists.Words(got.landed, ready, over, failed, PATIENCE_NS)
        experts.forward(got.rows, row_scales, None, experts.Matrices(*m), came, plan, out, waits, sms=sms)
        with torch.cuda.stream(side):
            y = d.combine(out, got, bias=beside, ready=ready)
        main.wait_stream(side)
        for x in (tokens, chosen, weights, scales, words, beside):
            if x is not None:
                x.record_stream(side)
        y.record_stream(main)
        return y
