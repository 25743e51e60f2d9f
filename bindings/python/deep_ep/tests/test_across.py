"""Groups whose ranks are on two hosts: what one host serves, and what does not cross."""

from __future__ import annotations

import ctypes.util

import pytest
import test_bad_input
import test_elastic
import test_ep_buffer
import test_few
import test_hybrid
import test_normal
import test_order
import test_pool
import torch
import torch.distributed as dist
import world
from switchyard import errors

import deep_ep

pytestmark = pytest.mark.skipif(ctypes.util.find_library("ucp") is None, reason="needs UCX")


@pytest.fixture
def hosts(worlds: world.Worlds) -> world.World:
    """Two hosts of two ranks."""
    return worlds.get(4, world.two_hosts)


def test_64_routings_at_a_time(hosts):
    hosts.run(test_normal.alive)


def test_one_rank_keeps_all_results(hosts):
    hosts.run(test_normal.keeps)


def test_tokens_come_and_go(hosts):
    hosts.run(test_normal.grows)


def test_modes(hosts):
    hosts.run(test_normal.modes)


@pytest.mark.parametrize(
    ("use_fp8", "scales", "way", "most"),
    [
        (False, "float32", "plain", test_few.MOST), (True, "ue8m0", "hook", test_few.MOST), (True, "round", "async", 40),
        (True, "float32", "hook", 1024),
    ],
)  # fmt: skip
def test_layers_of_few_tokens(hosts, use_fp8, scales, way, most):
    hosts.run(test_few.served, use_fp8, scales, way, most)


def test_masked_choices(hosts):
    hosts.run(test_few.masked)


@pytest.mark.parametrize("cpu_sync", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_layers_of_elastic(hosts, expand, cpu_sync):
    hosts.run(test_elastic.served, expand, cpu_sync)


@pytest.mark.parametrize("expand", [True, False])
def test_bits_where_sums_are_rounded_once(hosts, expand):
    hosts.run(test_order.bits, expand, False, 8192)


def test_results_come_from_the_event(hosts):
    hosts.run(test_ep_buffer.deferred)


@pytest.mark.parametrize("by_map", [True, False])
def test_rows_by_expert(hosts, by_map):
    hosts.run(test_hybrid.both_ways, by_map, 16)


@pytest.mark.parametrize("pool", [test_pool.bounded, test_pool.under_way, test_pool.last])
def test_a_pool(hosts, pool):
    hosts.run(pool)


@pytest.mark.parametrize("wrong", [test_bad_input.experts, test_bad_input.bounds])
def test_calls_that_are_refused(hosts, wrong):
    hosts.run(wrong)


def refused(rank, size):
    """Tensors of GPUs do not cross, and every call says so. A group of one host has what it had."""
    for kind in (deep_ep.Buffer, deep_ep.ElasticBuffer):
        buffer = kind(dist.group.WORLD)
        for _ in range(2):
            with pytest.raises(errors.Unsupported, match="a tensor is on cuda:0: the ranks of this group are on 2 hosts"):
                buffer._engines.of(torch.device("cuda", 0))
        buffer.destroy()
    assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (2, 2)
    assert deep_ep.get_logical_domain_size(dist.group.WORLD) == (1, 4)
    inside = [dist.new_group([h, h + 2]) for h in range(2)][rank % 2]
    buffer = deep_ep.ElasticBuffer(inside)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, 2)
    test_bad_input.elastic_works(buffer, rank // 2, 2)
    buffer.destroy()


def test_gpus_and_groups_of_one_host(hosts):
    hosts.run(refused)


def test_a_lost_rank(tmp_path):
    ranks = world.World(4, world.two_hosts, str(tmp_path / "store"))
    try:
        with pytest.raises(AssertionError) as caught:
            ranks.run(test_bad_input.lost, tmp_path, True)
        assert str(caught.value) == "lost: rank 3 has ended"  # and the others saw what they should
    finally:
        ranks.close()
