"""SGLang's dispatcher modules find this package, and their buffer is one of it."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deep_ep

pytest.importorskip("sglang", exc_type=ImportError)


def test_the_first_generation_is_found():
    from sglang.srt.layers.moe.token_dispatcher import deepep

    assert deepep.use_deepep, deepep._deepep_import_error
    assert deepep.Buffer is deep_ep.Buffer


def test_the_second_generation_is_found():
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2

    assert deepep_v2.use_deepep_v2, deepep_v2._deepep_v2_import_error
    assert deepep_v2.ElasticBuffer is deep_ep.ElasticBuffer


def made(rank, size):
    """The buffer that SGLang makes for a server with both modes, with its own numbers."""
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode

    config = types.SimpleNamespace(normal_dispatch_config=None, normal_combine_config=None, num_sms=20)
    gpu = types.SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(deepep.DeepEPConfig, "get_instance", return_value=config),
        mock.patch.object(deepep, "is_tbo_enabled", return_value=False),
        mock.patch.object(deepep, "get_cuda_version", return_value=(13, 0)),
        mock.patch.object(deepep, "_is_mnnvl_fabric_supported", return_value=True),
    ):
        buffer = deepep.DeepEPBuffer.get_deepep_buffer(dist.group.WORLD, 7168, 2, DeepEPMode.AUTO, 128, 4 * size)
        assert isinstance(buffer, deep_ep.Buffer)
        assert buffer.group_size == size
        assert buffer.low_latency_mode
        deepep.DeepEPBuffer.set_dispatch_mode_as_normal()
        deepep.DeepEPBuffer.set_dispatch_mode_as_low_latency()
    buffer.destroy()


def test_the_buffer_of_a_server(gloo):
    gloo.run(made, timeout=600)
