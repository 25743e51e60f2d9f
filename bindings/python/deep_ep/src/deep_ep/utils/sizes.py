"""How ranks lie, and how much memory a buffer is said to need."""

from __future__ import annotations

from typing import Any

import switchyard

# Sizes of buffers are multiples of this.
ALIGNMENT = 2 << 20


def align(n: int, to: int) -> int:
    return -(-n // to) * to


def aligned(counts: list[int], to: int) -> list[int]:
    """Counts at multiples of a number."""
    return counts if to == 1 else [align(n, to) for n in counts]


def get_num_allocation_alignment() -> int:
    """Of what sizes of buffers are multiples."""
    return ALIGNMENT


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Hosts, and ranks of each. The first call for a group is collective."""
    hosts = switchyard.communicator(group)._hosts
    return hosts, int(group.size()) // hosts


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Ranks that tokens reach in two steps, and in one. Every rank is reached in one."""
    return 1, int(group.size())
