"""Chunks of a result: one is sent while the next one is multiplied. No torch, no triton."""

from __future__ import annotations

from collections.abc import Iterator

from tileweave.planning.schedules.gather import cdiv

# Rows and columns of a tile of cuBLAS: a chunk that ends inside of one wastes the rest of it.
WHOLE_TILE = 128


def chunks_of(length: int, count: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of at most ``count`` chunks of ``length`` rows or columns, at least 1.

    Whole tiles of cuBLAS, where a chunk has as many rows. The last chunk is the smallest one,
    because only its communication is not hidden.
    """
    step = cdiv(length, count)
    if step >= WHOLE_TILE:
        step = cdiv(step, WHOLE_TILE) * WHOLE_TILE
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)
