"""Owners of tables: every column has one, memory suffices, and neither reads nor sends are left to
one rank."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileweave as tw
from tileweave.ops.embedding.bag_all_to_all_fused import group_of, spans_of
from tileweave.planning.sharding import (
    EmbeddingConfig,
    EmbeddingLayout,
    TableSpec,
    gradient_carrier,
    order_tables,
    plan_sharding,
)

# MLPerf's DLRM-v2
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

dims = st.sampled_from((4, 8, 64, 96, 128))
tables = st.lists(
    st.builds(TableSpec, st.just("t"), st.integers(1, 10**6), dims, st.floats(0, 200)), max_size=30
)


@given(tables=tables, ranks=st.integers(1, 8), itemsize=st.sampled_from((2, 4)))
def test_every_column_has_one_owner(tables: list[TableSpec], ranks: int, itemsize: int) -> None:
    plan = plan_sharding(tables, ranks, itemsize)
    layout = plan.layout()
    assert layout.invalid_reason() == ""
    assert layout.width == sum(t.dim for t in tables)
    assert [s.rank for s in plan.shards] == sorted(s.rank for s in plan.shards)
    for shard in plan.shards:
        assert shard.dim == tables[shard.table].dim or shard.dim * itemsize % 16 == 0


@given(tables=tables, ranks=st.integers(1, 8), memory=st.integers(1, 10**9))
def test_no_rank_holds_more_than_it_may(tables: list[TableSpec], ranks: int, memory: int) -> None:
    if sum(t.rows * t.dim * 4 for t in tables) <= memory:  # one rank could hold all
        assert len(plan_sharding(tables, ranks, 4, memory).shards) >= len(tables)
    with suppress(tw.InputError):
        plan = plan_sharding(tables, ranks, 4, memory)
        assert all(plan.memory(rank) <= memory for rank in range(ranks))


def test_tables_too_large_for_all_ranks_are_refused() -> None:
    with pytest.raises(tw.InputError, match="remedy: more ranks"):
        plan_sharding([TableSpec("t", 1000, 128)] * 3, 2, 4, 1000 * 128 * 4)


GOOD = TableSpec("t", 10, 8)
ROWS_AND_DIM = ((10, 0), (0, 8), (10, -8), (10, 8.0), (10.5, 8), ("10", 8))


def table(*sizes: Any) -> TableSpec:
    return TableSpec("t", *sizes)


def test_features_of_a_table_are_together() -> None:
    plan = plan_sharding([TableSpec("a", 9, 8, 2.0, 3), TableSpec("b", 9, 4, 12.0)], 2)
    assert [plan.features(rank) for rank in range(2)] == [[0, 1, 2], [3]]
    assert plan.layout() == EmbeddingLayout(((0, 8, 16), (24,)), ((8, 8, 8), (4,)))
    assert plan.bytes_read(0) == 3 * 2 * 8 * 4 and plan.bytes_sent(0) == 3 * 8 * 4
    assert plan.memory(0) == 9 * 8 * 4, "one copy"


@pytest.mark.parametrize(
    "wrong",
    [
        ([GOOD], 0),
        ([GOOD], -1),
        ([GOOD], 2.0),
        ([GOOD], 2, 0),
        ([GOOD, ("t", 10, 8)], 2),
        *(([GOOD, table(*sizes)], 2) for sizes in ROWS_AND_DIM),
        *(([GOOD, table(10, 8, pooling)], 2) for pooling in (math.nan, math.inf, -1.0, None)),
        *(([GOOD, table(10, 8, 1.0, features)], 2) for features in (0, -1, 1.5, None)),
    ],
    ids=str,
)
def test_invalid_sizes_are_refused(wrong: tuple) -> None:
    with pytest.raises(tw.InputError, match="1 at least"):
        plan_sharding(*wrong)


@given(
    rows=st.integers(1, 1000),
    pooling=st.floats(1, 100),
    ranks=st.integers(1, 8),
    each=st.integers(1, 4),
)
def test_equal_tables_are_distributed_evenly(
    rows: int, pooling: float, ranks: int, each: int
) -> None:
    plan = plan_sharding([TableSpec("t", rows, 64, pooling)] * (ranks * each), ranks)
    assert {len(plan.of_rank(rank)) for rank in range(ranks)} == {each}


@pytest.mark.parametrize("ranks", [2, 4])
def test_small_tables_are_spread_over_ranks(ranks: int) -> None:
    """Half of all lookups are of one table. Ranks without it must not get nearly all columns
    instead."""
    plan = plan_sharding(
        [TableSpec(f"t{i}", 10**6, 128, n) for i, n in enumerate(MULTI_HOT)], ranks
    )
    read, sent = ([of(rank) for rank in range(ranks)] for of in (plan.bytes_read, plan.bytes_sent))
    assert max(read) <= 1.1 * sum(read) / ranks
    assert max(sent) <= 1.1 * sum(sent) / ranks
    for rank, line in enumerate(plan.explain().splitlines()[:ranks]):
        assert f"reads {read[rank]:.0f} bytes" in line and f"pools {sent[rank]} " in line


# --- Gradients ---


@pytest.mark.parametrize("tables", [1, 2, 3, 8, 9, 26, 200])
def test_first_table_travels_alone_and_others_in_even_groups(tables: int) -> None:
    groups = [group_of(number, tables, 8) for number in range(tables)]
    counts = [groups.count(group) for group in range(1, 8)]
    assert groups == sorted(groups) and groups.count(0) == 1 and groups[-1] < 8
    assert max(counts) - min(counts) <= 1


def test_adjacent_tables_are_one_copy() -> None:
    layout = EmbeddingLayout(((0, 64, 96), (72, 128, 160)), ((64, 8, 32), (24, 32, 16)))
    assert spans_of(layout, 0, 0, 2) == [(0, 0, 64)]
    assert spans_of(layout, 0, 1, 2) == [(64, 64, 8), (96, 72, 32)], (
        "not side by side in the gradient"
    )
    assert spans_of(layout, 1, 0, 2) == [(72, 0, 24)]
    assert spans_of(layout, 1, 1, 2) == [(128, 24, 48)], "adjacent in both places"
    for owner in (0, 1):
        spans = [span for group in range(2) for span in spans_of(layout, owner, group, 2)]
        assert sum(dim for _, _, dim in spans) == sum(layout.dims[owner])


@pytest.mark.parametrize(
    ("dims", "batch", "carrier"),
    [
        ((128, 128), 65536, "copy_engine"),
        ((128, 128), 2048, "sm"),
        ((128, 32), 65536, "sm"),
        ((), 65536, "sm"),
    ],
)
def test_gradient_carrier(dims: tuple[int, ...], batch: int, carrier: str) -> None:
    layout = EmbeddingLayout.in_rank_order([dims] * 4)
    assert gradient_carrier(layout, batch, 4) == carrier


MIB = 1 << 20
IN_TURNS = EmbeddingConfig(8, 4, run=64)


@pytest.mark.parametrize(
    ("batch", "rows", "mib", "run"),
    [
        pytest.param(54782, (44551,) * 14, (27,) * 14, 0, id="each fits L2"),
        pytest.param(97176, (636339,) * 11, (78,) * 11, 0, id="a good part of each fits L2"),
        pytest.param(54782, (1000,) * 14, (3,) * 14, 64, id="all fit L2 together"),
        pytest.param(65536, (1_000_000, 20), (488, 1), 64, id="one is far too large"),
        pytest.param(5568, (326056,) * 21, (99,) * 21, 64, id="rows are read once or never"),
        pytest.param(8, (), (), 64, id="no tables"),
    ],
)
def test_tables_that_fit_l2_one_by_one_follow_each_other(
    batch: int, rows: tuple[int, ...], mib: tuple[int, ...], run: int
) -> None:
    nbytes = [count * MIB for count in mib]
    assert order_tables(IN_TURNS, batch, rows, nbytes, 60 * MIB) == replace(IN_TURNS, run=run)
    assert order_tables(IN_TURNS, batch, rows, nbytes, 0) == IN_TURNS, "L2 is not known"
    whole_rows = replace(IN_TURNS, run=1)
    assert order_tables(whole_rows, batch, rows, nbytes, 60 * MIB) == whole_rows
