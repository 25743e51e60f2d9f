"""The package as it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(text: str, *paths: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["deep_ep", "deep-ep", "sgl-deep-ep", "deepinfer-ep"])
def test_another_distribution_is_refused(tmp_path, name):
    info = tmp_path / f"{name.replace('-', '_')}-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    done = run("import deep_ep", tmp_path)
    assert done.returncode
    assert f"ImportError: deep_ep: the distributions switchyard-deep-ep and {name} 1.0.0 are both installed" in done.stderr


def test_an_import_starts_nothing():
    done = run(
        "import threading, torch\nbefore = threading.active_count()\n"
        "import deep_ep, deep_ep.buffers.legacy, deep_ep.buffers.elastic, deep_ep.utils.event\n"
        "from deep_ep.utils import EventHandle, EventOverlap\n"
        "assert threading.active_count() == before and not torch.cuda.is_initialized()\n"
        "assert deep_ep.topk_idx_t is torch.int64 and deep_ep.__version__ == '2.1.0'\n"
        "assert 'switchyard.torch' not in __import__('sys').modules\n"
        "deep_ep.Buffer.capture().current_stream_wait()\n"
        "with deep_ep.EventOverlap(deep_ep.EventHandle())(release_handle=True) as event: pass\n"
        "assert event.event is None\nprint('fine')"
    )
    assert done.stdout == "fine\n", done.stderr


def test_numbers_that_need_no_ranks():
    import deep_ep

    with pytest.raises(AssertionError, match="3 is odd"):
        deep_ep.Buffer.set_num_sms(3)
    config = deep_ep.Config(24, 8, 256)
    assert config.get_nvl_buffer_size_hint(14336, 8) >= config.get_nvl_buffer_size_hint(4096, 8) > 0
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    assert deep_ep.Buffer.get_dispatch_config(3).num_sms == deep_ep.Buffer.num_sms
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) >= 2 * 256 * 128 * 7168 * 2
