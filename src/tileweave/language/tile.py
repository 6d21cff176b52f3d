"""Device twins of ``schedule.py``: which tile, which rows, which share of K. Tested equal to it, element by element.

Integer arithmetic only, with no word of Triton's, so that the same source serves Triton and Gluon: ``SOURCES`` are the
undecorated functions, which ``language/hopper.py`` compiles as Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it in sight of every jitted function


def place(tile, rank, world_size, rows, tile_m, tile_rows, tile_cols, group_m, band_sources, lead):
    """Tile number -> (first row, row limit, tile column); see ``TileSchedule.place``."""
    per_source = tile_rows * tile_cols
    step = 0
    height = tile_rows
    within = tile
    if rows >= tile_m and tile >= per_source * lead:
        band = (tile - per_source * lead) // (per_source * band_sources)
        within = (tile - per_source * lead) % (per_source * band_sources)
        step = lead + band * band_sources
        height = (world_size - step) * tile_rows
        if height > band_sources * tile_rows:
            height = band_sources * tile_rows
    group = within // (group_m * tile_cols)
    rest = within % (group_m * tile_cols)
    tall = height - group * group_m
    if tall > group_m:
        tall = group_m
    row = group * group_m + rest % tall
    col = rest // tall
    source = (rank + 2 * world_size - step - row // tile_rows) % world_size
    first_row = source * rows + row % tile_rows * tile_m
    row_limit = source * rows + rows
    if rows < tile_m:
        first_row = row * tile_m
        row_limit = rows * world_size
    return first_row, row_limit, col


def place_out(tile, rank, world_size, rows, tile_m, tile_rows, tile_cols, group_m, chunk_rows):
    """Tile number -> (first row, row limit, tile column), remote owners first; see ``ScatterSchedule.place``."""
    per_owner = tile_rows * tile_cols
    step = tile // per_owner
    within = tile % per_owner
    chunk = within // (chunk_rows * tile_cols)
    rest = within % (chunk_rows * tile_cols)
    height = tile_rows - chunk * chunk_rows
    if height > chunk_rows:
        height = chunk_rows
    if rows < tile_m:
        chunk = 0 * tile
        rest = tile + 0
        height = tile_rows + 0
    group = rest // (group_m * tile_cols)
    rest = rest % (group_m * tile_cols)
    tall = height - group * group_m
    if tall > group_m:
        tall = group_m
    row = chunk * chunk_rows + group * group_m + rest % tall
    col = rest // tall
    owner = (rank + 1 + step) % world_size
    first_row = owner * rows + row * tile_m
    row_limit = owner * rows + rows
    if rows < tile_m:
        first_row = row * tile_m
        row_limit = rows * world_size
    return first_row, row_limit, col


def segment(index, num_segments, num_tiles, per_source, band_sources, lead):
    """Segment -> (first tile, number of tiles); see ``TileSchedule.segment``."""
    first = 0
    count = num_tiles
    if num_segments > 1:
        count = per_source
        if index >= lead:
            first = (lead + (index - lead) * band_sources) * per_source
            count = per_source * band_sources
            if count > num_tiles - first:
                count = num_tiles - first
    return first, count


def cut(count, num_programs, team, k_blocks, split_tail, min_span):
    """Tiles of a segment -> (tiles done whole, team, span of a team in k blocks); see ``TileSchedule.cut``."""
    whole = count
    if split_tail:
        whole = count // num_programs * num_programs
    if count % team != 0 or num_programs % team != 0:
        team = team * 0 + 1
    span = ((count - whole) * k_blocks + num_programs - 1) // num_programs
    if span < min_span:
        span = min_span
    return whole, team, span


def unit_count(program, num_programs, count, whole, team, k_blocks, span):
    """Units of a program in a segment -> (whole tiles, all units)."""
    tiles = (whole - program + num_programs - 1) // num_programs
    if program >= whole:
        tiles = 0
    total = (count - whole) // team * k_blocks
    begin = (num_programs // team - 1 - program // team) * span
    end = begin + span
    if end > total:
        end = total
    parts = 0
    if begin < end:
        parts = (end - 1) // k_blocks - begin // k_blocks + 1
    return tiles, tiles + parts


def unit_range(index, tiles, program, num_programs, count, whole, team, k_blocks, span):
    """Unit number of a program in a segment -> (tile in the segment, k begin, k end)."""
    tile = program + index * num_programs
    k_begin = 0
    k_end = k_blocks
    if index >= tiles:
        begin = (num_programs // team - 1 - program // team) * span
        end = begin + span
        if end > (count - whole) // team * k_blocks:
            end = (count - whole) // team * k_blocks
        bundle = begin // k_blocks + index - tiles
        if begin > bundle * k_blocks:
            k_begin = begin - bundle * k_blocks
        if end < bundle * k_blocks + k_blocks:
            k_end = end - bundle * k_blocks
        tile = whole + bundle * team + program % team
    return tile, k_begin, k_end


def part_range(tile, program, whole, num_programs, team, k_blocks, span):
    """Tile of a segment -> (its owner's program, how many helpers below it, ``team`` apart, hand it a part)."""
    owner = program
    helpers = 0
    if tile >= whole:
        start = (tile - whole) // team * k_blocks
        top = start // span
        owner = (num_programs // team - 1 - top) * team + program % team
        helpers = (start + k_blocks - 1) // span - top
    return owner, helpers


SOURCES = (place, place_out, segment, cut, unit_count, unit_range, part_range)

place = triton.jit(place)
place_out = triton.jit(place_out)
segment = triton.jit(segment)
cut = triton.jit(cut)
unit_count = triton.jit(unit_count)
unit_range = triton.jit(unit_range)
part_range = triton.jit(part_range)
