"""Matmul operators are simulated as they are planned: the path and the config of the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tileweave.errors import InputError
from tileweave.planning import choices
from tileweave.planning.candidates import PLANNED
from tileweave.planning.costs import data_sheet
from tileweave.planning.matmul import plan_matmul_all_reduce, plan_matmul_reduce_scatter
from tileweave.planning.measurements import Measurement
from tileweave.sim.machine import make_cluster, with_gpus
from tileweave.sim.operators import Operators
from tileweave.sim.plans import fused_config, machine_of, scatter_problem
from tileweave.sim.tables import with_config

FOUR = with_gpus(make_cluster("h200"), 4)
MACHINE = machine_of(FOUR.device)
SCATTER = "matmul_reduce_scatter"
PER_SHARD = next(
    config
    for config in PLANNED[SCATTER].configs
    if config.kernel == "library" and config.transport == "copy_engine"
)


@pytest.mark.parametrize("name", ["h100", "h200", "h800", "a100", "b200", "mi300x"])
def test_the_planner_knows_each_device_by_its_name(name: str) -> None:
    device = make_cluster(name).device
    sheet = data_sheet(machine_of(device))
    assert (sheet.link_rate, sheet.num_sms) == (device.link_rate, device.num_sms)


@pytest.mark.parametrize("rows", [1, 64, 512, 4096, 16384])
def test_the_config_is_that_of_the_plan(rows: int) -> None:
    for kind, planner in (
        ("all_reduce", plan_matmul_all_reduce),
        ("reduce_scatter", plan_matmul_reduce_scatter),
    ):
        problem = scatter_problem(kind, 4, rows, 8192, 2048)
        plan = planner(problem, MACHINE, False)
        assert plan.config is not None
        assert fused_config(f"matmul_{kind}", problem, MACHINE) == plan.config


def test_what_is_planned_unfused_is_simulated_unfused() -> None:
    """The candidate that is expected to be fastest has a time nevertheless: published tables have
    times of fused operators that are slower."""
    shape = (2048, 8192, 2304)  # that is not measured
    problem = scatter_problem("reduce_scatter", 4, *shape)
    before = Operators(FOUR).matmul_scatter("reduce_scatter", 4, *shape)
    config = fused_config(SCATTER, problem, MACHINE)
    assert before.fused < before.unfused
    try:
        choices.install([Measurement(SCATTER, problem, {None: 1.0, config: 2.0})])
        assert plan_matmul_reduce_scatter(problem, MACHINE, False).path == "unfused"
        ops = Operators(FOUR)
        after = ops.matmul_scatter("reduce_scatter", 4, *shape)
        assert after.fused == after.unfused == before.unfused
        assert fused_config(SCATTER, problem, MACHINE) == config
        assert ops.fused_matmul_scatter("reduce_scatter", 4, *shape) == before.fused
    finally:
        choices.clear()


def test_a_plan_is_made_again_when_choices_change() -> None:
    problem = scatter_problem("reduce_scatter", 4, 512, 8192, 2048)
    before = fused_config(SCATTER, problem, MACHINE)
    assert before != PER_SHARD
    with choices.forced(SCATTER, PER_SHARD):
        assert fused_config(SCATTER, problem, MACHINE) == PER_SHARD
    assert fused_config(SCATTER, problem, MACHINE) == before


def test_what_nothing_fused_can_run_is_refused() -> None:
    ops = Operators(FOUR)
    with pytest.raises(
        InputError, match=r"asked: the time of a fused all_gather_matmul.*K = 4097.*16 bytes"
    ):
        ops.fused_all_gather_matmul(4, 4096, 2048, 4097)
    found = ops.all_gather_matmul(4, 4096, 2048, 4097)
    assert found.fused == found.unfused


def test_shards_that_copy_engines_send_overlap_the_products() -> None:
    """The sends of three of four shards are hidden by products, or these by the sends."""
    ops = Operators(FOUR)
    table = with_config(SCATTER, PER_SHARD).of(SCATTER)

    def seconds(ops: Operators, m: int, n: int, k: int) -> float:
        return ops.fused_matmul_scatter("reduce_scatter", 4, m, n, k, entries=table)

    product, wire = (
        ops.costs.matmul(2048, 8192, 8192),
        2048 * 8192 * 2 / (FOUR.device.link_rate * ops.c.copy_fraction),
    )
    assert 4 * product < seconds(ops, 8192, 8192, 8192) < 4 * product + 2 * wire
    device = replace(FOUR.device, link_rate=FOUR.device.link_rate / 20)
    slow = Operators(replace(FOUR, device=device))
    assert 60 * wire < seconds(slow, 8192, 8192, 8192) < 60 * wire + 2 * product
