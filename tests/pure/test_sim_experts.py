"""Fused expert operators in the simulator: expected routing, tiles of the schedules, links and
memory as limits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import isclose

import pytest

from tileweave.planning.combine import plan_combine
from tileweave.planning.costs import Costs
from tileweave.planning.machine import Machine
from tileweave.planning.schedules.grouped import GroupedProblem, dispatch_config
from tileweave.sim import moe
from tileweave.sim.advise import advise, memory_of
from tileweave.sim.collectives import Group
from tileweave.sim.machine import Cluster, make_cluster, with_gpus
from tileweave.sim.moe import known_experts
from tileweave.sim.operators import ExpertMatmul, Lookups, Operators
from tileweave.sim.tiles_grouped import Routing, dispatch_matmul, matmul_combine
from tileweave.sim.workload import Scenario, simulate_all

FOUR = with_gpus(make_cluster("h200"), 4)
COSTS = Costs(FOUR.device)
H200 = Machine("x", "cuda", 90, 132)


def dispatch_of(tokens: int) -> GroupedProblem:
    return GroupedProblem(4, tokens, 8, 32, 3072, 4096, 2, "bfloat16")


def combine_of(tokens: int) -> GroupedProblem:
    return GroupedProblem(4, tokens, 8, 32, 4096, 1536, 2, "bfloat16")


def slower(factor: float) -> Cluster:
    return replace(FOUR, device=replace(FOUR.device, link_rate=FOUR.device.link_rate / factor))


def dispatch(tokens: int, cluster: Cluster = FOUR, skew: float = 1.0) -> float:
    p = dispatch_of(tokens)
    return dispatch_matmul(p, dispatch_config(p), COSTS, cluster, True, skew)


def combine(tokens: int, cluster: Cluster = FOUR, skew: float = 1.0) -> float:
    p = combine_of(tokens)
    cut = plan_combine(p, H200, False).config
    assert cut is not None
    return matmul_combine(p, cut, COSTS, cluster, True, skew)


@pytest.mark.parametrize(("tokens", "draws"), [(1, 600), (8, 300), (64, 60)])
def test_expected_routing_matches_drawn_routing(tokens: int, draws: int) -> None:
    """Compare with drawn batches: rows of the busiest rank, experts that are hit, tokens sent to a
    rank."""
    p, drawn = dispatch_of(tokens), random.Random(7)
    busiest, hit, reached = [], [], []
    for _ in range(draws):
        chosen = [drawn.sample(range(128), 8) for _ in range(4 * tokens)]
        rows = [
            sum(expert // 32 == rank for token in chosen for expert in token) for rank in range(4)
        ]
        most = rows.index(max(rows))
        busiest.append(max(rows))
        hit.append(len({expert for token in chosen for expert in token if expert // 32 == most}))
        reached.append(
            sum(any(expert // 32 == 0 for expert in token) for token in chosen) / len(chosen)
        )
    routing = Routing(p)
    assert routing.rows() == pytest.approx(sum(busiest) / draws, rel=0.06, abs=1.1)
    assert len(routing.offsets()) - 1 == pytest.approx(sum(hit) / draws, rel=0.08)
    assert routing.reached(32) == pytest.approx(sum(reached) / draws, rel=0.03)


def test_rows_are_distributed_over_experts_that_are_hit() -> None:
    offsets = Routing(dispatch_of(1)).offsets()
    assert all(a < b for a, b in pairwise(offsets)) and len(offsets) - 1 <= 32
    assert Routing(dispatch_of(4096), 1.5).rows() == 49152  # skew in addition to chance


@pytest.mark.parametrize("run", [dispatch, combine])
def test_few_tokens_are_weight_bound_and_many_compute_bound(run: object) -> None:
    p, cols, depth = (dispatch_of, 3072, 4096) if run is dispatch else (combine_of, 4096, 1536)
    few, many = (run(tokens) for tokens in (32, 4096))  # type: ignore[operator]
    weights = 32 * cols * depth * 2 / COSTS.memory_rate
    assert weights < few < 2.0 * weights
    multiply = 2.0 * Routing(p(4096)).rows() * cols * depth / COSTS.flops  # type: ignore[operator]
    assert multiply < many < 2.2 * multiply


@pytest.mark.parametrize("run", [dispatch, combine])
def test_slow_links_bound_dispatch_and_combine(run: object) -> None:
    p, width = (dispatch_of(4096), 4096) if run is dispatch else (combine_of(4096), 4096)
    wire = (
        3
        * 4096
        * Routing(p).reached(32)
        * width
        * 2
        / (FOUR.device.link_rate * COSTS.c.push_fraction)
    )
    assert run(4096, slower(100.0)) == pytest.approx(100.0 * wire, rel=0.05)  # type: ignore[operator]
    assert run(4096, slower(0.01)) < run(4096) < run(4096, slower(8.0))  # type: ignore[operator]


def test_routing_skew_costs_time() -> None:
    assert dispatch(4096, skew=1.3) > 1.15 * dispatch(4096)
    assert combine(4096, skew=1.3) > 1.15 * combine(4096)


def test_experts_within_a_node_and_across_nodes() -> None:
    ops = Operators(FOUR)
    inside = ops.dispatch_grouped(Group(4), ExpertMatmul(4096, 8, 128, 3072, 4096))
    assert isclose(
        inside.fused,
        min(ops.fused_dispatch_grouped(4, ExpertMatmul(4096, 8, 128, 3072, 4096)), inside.unfused),
    )
    both = Operators(make_cluster("h200", nodes=2))
    for time in (
        both.dispatch_grouped(Group(8, 2), ExpertMatmul(4096, 8, 128, 3072, 4096)),
        both.grouped_combine(Group(8, 2), ExpertMatmul(4096, 8, 128, 4096, 1536)),
    ):
        assert time.bound <= time.fused <= time.unfused


def test_experts_on_one_rank_send_nothing() -> None:
    alone = Scenario("moe", moe.by_name("qwen3-235b", ep=1), make_cluster("h200"))
    times = simulate_all(alone)
    assert times.seconds("unfused") == times.seconds("fused") == times.seconds("bound")
    assert "exposed communication" not in times.timelines["fused"].phases()
    ops = Operators(FOUR)
    combine, expected = (
        ops.grouped_combine(Group(1), ExpertMatmul(64, 8, 128, 4096, 1536)),
        ops.reduce_top_k(64, 8, 4096),
    )
    assert (
        combine.unfused
        == combine.compute
        == pytest.approx(ops.costs.grouped_matmul(128, 4, 4096, 1536) + expected)
    )
    small = replace(alone.workload, model=replace(known_experts("mixtral-8x7b"), layers=4))  # type: ignore[type-var]
    assert {one.name for one in advise(replace(alone, workload=small)).candidates} == {
        "ep 1",
        "ep 2",
        "ep 4",
        "ep 8",
    }


def test_attention_width_follows_its_heads() -> None:
    """The heads of Qwen3 have 128 columns each, twice hidden / heads."""
    qwen, mixtral = known_experts("qwen3-235b"), known_experts("mixtral-8x7b")
    assert (qwen.attended, qwen.qkv) == (64 * 128, (64 + 2 * 4) * 128)
    assert (mixtral.attended, mixtral.qkv) == (4096, (32 + 2 * 8) * 128)
    work = moe.by_name("qwen3-235b")
    weights = 94 * 4096 * (128 / 4 * 3 * 1536 + (2 * 64 + 2 * 4) * 128)
    found = memory_of(work, FOUR).parts
    assert found["experts"] + found["attention"] == 2 * weights
    wide, narrow = (
        simulate_all(
            Scenario("moe", replace(work, model=replace(qwen, head_dim=columns)), FOUR),
            modes=("fused",),
        )
        for columns in (128, 0)
    )
    phases = [found.timelines["fused"].phases() for found in (wide, narrow)]
    assert phases[0]["attention"] == pytest.approx(2 * phases[1]["attention"], rel=0.02)
    assert phases[0]["matmul"] > 1.6 * phases[1]["matmul"]


# --- Lookups ---


def test_rows_of_a_small_table_come_from_memory_once() -> None:
    ops, row = Operators(FOUR), 512.0
    l2 = FOUR.device.l2
    assert ops.rows_in_l2(1e6, l2 / row + 1, row) == ops.rows_in_l2(900, 1000, row) == 0.0
    assert ops.rows_in_l2(1e6, l2 / row, row) == pytest.approx(1 - l2 / row / 1e6, abs=1e-3)
    rng = random.Random(1)
    drawn = [rng.randrange(1000) for _ in range(2500)]
    assert ops.rows_in_l2(2500, 1000, row) == pytest.approx(1 - len(set(drawn)) / 2500, abs=0.01)

    bags, pooling = 524288, 32
    lookups = [Lookups(bags, pooling, row, in_l2=part) for part in (0.0, 0.999)]
    far, near = (ops.fused_embedding(4, one) for one in lookups)
    assert 1.8 < far / near < 2.2  # as measured: docs/simulator-accuracy.md, the seventh test
    assert near > bags * pooling * row / COSTS.c.own_l2
    assert ops.embedding_all_to_all(Group(4), lookups[1]).fused == near


def test_lookup_time_is_bound_by_memory_links_or_elements() -> None:
    bags, row = 524288, 512.0
    ops, costs = Operators(FOUR), COSTS
    rate = costs.c.own_memory * FOUR.device.memory_rate
    assert costs.own_lookup(bags, bags * 32, row) == pytest.approx(
        bags * 33 * (row + 8) / rate, rel=0.01
    )
    sent = 3 / 4 * bags * row / (FOUR.device.link_rate * costs.c.push_fraction)
    assert ops.fused_embedding(4, Lookups(bags, 1, row)) == pytest.approx(sent, rel=0.08)
    assert ops.fused_embedding(4, Lookups(bags, 32, row)) == pytest.approx(
        costs.own_lookup(bags, bags * 32, row), rel=0.03
    )
    half, whole = (costs.lookup(bags, bags * 8, 128.0 * itemsize, itemsize) for itemsize in (2, 4))
    assert half > 0.8 * whole  # the number of elements is the same
    eight = Lookups(bags, 8, row, itemsize=4)
    assert ops.embedding_all_to_all(Group(4), eight).fused == ops.fused_embedding(4, eight)
