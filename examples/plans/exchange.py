"""An exchange of one's own with splits: in each step two ranks swap what they have for each other."""

import math
import os

import numpy as np

import switchyard

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def schedule(size):
    # Rank r swaps with rank r ^ 1, then with r ^ 2, and so on. Ranks that are no power of two go round.
    if size & (size - 1):
        return {"orders": [[(r + i) % size for i in range(1, size)] for r in range(size)], "window": 1}
    return {"orders": [[r ^ i for i in range(1, size)] for r in range(size)], "window": 1}


def cost(nbytes, size):
    return 0.1 + nbytes / 1e6 if nbytes >= 4096 else math.inf


switchyard.register_algorithm("swaps", cost, schedule, collective="exchange", ranks=[size])
switchyard.init()

x = np.full(1000 * size * (rank + 1), rank, "int32")  # 1000 * (rank + 1) for each rank
y = np.empty(sum(1000 * (r + 1) for r in range(size)), "int32")
send, receive = [1000 * (rank + 1)] * size, [1000 * (r + 1) for r in range(size)]
assert switchyard.explain(y, x, receive, send).startswith("swaps (lowest estimate)")
switchyard.all_to_all_single(y, x, receive, send)
assert (y == np.repeat(np.arange(size), receive)).all()

few = np.zeros(size, "int32")
assert not switchyard.explain(few, few.copy()).startswith("swaps")
switchyard.shutdown()
