"""Ranks as actors of Ray on one host, which meet by an ID: python examples/deploy/ray_actors.py RANKS"""

import sys

import ray
import switchyard


@ray.remote
class Rank:
    def __init__(self, rank: int, size: int, address: str) -> None:
        self.comm = switchyard.init(rank, size, address)

    def sum(self) -> float:
        import numpy as np

        x = np.full(4, float(self.comm.rank))
        switchyard.all_reduce(x, "sum")
        return float(x[0])

    def close(self) -> None:
        switchyard.shutdown()


def main() -> None:
    size = int(sys.argv[1])
    ray.init()
    address = switchyard.new_id()  # Ray carries it; who does not have it cannot join
    ranks = [Rank.options(num_cpus=1).remote(rank, size, address) for rank in range(size)]
    print(ray.get([rank.sum.remote() for rank in ranks]))
    ray.get([rank.close.remote() for rank in ranks])


if __name__ == "__main__":
    main()
