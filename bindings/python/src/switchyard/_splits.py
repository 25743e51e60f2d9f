"""How rows are divided among ranks: the checks of torch, with its words."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from . import errors


def splits(sizes: Any, rows: int, ranks: int) -> array[int] | None:
    """The split sizes of a buffer with so many rows, None for equal ones."""
    if sizes is None or (isinstance(sizes, (list, tuple)) and not sizes):
        if rows % ranks:
            raise errors.InvalidArgument(
                f"Tensor's dim 0 does not divide equally across group size ({rows} rows, {ranks} ranks)"
            )
        return None
    if not isinstance(sizes, (list, tuple)):
        if hasattr(sizes, "shape") or isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
            raise errors.InvalidType(f"switchyard: split sizes are a {type(sizes).__name__}, want a list of integers")
        sizes = list(sizes)
    try:
        counts = array("q", sizes)
    except (TypeError, OverflowError) as err:
        raise errors.InvalidType(f"switchyard: split sizes {sizes!r}, want a list of integers") from err
    if len(counts) != ranks:
        raise errors.InvalidArgument(f"Number of tensor splits not equal to group size ({len(counts)} splits, {ranks} ranks)")
    if sum(counts) != rows:
        raise errors.InvalidArgument(
            f"Split sizes doesn't match total dim 0 size ({list(counts)} are {sum(counts)} rows, the tensor has {rows})"
        )
    if min(counts) < 0:
        raise errors.InvalidArgument(f"switchyard: split sizes {list(counts)}: one is negative")
    return counts


def common(
    send: array[int] | None, send_row: int, recv: array[int] | None, recv_row: int
) -> tuple[array[int] | None, array[int] | None, int]:
    """Both splits in one unit of bytes. A row of 0 bytes stands for a buffer without any."""
    if send_row == 0:
        send = None
    if recv_row == 0:
        recv = None
    if send_row == recv_row or send_row == 0 or recv_row == 0:
        return send, recv, max(send_row, recv_row, 1)
    if send is not None:
        send = array("q", [n * send_row for n in send])
    if recv is not None:
        recv = array("q", [n * recv_row for n in recv])
    return send, recv, 1
