"""Which rows and columns a tile of a grouped matmul covers, computed on the device from the offsets
of the experts.

Tiles are numbered expert by expert; within an expert by bands of ``group_m`` tile rows, within a
band column by column, so that programs that run at the same time share weights and rows. An expert
without rows has no tile. Programs take rising tile numbers, so they *walk*: they know the expert
they are at and the number of its first tile, and a step costs one load.

Integer arithmetic and loads of integers only: the same source serves Triton and Gluon
(``SOURCES``), as in ``device/triton/tiles.py``. The host's counterpart, for tests, is
``planning.schedules.grouped.walk``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Up to so many rows of a tile only those of its expert are read: experts often have few.
LOW_TILE = tl.constexpr(64)


class Walk(NamedTuple):
    """Where a program is: an expert, its first tile and the next expert's, and its rows [begin,
    end)."""

    expert: Any
    first_tile: Any
    next_tile: Any
    begin: Any
    end: Any


def first_expert(offsets, tile_cols, tile_m):
    """The beginning of a walk, at expert 0. ``offsets`` int32 [experts + 1]: first row of each;
    ``tile_cols``: tiles across."""
    begin = tl.load(offsets)
    end = tl.load(offsets + 1)
    tiles = (end - begin + tile_m - 1) // tile_m * tile_cols
    return Walk(begin * 0, begin * 0, tiles, begin, end)


def walk_to(walk, tile, offsets, experts, tile_cols, tile_m):
    """The walk at ``tile``, which may not be before the walk's. The result has ``expert`` ==
    ``experts`` if there is no such tile."""
    expert, first_tile, next_tile, begin, end = walk
    while (expert < experts) & (tile >= next_tile):
        expert += 1
        first_tile = next_tile
        begin = end
        if expert < experts:
            end = tl.load(offsets + expert + 1)
            next_tile = first_tile + (end - begin + tile_m - 1) // tile_m * tile_cols
    return Walk(expert, first_tile, next_tile, begin, end)


def place_in_expert(walk, tile, tile_cols, tile_m, group_m):
    """A tile of the walk's expert -> (first row, tile column); its rows end at ``walk.end`` or
    before."""
    tile_rows = (walk.end - walk.begin + tile_m - 1) // tile_m
    within = tile - walk.first_tile
    group = within // (group_m * tile_cols)
    rest = within % (group_m * tile_cols)
    tall = tile_rows - group * group_m
    if tall > group_m:
        tall = group_m
    return walk.begin + (group * group_m + rest % tall) * tile_m, rest // tall


SOURCES = (first_expert, walk_to, place_in_expert)
first_expert, walk_to, place_in_expert = (triton.jit(source) for source in SOURCES)
