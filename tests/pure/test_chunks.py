"""Chunks of rows of an all-reduce."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tileweave.planning.schedules.chunks import chunks_of, fits_chunks


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("tile_m", [16, 128])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 64])
def test_chunks_cover_the_rows(size: int, tile_m: int, count: int) -> None:
    unit = size * tile_m
    for rows in range(unit, 9 * unit, 7):
        if not fits_chunks(rows, size, tile_m):
            assert rows < 2 * unit and rows % size
            continue
        chunks = chunks_of(rows, count, size, tile_m)
        assert chunks[0][0] == 0 and chunks[-1][1] == rows
        assert len(chunks) <= max(count, 1 + (rows % size > 0))
        shared = [end - begin for (_, end), (begin, _) in pairwise(chunks)]
        assert not any(shared[:-1]) and all(0 <= one < size for one in shared[-1:]), "no gap"
        assert rows % size or not any(shared)
        sizes = [end - begin for begin, end in chunks]
        assert all(one % size == 0 and one >= unit for one in sizes), "a tile for each rank"
