"""Chunks of rows of an all-reduce."""

from __future__ import annotations

import pytest

from tileweave.planning.schedules.rows import WHOLE_TILE, chunk_rows, num_chunks


@pytest.mark.parametrize("rows", [1, 2, 7, 127, 128, 129, 640, 2048, 4000, 16384])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8, 64])
def test_chunks_cover_the_rows(rows: int, chunks: int) -> None:
    step, count = chunk_rows(rows, chunks), num_chunks(rows, chunks)
    assert 1 <= count <= min(chunks, rows)
    assert (count - 1) * step < rows <= count * step, "the last chunk is not empty, nor the largest"
    assert step % WHOLE_TILE == 0 or step < WHOLE_TILE
