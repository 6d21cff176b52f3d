"""Mismatched calls that all ranks have made before: cached results of checks do not replace the
comparison."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from tests.support.worlds import Member, Worlds

import tileweave as tw

ROWS = (8, 9)


def disagree_on_what_is_known(me: Member, odd: int) -> str:
    """Both calls are accepted and cached on every rank. Then one rank makes the other call."""
    w = torch.ones(16, 32)
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1", TILEWEAVE_TIMEOUT="3"):
        for rows in ROWS * 2:
            tw.all_gather_matmul(torch.ones(rows, 32), w)
        me.barrier()
        with pytest.raises(tw.RankMismatchError) as caught:
            tw.all_gather_matmul(torch.ones(ROWS[me.rank == odd], 32), w)
        y = tw.all_gather_matmul(torch.ones(8, 32), w)  # nothing was sent, so all ranks go on
    assert torch.equal(y, torch.full((8 * me.world_size, 16), 32.0))
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 1])
def test_debugging_compares_cached_calls(worlds: Worlds, odd: int) -> None:
    texts = worlds("gloo", 2).run(disagree_on_what_is_known, odd)
    assert len(set(texts)) == 1 and "allowed: the same operator" in texts[0], texts
