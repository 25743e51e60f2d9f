"""The C ABI of the shared library: its functions, and the structures that they take by their address.

The structures have the fields of those of package core in Go, which says what they mean. A call is an array of their numbers,
which is made faster than a structure of ctypes: the functions below put them in order. Tests compare all of it with the
headers that the build writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint64, c_void_p, sizeof
from typing import Any

VERSION = 20

_u64p, _i64p, _i32p = POINTER(c_uint64), POINTER(c_int64), POINTER(c_int32)

#: Arguments of the functions, by name without the prefix. Addresses of arrays and structures are passed as integers: c_void_p.
PROTOTYPES: dict[str, list[Any]] = {
    "new_id": [c_char_p, c_char_p, c_int64],
    "listen": [c_char_p, _u64p, c_char_p, c_int64],
    "unlisten": [c_uint64],
    "check_algorithms": [c_char_p],
    "open": [c_char_p, _u64p, _u64p],
    "rank": [c_uint64, _i32p, _i32p],
    "wait": [c_uint64, c_uint64, c_int64, _i64p],
    "all_to_all": [c_uint64, c_uint64, c_void_p, c_void_p, c_void_p, c_int64, _u64p],
    "explain": [c_uint64, c_void_p, c_void_p, c_char_p, c_int64],
    "explain_reduction": [c_uint64, c_int64, c_int64, c_int64, c_char_p, c_int64],
    "fault": [c_uint64],
    "observe": [c_int32, c_char_p, c_char_p, c_int64, _i64p],
    "doctor": [c_char_p, c_char_p, c_int64, _i64p],
    "records": [c_char_p, c_char_p, c_char_p, c_int64, _i64p],
    "unmet": [c_char_p, _u64p],
    "met": [c_uint64, c_uint64],
    "fell_back": [c_uint64, c_char_p, c_char_p, c_char_p],
    "refuse": [c_uint64, c_int32, c_char_p, _u64p],
    "all_reduce": [c_uint64, c_uint64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, _u64p],
    "reduce_scatter": [c_uint64, c_uint64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64, _u64p],
    "all_gather": [c_uint64, c_uint64, c_void_p, c_int64, c_void_p, c_int64, c_int64, _u64p],
    "all_to_all_by_plan": [c_uint64, c_uint64, c_void_p, c_void_p, c_int64, c_int64, _u64p],
    "broadcast": [c_uint64, c_uint64, c_void_p, c_int64, c_int64, c_int64, _u64p],
    "messages": [c_uint64, c_uint64, c_void_p, c_int64, c_int64, c_void_p, _u64p],
    "transfer": [c_uint64, c_uint64, c_void_p, c_int64, _u64p],
    "request": [c_uint64, c_int64, c_void_p],
    "lend": [c_uint64, c_int64, c_uint64, c_int64, c_int32, c_int64, _u64p],
    "take_back": [c_uint64, c_int64, c_int64, c_int64],
    "borrow": [c_uint64, c_int64, c_int64, c_int64, c_int64, _u64p, _u64p, _i64p],
    "give_back": [c_uint64],
    "barrier": [c_uint64, c_uint64, c_int64, _u64p],
    "alloc": [c_uint64, c_uint64, c_uint64, c_int64, _u64p],
    "block": [c_uint64, _u64p, _i64p],
    "free": [c_uint64, c_uint64, c_uint64, _u64p],
    "verify": [c_uint64, c_uint64, _u64p],
    "gpu_open": [c_uint64, c_char_p, _u64p],
    "gpu_reducer": [c_uint64, c_uint64, _u64p],
    "gpu_pool": [c_uint64, c_uint64, c_uint64, c_int64, _u64p],
    "kernels_open": [c_uint64, c_uint64, c_int64, _u64p],
    "kernels_argument": [c_uint64, _u64p],
    "kernels_load": [c_uint64, c_void_p, c_int64, c_char_p, _i64p],
    "kernels_launch": [c_uint64, c_uint64, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64],
    "split": [c_uint64, c_int64, c_int64, _u64p, _u64p],
    "shrink": [c_uint64, c_void_p, c_int64, c_int64, _u64p, _u64p],
    "admit": [c_uint64, c_int64, c_char_p, c_int64, _u64p, _u64p],
    "replace": [c_uint64, c_int64, c_char_p, c_int64],
    "close": [c_uint64, c_int32, _u64p],
    "set_timeout": [c_uint64, c_int64, _u64p],
    "abort": [c_uint64, c_char_p],
    "abandon": [c_uint64, c_int64, c_int32],
    "drop": [c_uint64],
    "dispatcher": [c_uint64, c_uint64, c_char_p, _u64p],
    "dispatcher_info": [c_uint64, _i64p, _i64p, _i64p, _i64p, _i64p, c_void_p, c_int64],
    "dispatcher_counters": [c_uint64, c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "dispatcher_mask": [c_uint64, c_int64],
    "dispatcher_masked": [c_uint64, _u64p],
    "dispatcher_unmask": [c_uint64, c_uint64, c_int64, _u64p],
    "dispatcher_close": [c_uint64, c_uint64, _u64p],
    "dispatch": [c_uint64, c_uint64, c_void_p, c_int64, _u64p],
    "deliver": [c_uint64, c_uint64, c_void_p, c_void_p, c_int64, _u64p, c_void_p, c_int64],
    "combine": [c_uint64, c_uint64, c_void_p, c_int64, _u64p],
    "combine_backward": [c_uint64, c_uint64, c_void_p, c_int64, _u64p],
    "receive": [c_uint64, c_uint64, c_uint64, c_int32, c_int64, _u64p],
    "results": [c_uint64, c_uint64, c_void_p],
    "expand": [c_uint64, c_uint64, c_void_p],
    "fold": [c_uint64, c_uint64, c_void_p],
    "route": [c_uint64, c_uint64, c_void_p, c_int64, _u64p],
    "output": [c_uint64, c_void_p],
    "counts": [c_uint64, c_int64, _i64p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
    "release": [c_uint64],
}  # fmt: skip


class Buffer(Structure):
    """Memory of a caller."""

    _fields_ = [("Addr", c_uint64), ("Bytes", c_int64)]


class Detail(Structure):
    """More about an error."""

    _fields_ = [(name, c_int64) for name in ("Earlier", "Rank", "Token", "Choice", "Expert")]


class ShapeHead(Structure):
    """The fields of an exchange that all ranks share. Rows to send and to receive, for each rank, lie behind it."""

    _fields_ = [
        (name, c_int64) for name in ("Row", "DstBytes", "SrcBytes", "Live", "Placed", "MaxSMs", "CopySMs", "NoSMs")
    ]


class DispatchCall(Structure):
    """A dispatch. Made and Rows are results."""

    _fields_ = [
        *((name, Buffer) for name in ("X", "Scales", "Experts", "Weights", "Numbers")),
        ("Handle", c_uint64),
        ("Half", c_int64),
        ("Made", c_uint64),
        ("Rows", c_uint64),
    ]


class CombineCall(Structure):
    """A combine, or the gradient of a dispatch."""

    _fields_ = [
        *((name, Buffer) for name in ("Y", "Rows", "Weights", "SumWeights")),
        ("Bias", Buffer * 2),
        ("Ready", Buffer),
        ("TokenWeights", Buffer),
        ("Handle", c_uint64),
        ("Routing", c_uint64),
        *((name, c_int64) for name in ("Backward", "Weighting", "Half", "Release")),
    ]


#: The parts that a dispatch has left, in the order of ResultCall, and memory that is copied besides.
RESULTS = ("Rows", "Scales", "Indices", "Weights", "Sources", "Counts", "Offsets", "RankCounts", "Routing", "From", "To")


class ResultCall(Structure):
    """All that a dispatch has left is copied. Made is a result."""

    _fields_ = [
        *((name, Buffer) for name in RESULTS),
        ("Handle", c_uint64),
        *((name, c_int64) for name in ("Length", "Release")),
        ("Made", c_uint64),
    ]


#: The memory of an ExpandCall, and of a FoldCall.
EXPANSION = ("Indices", "Counts", "Slots", "Rooms", "Rows", "ToRows", "Scales", "ToScales", "Weights", "ToWeights")
FOLDING = ("Rows", "Slots", "Sums", "Weights", "ToWeights")


class ExpandCall(Structure):
    """Rows one for each token become rows one for each choice. Slots and Rooms are results."""

    _fields_ = [*((name, Buffer) for name in EXPANSION), ("Align", c_int64), ("Length", c_int64)]


class FoldCall(Structure):
    """The sums of such rows for each token."""

    _fields_ = [*((name, Buffer) for name in FOLDING), ("Type", c_int64)]


class RouteCall(Structure):
    """A routing is gone by. Made and Rows are results."""

    _fields_ = [(name, c_uint64) for name in ("Routing", "Made", "Rows")]


class MessageCall(Structure):
    """A message between two ranks."""

    _fields_ = [("Buffer", Buffer), ("Receive", c_int64), ("Peer", c_int64), ("Tag", c_uint64)]


class TransferCall(Structure):
    """A put, a get, a signal or a wait."""

    _fields_ = [("Mine", Buffer), ("At", Buffer), *((name, c_int64) for name in ("Kind", "Peer", "Semaphore"))]


#: The kinds of transfers.
PUT, GET, SIGNAL, WAIT = range(4)
#: The peer of a receive from any rank.
ANY = -1


class BackwardCall(Structure):
    """The gradients of a combine."""

    _fields_ = [
        *((name, Buffer) for name in ("DRows", "DWeights", "DY", "Rows", "Weights")),
        ("Handle", c_uint64),
        ("Weighting", c_int64),
    ]


def word(field: Any) -> int:
    """Which number of a structure a field is, or begins with."""
    return int(field.offset) // sizeof(c_int64)


# Where to look in the arrays of calls.
MADE, ROWS = word(DispatchCall.Made), word(DispatchCall.Rows)
RESULT_HANDLE, RESULT_MADE = word(ResultCall.Handle), word(ResultCall.Made)
ROUTE_MADE, ROUTE_ROWS = word(RouteCall.Made), word(RouteCall.Rows)
HEAD = sizeof(ShapeHead) // sizeof(c_int64)
LIVE, PLACED = word(ShapeHead.Live), word(ShapeHead.Placed)
MAX_SMS, COPY_SMS, NO_SMS = word(ShapeHead.MaxSMs), word(ShapeHead.CopySMs), word(ShapeHead.NoSMs)

#: The address and the bytes of some memory.
Memory = tuple[int, int]


def shape_head(row: int, dst_bytes: int, src_bytes: int) -> array[int]:
    """A ShapeHead."""
    return array("q", (row, dst_bytes, src_bytes, 0, 0, 0, 0, 0))


def dispatch_call(
    x: Memory, scales: Memory, experts: Memory, weights: Memory, handle: int, half: int, numbers: Memory = (0, 0)
) -> array[int]:
    """A DispatchCall."""
    return array("q", (*x, *scales, *experts, *weights, *numbers, handle, half, 0, 0))


def combine_call(
    buffers: Sequence[int], handle: int, routing: int, backward: int, weighting: int, half: int, release: int
) -> array[int]:
    """A CombineCall. buffers are addresses and bytes of Y, Rows, Weights, SumWeights, both of Bias, Ready and
    TokenWeights."""
    return array("q", (*buffers, handle, routing, backward, weighting, half, release))


def result_call(buffers: Sequence[int], handle: int, length: int, release: int) -> array[int]:
    """A ResultCall. buffers are addresses and bytes of RESULTS."""
    return array("q", (*buffers, handle, length, release, 0))


def expand_call(buffers: Sequence[int], align: int, length: int) -> array[int]:
    """An ExpandCall. buffers are addresses and bytes of EXPANSION."""
    return array("q", (*buffers, align, length))


def fold_call(buffers: Sequence[int], dtype: int) -> array[int]:
    """A FoldCall. buffers are addresses and bytes of FOLDING."""
    return array("q", (*buffers, dtype))


def route_call(routing: int) -> array[int]:
    """A RouteCall."""
    return array("q", (routing, 0, 0))


def message_call(receive: bool, peer: int, tag: int, at: Memory) -> array[int]:
    """A MessageCall. Several of them one after the other are a list."""
    return array("q", (*at, receive, peer, tag))


#: The words of a MessageCall.
CALL = len(message_call(False, 0, 0, (0, 0)))


def transfer_call(kind: int, peer: int, mine: Memory = (0, 0), at: Memory = (0, 0), semaphore: int = 0) -> array[int]:
    """A TransferCall."""
    return array("q", (*mine, *at, kind, peer, semaphore))


def backward_call(buffers: Sequence[int], handle: int, weighting: int) -> array[int]:
    """A BackwardCall. buffers are addresses and bytes of DRows, DWeights, DY, Rows and Weights."""
    return array("q", (*buffers, handle, weighting))
