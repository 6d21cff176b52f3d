"""Integer maps that hosts, kernels, tests and the simulator share: who sends what, in which order
work is done.

No torch and no triton here. The kernels' own copies of these maps live in
``device/triton/tiles.py`` and are tested equal to these, element by element.

Words: R ranks, each with a *shard* of m rows. A *unit* is one piece of work of a program: a tile,
or a part of a tile's K range. Units are ordered so that what needs nothing from others comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MIN_SPAN = 4  # K blocks: spans of cut tiles are as long at least, but for the last one in line


def arrival_order(rank: int, world_size: int) -> list[int]:
    """Sources in the order in which ``rank`` uses them: itself, then who pushes to it first."""
    return [(rank - step) % world_size for step in range(world_size)]


def push_order(rank: int, world_size: int) -> list[int]:
    """Peers in the order in which ``rank`` pushes: the next rank first, so no receiver has two
    senders."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def slot_place(rank: int, source: int, world_size: int, spans_shards: bool) -> int:
    """Where ``source``'s shard stands in a slot of ``rank``, in shards.

    By order of arrival, R-1 places: the own shard is read where it is. Only where tiles span
    shards, all R in rank order, the own one too: then a tile's rows are contiguous, and one load
    fetches them.
    """
    return source if spans_shards else (rank - source - 1) % world_size


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: tile (first_row, tile_col) over k blocks [k_begin, k_end).

    ``first_row`` is a global row of the output; rows from ``row_limit`` on belong to other tiles.
    ``owner`` stores the tile; ``helpers`` programs below it, ``team`` apart, each hand it one part
    of the sum (0 for a whole tile).
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
    """How the inputs of an all-gather, or of an all-to-all, stand in memory: R parts of ``depth``
    columns.

    step, pitch : elements of the input from one peer's part to the next one's (0: all get the
        same), and from row to row.
    exchange : an all-to-all. side_by_side : parts follow each other along K, and not along rows;
        the schedule then has one source, of all K.
    chunk_rows, chunks : rows that a copy engine sends, and signals, at once; how many such chunks a
        part has.
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
    """The work of one all-gather + matmul on one rank, split over persistent programs.

    Tiles stand in one line: those of the own shard (``own_first``), then *bands* of
    ``band_sources`` sources by order of arrival. The line is cut into *segments*: all of it
    (``cut_bands=False``), or the own shard and each band by itself, so that every program works on
    what is there. In a segment program p takes tiles p, p+P, p+2P ... as long as they fill whole
    waves; the rest is cut along K (``split_tail``), so that every program gets about the same
    number of k blocks of it (stream-K, arXiv 2301.03598).

    Programs that share columns of w should read them at the same time, or L2 cannot serve them:
    ``team`` programs in a row take a bundle of ``team`` tiles, which stand in one column, over one
    K range.

    Spans of the cut tiles are dealt from the last team down. So a tile that several programs share
    is begun by the highest of them, as the last thing in its span; that one is its *owner*, and it
    waits for lower programs only.

    rows : rows of a shard (m). cols, depth : N/R, K. tile_rows : tiles along m of one shard, or
        along M if tiles span shards.
    group_m : tile rows of an L2 band, see :func:`grouped`. num_programs : P. own_first : see
        :attr:`lead`.
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

    @property
    def spans_shards(self) -> bool:
        """True where a tile is taller than a shard: then tiles cover the gathered rows in rank
        order."""
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
    def per_source(self) -> int:
        """Tiles of one source; all tiles where tiles span shards."""
        return self.tile_rows * self.tile_cols

    @property
    def slot_rows(self) -> int:
        """Rows that a slot holds."""
        return self.rows * (self.world_size if self.spans_shards else self.world_size - 1)

    @property
    def num_tiles(self) -> int:
        return self.per_source * (1 if self.spans_shards else self.world_size)

    @property
    def band_tiles(self) -> int:
        return self.per_source * self.band_sources

    @property
    def lead(self) -> int:
        """Sources before the first band: the own one, or none."""
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
        """Tiles in a segment -> (tiles done whole, team, k blocks of the cut ones that each team
        takes).

        Teams are given up (1) where they would not come out even.
        """
        whole = count // self.num_programs * self.num_programs if self.split_tail else count
        team = 1 if count % self.team or self.num_programs % self.team else self.team
        return whole, team, max(cdiv((count - whole) * self.k_blocks, self.num_programs), MIN_SPAN)

    @property
    def has_cut_tiles(self) -> bool:
        return any(
            self.cut(count)[0] < count for _, count in map(self.segment, range(self.num_segments))
        )

    def place(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (first row, row limit, tile column), by order of arrival and in groups of
        tile rows."""
        if self.spans_shards:
            row, col = grouped(tile, self.tile_rows, self.tile_cols, self.group_m)
            return row * self.tile_m, self.rows * self.world_size, col
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

    def units(self, program: int) -> Iterator[Unit]:
        """The units of one program, in the order in which it does them."""
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
        """An upper bound on the units of one program (the kernel's trace has a row for each)."""
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
    """Tile number -> (row, column) in bands of ``group`` rows, which keeps both operands in L2."""
    band, within = divmod(index, group * cols)
    height = min(rows - band * group, group)
    return band * group + within % height, within // height


def slice_bounds(total: int, num_slices: int, index: int, quantum: int) -> tuple[int, int]:
    """Elements [begin, end) of slice ``index`` of a shard of ``total`` elements, in whole
    quanta."""
    size = cdiv(cdiv(total, num_slices), quantum) * quantum
    return min(index * size, total), min((index + 1) * size, total)
