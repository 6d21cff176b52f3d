"""Integer maps that host, kernels, tests and simulator share: what each rank sends, and in which
order work is done.

No torch and no triton here. The copies that kernels use are in ``device/triton/tiles.py`` and are
tested equal to these, element by element.

R ranks have a *shard* of m rows each. A *unit* is one piece of work of a program: a tile, or a part
of a tile's K range. Units are ordered so that those that need no data of other ranks come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MIN_SPAN = 4  # K blocks of a span of cut tiles, at least, except for the last span


def arrival_order(rank: int, world_size: int) -> list[int]:
    """Sources in the order in which ``rank`` uses them: itself, then in the order of their
    pushes."""
    return [(rank - step) % world_size for step in range(world_size)]


def push_order(rank: int, world_size: int) -> list[int]:
    """Peers in the order in which ``rank`` pushes to them: the next rank first, so that no receiver
    has two senders at a time."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def slot_place(rank: int, source: int, world_size: int, spans_shards: bool) -> int:
    """The index of the shard of ``source`` in a slot of ``rank``.

    A slot has R-1 shards in order of arrival; the own shard is read from the input. If tiles span
    shards, a slot has all R shards in rank order, so that the rows of a tile are contiguous and one
    load fetches them.
    """
    return source if spans_shards else (rank - source - 1) % world_size


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: tile (first_row, tile_col) over K blocks [k_begin, k_end).

    ``first_row`` is a global row of the output; rows from ``row_limit`` on belong to other tiles.
    Program ``owner`` stores the tile. The ``helpers`` programs owner - team, owner - 2 team, ...
    each give it one partial tile (0 for a whole tile).
    """

    tile: int
    first_row: int
    row_limit: int
    tile_col: int
    k_begin: int
    k_end: int
    segment: int
    owner: int
    helpers: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The layout of the input of an all-gather or all-to-all: R parts of ``depth`` columns.

    step : elements of the input from the part of one peer to that of the next (0: all peers get the
        same part).
    pitch : elements from row to row.
    exchange : whether it is an all-to-all.
    side_by_side : parts follow each other along K and not along rows; the schedule then has one
        source, with all of K.
    chunk_rows : rows of a chunk, which one copy moves and one signal announces.
    chunks : chunks per part.
    """

    rank: int
    world_size: int
    depth: int
    pitch: int
    step: int = 0
    exchange: bool = False
    side_by_side: bool = False
    chunk_rows: int = 1 << 30
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """The work of one all-gather + matmul on one rank, divided among persistent programs.

    Tiles are numbered in the order of work: those of the own shard (``own_first``), then those of
    *bands* of ``band_sources`` sources, in order of arrival. The numbers are divided into
    *segments*: one segment (``cut_bands=False``), or the own shard and each band by itself, so that
    every program works on data that has arrived. In a segment, program p takes tiles p, p+P,
    p+2P ... as long as they fill whole waves. The remaining tiles are cut along K (``split_tail``),
    so that every program gets about the same number of K blocks of them (stream-K, arXiv
    2301.03598).

    Programs that share columns of w should read them at the same time, so that L2 serves them:
    ``team`` consecutive programs take ``team`` tiles of one column over the same K range.

    Spans of the cut tiles are assigned from the last team down. So of the programs that share a
    tile, the highest one begins it, as the last work of its span. That program is the *owner* of
    the tile and waits for lower programs only.

    rows : rows of a shard (m).
    cols, depth : N/R and K.
    group_m : tile rows that share columns of w in L2, see :func:`grouped`.
    num_programs : P.
    own_first : see :attr:`lead`.
    per_node : ranks of a node, where those of other nodes share no memory with this one; 0: all
        ranks share memory. Then the tiles of this node come first, source after source. Those of
        other nodes follow chunk after chunk, since all of these sources arrive at the same time.
    chunk_tiles : tile rows of a chunk, with ``per_node``.
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
    split_tail: bool = True
    band_sources: int = 1
    cut_bands: bool = False
    team: int = 1
    own_first: bool = True
    per_node: int = 0
    chunk_tiles: int = 1

    @property
    def spans_shards(self) -> bool:
        """Whether a tile is taller than a shard: then tiles cover the gathered rows in rank
        order."""
        return self.rows < self.tile_m

    @property
    def tile_rows(self) -> int:
        """Tiles along the rows of one shard; of all shards if tiles span shards."""
        return cdiv(self.rows * (self.world_size if self.spans_shards else 1), self.tile_m)

    @property
    def tile_cols(self) -> int:
        return cdiv(self.cols, self.tile_n)

    @property
    def k_blocks(self) -> int:
        return cdiv(self.depth, self.tile_k)

    @property
    def per_source(self) -> int:
        """Tiles of one source; all tiles if tiles span shards."""
        return self.tile_rows * self.tile_cols

    @property
    def slot_rows(self) -> int:
        """Rows of a slot."""
        return self.rows * (self.world_size if self.spans_shards else self.world_size - 1)

    @property
    def num_tiles(self) -> int:
        return self.per_source * (1 if self.spans_shards else self.world_size)

    @property
    def band_tiles(self) -> int:
        return self.per_source * self.band_sources

    @property
    def lead(self) -> int:
        """Sources before the first band: 1 (the own shard) or 0."""
        return int(self.own_first)

    @property
    def num_segments(self) -> int:
        if self.spans_shards or not self.cut_bands:
            return 1
        return self.lead + cdiv(self.world_size - self.lead, self.band_sources)

    def segment(self, index: int) -> tuple[int, int]:
        """Segment -> (first tile, number of tiles)."""
        if self.num_segments == 1:
            return 0, self.num_tiles
        if index < self.lead:
            return 0, self.per_source
        first = self.lead * self.per_source + (index - self.lead) * self.band_tiles
        return first, min(self.band_tiles, self.num_tiles - first)

    def cut(self, count: int) -> tuple[int, int, int]:
        """Tiles in a segment -> (whole tiles, team, K blocks of cut tiles per team).

        The team is 1 if ``team`` does not divide the tiles and the programs.
        """
        whole = count // self.num_programs * self.num_programs if self.split_tail else count
        team = 1 if count % self.team or self.num_programs % self.team else self.team
        return whole, team, max(cdiv((count - whole) * self.k_blocks, self.num_programs), MIN_SPAN)

    @property
    def has_cut_tiles(self) -> bool:
        return any(
            self.cut(count)[0] < count for _, count in map(self.segment, range(self.num_segments))
        )

    @property
    def part_elements(self) -> int:
        """Partial sums of tiles that are cut along K: at most one tile of each program and
        segment."""
        parts = self.num_segments * self.num_programs if self.has_cut_tiles else 0
        return parts * self.tile_m * self.tile_n

    def place(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (first row, row limit, tile column), in order of arrival and in groups of
        tile rows."""
        if self.spans_shards:
            row, col = grouped(tile, self.tile_rows, self.tile_cols, self.group_m)
            return row * self.tile_m, self.rows * self.world_size, col
        if self.per_node:
            source, row, col = self._place_in_nodes(tile)
            return source * self.rows + row * self.tile_m, (source + 1) * self.rows, col
        step, height, within = 0, self.tile_rows, tile
        if tile >= self.lead * self.per_source:
            band, within = divmod(tile - self.lead * self.per_source, self.band_tiles)
            step = self.lead + band * self.band_sources
            height = min(self.band_sources, self.world_size - step) * self.tile_rows
        row, col = grouped(within, height, self.tile_cols, self.group_m)
        source = (self.rank - step - row // self.tile_rows) % self.world_size
        return (
            source * self.rows + row % self.tile_rows * self.tile_m,
            (source + 1) * self.rows,
            col,
        )

    def _place_in_nodes(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (source, tile row of its shard, tile column)."""
        each, local = self.per_node, self.rank % self.per_node
        near = each * self.per_source
        if tile < near:
            step, within = divmod(tile, self.per_source)
            row, col = grouped(within, self.tile_rows, self.tile_cols, self.group_m)
            return self.rank - local + (local - step) % each, row, col
        far = self.world_size - each  # sources of other nodes
        chunk, within = divmod(tile - near, far * self.chunk_tiles * self.tile_cols)
        height = min(self.chunk_tiles, self.tile_rows - chunk * self.chunk_tiles)
        row, col = grouped(within, far * height, self.tile_cols, self.group_m)
        step, row = divmod(row, height)
        node = (self.rank // each - 1 - step // each) * each
        source = (node + (local - step) % each) % self.world_size
        return source, chunk * self.chunk_tiles + row, col

    def units(self, program: int) -> Iterator[Unit]:
        """The units of one program, in its order of work."""
        for index in range(self.num_segments):
            first, count = self.segment(index)
            whole, team, span = self.cut(count)
            for tile in range(program, whole, self.num_programs):
                yield Unit(
                    first + tile, *self.place(first + tile), 0, self.k_blocks, index, program, 0
                )
            last = self.num_programs // team - 1
            total = (count - whole) // team * self.k_blocks
            begin = min((last - program // team) * span, total)
            end = min(begin + span, total)
            while begin < end:
                bundle = begin // self.k_blocks
                start, stop = bundle * self.k_blocks, min(end, (bundle + 1) * self.k_blocks)
                top = start // span
                number = first + whole + bundle * team + program % team
                yield Unit(
                    number,
                    *self.place(number),
                    begin - start,
                    stop - start,
                    index,
                    (last - top) * team + program % team,
                    (start + self.k_blocks - 1) // span - top,
                )
                begin = stop

    def max_units(self) -> int:
        """An upper bound on the units of one program; the trace of a kernel has a row for each."""
        total = 0
        for index in range(self.num_segments):
            whole, _, span = self.cut(self.segment(index)[1])
            total += cdiv(whole, self.num_programs) + cdiv(span, self.k_blocks) + 1
        return total

    def sources(self, unit: Unit) -> list[int]:
        """Ranks whose rows a unit reads."""
        last = min(unit.first_row + self.tile_m, unit.row_limit) - 1
        return list(range(unit.first_row // self.rows, last // self.rows + 1))


def grouped(index: int, rows: int, cols: int, group: int) -> tuple[int, int]:
    """Tile number -> (row, column) in groups of ``group`` rows, which keeps both operands in L2."""
    band, within = divmod(index, group * cols)
    height = min(rows - band * group, group)
    return band * group + within % height, within // height


def slice_bounds(total: int, num_slices: int, index: int, quantum: int) -> tuple[int, int]:
    """Elements [begin, end) of slice ``index`` of a shard of ``total`` elements, in multiples of
    ``quantum``."""
    size = cdiv(cdiv(total, num_slices), quantum) * quantum
    return min(index * size, total), min((index + 1) * size, total)
