"""What the package knows of the C ABI is what the headers say that the build writes."""

from __future__ import annotations

import re
from ctypes import Array, c_char_p, c_int32, c_int64, c_uint64, c_void_p, sizeof
from pathlib import Path

import pytest

import switchyard as sw
from switchyard._core import abi

FOLDER = Path(sw.__file__).resolve().parent
#: What an argument may be in Python. Addresses go as integers, or by reference.
KINDS = {
    "uint64_t": {c_uint64},
    "int64_t": {c_int64},
    "int32_t": {c_int32},
    "char*": {c_char_p},
    "void*": {c_void_p},
    "uint64_t*": {abi._u64p, c_void_p},
    "int64_t*": {abi._i64p, c_void_p},
    "int32_t*": {abi._i32p, c_void_p},
}
#: Functions that are not called through the table: of single use, or called by torch.
APART = {"abi_version", "threads", "live", "pool_take", "pool_give"}
STRUCTURES = {
    "buffer": abi.Buffer,
    "shape_head": abi.ShapeHead,
    "detail": abi.Detail,
    "dispatch_call": abi.DispatchCall,
    "combine_call": abi.CombineCall,
    "result_call": abi.ResultCall,
    "expand_call": abi.ExpandCall,
    "fold_call": abi.FoldCall,
    "route_call": abi.RouteCall,
    "backward_call": abi.BackwardCall,
    "message_call": abi.MessageCall,
    "transfer_call": abi.TransferCall,
}


def test_prototypes_are_those_of_the_header():
    header = (FOLDER / "libswitchyard.h").read_text()
    found = dict(re.findall(r"^extern int32_t switchyard_(\w+)\((.*)\);", header, re.MULTILINE))
    assert found.keys() - APART == abi.PROTOTYPES.keys()
    for name, arguments in abi.PROTOTYPES.items():
        kinds = [re.sub(r"\s*\w+$", "", a.strip()) for a in found[name].split(",")]
        assert len(kinds) == len(arguments), (name, found[name])
        for kind, given in zip(kinds, arguments):
            known = {c_void_p} if kind.startswith("struct switchyard_") else KINDS[kind]
            assert given in known, (name, kind, given)


@pytest.mark.parametrize("name", ["SWITCHYARD", "SWITCHYARD_DEVICE"])
def test_the_headers_for_kernels_are_installed(name):
    text = (FOLDER / f"{name.lower()}.cuh").read_text()
    assert re.search(rf"^#define {name}_VERSION 1$", text, re.MULTILINE)
    assert not re.search(r'^#include "', text, re.MULTILINE)  # it stands alone


def fields(body: str) -> list[tuple[str, object, int]]:
    """Names, types and lengths of arrays, in order."""
    listed = []
    for kind, names in re.findall(r"^\s*((?:struct )?\w+) ([^;/]+);", body, re.MULTILINE):
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            listed.append((name, {"uint64_t": c_uint64, "int64_t": c_int64}.get(kind, abi.Buffer), int(length or 1)))
    return listed


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_header(name):
    header = (FOLDER / "switchyard.h").read_text()
    (body,) = re.findall(rf"^struct switchyard_{name} \{{(.*?)^\}};", header, re.MULTILINE | re.DOTALL)
    ours = []
    for field, kind in STRUCTURES[name]._fields_:
        array = issubclass(kind, Array)
        ours.append((field, kind._type_ if array else kind, kind._length_ if array else 1))
    assert ours == fields(body)
    assert sizeof(STRUCTURES[name]) == sum(sizeof(kind) * n for _, kind, n in ours)


def test_calls_are_in_the_order_of_their_structures():
    def numbers(structure):
        return [
            (name, [(b.Addr, b.Bytes) for b in value] if isinstance(value, Array) else
             (value.Addr, value.Bytes) if isinstance(value, abi.Buffer) else value)
            for name, _ in structure._fields_ for value in [getattr(structure, name)]
        ]  # fmt: skip

    call = abi.dispatch_call((1, 2), (3, 4), (5, 6), (7, 8), 9, 10, (13, 14))
    call[abi.MADE], call[abi.ROWS] = 11, 12
    assert numbers(abi.DispatchCall.from_buffer(call)) == [
        ("X", (1, 2)), ("Scales", (3, 4)), ("Experts", (5, 6)), ("Weights", (7, 8)), ("Numbers", (13, 14)),
        ("Handle", 9), ("Half", 10), ("Made", 11), ("Rows", 12),
    ]  # fmt: skip
    assert numbers(abi.CombineCall.from_buffer(abi.combine_call(range(1, 17), 17, 18, 19, 20, 21, 22))) == [
        ("Y", (1, 2)), ("Rows", (3, 4)), ("Weights", (5, 6)), ("SumWeights", (7, 8)), ("Bias", [(9, 10), (11, 12)]),
        ("Ready", (13, 14)), ("TokenWeights", (15, 16)), ("Handle", 17), ("Routing", 18), ("Backward", 19),
        ("Weighting", 20), ("Half", 21), ("Release", 22),
    ]  # fmt: skip
    assert numbers(abi.BackwardCall.from_buffer(abi.backward_call(range(1, 11), 11, 12))) == [
        ("DRows", (1, 2)), ("DWeights", (3, 4)), ("DY", (5, 6)), ("Rows", (7, 8)), ("Weights", (9, 10)), ("Handle", 11),
        ("Weighting", 12),
    ]  # fmt: skip
    assert numbers(abi.MessageCall.from_buffer(abi.message_call(True, 2, 3, (4, 5)))) == [
        ("Buffer", (4, 5)), ("Receive", 1), ("Peer", 2), ("Tag", 3),
    ]  # fmt: skip
    assert numbers(abi.TransferCall.from_buffer(abi.transfer_call(abi.WAIT, 2, (3, 4), (5, 6), 7))) == [
        ("Mine", (3, 4)), ("At", (5, 6)), ("Kind", 3), ("Peer", 2), ("Semaphore", 7),
    ]  # fmt: skip
    call = abi.result_call(range(1, 23), 23, 24, 25)
    call[abi.RESULT_MADE] = 26
    assert numbers(abi.ResultCall.from_buffer(call)) == [
        *((name, (2 * i + 1, 2 * i + 2)) for i, name in enumerate(abi.RESULTS)), ("Handle", 23), ("Length", 24),
        ("Release", 25), ("Made", 26),
    ]  # fmt: skip
    assert numbers(abi.ExpandCall.from_buffer(abi.expand_call(range(1, 21), 21, 22))) == [
        *((name, (2 * i + 1, 2 * i + 2)) for i, name in enumerate(abi.EXPANSION)), ("Align", 21), ("Length", 22),
    ]  # fmt: skip
    assert numbers(abi.FoldCall.from_buffer(abi.fold_call(range(1, 11), 11))) == [
        *((name, (2 * i + 1, 2 * i + 2)) for i, name in enumerate(abi.FOLDING)), ("Type", 11),
    ]  # fmt: skip
    call = abi.route_call(1)
    call[abi.ROUTE_MADE], call[abi.ROUTE_ROWS] = 2, 3
    assert numbers(abi.RouteCall.from_buffer(call)) == [("Routing", 1), ("Made", 2), ("Rows", 3)]
    head = abi.shape_head(1, 2, 3)
    assert len(head) == abi.HEAD
    for at, value in ((abi.LIVE, 4), (abi.PLACED, 5), (abi.MAX_SMS, 6), (abi.COPY_SMS, 7), (abi.NO_SMS, 8)):
        head[at] = value
    assert [value for _, value in numbers(abi.ShapeHead.from_buffer(head))] == list(range(1, 9))
