"""Chunks of rows of an all-reduce: one is gathered while the next one is multiplied. No torch, no
triton."""

from __future__ import annotations

from tileweave.planning.schedules.gather import cdiv


def chunks_of(rows: int, count: int, world_size: int, tile_m: int) -> list[tuple[int, int]]:
    """(begin, end) of at most ``count`` chunks of ``rows``; of each, every rank reduces as many
    rows.

    rows : a multiple of ``world_size``, at least ``world_size * tile_m``.

    Chunks are equal, of whole tiles for each rank, but for the last: it is the smaller one, because
    its gather is not hidden, unless that were less than a tile for each rank.
    """
    unit = world_size * tile_m
    step = cdiv(cdiv(rows, count), unit) * unit
    begins = list(range(0, rows, step))
    if len(begins) > 1 and rows - begins[-1] < unit:
        begins.pop()
    return list(zip(begins, [*begins[1:], rows], strict=True))
