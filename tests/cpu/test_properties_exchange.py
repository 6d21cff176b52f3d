"""Random shapes, offsets, strides and dtypes of the exchanges and the expert operators, with values
that are not finite, zeros with a sign, and subnormal ones: results equal fp64.

``tests/support/properties.py`` has the strategies and the check of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.support.worlds import Member, Worlds

pytest.importorskip("hypothesis")

from hypothesis import strategies as st
from tests.support.properties import (
    Planted,
    check_result,
    dtypes,
    for_any,
    in_world,
    offsets,
    scale_of,
    with_gaps,
    write_special_values,
)

import tileweave as tw

SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-7)
few = st.one_of(st.integers(1, 3), st.integers(4, 24))
planted = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=3
).map(tuple)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- Exchanges ---


@dataclass(frozen=True)
class Exchanged:
    """One call in a world of two. ``rows``, ``cols``, ``depth``: of half of x and w."""

    op: str
    rows: int
    cols: int
    depth: int
    dims: tuple[int, int]
    dtype: str
    bias: bool
    into: bool
    offset: tuple[int, int]
    gap: int
    planted: Planted


EXCHANGES = st.builds(
    Exchanged,
    op=st.sampled_from(["matmul_all_to_all", "all_to_all_matmul"]),
    rows=few,
    cols=few,
    depth=few,
    dims=st.sampled_from([(1, 0), (0, 1)]),
    dtype=dtypes,
    bias=st.booleans(),
    into=st.booleans(),
    offset=st.tuples(offsets, offsets),
    gap=st.integers(0, 5),
    planted=planted,
)


def exchanged(parts: list[torch.Tensor], rank: int, dims: tuple[int, int]) -> torch.Tensor:
    """What ``rank`` has after an all-to-all of these."""
    scatter, gather = dims
    return torch.cat([part.chunk(len(parts), scatter)[rank] for part in parts], gather)


def check_exchange(me: Member, e: Exchanged) -> None:
    size, dtype = me.world_size, getattr(torch, e.dtype)
    first = e.op == "matmul_all_to_all"
    xs = [normal(rank, 2 * e.rows, 2 * e.depth).to(dtype) for rank in range(size)]
    write_special_values(xs, e.planted)
    depth = xs[0].shape[1]
    if not first:
        depth = exchanged(xs, 0, e.dims).shape[1]
    w = (normal(9, 2 * e.cols, depth) / depth**0.5).to(dtype)
    bias = normal(8, 2 * e.cols).to(dtype) if e.bias else None
    add = 0.0 if bias is None else bias.double()
    if first:
        want = exchanged([x.double() @ w.double().t() + add for x in xs], me.rank, e.dims)
    else:
        want = exchanged([x.double() for x in xs], me.rank, e.dims) @ w.double().t() + add
    options = {}
    if e.into:
        options["out"] = torch.full(want.shape, float("nan"), dtype=dtype)
    y = getattr(tw, e.op)(
        with_gaps(xs[me.rank], e.offset[0]),
        with_gaps(w, e.offset[1], e.gap),
        bias,
        scatter_dim=e.dims[0],
        gather_dim=e.dims[1],
        **options,
    )
    check_result(y, want, scale_of(*xs))


@pytest.mark.timeout(600)
def test_any_exchange(worlds: Worlds) -> None:
    for_any(EXCHANGES, 25, in_world(worlds("gloo", 2), check_exchange))


# --- Experts ---


@dataclass(frozen=True)
class Experts:
    """A dispatch and a combine in a world of two.

    tokens : of each rank. experts : per rank. holes : whether some choices name no expert; their
    weights are NaN then.
    """

    tokens: tuple[int, int]
    experts: int
    topk: int
    depth: int
    width: int
    dtype: str
    index_dtype: torch.dtype
    weighted: bool
    holes: bool
    offset: tuple[int, int]
    seed: int
    planted: Planted
    planted_rows: Planted


EXPERTS = st.builds(
    Experts,
    tokens=st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any),
    experts=st.integers(1, 3),
    topk=st.integers(1, 3),
    depth=few,
    width=few,
    dtype=dtypes,
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    weighted=st.booleans(),
    holes=st.booleans(),
    offset=st.tuples(offsets, offsets),
    seed=st.integers(0, 1000),
    planted=planted,
    planted_rows=planted,
)


def check_experts(me: Member, e: Experts) -> None:
    size, dtype, most = me.world_size, getattr(torch, e.dtype), max(e.tokens)
    xs = [normal(e.seed + r, e.tokens[r], e.depth).to(dtype) for r in range(size)]
    write_special_values(xs, e.planted)
    number = e.experts * size
    draw = torch.Generator().manual_seed(e.seed)
    ids = [torch.randint(-e.holes, number, (n, e.topk), generator=draw) for n in e.tokens]
    up = (normal(e.seed + 7, number, e.width, e.depth) / e.depth**0.5).to(dtype)
    down = (normal(e.seed + 8, number, e.depth, e.width) / e.width**0.5).to(dtype)
    mine = slice(me.rank * e.experts, (me.rank + 1) * e.experts)
    y, plan = tw.dispatch_grouped_matmul(
        with_gaps(xs[me.rank], e.offset[0]),
        up[mine].clone(),
        with_gaps(ids[me.rank].double(), 0).to(e.index_dtype),
        max_tokens=most,
    )
    rows, entries = int(plan.offsets[-1]), []
    owners = torch.repeat_interleave(
        torch.arange(e.experts) + mine.start, plan.offsets.long().diff()
    )
    want = torch.zeros(rows, e.width, dtype=torch.float64)
    for row in range(rows):
        source, rest = divmod(int(plan.row_entry[row]), most * e.topk)
        token, choice = divmod(rest, e.topk)
        entries.append((source, token, choice))
        assert ids[source][token, choice] == owners[row]
        want[row] = up[owners[row]].double() @ xs[source][token].double()
    expected = [
        (source, token, choice)
        for source in range(size)
        for token, choices in enumerate(ids[source].tolist())
        for choice, expert in enumerate(choices)
        if mine.start <= expert < mine.stop
    ]
    assert sorted(entries) == expected
    check_result(y[:rows], want, scale_of(*xs))
    # rows of the combine are drawn by entry, so that every rank knows all of them
    values = normal(e.seed + 5, size * most * e.topk, e.width).to(dtype)
    halves = list(values.view(size, -1))
    write_special_values([half for half in halves if half.numel()] or halves, e.planted_rows[:2])
    h = with_gaps(torch.zeros(plan.bound, e.width, dtype=dtype), e.offset[1])
    h[:rows] = values[plan.row_entry[:rows].long()]
    weights = [normal(e.seed + 20 + r, e.tokens[r], e.topk).abs() for r in range(size)]
    for of, chosen in zip(weights, ids, strict=True):
        of[chosen < 0] = float("nan")
    z = tw.grouped_matmul_combine(
        h, down[mine].clone(), plan, weights[me.rank] if e.weighted else None
    )
    want = torch.zeros(e.tokens[me.rank], e.depth, dtype=torch.float64)
    for token, choices in enumerate(ids[me.rank].tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                entry = (me.rank * most + token) * e.topk + choice
                part = down[expert].double() @ values[entry].double()
                want[token] += part * (
                    float(weights[me.rank][token, choice]) if e.weighted else 1.0
                )
    check_result(z, want, 4 * scale_of(values, want))


@pytest.mark.timeout(600)
def test_any_experts(worlds: Worlds) -> None:
    for_any(EXPERTS, 25, in_world(worlds("gloo", 2), check_experts))
