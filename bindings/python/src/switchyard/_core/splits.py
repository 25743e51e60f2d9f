"""How rows are divided among ranks: the checks of torch, with its words, and what the library wants to know of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from .. import errors
from .abi import shape_head
from .arguments import type_of

# Types that can be iterated over and are yet no list: its order is nobody's, or its entries are no sizes.
_NO_LISTS = (dict, set, frozenset, str, bytes, bytearray)
# How many shapes of calls a place remembers.
_MOST = 1024


class Shapes:
    """The parts that exchanges of the same shape have in common, worked out once. It knows nothing of tensors."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._known: dict[Any, tuple[int, array[int]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self,
        out_shape: Sequence[int],
        in_shape: Sequence[int],
        item: int,
        output_split_sizes: Any,
        input_split_sizes: Any,
    ) -> tuple[int, array[int]]:
        """The address of a core.Shape, and the array that holds it. Elements have item bytes. The shapes can
        be hashed."""
        # Splits are compared as 64-bit integers: 2.0 is equal to 2, and yet refused.
        try:
            if output_split_sizes is None and input_split_sizes is None:
                counts, key = None, (out_shape, in_shape, item)
            elif isinstance(input_split_sizes, _NO_LISTS) or isinstance(output_split_sizes, _NO_LISTS):
                raise TypeError
            else:
                counts = array("q", input_split_sizes)
                sent = len(counts)
                counts.extend(output_split_sizes)
                key = (out_shape, in_shape, item, sent, counts.tobytes())  # type: ignore[assignment]
            known = self._known.get(key)
        except (TypeError, OverflowError):  # one of them is None, or wrong, or unusual; told apart below
            return self._make(out_shape, in_shape, item, output_split_sizes, input_split_sizes)
        if known is None:
            if counts:
                known = self._of_rows(out_shape, in_shape, item, counts, sent)
                output_split_sizes, input_split_sizes = counts[sent:], counts[:sent]  # which iterators give once
            if known is None:
                known = self._make(out_shape, in_shape, item, output_split_sizes, input_split_sizes)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = known
        return known

    def _of_rows(
        self, out_shape: Sequence[int], in_shape: Sequence[int], item: int, counts: array[int], sent: int
    ) -> tuple[int, array[int]] | None:
        """The shape of an exchange of rows of equal size, where nothing is wrong with it: the usual case, made soon, because
        tokens go elsewhere in every call. counts are the rows to send and then those to receive."""
        ranks, rank = self.ranks, self.rank
        if sent != ranks or len(counts) != 2 * ranks or min(counts) < 0 or counts[rank] != counts[ranks + rank]:
            return None
        try:
            (got, width), (rows, other) = out_shape, in_shape
        except ValueError:  # other than two dimensions
            if not out_shape or out_shape[1:] != in_shape[1:]:
                return None
            got, rows, width = out_shape[0], in_shape[0], _product(in_shape[1:])
        else:
            if width != other:
                return None
        row = width * item
        if row == 0 or sum(counts) != rows + got or sum(counts[:ranks]) != rows:
            return None
        numbers = shape_head(row, got * row, rows * row)
        numbers += counts
        return numbers.buffer_info()[0], numbers

    def _make(
        self, out_shape: Sequence[int], in_shape: Sequence[int], item: int, output_splits: Any, input_splits: Any
    ) -> tuple[int, array[int]]:
        for name, shape in (("output", out_shape), ("input", in_shape)):
            if not shape:
                raise errors.InvalidArgument(f"switchyard: {name} has no dimension to split")
        out_bytes, in_bytes = _product(out_shape) * item, _product(in_shape) * item
        send = splits(input_splits, in_shape[0], self.ranks, "input")
        recv = splits(output_splits, out_shape[0], self.ranks, "output")
        send_row, recv_row = in_bytes // in_shape[0] if in_bytes else 0, out_bytes // out_shape[0] if out_bytes else 0
        if send[self.rank] * send_row != recv[self.rank] * recv_row:
            raise self._unlike(out_shape, in_shape, output_splits, input_splits, recv[self.rank], send[self.rank])
        send, recv, row = common(send, send_row, recv, recv_row)
        return self.of_bytes(row, out_bytes, in_bytes, send, recv)

    def _unlike(
        self, out_shape: Sequence[int], in_shape: Sequence[int], output_splits: Any, input_splits: Any, got: int, sent: int
    ) -> errors.InvalidArgument:
        """This rank's part for itself, which is other rows in the output than in the input."""
        rank, rows = self.rank, (tuple(out_shape[1:]), tuple(in_shape[1:]))
        if rows[0] != rows[1]:
            received, given = got * _product(rows[0]), sent * _product(rows[1])
            return errors.InvalidArgument(
                f"switchyard: output has rows of shape {rows[0]}, input of {rows[1]}: rank {rank} sends {given} elements to "
                f"itself and receives {received}"
            )
        sides = []
        for name, sizes, shape, n in (("input", input_splits, in_shape, sent), ("output", output_splits, out_shape, got)):
            equal = f"{name} of shape {tuple(shape)} has {n} rows for each rank"
            sides.append(equal if _equally(sizes) else f"{name}_split_sizes[{rank}] is {n}")
        return errors.InvalidArgument(f"switchyard: {' and '.join(sides)}: what a rank sends to itself it receives")

    @staticmethod
    def of_bytes(row: int, out_bytes: int, in_bytes: int, send: array[int], recv: array[int]) -> tuple[int, array[int]]:
        """A shape that is not remembered, with splits in rows."""
        numbers = shape_head(row, out_bytes, in_bytes) + send + recv
        return numbers.buffer_info()[0], numbers


