"""The integer maps of ``planning/schedules`` for kernels: which tile, which rows, which part of K.
Tested equal to the maps there, element by element.

Integer arithmetic only, without functions of Triton, so that the same source serves Triton and
Gluon: ``SOURCES`` are the undecorated functions, which ``device/gluon/matmul.py`` compiles as
Gluon.

A kernel makes one :class:`Tiles` (or :class:`OwnerTiles`) of its arguments and passes it on. Named
tuples cost nothing: their fields are the arguments themselves. But in a tuple that is assigned to a
name Triton makes numbers of constants: they are folded, but cannot be a shape or a bound of
``static_range``, so those are passed separately (decision 0009).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileweave.planning.schedules.gather import MIN_SPAN as _MIN_SPAN

MIN_SPAN = tl.constexpr(_MIN_SPAN)


class Tiles(NamedTuple):
    """What the device needs of a ``TileSchedule``; the fields have the same names there."""

    rank: Any
    world_size: Any
    rows: Any
    tile_m: Any
    group_m: Any
    num_tiles: Any
    num_segments: Any
    band_sources: Any
    lead: Any
    team: Any
    tile_rows: Any
    tile_cols: Any
    k_blocks: Any
    split_tail: Any


class OwnerTiles(NamedTuple):
    """What the device needs of a ``ScatterSchedule``. ``chunk_rows``: tile rows of a chunk, at most
    ``tile_rows``."""

    rank: Any
    world_size: Any
    rows: Any
    tile_m: Any
    group_m: Any
    num_tiles: Any
    chunk_rows: Any
    team: Any
    tile_rows: Any
    tile_cols: Any
    k_blocks: Any
    split_tail: Any


class Share(NamedTuple):
    """One program's part of a segment: ``tiles`` whole tiles in turn, then parts of tiles that are
    cut; ``units`` in total.

    Tiles of the segment from number ``whole`` on are cut along K. They form bundles of ``team``
    tiles, one for each program of a team. The bundles' K blocks, ``k_blocks`` in each, are numbered
    consecutively; this program takes K blocks [begin, end), at most ``span`` of them.
    """

    program: Any
    num_programs: Any
    tiles: Any
    units: Any
    whole: Any
    team: Any
    k_blocks: Any
    span: Any
    begin: Any
    end: Any


class Unit(NamedTuple):
    """One unit of work: K blocks [``k_begin``, ``k_end``) of a tile.

    ``tile``: its number among all tiles. Rows from ``row_limit`` on belong to other tiles. ``col``:
    the tile's column, in tiles.
    """

    tile: Any
    first_row: Any
    row_limit: Any
    col: Any
    k_begin: Any
    k_end: Any


def place(tiles, tile):
    """Tile number -> (first row, row limit, tile column); see ``TileSchedule.place``."""
    rows, tile_rows = tiles.rows, tiles.tile_rows
    per_source = tile_rows * tiles.tile_cols
    step = 0
    height = tile_rows
    within = tile
    if rows >= tiles.tile_m and tile >= per_source * tiles.lead:
        band = (tile - per_source * tiles.lead) // (per_source * tiles.band_sources)
        within = (tile - per_source * tiles.lead) % (per_source * tiles.band_sources)
        step = tiles.lead + band * tiles.band_sources
        height = (tiles.world_size - step) * tile_rows
        if height > tiles.band_sources * tile_rows:
            height = tiles.band_sources * tile_rows
    group = within // (tiles.group_m * tiles.tile_cols)
    rest = within % (tiles.group_m * tiles.tile_cols)
    tall = height - group * tiles.group_m
    if tall > tiles.group_m:
        tall = tiles.group_m
    row = group * tiles.group_m + rest % tall
    col = rest // tall
    source = (tiles.rank + 2 * tiles.world_size - step - row // tile_rows) % tiles.world_size
    first_row = source * rows + row % tile_rows * tiles.tile_m
    row_limit = source * rows + rows
    if rows < tiles.tile_m:
        first_row = row * tiles.tile_m
        row_limit = rows * tiles.world_size
    return first_row, row_limit, col


def place_in_nodes(tiles, tile, per_node, chunk_tiles):
    """:func:`place` where ``per_node`` ranks share memory; see ``TileSchedule.per_node``."""
    rows, tile_rows = tiles.rows, tiles.tile_rows
    per_source = tile_rows * tiles.tile_cols
    local = tiles.rank % per_node
    chunk = 0 * tile
    step = tile // per_source
    within = tile % per_source
    tall_source = tile_rows + 0
    height = tile_rows + 0
    if tile >= per_node * per_source:
        far = tiles.world_size - per_node
        within = tile - per_node * per_source
        chunk = within // (far * chunk_tiles * tiles.tile_cols)
        within = within % (far * chunk_tiles * tiles.tile_cols)
        tall_source = tile_rows - chunk * chunk_tiles
        if tall_source > chunk_tiles:
            tall_source = chunk_tiles + 0
        height = far * tall_source
        step = per_node + 0 * tile
    group = within // (tiles.group_m * tiles.tile_cols)
    rest = within % (tiles.group_m * tiles.tile_cols)
    tall = height - group * tiles.group_m
    if tall > tiles.group_m:
        tall = tiles.group_m
    row = group * tiles.group_m + rest % tall
    col = rest // tall
    step += row // tall_source
    row = chunk * chunk_tiles + row % tall_source
    node = tiles.rank // per_node + tiles.world_size // per_node - step // per_node
    source = node * per_node % tiles.world_size + (local + per_node - step % per_node) % per_node
    return source * rows + row * tiles.tile_m, source * rows + rows, col


def place_out(tiles, tile):
    """Tile number -> (first row, row limit, tile column), remote owners first; see
    ``ScatterSchedule.place``."""
    rows, tile_rows, chunk_rows = tiles.rows, tiles.tile_rows, tiles.chunk_rows
    per_owner = tile_rows * tiles.tile_cols
    step = tile // per_owner
    within = tile % per_owner
    chunk = within // (chunk_rows * tiles.tile_cols)
    rest = within % (chunk_rows * tiles.tile_cols)
    height = tile_rows - chunk * chunk_rows
    if height > chunk_rows:
        height = chunk_rows
    if rows < tiles.tile_m:
        # numbers, not constants: both branches need the same types
        chunk = 0 * tile
        rest = tile + 0
        height = tile_rows + 0
    group = rest // (tiles.group_m * tiles.tile_cols)
    rest = rest % (tiles.group_m * tiles.tile_cols)
    tall = height - group * tiles.group_m
    if tall > tiles.group_m:
        tall = tiles.group_m
    row = chunk * chunk_rows + group * tiles.group_m + rest % tall
    col = rest // tall
    owner = (tiles.rank + 1 + step) % tiles.world_size
    first_row = owner * rows + row * tiles.tile_m
    row_limit = owner * rows + rows
    if rows < tiles.tile_m:
        first_row = row * tiles.tile_m
        row_limit = rows * tiles.world_size
    return first_row, row_limit, col


def segment(tiles, index):
    """Segment -> (first tile, number of tiles); see ``TileSchedule.segment``."""
    per_source = tiles.tile_rows * tiles.tile_cols
    first = 0
    count = tiles.num_tiles
    if tiles.num_segments > 1:
        count = per_source
        if index >= tiles.lead:
            first = (tiles.lead + (index - tiles.lead) * tiles.band_sources) * per_source
            count = per_source * tiles.band_sources
            if count > tiles.num_tiles - first:
                count = tiles.num_tiles - first
    return first, count


def share_of(tiles, program, num_programs, count):
    """A program's :class:`Share` of a segment of ``count`` tiles; see ``TileSchedule.cut``."""
    team, k_blocks = tiles.team, tiles.k_blocks
    whole = count
    if tiles.split_tail:
        whole = count // num_programs * num_programs
    if count % team != 0 or num_programs % team != 0:
        team = team * 0 + 1  # a number, not a constant, as the other branch has
    span = ((count - whole) * k_blocks + num_programs - 1) // num_programs
    if span < MIN_SPAN:
        span = MIN_SPAN
    own = (whole - program + num_programs - 1) // num_programs
    if program >= whole:
        own = 0
    total = (count - whole) // team * k_blocks
    begin = (num_programs // team - 1 - program // team) * span
    end = begin + span
    if end > total:
        end = total
    parts = 0
    if begin < end:
        parts = (end - 1) // k_blocks - begin // k_blocks + 1
    return Share(program, num_programs, own, own + parts, whole, team, k_blocks, span, begin, end)


def unit_range(share, index):
    """Unit number of a program in a segment -> (tile in the segment, k begin, k end)."""
    k_blocks = share.k_blocks
    tile = share.program + index * share.num_programs
    k_begin = 0
    k_end = k_blocks
    if index >= share.tiles:
        bundle = share.begin // k_blocks + index - share.tiles
        if share.begin > bundle * k_blocks:
            k_begin = share.begin - bundle * k_blocks
        if share.end < bundle * k_blocks + k_blocks:
            k_end = share.end - bundle * k_blocks
        tile = share.whole + bundle * share.team + share.program % share.team
    return tile, k_begin, k_end


def part_range(share, tile):
    """Tile of a segment -> (the program that owns it, the number of helpers: programs below the
    owner, ``team`` apart, that each give it a partial tile)."""
    team, k_blocks = share.team, share.k_blocks
    owner = share.program
    helpers = 0
    if tile >= share.whole:
        start = (tile - share.whole) // team * k_blocks
        top = start // share.span
        owner = (share.num_programs // team - 1 - top) * team + share.program % team
        helpers = (start + k_blocks - 1) // share.span - top
    return owner, helpers


SOURCES = (place, place_out, segment, share_of, unit_range, part_range)

place = triton.jit(place)
place_in_nodes = triton.jit(place_in_nodes)
place_out = triton.jit(place_out)
segment = triton.jit(segment)
share_of = triton.jit(share_of)
unit_range = triton.jit(unit_range)
part_range = triton.jit(part_range)
