"""The package as it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def run(text: str, *paths: object, arguments: Sequence[object] = ()) -> subprocess.CompletedProcess[str]:
    """Run a text, or a command, with folders on the path of Python."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *map(str, arguments or ("-c", text))]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def theirs(site: Path, name: str, how: str, files: bool = True) -> None:
    """A distribution that has a package deep_ep; how says which file of its metadata knows that."""
    info = site / f"{name.replace('-', '_')}-0.1.2.post1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.2.post1\n")
    (info / how).write_text("deep_ep\n" if how == "top_level.txt" else f"deep_ep/__init__.py,,\n{info.name}/METADATA,,\n")
    if files:
        (site / "deep_ep").mkdir()
        (site / "deep_ep" / "__init__.py").write_text("")


#: Says whose package this process and one that it starts would import.
WHOSE = """
import subprocess, sys
WHOSE = "import importlib.util as u; print('ours' if 'switchyard' in u.find_spec('deep_ep').origin else 'theirs', flush=True)"
exec(WHOSE)
subprocess.run([sys.executable, "-c", WHOSE], check=True)
"""


def test_a_program_is_run_with_this_package_beside_another(tmp_path):
    import switchyard_deep_ep

    site, program = tmp_path / "site", tmp_path / "program.py"
    theirs(site, "sgl-deep-ep", "RECORD")
    program.write_text(WHOSE)
    assert run(WHOSE, site).stdout == "theirs\ntheirs\n"
    for started in ([program], ["-m", "program"]):
        done = run("", site, tmp_path, arguments=["-m", "switchyard_deep_ep", *started])
        assert done.stdout == "ours\nours\n", done.stderr
    done = run("", site, arguments=["-m", "switchyard_deep_ep", "--path"])
    assert done.stdout == switchyard_deep_ep.FOLDER + "\n"
    assert run(WHOSE, done.stdout.strip(), site).stdout == "ours\nours\n"
    assert run("import switchyard_deep_ep\nswitchyard_deep_ep.install()\n" + WHOSE, site).stdout == "ours\nours\n"
    done = run("", site, arguments=["-m", "switchyard_deep_ep", "--which"])
    assert done.stdout == f"deep_ep is not Switchyard's: {site}/deep_ep/__init__.py; sgl-deep-ep 0.1.2.post1 has one\n"
    done = run("import deep_ep, switchyard_deep_ep\nswitchyard_deep_ep.install()", site)
    assert f"ImportError: switchyard_deep_ep: install: deep_ep is imported already, from {site}/deep_ep" in done.stderr


def test_no_file_is_in_a_folder_of_others():
    import importlib.metadata

    installed = importlib.metadata.files("switchyard-deep-ep") or []
    assert {str(file.parts[0]).partition("-")[0] for file in installed} == {"switchyard_deep_ep", "switchyard_deep_ep.pth"}


@pytest.mark.parametrize("how", ["top_level.txt", "RECORD"])
@pytest.mark.parametrize("name", ["deep_ep", "sgl-deep-ep", "a-name-that-nobody-knows"])
def test_another_distribution_that_python_finds_later_is_refused(tmp_path, name, how):
    theirs(tmp_path, name, how, files=False)  # as where it is installed editable
    done = run("import deep_ep", tmp_path)
    assert f"ImportError: deep_ep: {name} 0.1.2.post1 and switchyard-deep-ep are installed, and have" in done.stderr
    done = run("import switchyard_deep_ep as s\ns.install()\ns.check()\nprint('fine')", tmp_path)
    assert done.stdout == "fine\n", done.stderr


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
