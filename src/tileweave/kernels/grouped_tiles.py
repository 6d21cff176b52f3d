"""Which rows and columns a tile of a grouped matmul covers, from the offsets of the experts, on the device.

Tiles are numbered expert by expert; in an expert by bands of ``group_m`` tile rows, in a band column by column, so that
programs that work side by side share weights and rows. An expert without rows has no tile. Programs take rising tile
numbers, so they *walk*: the state is the expert they are at and the number of its first tile, and a step costs one load.

Integer arithmetic and loads of words only: the same source serves Triton and Gluon (``SOURCES``), as in
``language/tile.py``. The host's twin, for tests, is ``schedule_grouped.walk``.
"""

from __future__ import annotations

import triton
import triton.language as tl


def first_expert(offsets, tile_cols, tile_m):
    """The walk's state at its beginning: (expert, first tile of it, first tile of the next, first row, end of its rows)."""
    begin = tl.load(offsets)
    end = tl.load(offsets + 1)
    tiles = (end - begin + tile_m - 1) // tile_m * tile_cols
    return begin * 0, begin * 0, tiles, begin, end


def walk_to(tile, expert, first_tile, next_tile, begin, end, offsets, experts, tile_cols, tile_m):
    """The state at ``tile``, which may not be before that of the last call. ``expert == experts``: there is no such tile."""
    while (expert < experts) & (tile >= next_tile):
        expert += 1
        first_tile = next_tile
        begin = end
        if expert < experts:
            end = tl.load(offsets + expert + 1)
            next_tile = first_tile + (end - begin + tile_m - 1) // tile_m * tile_cols
    return expert, first_tile, next_tile, begin, end


def place_in_expert(within, begin, end, tile_cols, tile_m, group_m):
    """Tile ``within`` of an expert with rows [begin, end) -> (first row, tile column); its rows end at ``end`` at most."""
    tile_rows = (end - begin + tile_m - 1) // tile_m
    group = within // (group_m * tile_cols)
    rest = within % (group_m * tile_cols)
    tall = tile_rows - group * group_m
    if tall > group_m:
        tall = group_m
    return begin + (group * group_m + rest % tall) * tile_m, rest // tall


SOURCES = (first_expert, walk_to, place_in_expert)
first_expert, walk_to, place_in_expert = (triton.jit(source) for source in SOURCES)
