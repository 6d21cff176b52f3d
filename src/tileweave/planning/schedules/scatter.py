"""The integer map of matmuls whose output tiles go to owners: remote tiles first, the own ones
last.

Beside ``planning/schedules/gather.py``, whose cutting of tiles over programs it takes over. The
kernels' copy is ``device/triton/tiles.py:place_out``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.planning.schedules.gather import TileSchedule, cdiv, grouped


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of matrices: each rank cuts its own into R parts along ``scatter_dim`` (0 rows,
    1 columns), part p goes to rank p, and what a rank gets stands in rank order along
    ``gather_dim``."""

    scatter_dim: int
    gather_dim: int

    @property
    def reverse(self) -> Exchange:
        """What undoes it; also its gradient."""
        return Exchange(self.gather_dim, self.scatter_dim)

    def part(self, rows: int, cols: int, world_size: int) -> tuple[int, int]:
        """Sizes of a part of a rank's [rows, cols]."""
        return (rows // world_size, cols) if self.scatter_dim == 0 else (rows, cols // world_size)

    def result(self, rows: int, cols: int, world_size: int) -> tuple[int, int]:
        """Sizes of what a rank has of it afterwards."""
        rows, cols = self.part(rows, cols, world_size)
        return (rows * world_size, cols) if self.gather_dim == 0 else (rows, cols * world_size)


@dataclass(frozen=True, slots=True)
class ScatterSchedule(TileSchedule):
    """The work of one matmul + reduce-scatter on one rank: ``rows`` are those of one owner (m = M /
    R), ``depth`` the local K.

    Tiles stand in one line: those of owner rank+1, then of rank+2, ..., the own ones last, so that
    what peers wait for is made first and, as long as ranks are in step, no receiver has two
    senders. Within an owner, *chunks* of ``chunk_rows`` tile rows follow each other: a chunk is
    what a copy engine takes at once. Where a tile is taller than m (``spans_shards``), tiles cover
    all M rows in order, the same on every rank.
    """

    chunk_rows: int = 1 << 20

    @property
    def chunks(self) -> int:
        """Chunks of one owner."""
        return cdiv(self.tile_rows, self.chunk_rows)

    def place(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (first row, row limit, tile column)."""
        if self.spans_shards:
            row, col = grouped(tile, self.tile_rows, self.tile_cols, self.group_m)
            return row * self.tile_m, self.rows * self.world_size, col
        step, chunk, rest = self.turn(tile)
        first, end = self.chunk_bounds(chunk)
        row, col = grouped(rest, end - first, self.tile_cols, self.group_m)
        owner = (self.rank + 1 + step) % self.world_size
        first_row = owner * self.rows + (first + row) * self.tile_m
        return first_row, (owner + 1) * self.rows, col

    def turn(self, tile: int) -> tuple[int, int, int]:
        """Tile number -> (how far behind rank + 1 its owner is, chunk of that owner, tile of that
        chunk)."""
        step, rest = divmod(tile, self.per_source)
        return step, *divmod(rest, self.chunk_rows * self.tile_cols)

    def chunk_bounds(self, chunk: int) -> tuple[int, int]:
        """Chunk -> its tile rows [first, end) within an owner."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.tile_rows)

    @property
    def pitch(self) -> int:
        """Elements from row to row of what copy engines take: ``cols``, up to a multiple of 16
        bytes of halves for TMA."""
        return cdiv(self.cols, 8) * 8

    @property
    def place_elements(self) -> int:
        """Elements of one peer's partials in a slot, and of ``staging`` for one peer: whole tiles,
        all that it can own.

        Where tiles span shards each may hold rows of every owner, so a place has room for all of
        them.
        """
        return self.per_source * self.tile_m * self.tile_n

    @property
    def slot_elements(self) -> int:
        """Elements of a slot: a place for each peer."""
        return (self.world_size - 1) * self.place_elements
