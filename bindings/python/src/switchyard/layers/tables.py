"""The tiles of products, by their shape. The figures come from measurements on H200."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """A product's tiles: rows, columns (of the gate and of the up each, in the first product) and the depth of a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    #: Blocks of rows that take a column before the next.
    group: int = 8
    #: The product is made transposed, for few rows: then columns are what the tensor cores want 64 of.
    swap: bool = False
    #: Programs on a multiprocessor.
    programs: int = 1


def part_of(n: int, most: int) -> int:
    """The largest power of two that divides n and is at most ``most``."""
    return min(n & -n, most)


def fitted(t: Tiles, columns: int, depth: int) -> Tiles:
    """The tiles for matrices of this number of columns and this depth."""
    return t._replace(columns=part_of(columns, t.columns), depth=part_of(depth, t.depth))


class Plan(NamedTuple):
    """The tiles of a layer's products. All have blocks of the same rows."""

    block: int
    up: Tiles
    down: Tiles
    down_back: Tiles
    up_back: Tiles
    matrices_back: Tiles


def plan(rows: float, float8: bool, wide: bool, hopper: bool) -> Plan:
    """The tiles for experts that have this number of rows on average. wide says that elements have 4 bytes, and hopper
    that the GPU is of that generation or a later one. Those of earlier GPUs are not measured."""
    if wide or not hopper:
        t = Tiles(16 if rows <= 16 else 64, 64, 32, 4, 2)
        if float8:  # scales are for 128 columns
            t = t._replace(columns=128, depth=128, warps=8)
        return Plan(t.rows, t, t, t, t, t._replace(depth=16 if rows <= 16 else 32))
    if float8:
        if rows <= 16:
            up = down = Tiles(16, 128, 128, 4, 3, swap=True, programs=2)
        elif rows <= 96:
            up, down = Tiles(64, 128, 128, 4, 4), Tiles(64, 128, 128, 4, 3, programs=2)
        else:
            up, down = Tiles(128, 128, 128, 8, 3), Tiles(128, 128, 128, 8, 4)
        return Plan(up.rows, up, down, up, up, up)
    back = Tiles(64, 128, 64, 4, 4, programs=2)
    if rows <= 16:
        few = Tiles(16, 128, 64, 4, 4, swap=True)
        return Plan(16, few._replace(columns=64, programs=2), few, back, few, Tiles(128, 128, 16, 4, 3))
    if rows <= 96:
        half = Tiles(64, 128, 64, 4, 4)
        return Plan(64, half, half, back, Tiles(64, 256, 64, 4, 4), Tiles(128, 128, 64, 8, 4))
    down = Tiles(128, 256, 64, 8, 3, group=4)
    return Plan(128, Tiles(128, 128, 64, 8, 4), down, back, down, Tiles(128, 256, 64, 8, 3))
