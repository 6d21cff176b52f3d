"""The schedule of matmuls whose output tiles go to their owners: tiles of peers first, own tiles
last.

Tiles are divided among programs as in ``gather.py``. The copy that kernels use is ``place_out`` in
``device/triton/tiles.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.planning.schedules.gather import TileSchedule, cdiv, grouped


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of matrices.

    Each rank cuts its matrix into R parts along ``scatter_dim`` (0: rows, 1: columns) and sends
    part p to rank p. The parts that a rank receives are joined in rank order along ``gather_dim``.
    """

    scatter_dim: int
    gather_dim: int

    @property
    def reverse(self) -> Exchange:
        """The exchange that undoes this one; also its gradient."""
        return Exchange(self.gather_dim, self.scatter_dim)

    def part(self, rows: int, cols: int, world_size: int) -> tuple[int, int]:
        """Sizes of a part of the matrix [rows, cols] of a rank."""
        return (rows // world_size, cols) if self.scatter_dim == 0 else (rows, cols // world_size)

    def result(self, rows: int, cols: int, world_size: int) -> tuple[int, int]:
        """Sizes of the matrix that a rank has afterwards."""
        rows, cols = self.part(rows, cols, world_size)
        return (rows * world_size, cols) if self.gather_dim == 0 else (rows, cols * world_size)


@dataclass(frozen=True, slots=True)
class ScatterSchedule(TileSchedule):
    """The work of one matmul + reduce-scatter on one rank.

    ``rows`` are the rows of one owner (m = M / R), ``depth`` is the local K.

    Tiles are numbered by owner: rank+1, rank+2, ..., the own tiles last. So what peers wait for is
    computed first and, while ranks are in step, no receiver has two senders. The tiles of an owner
    are divided into *chunks* of ``chunk_rows`` tile rows; a copy engine moves a chunk at a time. If
    a tile is taller than m (``spans_shards``), tiles cover all M rows in order, the same on every
    rank.
    """

    chunk_rows: int = 1 << 20

    @property
    def chunks(self) -> int:
        """Chunks per owner."""
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
        """Tile number -> (owner as a distance from rank + 1, chunk of that owner, tile of that
        chunk)."""
        step, rest = divmod(tile, self.per_source)
        return step, *divmod(rest, self.chunk_rows * self.tile_cols)

    def chunk_bounds(self, chunk: int) -> tuple[int, int]:
        """Chunk -> its tile rows [first, end) within an owner."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.tile_rows)

    @property
    def pitch(self) -> int:
        """Elements from row to row of what copy engines move: ``cols``, rounded up to 16 bytes of
        16-bit elements for TMA."""
        return cdiv(self.cols, 8) * 8

    @property
    def place_elements(self) -> int:
        """Elements that a slot, and ``staging``, has for each peer: all tiles that it can own.

        If tiles span shards, a tile may have rows of every owner, so there is room for all tiles.
        """
        return self.per_source * self.tile_m * self.tile_n

    @property
    def slot_elements(self) -> int:
        """Elements of a slot: ``place_elements`` for each peer."""
        return (self.world_size - 1) * self.place_elements
