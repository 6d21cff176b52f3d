"""The sums of the Hopper kernel of grouped_matmul_combine: its Gluon source, interpreted as Triton.
See ``tests/support/gluon_as_triton.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support import gluon_as_triton
from tests.support.experts import Case
from tests.support.worlds import Worlds

from tileweave.planning.combine import CombineConfig

TWO_WARPS = CombineConfig(
    "triton", 16, 32, 32, 1, 2, 2, chunks=2, groups=2, block_tokens=16, block_cols=256
)
EIGHT_WARPS = replace(TWO_WARPS, num_warps=8, chunks=1, groups=3, block_tokens=4, block_cols=1024)
SMALL = Case((5,), experts=2, depth=16, cols=40)
ROUTINGS = (
    "even",
    "skewed",
    "one_expert",
    "one_rank",
    "empty_experts",
    "holes",
    "no_choices",
    "repeated",
)
CASES = [replace(SMALL, routing=routing) for routing in ROUTINGS]
# more rows per token than are loaded at once
LONG = replace(SMALL, tokens=(11, 0, 3), experts=4, topk=7)


def test_combine_sums_of_two_warps(worlds: Worlds) -> None:
    worlds("gloo", 3).run(gluon_as_triton.parity, [*CASES, LONG], [TWO_WARPS])


def test_combine_sums_of_eight_warps(worlds: Worlds) -> None:
    worlds("gloo", 3).run(
        gluon_as_triton.parity, [LONG, replace(SMALL, tokens=(3, 6))], [EIGHT_WARPS]
    )


def test_combine_sums_of_many_chunks(worlds: Worlds) -> None:
    """Blocks of this rank between those for peers, after them, or none."""
    few, many = (replace(TWO_WARPS, chunks=chunks, block_tokens=2, tile_n=16) for chunks in (3, 5))
    cases = [replace(SMALL, tokens=(11, 0, 3), cols=70), replace(SMALL, tokens=(4, 5), cols=90)]
    worlds("gloo", 3).run(gluon_as_triton.parity, cases, [few, many])


def test_combine_sums_without_weights(worlds: Worlds) -> None:
    worlds("gloo", 2).run(gluon_as_triton.parity, [SMALL, LONG], [TWO_WARPS], False)


@pytest.mark.parametrize("ahead", [2, 8])
def test_combine_sums_with_more_or_less_at_once(worlds: Worlds, ahead: int) -> None:
    cases = [LONG, CASES[5]]
    worlds("gloo", 2).run(gluon_as_triton.parity, cases, [TWO_WARPS], True, {"AHEAD": ahead})


def test_combine_sums_are_in_rank_order(worlds: Worlds) -> None:
    worlds("gloo", 3).run(gluon_as_triton.sums_in_rank_order, TWO_WARPS)
