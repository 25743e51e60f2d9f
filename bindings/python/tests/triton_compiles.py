"""Compiles kernels with switchyard.triton for GPUs, and looks at what has come of it: `python triton_compiles.py EXAMPLE`."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

import switchyard.triton as st
from switchyard.layers import waits


@triton.jit
def blocks(world, out, x, count, SIZE: tl.constexpr):
    """Values of pointers of many kinds, ranks and signals that are constants."""
    call = st.begin(world, 7)
    k = tl.arange(0, SIZE)
    for peer in tl.static_range(2):
        st.put(call, peer, out + k, tl.load(x + k))
        st.signal(call, peer, 3)
        call = st.wait(call, peer, 3)
        tl.store(st.at(call, peer, out) + count + k, tl.load(x + k), mask=call.number != 0)


@triton.jit
def products(world, x, out, count, WAITS: tl.constexpr):
    """Rows of peers go into products as they come."""
    call = st.begin(world)
    k = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    sums = tl.zeros([64, 64], tl.float32)
    for i in tl.range(count, num_stages=3):
        if WAITS:
            call = st.wait(call, i, 0)
        rows = tl.load(x + i * 4096 + k)
        sums = tl.dot(rows, rows, sums)
    tl.store(out + k, sums)


@triton.jit
def landings(world, landed, counts, over, failed, out, count, E: tl.constexpr):
    """The waits of layers: for rows of each expert, as far as their numbers are known."""
    e = tl.arange(0, E)
    many = waits.await_counts(counts, e, e < E, over, failed, count)
    tl.store(out + e, many)
    for expert in range(0, waits.unless(failed, E)):
        if waits.await_rows(landed, counts, expert, over, failed, count):
            tl.store(out + expert, 0)


def alone(ptx: str) -> list[str]:
    """The branches that depend on what a thread has read by itself: the time, or words that others may write meanwhile. What
    one thread reads for all goes through shared memory, and a vote is that of all."""
    read: set[str] = {"%globaltimer"}
    steps = []
    for line in ptx.splitlines():
        guard, rest = re.fullmatch(r"\s*(?:@!?(%p\d+))?(.*?)(?://.*)?", line).groups()
        names = re.findall(r"%[a-z]+\d*|\bmine\b|\bany\b", rest)
        if names and not re.match(r"\s*(st|bar|ld\.shared|\.reg)\b", rest):
            steps.append((names[0], {guard, *names[1:]}, "ld.global" in rest or "ld.volatile.global" in rest))
    known = -1
    while len(read) != known:
        known = len(read)
        read.update(into for into, sources, loads in steps if loads or read & sources)
    return [line for line in ptx.splitlines() if (m := re.match(r"\s*@!?(%p\d+)\s+bra", line)) and m[1] in read]


def example() -> Any:
    """The kernel of examples/kernels."""
    spec = importlib.util.spec_from_file_location("all_gather_triton", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.all_gather


def code(kernel: Any, kinds: dict[str, str], arch: int, warps: int, **constants: int) -> str:
    """A kernel's PTX. Pointers are multiples of 16 bytes, as torch's are."""
    signature = {"world": "i64", **kinds, "count": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    assert made.asm["cubin"]
    return made.asm["ptx"]


#: What every signal does at the end: threads meet, and then one thread releases.
SIGNAL = re.compile(
    r"bar\.sync\s+0;\s*\{\s*\.reg \.pred first;\s*\.reg \.b32 thread;\s*mov\.u32 thread, %tid\.x;\s*"
    r"setp\.eq\.u32 first, thread, 0;\s*@first fence\.acq_rel\.sys;\s*@first st\.relaxed\.sys\.global\.u64"
)


def main() -> None:
    for arch, warps in ((80, 8), (90, 1), (90, 8), (100, 8)):
        ptx = code(example(), {"out": "*i64", "x": "*i64"}, arch, warps, BLOCK=1024)
        ptx = re.sub(r"^\s*(\.loc|//|\$L__tmp).*\n", "", ptx, flags=re.MULTILINE)
        assert len(SIGNAL.findall(ptx)) == ptx.count("@first st.") > 0
        # One thread polls, for all. No branch depends on what each of them has read by itself, such as the time.
        polls = re.findall(r"^.*(?:sys\.acquire|acquire\.sys).*$", ptx, re.MULTILINE)
        assert polls
        assert all(re.match(r"\s*@%p\d+ (ld|atom)\.", poll) for poll in polls), polls
        assert "bar.red.or.pred" in ptx
    for kind in ("i1", "i8", "fp8e5", "fp16", "fp32", "i64"):
        ptx = code(blocks, {"out": "*" + kind, "x": "*" + kind}, 90, 4, SIZE=2048)
        assert re.search(r"st\.global\.v[248]", ptx), f"stores of {kind} are not wide"
    for wait in (0, 1):
        ptx = code(products, {"x": "*fp16", "out": "*fp32"}, 90, 4, WAITS=wait)
        assert ("cp.async" in ptx) == (not wait), "loads come before the wait that is in front of them"
    for warps in (1, 4):
        ptx = code(landings, dict.fromkeys(("landed", "counts", "over", "failed", "out"), "*i32"), 90, warps, E=8)
        assert "bra" in ptx
        assert not alone(ptx)


if __name__ == "__main__":
    main()
