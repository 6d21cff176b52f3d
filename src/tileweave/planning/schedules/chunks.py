"""Chunks of rows that travel between nodes while others are multiplied. No torch, no triton."""

from __future__ import annotations

from collections.abc import Sequence

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
