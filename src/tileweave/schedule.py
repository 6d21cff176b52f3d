"""Integer maps that hosts, kernels, tests and the simulator share: who sends what, in which order work is done.

No torch and no triton here. The kernels' own copies of these maps live in ``language/tile.py`` and
are tested equal to these, element by element.

Words: R ranks, each with a *shard* of m rows. A *unit* is one piece of work of a program: a tile, or
a part of a tile's K range. Units are ordered so that what needs nothing from others comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


MIN_SPAN = 4


def arrival_order(rank: int, world_size: int) -> list[int]:
    """Sources in the order in which ``rank`` uses them: itself, then who pushes to it first."""
    return [(rank - step) % world_size for step in range(world_size)]


def push_order(rank: int, world_size: int) -> list[int]:
    """Peers in the order in which ``rank`` pushes: the next rank first, so no receiver has two senders."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def slot_index(rank: int, source: int, world_size: int) -> int:
    """Where ``source``'s shard stands in a slot of ``rank``; the own shard is never stored, so R-1 places."""
    return (rank - source - 1) % world_size


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: tile (tile_row, tile_col) over k blocks [k_begin, k_end).

    ``first_row`` is a global row of the output; rows from ``row_limit`` on belong to other tiles.
    ``part`` of ``num_parts``: which share of the tile's K range this is (0 of 1 for a whole tile).
    """

    tile: int
    first_row: int
    row_limit: int
    tile_col: int
    k_begin: int
    k_end: int
    part: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """The work of one all-gather + matmul on one rank, split over persistent programs.

    The tiles of all sources stand in one line, in order of arrival. Program p takes tiles p, p+P, p+2P ...
    of the first ``num_whole`` (a multiple of P); the tiles that do not fill a last wave are cut along K, so
    that every program gets the same number of k blocks of them (stream-K, arXiv 2301.03598).

    rows : rows of a shard (m). tile_rows : tiles along m of one shard, or along M if tiles span shards.
    """

    rank: int
    world_size: int
    rows: int
    cols: int
    depth: int
    tile_m: int
    tile_n: int
    tile_k: int
    group_m: int
    num_programs: int
    split_tail: bool

    @property
    def spans_shards(self) -> bool:
        """True where a tile is taller than a shard: then tiles cover the gathered rows in rank order."""
        return self.rows < self.tile_m

    @property
    def tile_rows(self) -> int:
        return cdiv(self.rows * (self.world_size if self.spans_shards else 1), self.tile_m)

    @property
    def tile_cols(self) -> int:
        return cdiv(self.cols, self.tile_n)

    @property
    def k_blocks(self) -> int:
        return cdiv(self.depth, self.tile_k)

    @property
    def num_tiles(self) -> int:
        return self.tile_rows * self.tile_cols * (1 if self.spans_shards else self.world_size)

    @property
    def num_whole(self) -> int:
        """Tiles done whole; the rest, fewer than a wave, are cut along K."""
        if not self.split_tail:
            return self.num_tiles
        return self.num_tiles // self.num_programs * self.num_programs

    @property
    def tail_span(self) -> int:
        """k blocks of the cut tiles that each program takes; under MIN_SPAN the sum of parts costs more than it saves."""
        return max(cdiv((self.num_tiles - self.num_whole) * self.k_blocks, self.num_programs), MIN_SPAN)

    def place(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (first row, row limit, tile column), by order of arrival and in groups of tile rows."""
        per_source = self.tile_rows * self.tile_cols
        step, within = divmod(tile, per_source)
        row, col = grouped(within, self.tile_rows, self.tile_cols, self.group_m)
        if self.spans_shards:
            return row * self.tile_m, self.rows * self.world_size, col
        source = (self.rank - step) % self.world_size
        return source * self.rows + row * self.tile_m, (source + 1) * self.rows, col

    def unit(self, tile: int, k_begin: int, k_end: int) -> Unit:
        first_row, row_limit, col = self.place(tile)
        if tile < self.num_whole:
            return Unit(tile, first_row, row_limit, col, k_begin, k_end, 0, 1)
        start = (tile - self.num_whole) * self.k_blocks
        first = start // self.tail_span
        last = (start + self.k_blocks - 1) // self.tail_span
        part = (start + k_begin) // self.tail_span - first
        return Unit(tile, first_row, row_limit, col, k_begin, k_end, part, last - first + 1)

    def units(self, program: int) -> Iterator[Unit]:
        """The units of one program, in the order in which it does them."""
        for tile in range(program, self.num_whole, self.num_programs):
            yield self.unit(tile, 0, self.k_blocks)
        total = (self.num_tiles - self.num_whole) * self.k_blocks
        begin = min(program * self.tail_span, total)
        end = min(begin + self.tail_span, total)
        while begin < end:
            tile = begin // self.k_blocks
            stop = min(end, (tile + 1) * self.k_blocks)
            k_begin = begin - tile * self.k_blocks
            yield self.unit(self.num_whole + tile, k_begin, k_begin + stop - begin)
            begin = stop

    def max_units(self) -> int:
        """An upper bound on the units of one program (the kernel's trace has a row for each)."""
        return self.num_whole // self.num_programs + 1 + cdiv(self.tail_span, max(self.k_blocks, 1)) + 1

    def sources(self, unit: Unit) -> list[int]:
        """Ranks whose rows a unit reads."""
        last = min(unit.first_row + self.tile_m, unit.row_limit) - 1
        return list(range(unit.first_row // self.rows, last // self.rows + 1))


def grouped(index: int, rows: int, cols: int, group: int) -> tuple[int, int]:
    """Tile number -> (row, column) in bands of ``group`` rows, which keeps both operands in L2."""
    band, within = divmod(index, group * cols)
    height = min(rows - band * group, group)
    return band * group + within % height, within // height


def slice_bounds(total: int, num_slices: int, index: int, quantum: int) -> tuple[int, int]:
    """Elements [begin, end) of slice ``index`` of a shard of ``total`` elements, in whole quanta."""
    size = cdiv(cdiv(total, num_slices), quantum) * quantum
    return min(index * size, total), min((index + 1) * size, total)
