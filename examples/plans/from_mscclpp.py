"""Makes a plan of an execution plan of MSCCL++: python from_mscclpp.py THEIRS.json > OURS.json

MSCCL++ runs several thread blocks on a GPU, and a plan has one list of steps for a rank. The script runs the thread blocks of all GPUs
once, each as far as it can go without what it waits for, and writes down the order of every GPU. Ranks that keep to that order end.

- A channel is a semaphore: the k-th channel between two GPUs has number k.
- A chunk of packets, which carry data and flag in one word, is a put and a signal with a semaphore of its own.
- Thread blocks that share an operation: the first of them does all of it. A pipeline runs one round.
- A plan in place writes its input. Here it has a copy: in the output, or in scratch for a reduce-scatter.

Operations of a switch (NVLS) have no counterpart. The library checks the plan that comes out as it checks all plans.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque

COLLECTIVES = {"allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather", "alltoall": "all-to-all"}
MOVES = {"put", "pws", "pwsf", "get", "copy", "ppkt", "rppkt", "cpkt", "upkt"}
REDUCTIONS = {"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"}
SIGNALS, WAITS = {"signal", "rlxsignal", "pws", "pwsf"}, {"wait", "rlxwait"}
NOTHING = {"nop", "flush"}  # they order the work of one thread block, which steps are in any case


class Refused(Exception):
    """The plan has what a plan of Switchyard cannot have."""


class Block:
    """A thread block: the operations that it has still to do, and what its numbers mean."""

    def __init__(self, gpu: dict, described: dict) -> None:
        self.rank, self.number = gpu["id"], described["id"]
        self.ops = deque(op for outer in described["ops"] for op in outer.get("ops", [outer]))
        self.arrived = None  # at a barrier: how many have to come
        self.channels = {c["channel_type"]: c["channel_ids"] for c in described["channels"]}
        refs = described.get("remote_buffer_refs", [])
        self.buffers = {r["access_channel_type"]: [gpu["remote_buffers"][i] for i in r["remote_buffer_ids"]] for r in refs}


class Converter:
    def __init__(self, plan: dict) -> None:
        self.gpus = sorted(plan["gpus"], key=lambda g: g["id"])
        self.ranks = len(self.gpus)
        if plan["collective"] not in COLLECTIVES:
            raise Refused(f"collective {plan['collective']!r}, want one of {', '.join(COLLECTIVES)}")
        self.name, self.collective = plan["name"], COLLECTIVES[plan["collective"]]
        first = self.gpus[0]
        self.inputs, self.outputs = first["input_chunks"], first["output_chunks"] or first["input_chunks"]
        self.scratch = max(g["scratch_chunks"] for g in self.gpus)
        self.place_of = {"i": ("input", 0), "o": ("output", 0), "s": ("scratch", 0)}
        self.in_place = plan["inplace"]
        if self.in_place and self.collective == "reduce-scatter":
            self.place_of["i"] = self.place_of["o"] = ("scratch", self.scratch)
        elif self.in_place:
            self.place_of["i"] = self.place_of["o"]
        self.steps: list[list[dict]] = [[] for _ in self.gpus]
        self.signals: Counter = Counter()  # by source, destination and semaphore
        self.semaphores: Counter = Counter()  # how many there are, by source and destination
        self.packets: dict = {}  # chunks of scratch with packets, by rank and chunk: who sent them with which semaphore, until waited for
        self.counts = [[s["init_value"] for s in g.get("semaphores", [])] for g in self.gpus]
        self.barriers: Counter = Counter()
        self.peers = [self._channels(g) for g in self.gpus]

    def _channels(self, gpu: dict) -> dict[str, list[tuple[int, int]]]:
        """The peer and the semaphore of every channel, by kind."""
        found: dict[str, list[tuple[int, int]]] = {}
        for described in sorted(gpu["channels"], key=lambda c: c["channel_type"]):
            for peer in described.get("connected_to", []):
                number = self.semaphores[gpu["id"], peer]
                self.semaphores[gpu["id"], peer] += 1
                found.setdefault(described["channel_type"], []).append((peer, number))
        return found

    def convert(self) -> dict:
        if self.in_place:
            self._copy_inputs()
        blocks = [Block(g, b) for g in self.gpus for b in g["threadblocks"]]
        while any(b.ops for b in blocks):
            moved = False
            for block in blocks:
                while block.ops and self._ready(block, block.ops[0]):
                    self._run(block, block.ops.popleft())
                    moved = True
            if not moved:
                stuck = next(b for b in blocks if b.ops)
                raise Refused(f"GPU {stuck.rank}, thread block {stuck.number} waits for ever in {json.dumps(stuck.ops[0])}")
        if self.in_place and self.collective == "reduce-scatter":
            for rank, steps in enumerate(self.steps):
                for k in range(self.outputs):
                    steps.append({"do": "copy", "from": [f"scratch:{self.scratch + rank * self.outputs + k}"], "to": f"output:{k}"})
            self.scratch += self.inputs
        blocks_of_input = 1 if self.collective in ("all-reduce", "all-gather") else self.ranks
        return {
            "name": self.name, "collective": self.collective, "ranks": self.ranks, "chunks": self.inputs // blocks_of_input,
            "scratch": self.scratch, "programs": self.steps,
        }  # fmt: skip

    def _copy_inputs(self) -> None:
        """Puts each rank's input where the plan expects it, and lets nobody touch it before."""
        buffer, base = self.place_of["i"]
        for rank, steps in enumerate(self.steps):
            first = base + (rank * self.inputs if self.collective == "all-gather" else 0)
            steps += [{"do": "copy", "from": [f"input:{k}"], "to": f"{buffer}:{first + k}"} for k in range(self.inputs)]
        touched = sorted({(b["rank"], g["id"]) for g in self.gpus for b in g["remote_buffers"] if b["type"] != "s"})
        ready = {pair: self._semaphore(*pair) for pair in touched}
        for (owner, other), number in ready.items():
            self.steps[owner].append({"do": "signal", "peer": other, "semaphore": number})
        for (owner, other), number in ready.items():
            self.steps[other].append({"do": "wait", "peer": owner, "semaphore": number})

    def _semaphore(self, source: int, destination: int) -> int:
        self.semaphores[source, destination] += 1
        return self.semaphores[source, destination] - 1

    def _connections(self, block: Block, op: dict) -> list[tuple[int, int]]:
        kind = op["channel_type"]
        return [self.peers[block.rank][kind][block.channels[kind][i]] for i in op["channel_ids"]]

    def _ready(self, block: Block, op: dict) -> bool:
        """Whether what an operation waits for has happened."""
        name, counts = op["name"], self.counts[block.rank]
        if name in WAITS:
            return all(self.signals[peer, block.rank, number] > 0 for peer, number in self._connections(block, op))
        if name == "sem_acquire":
            return all(counts[i] > 0 for i in op["semaphore_ids"])
        if name == "barrier":
            key, size = (block.rank, op["barrier_id"]), op["num_threadblocks"]
            if block.arrived is None:
                self.barriers[key] += 1
                block.arrived = -(-self.barriers[key] // size) * size
            return self.barriers[key] >= block.arrived
        return all(chunk in self.packets for chunk in self._packets_read(block, op))

    def _packets_read(self, block: Block, op: dict) -> list[tuple[int, int]]:
        refs = op.get("src_buff", []) if op["name"].endswith("pkt") and self._first_of_group(op) else []
        return [(block.rank, r["index"] + k) for r in refs if r.get("type") == "s" for k in range(r["size"])]

    @staticmethod
    def _first_of_group(op: dict) -> bool:
        return op.get("tbg_info", {}).get("tb_id", 0) == 0

    def _run(self, block: Block, op: dict) -> None:
        name, counts, steps = op["name"], self.counts[block.rank], self.steps[block.rank]
        if name not in MOVES | REDUCTIONS | SIGNALS | WAITS | NOTHING | {"barrier", "sem_acquire", "sem_release"}:
            raise Refused(f"GPU {block.rank}, thread block {block.number}: operation {name!r} has no counterpart")
        for chunk in self._packets_read(block, op):
            if self.packets[chunk] is not None:
                peer, number = self.packets[chunk]
                steps.append({"do": "wait", "peer": peer, "semaphore": number})
                self.packets[chunk] = None
        if name in MOVES | REDUCTIONS and self._first_of_group(op):
            self._move(block, op)
        if name == "barrier":
            block.arrived = None
        if name in ("sem_acquire", "sem_release"):
            for i in op["semaphore_ids"]:
                counts[i] += 1 if name == "sem_release" else -1
        if name in SIGNALS | WAITS:
            for peer, number in self._connections(block, op):
                steps.append({"do": "signal" if name in SIGNALS else "wait", "peer": peer, "semaphore": number})
                if name in SIGNALS:
                    self.signals[block.rank, peer, number] += 1
                else:
                    self.signals[peer, block.rank, number] -= 1

    def _move(self, block: Block, op: dict) -> None:
        """The steps of an operation that copies or reduces, chunk by chunk."""
        sources, targets = op["src_buff"], op["dst_buff"]
        for k in range(sources[0]["size"]):
            read = [self._place(block, op, r, k) for r in sources]
            write = [self._place(block, op, r, k) for r in targets]
            if op["name"] in REDUCTIONS:
                self._step(block, "reduce", read, write[0])
                for ref, to in zip(targets[1:], write[1:]):
                    self._copy(block, op, ref, k, write[0], to)
                continue
            for ref, source, to in zip(targets, read if len(read) > 1 else read * len(write), write):
                self._copy(block, op, ref, k, source, to)

    def _copy(self, block: Block, op: dict, ref: dict, k: int, source: str, to: str) -> None:
        """A chunk from a place to another, on this GPU or on a peer, as packets or not."""
        peer, packets, chunk = self._owner(block, op, ref), op["name"].endswith("pkt"), ref["index"] + k
        self._step(block, "copy" if peer == block.rank else "put", [source], to)
        if not packets or self._type(block, op, ref) != "s":
            return
        if self.packets.get((peer, chunk)) is not None:
            raise Refused(f"GPU {peer}: packets come to chunk {chunk} of its scratch before it has read those that lie there")
        self.packets[peer, chunk] = None
        if peer != block.rank:
            number = self._semaphore(block.rank, peer)
            self.packets[peer, chunk] = (block.rank, number)
            self.steps[block.rank].append({"do": "signal", "peer": peer, "semaphore": number})

    def _step(self, block: Block, do: str, read: list[str], write: str) -> None:
        self.steps[block.rank].append({"do": do, "from": read, "to": write})

    def _remote(self, block: Block, op: dict, ref: dict) -> dict | None:
        if "switch_channel_id" in ref:
            raise Refused(f"GPU {block.rank}, thread block {block.number}: {op['name']!r} goes through a switch")
        return block.buffers[op["channel_type"]][ref["buffer_id"]] if "buffer_id" in ref else None

    def _owner(self, block: Block, op: dict, ref: dict) -> int:
        remote = self._remote(block, op, ref)
        return block.rank if remote is None else remote["rank"]

    def _type(self, block: Block, op: dict, ref: dict) -> str:
        remote = self._remote(block, op, ref)
        return ref["type"] if remote is None else remote["type"]

    def _place(self, block: Block, op: dict, ref: dict, k: int) -> str:
        """A place as plans have it."""
        owner, kind = self._owner(block, op, ref), self._type(block, op, ref)
        buffer, base = self.place_of[kind]
        if self.in_place and kind == "i" and self.collective == "all-gather":
            base += owner * self.inputs
        if self.in_place and kind == "o" and self.collective == "reduce-scatter":
            base += owner * self.outputs
        return f"{buffer}:{base + ref['index'] + k}" + ("" if owner == block.rank else f"@{owner}")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: from_mscclpp.py PLAN.json")
    try:
        with open(sys.argv[1]) as file:
            theirs = json.load(file)
        if not isinstance(theirs, dict):
            raise Refused("no execution plan, which is a JSON object")
        plan = Converter(theirs).convert()
    except KeyError as err:
        sys.exit(f"from_mscclpp: {sys.argv[1]}: no {err} where execution plans have one")
    except (Refused, OSError, ValueError) as err:
        sys.exit(f"from_mscclpp: {sys.argv[1]}: {err}")
    json.dump(plan, sys.stdout)
    print()


if __name__ == "__main__":
    main()
