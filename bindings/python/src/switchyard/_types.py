"""Types of the arguments of the package's functions. Only type checkers load this module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Buffer

    from ._core.comm import Communicator


class HasDlpack(Protocol):
    """A torch tensor, a numpy array, or what else has DLPack."""

    def __dlpack__(self, *arguments: Any, **named: Any) -> Any: ...


class HasArrayInterface(Protocol):
    """An array that numpy can look at."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class HasToList(Protocol):
    """A tensor or an array of numbers, as split sizes may be."""

    def tolist(self) -> Any: ...


#: Memory that is sent, or received in.
Memory = Union[HasDlpack, HasArrayInterface, "Buffer"]
#: Numbers for each rank. None divides equally.
Sizes = Union[Sequence[int], HasToList, Iterable[int], None]
#: The ranks of a call: a communicator, a process group of torch's, or None for the default.
Group = Union["Communicator", "ProcessGroup", None]
#: An operator: its name, or torch's.
Op = Union[str, "torch.distributed.ReduceOp", "torch.distributed.ReduceOp.RedOpType"]
#: A device as torch has it.
Device = Union["torch.device", str, int, None]
#: A stream of CUDA: torch's, or a CUstream as an integer. None is the current one.
Stream = Union["torch.cuda.Stream", int, None]
#: A data type: its name, or that of torch or numpy.
DType = Union[str, type, "torch.dtype", Any]
#: Numbers in rows: a tensor, an array, or nested lists.
Numbers = Union[HasDlpack, HasArrayInterface, Sequence[Sequence[float]]]
#: Plans of collectives: paths of their files, or what is in these. None is none.
Plans = Union[Iterable[Union[str, "os.PathLike[str]", Mapping[str, Any]]], None]
