"""Groups that go on with fewer ranks or more, or with another process in the place of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._core.comm import Communicator
    from ._types import Group


def _after(before: Communicator, comm: Communicator) -> Communicator:
    """Makes comm the default communicator if before was it, and returns comm."""
    from ._core import comm as core

    if before is core._default:
        core.set_default(comm)
    return comm


def shrink(group: Group = None, leave_out: Iterable[int] = (), timeout: float | None = None) -> Communicator:
    """Make a communicator of the ranks that are left of a group, after some were lost; all of them call it.

    They keep their order, and agree on who they are, also when more are lost meanwhile. ``leave_out`` are ranks that the
    others go on without, though they may live. It is enough that one rank says so. A rank that the others have given up gets
    a :class:`switchyard.errors.PeerLost` with its own number.

    A rank that lives and does not call it is waited for, ``timeout`` seconds or else as long as in an operation. Then
    :class:`switchyard.errors.TimedOut` names it, and the call can be made again.

    What is returned goes wherever a group does, for tensors and arrays. It takes the place of the default communicator where
    that was the group. The one before is still to be closed. Objects that were made on it are of no more use: symmetric memory,
    dispatchers.
    """
    from . import communicator

    comm = communicator(group)
    return _after(comm, comm.shrink(leave_out, timeout))


def admit(addr: str, n: int = 1, group: Group = None, timeout: float | None = None) -> Communicator:
    """Make a communicator of the ranks of a group, in their order, and ``n`` newcomers behind them; all ranks call it.

    A newcomer is a process that calls ``init(addr=addr, late=True)``, before or after, with the arguments for the heap and the
    secret that the others had. The first rank listens at ``addr``, as rank 0 does in ``init``. The ranks are on one host.
    When not all newcomers come within ``timeout`` seconds, or else as long as an operation waits,
    :class:`switchyard.errors.TimedOut` is raised on all, and the group is what it was.

    The communicator goes wherever a group does, and replaces the default one where that was the group. The one before is still
    to be closed, and symmetric memory and dispatchers that were made on it stay there.
    """
    from . import communicator

    comm = communicator(group)
    return _after(comm, comm.admit(addr, n, timeout))


def replace(rank: int, addr: str, group: Group = None, timeout: float | None = None) -> None:
    """Let a fresh process in the place of ``rank``, which was lost, while the other ranks go on; one of them calls it.

    All ranks were made with ``init(replaceable=True)``, use a dispatcher with ``masks``, and are on one host without GPUs. The
    process calls ``init(addr=addr, replaces=True)`` with the rank and world size of the lost one, from the launcher or as
    arguments, makes the objects that the lost rank had made, with the same arguments, and ends with ``Dispatcher.unmask``. This
    call returns when the process is connected, after ``timeout`` seconds at most, or else as long as an operation waits. It may
    be made in a thread: operations go on meanwhile.
    """
    from . import communicator

    communicator(group).replace(rank, addr, timeout)
