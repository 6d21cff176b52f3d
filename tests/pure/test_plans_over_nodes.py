"""Plans of operators in groups that are on several nodes."""

from __future__ import annotations

import pytest

from tileweave.planning import topology
from tileweave.planning.combine import plan_combine
from tileweave.planning.machine import CPU, Machine
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_matmul_all_reduce,
    plan_matmul_all_to_all,
    plan_matmul_reduce_scatter,
)
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.schedules.chunks import parts_by_weight
from tileweave.planning.schedules.grouped import GroupedProblem, plan_dispatch
from tileweave.planning.sharding import plan_embedding

H100 = Machine("NVIDIA H100 80GB HBM3", "cuda", 90, 132)
PLANNERS = (plan_all_gather_matmul, plan_matmul_reduce_scatter, plan_matmul_all_reduce)


def planned(planner, rows: int, cols: int, depth: int, **more) -> Plan[MatmulConfig]:
    given = {"world_size": 2, "nodes": 2, "itemsize": 2, "dtype": "bfloat16", **more}
    return planner(Problem(rows=rows, cols=cols, depth=depth, **given), H100, False)


def chunks(plan: Plan[MatmulConfig]) -> int:
    assert plan.path == "fused" and plan.config is not None and plan.config.multiplies_chunks
    return plan.config.num_slices


@pytest.mark.parametrize("planner", PLANNERS)
def test_chunks_follow_the_matmul(planner) -> None:
    found = [
        chunks(planned(planner, rows, cols, 8192))
        for rows, cols in ((2048, 4096), (4096, 4096), (8192, 65536))
        if planner is not plan_matmul_all_reduce or rows > 2048
    ]
    assert found[-2:] == [2, 4] and found[:-2] in ([], [1])


@pytest.mark.parametrize("planner", PLANNERS)
def test_sixteen_ranks_of_two_nodes(planner) -> None:
    rows = 8192 if planner is plan_matmul_all_reduce else 1024
    plan = planned(planner, rows, 8192, 8192, world_size=16)
    assert chunks(plan) >= 2 and "2 nodes x 8" in plan.reason
    assert planned(planner, rows, 8192, 8192, world_size=32).path == "unfused"  # 16 ranks each
    assert planned(planner, rows, 8192, 8192, world_size=16, nodes=1).path == "unfused"


@pytest.mark.parametrize(
    ("planner", "rows", "more", "reason"),
    [
        (plan_all_gather_matmul, 128, {}, "too little to hide"),
        (plan_all_gather_matmul, 1024, {}, "too few to hide anything"),
        (plan_all_gather_matmul, 1024, {"itemsize": 4, "dtype": "float32"}, "tensor-core"),
        (plan_all_gather_matmul, 1024, {"itemsize": 1, "dtype": "float8_e4m3fn"}, "FP8"),
        (plan_matmul_all_reduce, 3, {"world_size": 8}, "3 rows, less than a node has ranks"),
        (plan_matmul_all_to_all, 1024, {}, "has no path between nodes"),
    ],
)
def test_what_runs_unfused(planner, rows: int, more: dict, reason: str) -> None:
    plan = planned(planner, rows, 4096, 4096, **more)
    assert plan.path == "unfused" and reason in plan.reason and "2 nodes" in plan.reason


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 1024])
@pytest.mark.parametrize("weights", [(1,), (4, 2, 1), (1, 2, 2, 1)])
def test_parts_by_weight(rows: int, weights: tuple[int, ...]) -> None:
    parts = parts_by_weight(rows, weights, 128)
    assert [row for begin, end in parts for row in range(begin, end)] == list(range(rows))
    assert len(parts) <= len(weights) and all(end > begin for begin, end in parts)
    if rows == 1024:
        assert all(begin % 128 == 0 for begin, _ in parts)


@pytest.mark.parametrize(("ranks", "fused"), [(2, True), (4, False), (16, False)])
def test_embeddings_on_gpus(ranks: int, fused: bool) -> None:
    plan = plan_embedding(ranks, 512, 4.0, H100, False, nodes=2)
    assert (plan.path == "fused") == fused and f"2 nodes x {ranks // 2}" in plan.reason
    assert plan_embedding(ranks, 512, 4.0, CPU, True, nodes=2).path == "fused"


@pytest.mark.parametrize("planner", [plan_dispatch, plan_combine])
@pytest.mark.parametrize("ranks", [2, 16])
def test_experts_on_gpus(planner, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = GroupedProblem(ranks, 1024, 8, 8, 2048, 2048, 2, "bfloat16", 2)
    plan = planner(sizes, H100, False)
    said = "collectives send as much" if ranks == 2 else "has run with one rank"
    assert plan.path == "unfused" and said in plan.reason
    assert planner(sizes, CPU, True).path == "fused"
    monkeypatch.setattr(topology, "TRY_ALL", True)
    assert planner(sizes, H100, False).path == "fused"
