"""Checks of arguments. A wrong one is refused before anything is sent."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from switchyard import errors
from torch import Tensor

from ._results import SUMMED, SUMS


def known(x: Any, idx: Any, weights: Any) -> Optional[tuple[Tensor, Optional[Tensor], tuple[Any, ...]]]:
    """Tokens, their scales, and the sizes and types of both, of choices and of weights, by which a caller remembers what checks
    found; None where the checks have to look, or the tensors are to be copied. Without choices there are no weights."""
    scales, words = None, None
    if type(x) is tuple and len(x) == 2:
        x, scales = x
        if type(scales) is not Tensor or scales.dim() != 2 or scales.requires_grad or not scales.is_contiguous():
            return None
        words = scales.shape[1], scales.dtype
    if type(x) is not Tensor or x.requires_grad or not x.is_contiguous():
        return None
    shape, device, ways = x.shape, x.device, None
    if len(shape) != 2:
        return None
    if idx is not None:
        if type(idx) is not Tensor or not idx.is_contiguous():
            return None
        chosen = idx.shape
        if len(chosen) != 2 or shape[0] != chosen[0] or idx.device != device:
            return None
        ways = chosen[1], idx.dtype
    if weights is not None:
        if type(weights) is not Tensor or weights.dtype is not torch.float32 or weights.shape != chosen:
            return None
        if weights.requires_grad or not weights.is_contiguous() or weights.device != device:
            return None
    if scales is not None and (scales.shape[0] != shape[0] or scales.device != device):
        return None
    return x, scales, (shape[1], x.dtype, words, ways, device)


class Tokens(NamedTuple):
    """Tokens to send, with scales where they are float8."""

    x: Tensor
    scales: Optional[Tensor]
    #: The format of the scales, as Shape has it.
    kind: str
    #: The type that the caller's scales have.
    words: Any

    def as_given(self, x: Any) -> bool:
        """Whether the caller's scales are sent as they are."""
        return self.scales is None or self.scales is x[1]

    def returned(self, rows: Tensor, scales: Optional[Tensor]) -> Any:
        """Rows as the caller gets them: with scales of the type that came."""
        if scales is None or self.words is None:
            return rows
        return rows, scales if scales.dtype is self.words else scales.view(self.words)


