"""Layers of experts by a dispatcher and by torch alone, on the host or a GPU. What the tests of both have in common."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import switchyard as sw

HIDDEN, TOP_K, MOST = 32, 3, 12
LAYOUTS = {
    "flat": {"align": 4},
    "padded": {"capacity": 64},
    "slab": {},
    "token_major": {},
    "rank_padded": {},
}


def sizes(rank: int, size: int) -> tuple[int, int]:
    """Experts in all, of which not every rank has as many, and tokens of a rank."""
    return 3 * size - 1, max(MOST - 2 * rank, 0)


def dispatcher(size: int, device: str, layout: str = "flat", **options) -> sw.Dispatcher:
    options = {"max_tokens": MOST, "layout": layout, "device": device, **LAYOUTS[layout], **options}
    return sw.Dispatcher(sizes(0, size)[0], TOP_K, HIDDEN, **options)


def routing(rank: int, size: int, device: str, seed: int, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
    """Tokens with their choices, of which some are masked, and their weights."""
    experts, most = sizes(rank, size)
    tokens = most if tokens is None else tokens
    g = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=g)
    idx = torch.rand(tokens, experts, generator=g).argsort(1)[:, :TOP_K]
    idx = torch.where(torch.rand(idx.shape, generator=g) < 0.2, -1, idx)
    weights = torch.rand(tokens, TOP_K, generator=g)
    return x.to(device), idx.to(device), weights.to(device)


def matrices(size: int, device: str) -> torch.Tensor:
    """What the experts multiply by: the same on all ranks."""
    g = torch.Generator().manual_seed(3)
    return (torch.randn(sizes(0, size)[0], HIDDEN, HIDDEN, generator=g) / 6).to(device)


def on(got: sw.Dispatched, name: str) -> torch.Tensor:
    return torch.as_tensor(getattr(got, name), device=got.rows.device)


def places(got: sw.Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each row, and whether there is a row. The host is not asked."""
    starts = on(got, "offsets")[:-1].contiguous()
    row = torch.arange(got.rows.shape[0], device=got.rows.device)
    group = (torch.searchsorted(starts, row, right=True) - 1).clamp(min=0)
    counts = on(got, "rank_counts" if got._dispatcher.by_token else "counts")
    return group, row < (starts + counts)[group]


def local(d: sw.Dispatcher, m: torch.Tensor) -> torch.Tensor:
    """The matrices of this rank's experts."""
    return m[torch.tensor(d.local_experts, device=m.device)]


def experts(got: sw.Dispatched, mine: torch.Tensor) -> torch.Tensor:
    """What this rank's experts make of the rows, in the layout of the rows. What is undefined, also in gradients, is masked."""
    group, used = places(got)
    rows = torch.where(used[:, None], got.rows.to(mine.dtype), 0)
    if not got._dispatcher.by_token:
        return torch.where(used[:, None], torch.tanh(torch.bmm(rows[:, None], mine[group])[:, 0]), 0)
    weights = got.row_weights
    out = torch.zeros_like(rows)
    for k in range(TOP_K):
        which = torch.where(used, got.indices[:, k], -1)
        made = torch.tanh(torch.bmm(rows[:, None], mine[which.clamp(min=0)])[:, 0])
        out = out + torch.where(which >= 0, weights[:, k], 0)[:, None].to(made.dtype) * made
    return torch.where(used[:, None], out, 0)


