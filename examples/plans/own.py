"""A reduction of one's own on any number of ranks: each writes its input to all others, and adds what has come."""

import os

import numpy as np

import switchyard

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def steps(rank):
    others = [(rank + i) % size for i in range(1, size)]
    for peer in others:
        yield {"do": "put", "from": ["input:0"], "to": f"scratch:{rank}@{peer}"}
        yield {"do": "signal", "peer": peer}
    for peer in others:
        yield {"do": "wait", "peer": peer}
    # All ranks add in one order, so all have the same bits.
    yield {"do": "reduce", "from": ["input:0" if r == rank else f"scratch:{r}" for r in range(size)], "to": "output:0"}


own = {
    "name": "own", "collective": "all-reduce", "ranks": size, "chunks": 1, "scratch": size,
    "bytes": [1024, 65536], "us": [0.5, 5000],  # by which small calls take it, and large ones do not
    "programs": [list(steps(r)) for r in range(size)],
}  # fmt: skip
switchyard.init(plans=[own])  # with torch: switchyard.communicator(group, plans=[own])

x = np.full(100, rank + 1.0, "float32")
assert switchyard.explain(x, x, call="all_reduce").startswith("plan own")
switchyard.all_reduce(x)
assert (x == size * (size + 1) / 2).all()

large = np.zeros(1 << 18, "float32")
assert not switchyard.explain(large, large, call="all_reduce").startswith("plan own")
switchyard.shutdown()
