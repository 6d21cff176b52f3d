"""Device twins of ``schedule.py``: which tile, which rows, which share of K. Tested equal to it, element by element.

Integer arithmetic only, with no word of Triton's, so that the same source serves Triton and Gluon: ``SOURCES`` are the
undecorated functions, which ``language/hopper.py`` compiles as Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it in sight of every jitted function


def place(tile, rank, world_size, rows, tile_m, tile_rows, tile_cols, group_m):
    """Tile number -> (first row, row limit, tile column); see ``TileSchedule.place``."""
    spans = rows < tile_m
    per_source = tile_rows * tile_cols
    step = tile // per_source
    within = tile % per_source
    band = within // (group_m * tile_cols)
    rest = within % (group_m * tile_cols)
    height = tile_rows - band * group_m
    if height > group_m:
        height = group_m
    row = band * group_m + rest % height
    col = rest // height
    source = (rank + world_size - step) % world_size
    first_row = source * rows + row * tile_m
    row_limit = source * rows + rows
    if spans:
        first_row = row * tile_m
        row_limit = rows * world_size
    return first_row, row_limit, col


def unit_count(program, num_programs, num_tiles, num_whole, k_blocks, tail_span):
    """Units of a program: whole tiles, then parts of the cut ones."""
    whole = (num_whole - program + num_programs - 1) // num_programs
    if program >= num_whole:
        whole = 0
    total = (num_tiles - num_whole) * k_blocks
    begin = program * tail_span
    end = begin + tail_span
    if end > total:
        end = total
    parts = 0
    if begin < end:
        parts = (end - 1) // k_blocks - begin // k_blocks + 1
    return whole, whole + parts


def unit_range(index, whole, program, num_programs, num_tiles, num_whole, k_blocks, tail_span):
    """Unit number of a program -> (tile, k begin, k end)."""
    tile = program + index * num_programs
    k_begin = 0
    k_end = k_blocks
    if index >= whole:
        total = (num_tiles - num_whole) * k_blocks
        begin = program * tail_span
        end = begin + tail_span
        if end > total:
            end = total
        cut = begin // k_blocks + index - whole
        if begin > cut * k_blocks:
            k_begin = begin - cut * k_blocks
        if end < cut * k_blocks + k_blocks:
            k_end = end - cut * k_blocks
        tile = num_whole + cut
    return tile, k_begin, k_end


def part_range(tile, num_whole, k_blocks, tail_span):
    """Cut tile -> (first program, last program) that do a part of it."""
    start = (tile - num_whole) * k_blocks
    return start // tail_span, (start + k_blocks - 1) // tail_span


SOURCES = (place, unit_count, unit_range, part_range)

place = triton.jit(place)
unit_count = triton.jit(unit_count)
unit_range = triton.jit(unit_range)
part_range = triton.jit(part_range)
