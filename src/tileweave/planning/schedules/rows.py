"""Chunks of rows: one chunk is reduced while the next one is multiplied. No torch, no triton."""

from __future__ import annotations

from tileweave.planning.schedules.gather import cdiv

# Rows of a tile of cuBLAS: a chunk that ends inside of one wastes the rest of it.
WHOLE_TILE = 128


def chunk_rows(rows: int, chunks: int) -> int:
    """Rows of each chunk but the last, which has at most as many: ``rows`` in ``chunks`` chunks at
    most.

    Whole tiles of cuBLAS, where a chunk has as many rows. The last chunk is the smaller one,
    because only its communication is not hidden.
    """
    step = cdiv(rows, chunks)
    return step if step < WHOLE_TILE else cdiv(step, WHOLE_TILE) * WHOLE_TILE


def num_chunks(rows: int, chunks: int) -> int:
    """The chunks that :func:`chunk_rows` makes of ``rows``."""
    return cdiv(rows, chunk_rows(rows, chunks))
