"""The Python interface of DeepEP 2.1 over Switchyard. docs/deep-ep.md of the repository says what each argument does here."""

from __future__ import annotations

import switchyard_deep_ep

switchyard_deep_ep.check()

import torch  # noqa: E402

from .buffers.elastic import ElasticBuffer, EPHandle  # noqa: E402
from .buffers.legacy import Buffer, Config  # noqa: E402
from .hybrid_ep_buffer import HybridEPBuffer  # noqa: E402
from .utils.event import EventHandle, EventOverlap  # noqa: E402
from .utils.sizes import get_logical_domain_size, get_physical_domain_size  # noqa: E402

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]

#: The version of DeepEP whose interface this is.
__version__ = "2.1.0"

#: The type of expert indices.
topk_idx_t = torch.int64