def tokens(call: str, x: Any) -> Tokens:
    """Tokens [n, hidden], or those of float8 with scales."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise NotImplementedError(f"deep_ep: {call}: x has {len(x)} parts, want rows and scales: no nvfp4")
        x, scales = x
    x = matrix(call, "x", x)
    if x.dtype not in SUMS:
        raise errors.InvalidType(f"deep_ep: {call}: x is {x.dtype}, want bfloat16, float16, float32 or float8_e4m3fn")
    if (x.element_size() == 1) != (scales is not None):
        raise errors.InvalidType(f"deep_ep: {call}: x is {x.dtype} with{'out' if scales is None else ''} scales")
    if scales is None:
        return Tokens(x, None, "", None)
    scales = matrix(call, "scales", scales, rows=x.shape[0], device=x.device)
    n, words, hidden = x.shape[0], scales.shape[1], x.shape[1]
    if scales.dtype not in (torch.float32, torch.int32):
        raise errors.InvalidType(f"deep_ep: {call}: scales are {scales.dtype}, want float32 or int32")
    blocks = -(-hidden // 128)
    if scales.dtype is torch.int32 and words == -(-blocks // 4):
        return Tokens(x, scales, "ue8m0", torch.int32)
    if words in (blocks, 1):
        plain = scales if scales.dtype is torch.float32 else scales.view(torch.float32)
        return Tokens(x, plain, "float32" if words == blocks else "row", scales.dtype)
    raise errors.InvalidArgument(
        f"deep_ep: {call}: scales are [{n}, {words}] of {scales.dtype}, want [{n}, {blocks}] or [{n}, 1], or four in an int32"
    )


def matrix(call: str, name: str, x: Any, rows: int = -1, columns: int = -1, device: Any = None) -> Tensor:
    """A tensor of two dimensions with its numbers one after the other."""
    if not isinstance(x, Tensor):
        raise errors.InvalidType(f"deep_ep: {call}: {name} is {type(x).__name__}, want a tensor")
    if x.dim() != 2 or rows not in (-1, x.shape[0]) or columns not in (-1, x.shape[1]):
        want = ", ".join("any" if n < 0 else str(n) for n in (rows, columns))
        raise errors.InvalidArgument(f"deep_ep: {call}: {name} has shape {tuple(x.shape)}, want ({want})")
    if device is not None and x.device != device:
        raise errors.InvalidArgument(f"deep_ep: {call}: {name} is on {x.device}, x on {device}")
    if x.requires_grad:
        x = x.detach()
    return x if x.is_contiguous() else x.contiguous()


def indices(call: str, topk_idx: Any, count: int = -1, device: Any = None) -> Tensor:
    """Expert indices of tokens."""
    idx = matrix(call, "topk_idx", topk_idx, rows=count, device=device)
    if idx.dtype not in (torch.int64, torch.int32):
        raise errors.InvalidType(f"deep_ep: {call}: topk_idx is {idx.dtype}, want int64 or int32")
    return idx


class Seen(NamedTuple):
    """Choices of which get_dispatch_layout has found that all are experts or none: their tensor, torch's count of its changes,
    and the number of experts."""

    idx: weakref.ref[Tensor]
    version: int
    experts: int


def in_range(call: str, idx: Tensor, count: int, waits: bool = True) -> Tensor:
    """Expert indices of 64 bits, -1 where a choice is masked; one that is neither is refused. On a GPU that waits for the
    current stream. With waits=False, and in a capture, such a choice is masked: a dispatch of it is refused."""
    wide = idx.to(torch.int64)
    if wide.is_cuda and (not waits or torch.cuda.is_current_stream_capturing()):
        return torch.where((wide >= 0) & (wide < count), wide, -1)
    for expert in torch.stack(wide.aminmax()).tolist() if wide.numel() else ():
        if not -1 <= expert < count:
            raise errors.InvalidArgument(f"deep_ep: {call}: topk_idx has expert {expert} of {count}")
    return wide


def choices(call: str, topk_idx: Any, topk_weights: Any, count: int, device: Any) -> tuple[Tensor, Optional[Tensor]]:
    """Expert indices and weights of tokens."""
    idx = indices(call, topk_idx, count, device)
    if topk_weights is None:
        return idx, None
    weights = matrix(call, "topk_weights", topk_weights, rows=count, columns=idx.shape[1], device=device)
    if weights.dtype is not torch.float32:
        raise errors.InvalidType(f"deep_ep: {call}: topk_weights is {weights.dtype}, want float32")
    return idx, weights


def rows(call: str, x: Any, dims: int = 2) -> Tensor:
    """Rows to combine. Those of 3 dimensions, which the caller has checked, stay as they are where that is possible."""
    if type(x) is Tensor and x.dtype in SUMMED and x.is_contiguous() and not x.requires_grad and x.dim() == dims:
        return x  # what is asked most, soonest
    x = matrix(call, "x", x if dims == 2 else x.reshape(-1, x.shape[2]))
    if x.element_size() == 1 or x.dtype not in SUMS:
        raise errors.InvalidType(f"deep_ep: {call}: x is {x.dtype}, want bfloat16, float16 or float32")
    return x


def biases(call: str, bias: Any, x: Tensor, count: int) -> Sequence[Tensor]:
    """None, one or two biases."""
    given = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise errors.InvalidArgument(f"deep_ep: {call}: {len(given)} biases, want at most 2")
    made = [matrix(call, "bias", b, rows=count, columns=x.shape[1], device=x.device) for b in given]
    for b in made:
        if b.dtype is not x.dtype:
            raise errors.InvalidType(f"deep_ep: {call}: bias is {b.dtype}, x is {x.dtype}")
    return made


def experts(call: str, num_experts: int, size: int) -> int:
    """A number of experts of which each rank has as many."""
    if num_experts < size or num_experts % size:
        raise errors.InvalidArgument(f"deep_ep: {call}: {num_experts} experts for {size} ranks, want a multiple of {size}")
    return num_experts


def alignment(call: str, name: str, value: Any) -> int:
    """The rows of which each expert has a multiple."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.InvalidArgument(f"deep_ep: {call}: {name} is {value!r}, want at least 1")
    return value


def stats(call: str, name: str, counts: Any, local: int, device: Any) -> None:
    """Refuse what the counts of local experts cannot be added to."""
    if counts is None:
        return
    if not isinstance(counts, Tensor):
        raise errors.InvalidType(f"deep_ep: {call}: {name} is {type(counts).__name__}, want a tensor")
    if counts.shape != (local,):
        raise errors.InvalidArgument(f"deep_ep: {call}: {name} has shape {tuple(counts.shape)}, want ({local},)")
    if counts.dtype not in (torch.int32, torch.int64):
        raise errors.InvalidType(f"deep_ep: {call}: {name} is {counts.dtype}, want int32 or int64")
    if counts.device != device:
        raise errors.InvalidArgument(f"deep_ep: {call}: {name} is on {counts.device}, x on {device}")


def stats_known(counts: Any) -> Optional[tuple[Any, ...]]:
    """The facts about counts that stats looks at, for who remembers that they were right; None where it has to look."""
    return (counts.shape, counts.dtype, counts.device) if type(counts) is Tensor else None


def num_sms(call: str, value: Any) -> int:
    """A bound of multiprocessors, 0 for none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise errors.InvalidArgument(f"deep_ep: {call}: num_sms is {value!r}, want at least 0")
    return value


def at_most(call: str, x: Tensor, most: int, name: str) -> None:
    if x.shape[0] > most:
        raise errors.InvalidArgument(f"deep_ep: {call}: x has {x.shape[0]} tokens, {name} is {most}")
