"""Chunks of rows: one travels while the next one is multiplied. No torch, no triton."""

from __future__ import annotations

from tileweave.planning.schedules.gather import cdiv


def equal_parts(rows: int, count: int) -> list[tuple[int, int]]:
    """(begin, end) of at most ``count`` chunks of ``rows``, equal but for the last, which is the
    smaller one."""
    step = cdiv(rows, count)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def fits_chunks(rows: int, world_size: int, tile_m: int) -> bool:
    """Whether :func:`chunks_of` can divide so many rows: a tile for each rank, or two where they
    are not the same for each."""
    return rows >= world_size * tile_m * (2 if rows % world_size else 1)


def chunks_of(rows: int, count: int, world_size: int, tile_m: int) -> list[tuple[int, int]]:
    """(begin, end) of at most ``count`` chunks of ``rows``; of each, every rank reduces as many
    rows.

    rows : such that :func:`fits_chunks`.

    Chunks are equal, of whole tiles for each rank, but for the last: it is the smaller one, because
    its gather is not hidden, unless that were less than a tile for each rank. Rows that are no
    multiple of ``world_size`` make two chunks at least, of which the last one begins up to
    ``world_size - 1`` rows before the end of the one before.
    """
    unit = world_size * tile_m
    step = cdiv(cdiv(rows, count), unit) * unit
    begins = list(range(0, rows, step))
    if len(begins) > 1 and rows - begins[-1] < unit:
        begins.pop()
    if len(begins) == 1 and rows % world_size:
        begins.append((rows - unit) // unit * unit)
    ends = [*begins[1:], rows]
    begins[-1] -= -(rows - begins[-1]) % world_size
    return list(zip(begins, ends, strict=True))
