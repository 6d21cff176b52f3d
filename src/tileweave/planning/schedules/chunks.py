"""Chunks of rows: one travels while the next one is multiplied. No torch, no triton."""

from __future__ import annotations

from collections.abc import Sequence

from tileweave.planning.schedules.gather import cdiv

# Relative sizes of chunks that travel between nodes: of one chunk, of two, and so on. An all-gather
# hides all matmuls but that of its last chunk, a reduce-scatter all but that of its first; an
# all-reduce neither the first matmul nor the last transfer. So these are small, with few chunks in
# all, as each costs a launch of NCCL.
SHRINKING = ((1,), (2, 1), (4, 2, 1), (8, 4, 2, 1))
GROWING = ((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8))
EVEN = ((1,), (1, 1), (1, 2, 1), (1, 2, 2, 1))
UNIT = 128  # rows: of a tile of cuBLAS


def chunks_by_weight(
    rows: int, most: int, weights: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """(begin, end) of at most ``most`` chunks of ``rows`` that travel between nodes."""
    return parts_by_weight(rows, weights[min(most, len(weights)) - 1], UNIT)


def parts_by_weight(rows: int, weights: Sequence[int], unit: int = 1) -> list[tuple[int, int]]:
    """(begin, end) of at most ``len(weights)`` chunks of ``rows``, as large as ``weights`` say; of
    multiples of ``unit`` rows where there are enough."""
    total = sum(weights)
    unit = unit if rows >= unit * total else 1
    ends = [rows * sum(weights[: at + 1]) // (total * unit) * unit for at in range(len(weights))]
    ends[-1] = rows
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if end > begin]


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
