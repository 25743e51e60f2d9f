"""Kernels of one's own in Triton that work with those of other ranks: ``switchyard.cuh``, word for word, for ``@triton.jit``.

    import switchyard.triton as st

    @triton.jit
    def everybody(world):
        call = st.begin(world)
        for peer in range(call.size):
            st.signal(call, peer, 0)
        for peer in range(call.size):
            call = st.wait(call, peer, 0)

    world = switchyard.DeviceCommunicator()
    everybody[(1,)](world.argument)

All ranks launch the same kernels of a communicator in the same order, and on one rank one follows the other. A launch is a
call: its number is one more than that of the last, also when a graph replays it. All programs of a launch that wait must run
at the same time: with ``launch_cooperative_grid=True`` the driver refuses a launch whose programs do not fit. A program is
one block (``num_ctas=1``) and is not specialised by warps.

A call that is over has the number 0: after a fault, and in a kernel that was built for another version. ``signal``, ``wait``
and ``put`` then do nothing, so a kernel needs no way out. Its own stores into memory of peers have ``call.number != 0`` as
their mask.

A program that comes back from a wait sees what the peer's program has written before it signalled, in whatever memory
(release and acquire at system scope). It reads what peers write once, after the wait.

A wait ends without a signal when the communicator's deadline has passed, when the group has failed, or when another wait of
this rank has ended so; it looks once more then. The rank that was waited for is in the error that ``switchyard.check``
raises from then on, and later launches do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda
except ImportError as err:
    raise ImportError("switchyard.triton: Triton cannot be imported: pip install triton") from err

__all__ = ["VERSION", "Call", "at", "begin", "put", "signal", "wait"]

#: SWITCHYARD_VERSION of ``switchyard.cuh``. A communicator refuses kernels with another one.
VERSION = tl.constexpr(1)

# Where the words of the header's structs are, in words of their own size, and its other numbers.
_VERSION = tl.constexpr(0)  # communicator, 4 bytes each
_SIGNALS = tl.constexpr(1)
_RANK = tl.constexpr(2)
_SIZE = tl.constexpr(3)
_BASE = tl.constexpr(2)  # communicator, 8 bytes each
_STRIDE = tl.constexpr(3)
_SEGMENTS = tl.constexpr(4)
_CONTROL = tl.constexpr(5)
_LINES = tl.constexpr(6)
_ABORT = tl.constexpr(7)
_RECORD = tl.constexpr(8)
_TIMEOUT_NS = tl.constexpr(9)
_CALLS = tl.constexpr(0)  # control, 8 bytes
_READERS = tl.constexpr(2)  # control, 4 bytes each
_FAULT = tl.constexpr(3)
_KIND = tl.constexpr(0)  # record, 8 bytes each; the peer is the other half of the first
_CALL = tl.constexpr(1)
_KERNELS = tl.constexpr(2)
_LIBRARYS = tl.constexpr(3)
_STOP = tl.constexpr(10)
_LATE = tl.constexpr(1)
_ABORTED = tl.constexpr(2)
_OTHER_VERSION = tl.constexpr(100)
_LINE_BYTES = tl.constexpr(32)
#: Polls of a wait between two looks at the clock and the words of aborts.
_LOOK_EVERY = tl.constexpr(256)


class Words(NamedTuple):
    """Addresses of a communicator, as numbers."""

    world: tl.tensor
    own: tl.tensor
    base: tl.tensor
    stride: tl.tensor
    segments: tl.tensor
    control: tl.tensor
    lines: tl.tensor


class Call(NamedTuple):
    """A launch, of :func:`begin`: its number, from 1 on and 0 once it is over, this rank, how many ranks there are, and how
    many indexes of signals for each pair of them."""

    number: tl.tensor
    rank: tl.tensor
    size: tl.tensor
    signals: tl.tensor
    words: Words


@triton.jit
def _wide(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _half(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _now_ns():
    return cuda.globaltimer()


@triton.jit
def _any(x):
    """Whether x holds for any thread. Threads read the time and other words one by one: no branch depends on that alone."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred mine, any;
            setp.ne.s32 mine, $1, 0;
            bar.red.or.pred any, 0, mine;
            selp.s32 $0, 1, 0, any;
        }
        """,
        "=r,r,~{memory}", [x.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    ) != 0  # fmt: skip


@triton.jit
def _publish(at, word):
    """Stores a word of 8 bytes behind all that the program has written."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys;
            @first st.relaxed.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l,~{memory}", [at, word], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _segment(call, peer):
    """Where a rank's segment begins. Its distance from another one is a multiple of pages."""
    words = call.words
    other = (words.segments != 0) & (peer != call.rank)
    return tl.load(_wide(words.segments) + peer, mask=other, other=words.base + peer * words.stride)


