"""Simulated operators over nodes: the schedules of the operators, and DeepEP's published times."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tileweave.planning.schedules.chunks import GROWING, SHRINKING, chunks_by_weight
from tileweave.sim.collectives import Group
from tileweave.sim.machine import make_cluster
from tileweave.sim.operators import ExpertMatmul, Operators
from tileweave.sim.public import figures, judge

ROWS, HIDDEN = 8192, 8192


def operators(nodes: int, per_node: int = 8) -> Operators:
    return Operators(make_cluster("h100", "ib-400", nodes, per_node))


def test_an_all_gather_hides_what_its_chunks_hide() -> None:
    """One rank on each node: nothing but transfers and matmuls, so the schedule is summed here."""
    ops, columns = operators(2, 1), 3584
    rows = ROWS // 2
    found = ops.all_gather_matmul(2, ROWS, columns, HIDDEN)
    product = lambda count: ops.costs.matmul(count, columns, HIDDEN) + ops.c.gap  # noqa: E731
    ends = []
    for most in (1, 2, 3, 4):
        arrived, done = 0.0, product(rows)
        for begin, end in chunks_by_weight(rows, most, SHRINKING):
            arrived += ops.collective("all_gather", 4.0 * (end - begin) * HIDDEN, Group(1, 2))
            done = max(done, arrived) + product(end - begin)
        ends.append(done + ops.c.signal)
    assert any(math.isclose(found.fused, end) for end in ends)
    assert found.fused < found.unfused


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_tensor_parallelism_over_nodes(kind: str) -> None:
    ops = operators(2)
    if kind == "gather":
        found = ops.all_gather_matmul(16, ROWS, 3584, HIDDEN)
        few = ops.all_gather_matmul(16, 1024, 3584, HIDDEN)
    else:
        found = ops.matmul_scatter("reduce_scatter", 16, ROWS, HIDDEN, 1792)
        few = ops.matmul_scatter("reduce_scatter", 16, 1024, HIDDEN, 1792)
    assert found.bound <= found.fused < 0.9 * found.unfused
    assert few.fused == few.unfused  # 64 rows of a rank: the plan is unfused


def test_chunks_cover_all_rows() -> None:
    for weights in (GROWING, SHRINKING):
        for most in (1, 3, 9):
            chunks = chunks_by_weight(1000, most, weights)
            assert chunks[0][0] == 0 and chunks[-1][1] == 1000
            assert all(end == begin for (_, end), (begin, _) in pairwise(chunks))


def test_tokens_cross_once_per_node() -> None:
    """More choices of a token take no more time between nodes, where a row of a choice would."""
    ops, group = operators(2), Group(8, 2)
    four, eight = (
        ops.dispatch_grouped(group, ExpertMatmul(4096, k, 256, 4096, 7168)) for k in (4, 8)
    )
    rail = ops.collective("all_gather", 2 * 4096 * 7168 * 2.0, Group(1, 2))
    inside = [ops.fused_dispatch_grouped(8, ExpertMatmul(8192, k, 128, 4096, 7168)) for k in (2, 4)]
    assert math.isclose(four.fused, rail + ops.c.gap + inside[0])
    assert math.isclose(eight.fused, rail + ops.c.gap + inside[1])
    assert eight.fused < eight.unfused


def test_normal_kernels_of_deepep_within_20_percent() -> None:
    names = [f"deepep normal {way} ep {ep}" for way in ("dispatch", "combine") for ep in (16, 32)]
    judged = judge([figure for figure in figures() if figure.name in names])
    assert len(judged) == len(names)
    for one in judged:
        assert abs(one.error) < 0.2, f"{one.figure.name}: {one.error:+.1%}"
