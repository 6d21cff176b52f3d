"""Random shapes, strides, dtypes and alignments, and values that are not finite: the public call
equals fp64, or raises an error that says what is wrong.

``tests/support/properties.py`` has the strategies and the check of a result.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.matmul_cases import AG, AR, RS
from tests.support.worlds import Member, Worlds

pytest.importorskip("hypothesis")

from hypothesis import strategies as st
from tests.support import properties
from tests.support.properties import for_any, in_world

import tileweave as tw

OPS = {AG: 60, RS: 30, AR: 40}  # examples per property


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("op", OPS)
def test_any_input(worlds: Worlds, op: str) -> None:
    for_any(properties.examples(op), OPS[op], in_world(worlds("gloo", 2), properties.check_call))


INPUTS = {
    AG: ["x", "w", "bias"],
    RS: ["x", "w", "bias"],
    AR: ["x", "w", "bias", "residual", "norm_weight", "residual_out"],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("op", OPS)
def test_out_never_shares_memory_with_an_input(worlds: Worlds, op: str) -> None:
    world = worlds("gloo", 2)

    def check(example: tuple[str, str, int]) -> None:
        other = "out=" if example[1] == "residual_out" else "an input"
        for text in world.run(properties.alias_error, example):
            assert f"in the storage of {other};" in text, f"{example}: {text!r}"

    for_any(st.tuples(st.just(op), st.sampled_from(INPUTS[op]), st.integers(0, 3000)), 12, check)


def public_words(me: Member, sizes: tuple[int, int, int]) -> None:
    """explain, warmup, synchronize and close accept any sizes, and agree with each other."""
    rows, cols, depth = sizes
    x, w = torch.zeros(rows, depth), torch.zeros(cols, depth)
    plan = tw.explain(AG, x, w)
    assert tw.warmup(AG, rows, cols, depth, dtype=torch.float32, device="cpu") == plan
    assert plan.path == ("fused" if min(rows, cols, depth) else "unfused"), plan
    tw.warmup(AR, rows, cols, depth, norm=rows % 2 == 0, dtype=torch.float32, device="cpu")
    tw.warmup(RS, rows * me.world_size, cols, depth, dtype=torch.float32, device="cpu")
    layer = tw.nn.ColumnParallelLinear(
        max(depth, 1), max(cols, 1) * me.world_size, bias=rows % 2 == 0
    )
    y = layer(torch.zeros(rows, max(depth, 1)))
    assert y.shape == (rows * me.world_size, max(cols, 1))
    tw.synchronize()
    if (rows + cols) % 3 == 0:
        tw.close()
    dist.barrier()


@pytest.mark.timeout(120)
def test_other_public_functions(worlds: Worlds) -> None:
    strategy = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 40))
    for_any(strategy, 15, in_world(worlds("gloo", 2), public_words))
