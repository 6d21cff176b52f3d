"""Fallbacks of plans, and the verdicts that a benchmark derives from its times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tileweave.bench.rivals import CORUN, GEMM, OURS, TORCHS, UNFUSED
from tileweave.bench.run import judge
from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import CPU, H200, Machine
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch
from tileweave.planning.sharding import TableSpec, plan_embedding, plan_sharding
from tileweave.profile.timing import _Lap, _timing


def test_largest_tables_first_where_most_read_first_does_not_fit() -> None:
    sizes = ((40, 2), (10, 9), (10, 9), (40, 1), (40, 5))
    plan = plan_sharding(
        [TableSpec(f"t{i}", rows, 4, pooling) for i, (rows, pooling) in enumerate(sizes)],
        2,
        4,
        1280,
    )
    assert (
        max(plan.memory(rank) for rank in (0, 1)) <= 1280 and plan.layout().invalid_reason() == ""
    )


def test_tables_are_cut_where_they_do_not_fit_whole() -> None:
    """Three tables of 1920 bytes, on two ranks of 2880."""
    plan = plan_sharding([TableSpec(name, 60, 8) for name in "abc"], 2, 4, 2880)
    assert [plan.memory(rank) for rank in (0, 1)] == [2880, 2880]


def test_combine_paths() -> None:
    p = GroupedProblem(4, 4096, 8, 32, 4096, 1536, 2, "bfloat16")
    assert (
        plan_combine(p, H200, False).path == "fused"
        and plan_combine(p, CPU, False).path == "unfused"
    )
    assert plan_combine(replace(p, world_size=1), H200, False).path == "local"
    for odd in (
        replace(p, world_size=9),
        replace(p, max_tokens=0),
        replace(p, dtype="float32", itemsize=4),
    ):
        assert plan_combine(odd, H200, False).path == "unfused", odd
    cut = plan_combine(replace(p, depth=1535), H200, False).config
    assert cut is not None and cut.kernel == "triton"


def test_lookup_paths() -> None:
    old = Machine("old", "cuda", 75, 40)
    paths = [
        plan_embedding(size, 512, 8.0, machine, False).path
        for size, machine in ((4, H200), (1, H200))
    ]
    assert paths == ["fused", "local"]
    for size, machine in ((9, H200), (4, CPU), (4, old)):
        assert plan_embedding(size, 512, 8.0, machine, False).path == "unfused"


def test_text_of_expert_and_lookup_plans() -> None:
    p = GroupedProblem(4, 4096, 8, 32, 4096, 1536, 2, "bfloat16")
    balanced = "1024 rows per expert if balanced"
    assert (
        str(plan_combine(p, H200, False))
        == f"fused, hopper kernel, tile 128x256x64, 4 stages, 4 chunks: {balanced}"
    )
    assert (
        str(plan_dispatch(p, H200, False))
        == f"fused, hopper kernel, tile 128x256x64, 4 stages: {balanced}"
    )
    alone, many = (plan_embedding(size, 512, 8.0, H200, False) for size in (1, 9))
    assert str(alone) == "local, 8 bags x 4 rows, 2 warps: a group of one rank keeps what it pools"
    assert str(many) == "unfused: world size 9 is above 8" and many.config is None


def test_the_best_rival_and_the_slowest_rank_count() -> None:
    times = {
        OURS: 100.0,
        GEMM: 90.0,
        UNFUSED: 150.0,
        CORUN: 95.0,
        TORCHS[0]: 120.0,
        TORCHS[1]: 200.0,
    }
    found = judge({name: {"median_us": us} for name, us in times.items()})
    assert (found["over_best"], found["over_torch"], found["over_unfused"]) == (1.2, 1.2, 1.5)
    assert found["e_overlap"] == pytest.approx(1 - 10 / 60) and found["limit_ratio"] == 0.95
    timing = _timing(_Lap(lambda: None, 1, False), [[1e-6, 5e-6, 3e-6], [2e-6, 4e-6, 6e-6]], "")
    assert timing.repeats_us == pytest.approx([2, 5, 6]) and timing.median_us == pytest.approx(5)