@triton.jit
def _line(call, of, index):
    """The place of a rank's signal of this index in every segment."""
    return call.words.lines + (call.signals.to(tl.int64) * of + index) * _LINE_BYTES


@triton.jit
def _over(call):
    return Call(tl.full([], 0, tl.int64), call.rank, call.size, call.signals, call.words)


@triton.jit
def _give_up(call, kind, peer, version):
    """Records the first fault of the rank."""
    words = call.words
    if tl.atomic_cas(_half(words.control) + _FAULT, 0, kind, sem="relaxed", scope="gpu") == 0:
        record = tl.load(_wide(words.world) + _RECORD)
        tl.store(_wide(record) + _CALL, call.number)
        tl.store(_wide(record) + _KERNELS, version)
        tl.store(_wide(record) + _LIBRARYS, tl.load(_half(words.world) + _VERSION))
        _publish(record + 8 * _KIND, kind + peer * tl.full([], 1 << 32, tl.int64))


@triton.jit
def begin(world, version: tl.constexpr = VERSION):
    """Begins a launch, first of all in it. ``world`` is ``DeviceCommunicator.argument``."""
    wide, half = _wide(world), _half(world)
    rank, base, stride = tl.load(half + _RANK), tl.load(wide + _BASE), tl.load(wide + _STRIDE)
    own = base + rank * stride
    control = own + tl.load(wide + _CONTROL)
    # One thread does an atomic operation, and all get its result. An addition of 0 is a load.
    number = tl.atomic_add(_wide(control) + _CALLS, 0, sem="relaxed", scope="sys") + 1
    good = tl.atomic_add(_half(control) + _FAULT, 0, sem="relaxed", scope="gpu") == 0
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if tl.atomic_add(_half(control) + _READERS, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(_half(control) + _READERS, 0)
        tl.atomic_xchg(_wide(control) + _CALLS, number, sem="relaxed", scope="sys")
    words = Words(world, own, base, stride, tl.load(wide + _SEGMENTS), control, tl.load(wide + _LINES))
    call = Call(number, rank, tl.load(half + _SIZE), tl.load(half + _SIGNALS), words)
    same = tl.load(half + _VERSION) == version
    if good & (not same):
        _give_up(call, tl.full([], _OTHER_VERSION, tl.int32), rank, version)
    return Call(tl.where(good & same, number, 0), rank, call.size, call.signals, words)


@triton.jit
def at(call, peer, mine):
    """Where a rank has what lies at these addresses in symmetric memory of this one."""
    away = tl.multiple_of(_segment(call, peer) - call.words.own, 128)
    return mine + tl.multiple_of(away // ((mine.dtype.element_ty.primitive_bitwidth + 7) // 8), 16)


@triton.jit
def put(call, peer, mine, value, mask=None):
    """Stores values where a rank has what lies at these addresses in symmetric memory of this one. Nothing once the call is
    over."""
    if call.number != 0:
        tl.store(at(call, peer, mine), value, mask=mask)


@triton.jit
def signal(call, peer, index):
    """Tells a rank, by the signal of this index, that the program has come so far. Once a call for each rank and index, so
    programs take indexes of their own. A rank may signal itself."""
    if call.number != 0:
        _publish(_segment(call, peer) + _line(call, call.rank, index), call.number)


@triton.jit
def wait(call, peer, index):
    """Waits for a rank's signal of this call. Returns the call, which is over if the signal has not come."""
    words = call.words
    word = _wide(words.own + _line(call, peer, index))
    number, since, polls = call.number, tl.full([], 0, tl.int64), tl.full([], 1, tl.int32)
    why = tl.full([], 0, tl.int32)  # the wait ends, with the next look
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while seen < number:
        if why != 0:
            _give_up(call, why, peer, 0)
            number = tl.full([], 0, tl.int64)
        else:
            if polls % _LOOK_EVERY == 0:
                stop = tl.load(_wide(words.own + tl.load(_wide(words.world) + _ABORT)), volatile=True)
                stop |= tl.load(_wide(tl.load(_wide(words.world) + _RECORD)) + _STOP, volatile=True)
                now = _now_ns()
                since = tl.where(since == 0, now, since)
                late = _any(now - since > tl.load(_wide(words.world) + _TIMEOUT_NS))
                why = tl.where(_any(stop != 0), _ABORTED, tl.where(late, _LATE, 0))
                if tl.atomic_add(_half(words.control) + _FAULT, 0, sem="relaxed", scope="gpu") != 0:
                    number = tl.full([], 0, tl.int64)  # somebody of this rank has given up and said why
            polls += 1
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    return Call(number, call.rank, call.size, call.signals, words)
