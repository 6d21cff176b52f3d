"""The recommendation step: whose update of tables, gradients in groups, a batch in all, cross
networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tileweave.errors import InputError
from tileweave.planning.costs import Costs
from tileweave.sim import dlrm
from tileweave.sim.machine import Cluster, make_cluster
from tileweave.sim.operators import Operators
from tileweave.sim.workload import Scenario, samples_of, simulate, simulate_all

NODES = make_cluster("h200", nodes=16)
OURS = dlrm.by_name("dlrm-ours")


def of(work: dlrm.Dlrm, mode: Any = "unfused", cluster: Cluster = NODES) -> float:
    return simulate(Scenario("dlrm", work, cluster), mode).seconds


def parts(work: dlrm.Dlrm, name: str, mode: Any = "unfused") -> list[float]:
    found = simulate(Scenario("dlrm", work, NODES), mode)
    return [part.seconds for task in found.tasks for part in task.parts if part.name == name]


def test_updates_are_priced_by_name() -> None:
    """tileweave's reads a gradient and reads and writes a row for each position; torch's is two
    lookups and a regrouping."""
    bags, row = 256 * 128, 256.0
    costs = Costs(NODES.device)
    (ours,) = parts(OURS, "update of tables")
    rate = costs.c.own_memory * NODES.device.memory_rate
    assert ours == pytest.approx(costs.c.matmul_launch + 3 * 20 * bags * row / rate)
    (theirs,) = parts(replace(OURS, update="torch"), "update of tables")
    lookup = costs.lookup(bags, bags * 20, row, 2)
    assert theirs == pytest.approx(costs.stream(2 * bags * row) + 2 * lookup)
    assert of(replace(OURS, update="torch")) > of(OURS)
    with pytest.raises(InputError, match="tileweave, torch"):
        dlrm.by_name("dlrm-ours", update="ours")


def test_gradients_travel_in_groups_while_others_are_applied() -> None:
    big = make_cluster("h200", nodes=128)
    ops = Operators(big)
    made = {
        groups: dlrm._Builder(OURS, big, ops, "fused", None).build(groups).seconds
        for groups in (1, dlrm.GROUPS)
    }
    assert dlrm.GROUPS == 8 and made[8] < made[1]
    assert of(OURS, "fused", big) == made[8]
    # where latencies outweigh what overlaps, gradients go at once
    small = replace(OURS, model=replace(OURS.model, batch_per_gpu=1, pooling=1.0))
    slow = replace(big, network=replace(big.network, latency=1e-3))
    assert of(small, "fused", slow) <= of(small, "unfused", slow)
    assert len(parts(small, "update of tables", "fused")) in (1, 8)


def test_fusion_may_save_more_than_the_forward_has() -> None:
    """Forward alone can save a fifth at most: it is one of five passes over vectors."""
    found = simulate_all(Scenario("dlrm", OURS, make_cluster("h200", nodes=128)))
    assert found.saving > 0.20
    assert found.seconds("bound") <= found.seconds("fused") <= found.seconds("unfused")


@pytest.mark.parametrize("nodes", [1, 16])
def test_mlperf_s_batch_is_the_same_on_any_number_of_gpus(nodes: int) -> None:
    work = dlrm.by_name("dlrm-v2")
    scenario = Scenario("dlrm", work, make_cluster("h200", nodes=nodes))
    assert samples_of(scenario) == (65536, "samples")
    with pytest.raises(InputError, match="batch 65536 and batch_per_gpu 3; allowed: one of both"):
        replace(work.model, batch_per_gpu=3)
    with pytest.raises(InputError, match="a batch of 65536 on 24 GPUs"):
        of(work, cluster=make_cluster("h200", nodes=3))


def test_a_cross_network_is_computed() -> None:
    work = dlrm.by_name("dlrm-v2")
    (cross, back) = parts(work, "cross network")
    flops = 3 * 2 * 2 * 512 * 3456 * 512  # layers, matmuls, flop, samples of a GPU, columns, rank
    assert cross > flops / NODES.device.flops and back == pytest.approx(2 * cross)
    pairs = replace(work, model=replace(work.model, cross_layers=0, cross_rank=0))
    assert not parts(pairs, "cross network") and of(pairs) < of(work)
    with pytest.raises(InputError, match="cross_layers 3 of rank 0"):
        replace(work.model, cross_rank=0)