def _product(shape: Iterable[int]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def integers(sizes: Any, name: str, ranks: int) -> array[int]:
    """A list of integers, one a rank, in whatever guise."""
    if isinstance(sizes, _NO_LISTS) or not (hasattr(sizes, "tolist") or isinstance(sizes, Iterable)):
        raise errors.InvalidType(f"switchyard: {name} is {type_of(sizes)}, want a list of integers")
    if hasattr(sizes, "ndim") and sizes.ndim != 1:
        raise errors.InvalidArgument(f"switchyard: {name} has {sizes.ndim} dimensions, want one")
    try:
        counts = array("q", sizes.tolist() if hasattr(sizes, "tolist") else list(sizes))
    except OverflowError:
        raise errors.InvalidArgument(f"switchyard: {name} is {sizes!r}, want integers of 64 bits") from None
    except TypeError as err:
        kind = f"{sizes.dtype} values" if hasattr(sizes, "dtype") else repr(sizes)
        raise errors.InvalidType(f"switchyard: {name} is {kind}, want a list of integers") from err
    if len(counts) != ranks:
        raise errors.InvalidArgument(
            f"switchyard: {name} has {len(counts)} entries, the group {ranks} ranks: Number of tensor splits not equal to "
            "group size"
        )
    return counts


def _equally(sizes: Any) -> bool:
    """Whether split sizes divide the rows equally."""
    return sizes is None or (isinstance(sizes, (list, tuple, array)) and not sizes)


def splits(sizes: Any, rows: int, ranks: int, side: str) -> array[int]:
    """The split sizes of a buffer with this number of rows, which is the output or the input."""
    if _equally(sizes):
        if rows % ranks:
            raise errors.InvalidArgument(
                f"switchyard: {side} has {rows} rows for {ranks} ranks: Tensor's dim 0 does not divide equally across group "
                "size"
            )
        return array("q", [rows // ranks]) * ranks
    name = f"{side}_split_sizes"
    counts = integers(sizes, name, ranks)
    if min(counts) < 0:
        raise errors.InvalidArgument(f"switchyard: {name} is {list(counts)}: one is negative")
    if sum(counts) != rows:
        raise errors.InvalidArgument(
            f"switchyard: {name} sums to {sum(counts)} rows, {side} has {rows}: Split sizes doesn't match total dim 0 size"
        )
    return counts


def common(send: array[int], send_row: int, recv: array[int], recv_row: int) -> tuple[array[int], array[int], int]:
    """Both splits in one unit of bytes. A row of 0 bytes stands for a buffer without any."""
    nothing = array("q", bytes(8 * len(send)))
    if send_row == recv_row or send_row == 0 or recv_row == 0:
        return send if send_row else nothing, recv if recv_row else nothing, max(send_row, recv_row, 1)
    return array("q", [n * send_row for n in send]), array("q", [n * recv_row for n in recv]), 1
