"""The Python interface of DeepEP 2.1 and 2.5 over Switchyard. docs/deep-ep.md of the repository says what arguments do."""

from __future__ import annotations

import switchyard_deep_ep

switchyard_deep_ep.check()

import torch  # noqa: E402

from .buffers._ep_handle import EPHandle  # noqa: E402
from .buffers.allocator import BufferAllocator  # noqa: E402
from .buffers.elastic import ElasticBuffer  # noqa: E402
from .buffers.ep import BucketBuffer, BucketSession, EngramBuffer, EPBuffer, PPBuffer  # noqa: E402
from .buffers.legacy import Buffer, Config  # noqa: E402
from .hybrid_ep_buffer import HybridEPBuffer  # noqa: E402
from .utils.event import EventHandle, EventOverlap  # noqa: E402
from .utils.sizes import get_logical_domain_size, get_num_allocation_alignment, get_physical_domain_size  # noqa: E402

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]

#: The version of DeepEP that has most of this interface: EPBuffer and BufferAllocator are of 2.5.
__version__ = "2.1.0"

#: The type of expert indices.
topk_idx_t = torch.int64
