"""Chunks of a result that is sent while it is multiplied."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tileweave.planning.schedules.chunks import WHOLE_TILE, chunks_of


@pytest.mark.parametrize("length", [1, 2, 7, 127, 128, 129, 640, 2048, 4000, 16384])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 64])
def test_chunks_cover_all(length: int, count: int) -> None:
    chunks = list(chunks_of(length, count))
    assert chunks[0][0] == 0 and chunks[-1][1] == length and len(chunks) <= count
    assert all(end == begin for (_, end), (begin, _) in pairwise(chunks)), "no gap"
    sizes = [end - begin for begin, end in chunks]
    assert len({*sizes[:-1]}) <= 1 and 0 < sizes[-1] <= sizes[0]
    assert all(begin % WHOLE_TILE == 0 for begin, _ in chunks) or sizes[0] < WHOLE_TILE
