"""Waits of the layers' kernels for rows of a dispatch that is under way. Each has an end (F1)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def now_ns():
    return cuda.globaltimer()


@triton.jit
def unless(failed, n):
    """n, or 0 if an earlier kernel has given up."""
    return tl.where(tl.load(failed) == 0, n, 0)


@triton.jit
def ended(over, failed):
    """Whether the dispatch has ended, or a wait for it was given up. Rows that land later are not waited for."""
    return (tl.atomic_add(over, 0, sem="acquire", scope="gpu") != 0) | (tl.load(failed, volatile=True) != 0)


@triton.jit
def await_rows(landed, counts, expert, over, failed, patience):
    """Waits until all rows of an expert have landed, and says whether they have. Later reads see what was written.
    It gives up, and sets failed, when the dispatch has ended without them or none has landed for patience ns."""
    want = tl.load(counts + expert, volatile=True)
    have = tl.atomic_add(landed + expert, 0, sem="acquire", scope="sys")
    if have != want:
        since = now_ns()
        waits = True
        while waits:
            # Why the wait is over is looked at before the rows: those that came until then count.
            last = ended(over, failed)
            before, now = have, now_ns()
            want = tl.load(counts + expert, volatile=True)
            have = tl.atomic_add(landed + expert, 0, sem="acquire", scope="sys")
            since = tl.where(have != before, now, since)
            waits = (have != want) & (not last) & (now - since < patience)
        if have != want:
            tl.store(failed, 1)
    return have == want


@triton.jit
def await_counts(counts, e, mask, over, failed, patience):
    """Waits until the counts of experts are known, which are negative before, and gives up as await_rows does. Those that are
    not known are 0 then."""
    many = tl.load(counts + e, mask=mask, other=0, volatile=True)
    since = now_ns()
    waits = tl.min(many, 0) < 0
    while waits:
        last = ended(over, failed)
        now = now_ns()
        many = tl.load(counts + e, mask=mask, other=0, volatile=True)
        waits = (tl.min(many, 0) < 0) & (not last) & (now - since < patience)
    if tl.min(many, 0) < 0:
        tl.store(failed, 1)
    return tl.maximum(many, 0)
