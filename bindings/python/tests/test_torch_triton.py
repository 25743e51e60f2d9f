"""Kernels of one's own in Triton, without a GPU: their layout, what they compile to, and their protocol in the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import switchyard as sw

pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "kernels" / "all_gather_triton.py"


def python(*arguments: object, **environment: str) -> str:
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def structs(header: str) -> dict[str, dict[str, tuple[int, int]]]:
    """The place and the size of every word of the header's structs, in bytes."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", re.sub(r"//.*", "", header), re.DOTALL | re.MULTILINE):
        at, words = 0, found.setdefault(name, {})
        for bits, names in re.findall(r"uint(\d+)_t ([^;]+);", body):
            for word, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
                size = int(bits) // 8
                assert at % size == 0, f"{name}.{word} has padding"
                words[word] = at, size
                at += size * int(count or 1)
    return found


def test_words_lie_where_the_header_has_them():
    import switchyard.triton as st

    header = (Path(sw.__file__).parent / "switchyard.cuh").read_text()
    found = structs(header)
    # The peer of a record and its kind are one word here.
    halves = {("record", "kind"): 8, ("record", "peer"): None}
    unused = {("record", "others")}
    for name, words in found.items():
        for word, (at, size) in words.items():
            size = halves.get((name, word), size)
            if size is not None and (name, word) not in unused:
                assert getattr(st, f"_{word.upper()}").value * size == at, f"{name}.{word}"
    assert found["record"]["peer"] == (4, 4)
    assert set(found) == {"communicator", "control", "record"}
    numbers = dict(re.findall(r"(\w+) = (\d+)[,;} ]", header)) | dict(re.findall(r"#define (\w+) (\d+)", header))
    for theirs, ours in {
        "SWITCHYARD_VERSION": st.VERSION, "late": st._LATE, "aborted": st._ABORTED, "other_version": st._OTHER_VERSION,
        "line_bytes": st._LINE_BYTES,
    }.items():  # fmt: skip
        assert int(numbers[theirs]) == ours.value, theirs
    assert re.search(r"look_every =\s+(\d+)", header)[1] == str(st._LOOK_EVERY.value)


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the examples")
def test_kernels_compile_without_a_gpu(tmp_path):
    python(HERE / "triton_compiles.py", EXAMPLE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the examples")
def test_the_protocol_in_the_interpreter():
    python(HERE / "triton_ranks.py", EXAMPLE, TRITON_INTERPRET="1")


def test_triton_is_loaded_by_those_who_use_it():
    code = """
        import sys
        import switchyard
        assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
        sys.modules["triton"] = None  # as if it were not installed
        try:
            import switchyard.triton
        except ImportError as err:
            assert str(err) == "switchyard.triton: Triton cannot be imported: pip install triton", err
        else:
            sys.exit("it was imported")
    """
    python("-c", textwrap.dedent(code))
