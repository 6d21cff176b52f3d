"""Who owns which table: every column once, memory kept, and neither reading nor sending left to one rank."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileweave as tw
from tileweave.sharding import TableSpec, plan_sharding

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM-v2

dims = st.sampled_from((4, 8, 64, 96, 128))
tables = st.lists(st.builds(TableSpec, st.just("t"), st.integers(1, 10**6), dims, st.floats(0, 200)), max_size=30)


@given(tables=tables, ranks=st.integers(1, 8), itemsize=st.sampled_from((2, 4)))
def test_every_column_has_one_owner(tables: list[TableSpec], ranks: int, itemsize: int) -> None:
    plan = plan_sharding(tables, ranks, itemsize)
    layout = plan.layout()
    assert layout.faults() == ""
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


def test_too_much_for_all_ranks() -> None:
    with pytest.raises(tw.InputError, match="remedy: more ranks"):
        plan_sharding([TableSpec("t", 1000, 128)] * 3, 2, 4, 1000 * 128 * 4)


@given(rows=st.integers(1, 1000), pooling=st.floats(1, 100), ranks=st.integers(1, 8), each=st.integers(1, 4))
def test_equal_tables_are_shared_out_evenly(rows: int, pooling: float, ranks: int, each: int) -> None:
    plan = plan_sharding([TableSpec("t", rows, 64, pooling)] * (ranks * each), ranks)
    assert {len(plan.of_rank(rank)) for rank in range(ranks)} == {each}


@pytest.mark.parametrize("ranks", [2, 4])
def test_small_tables_do_not_all_go_where_little_is_read(ranks: int) -> None:
    """Half of all lookups are of one table: whoever does not have it must not get nearly all columns instead."""
    plan = plan_sharding([TableSpec(f"t{i}", 10**6, 128, n) for i, n in enumerate(MULTI_HOT)], ranks)
    read, sent = ([of(rank) for rank in range(ranks)] for of in (plan.bytes_read, plan.bytes_sent))
    assert max(read) <= 1.1 * sum(read) / ranks
    assert max(sent) <= 1.1 * sum(sent) / ranks
    for rank, line in enumerate(plan.explain().splitlines()[:ranks]):
        assert f"reads {read[rank]:.0f} bytes" in line and f"pools {sent[rank]} " in line
