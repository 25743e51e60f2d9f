"""Waits of the layers' kernels for rows of a dispatch that is under way. Each has an end (F1).

Threads read counts, the time and ``failed`` one by one, so two of them may see different ones. They vote (``_any``) before a
branch or a loop depends on that: all of a program's threads go the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import triton as st


@triton.jit
def unless(failed, n):
    """n, or 0 if a kernel has given up."""
    return tl.where(st._any(tl.load(failed) != 0), 0, n)


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
    missing = st._any(have != want)
    if missing:
        since = st._now_ns()
        waits = True
        while waits:
            # Why the wait is over is looked at before the rows: those that came until then count.
            last = ended(over, failed)
            before, now = have, st._now_ns()
            want = tl.load(counts + expert, volatile=True)
            have = tl.atomic_add(landed + expert, 0, sem="acquire", scope="sys")
            since = tl.where(have != before, now, since)
            missing = st._any(have != want)
            waits = missing & (not st._any(last | (now - since >= patience)))
        if missing:
            tl.store(failed, 1)
    return not missing


@triton.jit
def await_counts(counts, e, mask, over, failed, patience):
    """Waits until the counts of experts are known, which are negative before. All are 0 where it gives up, as await_rows
    does."""
    many = tl.load(counts + e, mask=mask, other=0, volatile=True)
    since = st._now_ns()
    missing = st._any(tl.min(many, 0) < 0)
    waits = missing
    while waits:
        last = ended(over, failed)
        now = st._now_ns()
        many = tl.load(counts + e, mask=mask, other=0, volatile=True)
        missing = st._any(tl.min(many, 0) < 0)
        waits = missing & (not st._any(last | (now - since >= patience)))
    if missing:
        tl.store(failed, 1)
    return tl.where(missing, 0, many)