def reference(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(TOP_K):
        made = torch.tanh(torch.bmm(x[:, None], m[idx[:, k].clamp(min=0)])[:, 0])
        y = y + (weights[:, k] * (idx[:, k] >= 0))[:, None] * made.float()
    return y.to(x.dtype)


def layer(
    d: sw.Dispatcher, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, m: torch.Tensor, way: str = "weighted"
) -> torch.Tensor:
    mine = local(d, m)
    if way == "halves":
        got = d.dispatch(x, idx, weights, async_op=True)
        assert got.wait() is got.wait()
        return d.combine(experts(got, mine), got, async_op=True).wait()
    if way == "given":  # weights come with the rows, and go back with them
        got = d.dispatch(x, idx, weights)
        return d.combine(experts(got, mine), got, weights=None if d.by_token else got.row_weights)
    if way == "unweighted":
        got = d.dispatch(x, idx, weights)
        out = experts(got, mine)
        return d.combine(out if d.by_token else out * got.row_weights[:, None].to(out.dtype), got, weighted=False)
    got = d.dispatch(x, idx, weights)
    return d.combine(experts(got, mine), got)


def gradients(
    rank: int, size: int, device: str, layout: str, dtype: str, ways: list[str], options: dict, compiled: bool = False
) -> None:
    """Results and gradients of a layer, several times with other routing, against those of torch alone."""
    kind = getattr(torch, dtype)
    d = dispatcher(size, device, layout, dtype=dtype, row_weights=True, handles=2, **options)
    loose = kind is not torch.float32
    tolerance = {"rtol": 6e-2, "atol": 6e-2} if loose else {"rtol": 1e-4, "atol": 1e-5}
    function = layer
    if compiled:
        torch._dynamo.config.capture_dynamic_output_shape_ops = device == "cpu"  # there are as many rows as came
        function = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    m = matrices(size, device).to(kind)
    for seed, way in enumerate(ways):
        x, idx, weights = routing(rank, size, device, seed)
        x = x.to(kind)
        g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(device, kind)
        answers = []
        for ours in (True, False):
            leaves = [t.clone().requires_grad_() for t in (x, weights, m)]
            a, w, b = leaves
            y = function(d, a, idx, w, b, way) if ours else reference(a, idx, w, b)
            y.backward(g)
            answers.append([y.detach(), *(leaf.grad for leaf in leaves)])
            del y, leaves, a, w, b
        for name, mine, theirs in zip(("y", "dx", "dw"), *answers):
            about = f"seed {seed}, {way}, {name}: "
            torch.testing.assert_close(mine, theirs, **tolerance, msg=lambda text, about=about: about + text)
        grads = [a[3].float() for a in answers]
        for grad in grads:
            sw.all_reduce(grad)  # an expert's gradient is where the expert is
        torch.testing.assert_close(*grads, **tolerance)
    torch.compiler.reset()
    d.close()


def biased(rank: int, size: int, device: str) -> None:
    """Biases and summed weights, and their gradients."""
    d = dispatcher(size, device, "token_major")
    x, idx, weights = routing(rank, size, device, 5)
    biases = [torch.randn(x.shape, device=device, requires_grad=True) for _ in range(2)]
    m = matrices(size, device)
    got = d.dispatch(x, idx, weights)
    want = reference(x, idx, weights, m)
    y = d.combine(experts(got, local(d, m)), got, bias=biases[0])
    torch.testing.assert_close(y, want + biases[0], rtol=1e-4, atol=1e-5)
    y = d.combine(experts(got, local(d, m)), got, bias=biases)
    torch.testing.assert_close(y, want + biases[0] + biases[1], rtol=1e-4, atol=1e-5)
    g = torch.randn_like(y)
    y.backward(g)
    assert all(torch.equal(b.grad, g) for b in biases)
    _, sums = d.combine(experts(got, local(d, m)), got, weights=got.row_weights, sum_weights=True)
    assert torch.equal(sums, torch.where(idx >= 0, weights, 0))
    with pytest.raises(sw.errors.InvalidArgument, match="at most 2"):
        d.combine(got.rows, got, bias=[*biases, biases[0]])
    if len(x):
        with pytest.raises(sw.errors.InvalidArgument, match="bias has"):
            d.combine(got.rows, got, bias=biases[0][1:])
    del got, y
    d.close()


def again(rank: int, size: int, device: str) -> None:
    """Other rows by the ways of a dispatch."""
    d = dispatcher(size, device, sources=True)
    x, idx, weights = routing(rank, size, device, 7)
    m = matrices(size, device)
    got = d.dispatch(x.requires_grad_(), idx, weights)
    counts, loss = on(got, "counts").tolist(), (got.rows * got.rows).sum()
    other = torch.randn_like(x).requires_grad_()
    for half in (False, True):
        new = d.redispatch(other, got, async_op=half).wait()
        assert on(new, "counts").tolist() == counts
        y = d.combine(experts(new, local(d, m)), new)
        torch.testing.assert_close(y, reference(other, idx, weights, m), rtol=1e-4, atol=1e-5)
        y.sum().backward()
        want = other.detach().clone().requires_grad_()
        reference(want, idx, weights, m).sum().backward()
        torch.testing.assert_close(other.grad, want.grad, rtol=1e-4, atol=1e-5)
        other.grad = None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(sw.errors.InvalidArgument, match="tokens"):
        d.redispatch(torch.ones(len(x) + 1, HIDDEN, device=device), got)
    # Each row says where it is from.
    _, used = places(got)
    everybody = [routing(r, size, device, 7)[0] for r in range(size)]
    fresh = d.dispatch(x.detach(), idx, weights)
    for at in used.nonzero()[:, 0].tolist():
        r, t = fresh.sources[at].tolist()
        assert torch.equal(fresh.rows[at], everybody[r][t])
    del got, new, y, loss, fresh
    d.close()


def kept(rank: int, size: int, device: str, layout: str) -> None:
    """64 routings outlive their outputs, of which there are two, and serve calls in any order, until each rank drops them."""
    d = dispatcher(size, device, layout, handles=2)
    mine = local(d, matrices(size, device))
    routings = []
    for seed in range(64):
        batch = routing(rank, size, device, seed, tokens=0 if seed % 9 == rank else None)
        got = d.dispatch(*batch, async_op=seed % 2 == 0).wait()
        routings.append((batch, got.keep(), experts(got, mine)))
        assert routings[-1][1].tokens == len(batch[0])
        assert routings[-1][1].memory.numel() < d.routing_bytes + 128
        del got
    for at in torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist():
        batch, routed, made = routings[at]
        want, half = reference(*batch, matrices(size, device)), at % 2 == 1
        way = d.route(routed)
        y = torch.full_like(want, -1)
        assert d.combine(made, way, out=y) is y
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        if at % 3 == 0:  # again from the routing that was taken from a routing, with other rows, and with gradients
            again = way.keep()
            del way
            way = d.route(again)
            other = torch.randn_like(batch[0])
            new = d.redispatch(other, way, async_op=half).wait()
            fresh = d.dispatch(other, batch[1], batch[2])
            assert on(new, "counts").tolist() == on(fresh, "counts").tolist()
            assert on(new, "offsets").tolist() == on(fresh, "offsets").tolist()
            sums = [d.combine(g.rows, g, weighted=False) for g in (new, fresh)]
            assert torch.equal(*sums)
            del new
            leaves = [made.clone().requires_grad_() for _ in range(2)]
            for leaf, g in zip(leaves, (way, fresh)):
                y = d.combine(leaf, g, async_op=half)
                (y.wait() if half else y).square().sum().backward()
            _, used = places(fresh)
            assert torch.equal(leaves[0].grad[used], leaves[1].grad[used])
            del fresh, g, again
        del way, y
        if rank:
            routings[at] = None
    del routed
    other = dispatcher(size, device, layout, handles=1)
    with pytest.raises(ValueError, match="another dispatcher"):
        other.route(routings[0][1] if rank == 0 else d.dispatch(*batch).keep())
    if rank == 0:
        d.dispatch(*batch)
    with pytest.raises(TypeError, match="want what keep returned"):
        d.route(batch)
    got = d.dispatch(*batch)
    for kind, text, out in (
        (ValueError, "out is .3, 32., want", torch.empty(3, HIDDEN, device=device)),
        (TypeError, "out is torch.float64", torch.empty(len(batch[0]), HIDDEN, device=device, dtype=torch.float64)),
        (TypeError, "out is an int", 3),
        (ValueError, "not contiguous", torch.empty(HIDDEN, len(batch[0]), device=device).t()),
    ):
        with pytest.raises(kind, match=text):
            d.combine(got.rows, got, out=out)
    with pytest.raises(ValueError, match="out, and gradients"):
        d.combine(got.rows.clone().requires_grad_(), got, out=torch.empty(len(batch[0]), HIDDEN, device=device))
    last = got.keep()
    del got
    other.close()
    d.close()
    with pytest.raises(sw.errors.InvalidArgument):
        d.route(last)


def taken(rank: int, size: int, device: str, layout: str) -> None:
    """The caller owns all that a dispatch left, in exact size or in another, and the way back is a routing."""
    by_row = {"sources": True, "row_weights": layout not in ("token_major", "rank_padded")}
    d = dispatcher(size, device, layout, handles=2, host_counts=True, **by_row)
    mine = local(d, matrices(size, device))
    names = ("rows", "scales", "indices", "row_weights", "sources")
    for seed, more in enumerate((None, 0, -2, 3)):
        batch = routing(rank, size, device, seed, tokens=0 if seed % 2 == rank else None)
        got = d.dispatch(*batch, async_op=seed % 2 == 0)
        if seed % 2 == 0:
            with pytest.raises(sw.errors.InvalidArgument, match="second half"):
                got.take(1)
        got.wait()
        host, y = got.host_counts(), d.combine(experts(got, mine), got)
        made = experts(got, mine)[: host.rows].clone()
        want = {}
        for name in names[:1] + names[2:]:
            try:
                want[name] = getattr(got, name)[: host.rows].clone()
            except sw.errors.InvalidArgument:
                assert name == "indices"
        lists = [on(got, name).tolist() for name in ("counts", "offsets", "rank_counts")]
        length = None if more is None else max(host.rows + more, 0)
        left = got.take(length)
        with pytest.raises(sw.errors.Freed):
            got.keep()
        del got
        for _ in range(2):  # which take both outputs
            d.dispatch(*routing(rank, size, device, seed + 10)).release()
        n = host.rows if length is None else length
        assert left.scales is None
        assert (left.indices is None) == (layout not in ("token_major", "rank_padded"))
        for name, x in want.items():
            part, came = getattr(left, name), min(n, host.rows)
            assert part.shape == (n, *x.shape[1:])
            assert part.dtype is x.dtype
            assert torch.equal(part[:came].nan_to_num(), x[:came].nan_to_num()) or layout in ("slab", "rank_padded")
            if name in ("indices", "row_weights"):
                assert (part[came:] == (-1 if name == "indices" else 0)).all()
        known = (left.counts, left.offsets, left.rank_counts)
        assert [x.tolist() for x in known] == lists
        assert all(x.dtype is torch.int32 and x.device.type in device for x in known)
        if layout not in ("token_major", "rank_padded"):
            late = torch.rand_like(batch[2])
            weighed = d.dispatch(batch[0], batch[1], late)
            for way in (left.routing, weighed):
                assert torch.equal(d.combine(made, way, token_weights=late), d.combine(made, weighed))
            assert torch.equal(d.combine(made, weighed, token_weights=late, async_op=True).wait(), d.combine(made, weighed))
            with pytest.raises(sw.errors.InvalidArgument, match="token_weights are"):
                d.combine(made, weighed, token_weights=late[:, :1])
            with pytest.raises(sw.errors.InvalidArgument, match="token_weights and weights"):
                d.combine(made, weighed, token_weights=late, weighted=False)
            with pytest.raises(sw.errors.Unsupported, match="give weights to dispatch"):
                d.combine(made, weighed, token_weights=late.clone().requires_grad_())
            del way, weighed
        else:
            with pytest.raises(sw.errors.InvalidArgument, match="rows by token"):
                d.combine(made, left.routing, token_weights=batch[2])
        for _ in range(2):
            assert torch.equal(d.combine(made, left.routing), y)
            assert torch.equal(d.combine(made, left.routing, out=torch.empty_like(y)), y)
        with pytest.raises(sw.errors.InvalidArgument, match="route first"):
            d.combine(made, left.routing, release=True)
        with pytest.raises(sw.errors.InvalidArgument, match="route first"):
            d.combine(made, left.routing, async_op=True)
        with pytest.raises(sw.errors.Unsupported, match="route first"):
            d.combine(made.requires_grad_(), left.routing)
    d.close()


def shared(rank: int, size: int, device: str, layout: str) -> None:
    """Dispatchers that share memory have the results of those with memory of their own, while they grow."""
    options = {"handles": 1, "host_counts": True}
    kept, makers, alone = [], [], dispatcher(size, device, layout, max_tokens=MOST, **options)
    for most in (MOST, 40 * MOST, 2 * MOST):
        makers.append(dispatcher(size, device, layout, max_tokens=most, share_memory=True, **options))
        for seed, d in enumerate(makers):
            batch = routing(rank, size, device, 10 * len(makers) + seed, tokens=0 if seed % 2 == rank else None)
            got = d.dispatch(*batch)
            made = got.rows[: got.host_counts().rows].nan_to_num() * (1 + rank)
            left = got.take()
            other = alone.dispatch(*batch)
            want = alone.combine(other.rows[: other.host_counts().rows].nan_to_num() * (1 + rank), other)
            other.release()
            kept.append((d, left.routing, made, want))
        for d, way, made, want in kept:
            assert torch.equal(d.combine(made, way), want)
    got = makers[0].dispatch(*batch)
    rows = got.rows
    makers[1].dispatch(*batch).release()
    with pytest.raises(sw.errors.InvalidArgument, match="another dispatcher has made a call since"):
        makers[0].combine(rows, got)
    with pytest.raises(sw.errors.Unsupported, match="halves"):
        makers[1].dispatch(*batch, async_op=True)
    got.release()
    for d in (*makers, alone):
        d.close()


def float8(rank: int, size: int, device: str, layout: str, options: dict) -> None:
    """Tokens quantised on the way, or before."""
    tokens = sizes(rank, size)[1]
    hidden = 320
    columns, exponents = options.get("scale_columns", False), options.get("scale_format") == "ue8m0"
    make = {"max_tokens": MOST, "layout": layout, "device": device, "sources": True, "dtype": "bfloat16", **LAYOUTS[layout]}
    d = sw.Dispatcher(2 * size, 2, hidden, quantize=True, **make, **options)
    everybody = []
    for r in range(size):
        g = torch.Generator().manual_seed(r)
        everybody.append((torch.randn(sizes(r, size)[1], hidden, generator=g) * 3).bfloat16().to(device))
    x = everybody[rank]
    g = torch.Generator().manual_seed(50 + rank)
    idx = torch.rand(tokens, 2 * size, generator=g).argsort(1)[:, :2].to(device)
    weights = torch.ones(tokens, 2, device=device)

    def wide(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if exponents:
            scales = torch.exp2(scales.contiguous().view(torch.uint8).float() - 127)
        each = scales.repeat_interleave(128, -1)[..., :hidden] if not options.get("scale_per_token") else scales
        return q.float() * each

    got = d.dispatch(x, idx, weights)
    assert got.rows.dtype is torch.float8_e4m3fn
    blocks = 1 if options.get("scale_per_token") else 3
    words = 1 if exponents else blocks
    scales = got.scales
    if columns:
        assert scales.stride(-2) == 1
        scales = scales.reshape(-1, words)
    assert scales.shape[1] == words
    if options.get("scale_format") == "power_of_two":
        assert (torch.frexp(scales[places(got)[1].nonzero()[:, 0]])[0] == 0.5).all()
    _, used = places(got)
    at = used.nonzero()[:, 0]
    source = got.sources[at].long()
    want = torch.stack([everybody[r][t] for r, t in source.tolist()]) if len(at) else x[:0]
    back = wide(got.rows.float()[at], scales[at])
    torch.testing.assert_close(back, want.float(), rtol=1 / 8, atol=1 / 8)
    with pytest.raises(sw.errors.Unsupported, match="float8 have no gradient"):
        d.dispatch(x.clone().requires_grad_(), idx, weights)
    # The gradient of the tokens, by hand: of a sum of rows each token gets one for each row.
    ones = torch.ones(got.rows.shape, dtype=torch.bfloat16, device=device)
    dx = d.dispatch_backward(ones, got)
    owners = idx // 2 if d.by_token else torch.arange(2, device=device).expand_as(idx)
    rows_of = torch.where(owners[:, :1] == owners[:, 1:], 1, 2) if len(idx) else idx[:, :1]
    assert torch.equal(dx.float(), rows_of.expand_as(dx).float())
    # Tokens that are float8 before, with scales that tell them apart.
    if not options:
        given = sw.Dispatcher(2 * size, 2, hidden, **{**make, "dtype": torch.float8_e4m3fn})
        tokens8 = torch.ones(tokens, hidden, device=device).to(torch.float8_e4m3fn)
        scales8 = torch.arange(tokens, device=device)[:, None] + torch.tensor([100.0 * rank, 1000, 2000], device=device)
        came = given.dispatch(tokens8, idx, weights, scales=scales8)
        assert came.rows.dtype is torch.float8_e4m3fn
        assert (came.rows.float()[at] == 1).all()
        sent = torch.tensor([[100.0 * r + t, 1000 + t, 2000 + t] for r, t in source.tolist()], device=device).view(-1, 3)
        assert torch.equal(came.scales[at], sent)
        del came
        given.close()
    del got, ones, scales
    d.close()


def lifetimes(rank: int, size: int, device: str) -> None:
    """An output lives as long as what needs it, and no longer."""
    d = sw.Dispatcher(size, 1, 16, max_tokens=8, handles=2, device=device, sources=True)
    x, idx = torch.ones(8, 16, device=device, requires_grad=True), torch.full((8, 1), rank, device=device)
    got = d.dispatch(x.detach(), idx)
    rows, sources = got.rows[2:5], got.sources
    del got
    other = d.dispatch(x.detach() * 2, idx)
    with pytest.raises(sw.errors.NoHandle):
        d.dispatch(x.detach(), idx)
    assert rows[0, 0].item() == 1
    del rows
    with pytest.raises(sw.errors.NoHandle):
        d.dispatch(x.detach(), idx)
    del sources
    third = d.dispatch(x.detach() * 3, idx)
    assert (other.rows[0, 0].item(), third.rows[0, 0].item()) == (2, 3)
    with pytest.raises(sw.errors.InvalidArgument, match="are alive: 2"):
        d.close()
    third.release()
    third.release()
    with pytest.raises(sw.errors.Freed):
        d.combine(third.rows, third)
    del other, third
    # Backward gives back what only gradients need, while the loss is still there.
    losses = []
    for _ in range(10):
        got = d.dispatch(x, idx)
        loss = d.combine(got.rows * 3, got).sum()
        del got
        loss.backward()
        losses.append(loss)
    assert x.grad[0, 0].item() == 30
    # A combine that gives its dispatch back.
    for k in range(10):
        got = d.dispatch(x.detach() * k, idx)
        assert d.combine(got.rows, got, release=True)[0, 0].item() == k
        with pytest.raises(sw.errors.Freed):
            d.combine(got.rows, got)
    with pytest.raises(sw.errors.InvalidArgument, match="gradients need"):
        d.combine(d.dispatch(x, idx).rows, d.dispatch(x, idx), release=True)
    del got, loss, losses
    d.close()


def two_at_a_time(rank: int, size: int, device: str, layout: str, options: dict) -> None:
    """Two micro-batches take turns, half by half."""
    d = dispatcher(size, device, layout, handles=2, **options)
    m = matrices(size, device)
    for seed in range(6):
        batches = [routing(rank, size, device, 20 + 2 * seed + k) for k in range(2)]
        got = [d.dispatch(*b, async_op=True) for b in batches]
        out = []
        for g in got:
            g.wait()
            out.append(d.combine(experts(g, local(d, m)), g, async_op=True))
        for b, o in zip(batches, out):
            torch.testing.assert_close(o.wait(), reference(*b, m), rtol=1e-4, atol=1e-5)
            assert o.wait() is o.wait()
        got, g = [], None
    got = [d.dispatch(*batches[0])]
    with pytest.raises(sw.errors.InvalidArgument, match="half"):
        d.combine(got[0].rows, d.dispatch(*batches[0], async_op=True))
    del got, g, out, o
    d.close()


def counted(rank: int, size: int, device: str) -> None:
    """What the host hears."""
    d = dispatcher(size, device, "flat", host_counts=True)
    x, idx, weights = routing(rank, size, device, 9)
    got = d.dispatch(x, idx, weights)
    host = got.host_counts()
    assert host.rows == got.num_rows == host.offsets[-1]
    assert host.counts == on(got, "counts").tolist()
    assert host.offsets == on(got, "offsets").tolist()
    assert host.rank_counts == on(got, "rank_counts").tolist()
    m = matrices(size, device)
    parts = [torch.tanh(rows @ m[e]) for e, rows in zip(got.experts, got.expert_rows())]
    out = torch.zeros(host.rows, HIDDEN, device=device)  # as many as came
    for part, first in zip(parts, host.offsets):
        out[first : first + len(part)] = part
    torch.testing.assert_close(d.combine(out, got), reference(x, idx, weights, m), rtol=1e-4, atol=1e-5)
    counters = d.counters()
    assert sum(counters.choices) == int((idx >= 0).sum())
    assert counters.bytes == d.traffic()
    assert len(counters.waited) == size
    if host.rows > 1:
        with pytest.raises(sw.errors.InvalidArgument, match="rows has"):
            d.combine(out[1:], got)
    del got
    d.close()


def refused(rank: int, size: int, device: str) -> None:
    """Wrong arguments, before anything is sent."""
    d = dispatcher(size, device, "token_major", handles=1)
    x, idx, weights = routing(rank, size, device, 11, tokens=4)
    for kind, text, arguments in (
        (TypeError, "x is torch.float64", (x.double(), idx, weights)),
        (ValueError, "want rows of 32", (x[:, :16], idx, weights)),
        (TypeError, "experts is torch.float32", (x, weights, weights)),
        (ValueError, "want .4, 3. for both", (x, idx[:2], weights)),
        (ValueError, "want .4, 3. for both", (x, idx, weights[:, :2])),
        (ValueError, r"experts is .4, 2., want .4, 3.$", (x, idx[:, :2])),
        (ValueError, "13 tokens", (x.new_ones(13, HIDDEN), idx.new_zeros(13, TOP_K))),
    ):
        with pytest.raises(kind, match=text):
            d.dispatch(*arguments)
    got = d.dispatch(x.t().contiguous().t(), idx.int(), weights.double())  # converted
    for kind, text, call in (
        (ValueError, "rows has", lambda: d.combine(got.rows[:1], got)),
        (TypeError, "rows is torch.float64", lambda: d.combine(got.rows.double(), got)),
        (ValueError, "weighted=False", lambda: d.combine(got.rows, got, weights=got.row_weights, weighted=False)),
        (ValueError, "the rows lie by token", lambda: got.expert_rows()),
        (ValueError, "has no sources", lambda: got.sources),
        (ValueError, "has no landed", lambda: got.landed),
        (TypeError, "want what dispatch returned", lambda: d.combine(got.rows, got.rows)),
    ):
        with pytest.raises(kind, match=text):
            call()
    other = dispatcher(size, device, "token_major", handles=1)
    with pytest.raises(ValueError, match="another dispatcher"):
        other.combine(got.rows, got)
    got = None
    other.close()
    d.close()


def overflow(rank: int, size: int, device: str) -> None:
    """What does not fit is every rank's error, and the next one fits."""
    d = sw.Dispatcher(size, 1, 16, max_tokens=8, layout="padded", capacity=8, device=device)
    x, weights = torch.ones(8, 16, device=device), torch.ones(8, 1, device=device)
    here = torch.full((8, 1), rank, device=device)
    wrong = here.clone()
    wrong[3] += size  # the only one: a GPU names any of several

    def fails(idx: torch.Tensor) -> None:
        got = d.dispatch(x, idx, weights)
        torch.cuda.synchronize()  # on the host the call has failed
        d.combine(got.rows, got)

    for _ in range(3):
        text = f"expert 0 on rank 0 would get {8 * size} rows, its capacity is 8"
        with pytest.raises(sw.errors.Overflow, match=text):
            fails(torch.zeros_like(here))
        sw.barrier()
        got = d.dispatch(x * 2, here, weights)
        assert (d.combine(got.rows, got) == 2).all()
        with pytest.raises(sw.errors.InvalidArgument, match=f"token 3 of rank 0 has expert {size} as choice 0") as caught:
            fails(wrong if rank == 0 else here)
        assert caught.value.choice == (0, 3, 0, size)
        sw.barrier()
    del got, caught  # its traceback has the output of the call that failed
    d.close()
