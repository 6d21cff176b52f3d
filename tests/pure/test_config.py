"""Plans: what runs where, with a reason for everything that does not run fused."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileweave.config import MatmulConfig, Plan, Problem, plan_all_gather_matmul, schedule_for
from tileweave.topology import CPU, H200, Machine, preset

WORLD_SIZES = range(2, 9)
SMALL_GPU = preset("some GPU", "cuda", 80, 108, 167936)
MAX_SLICES = 32  # signals that a source has in each peer

thorough = settings(max_examples=300, deadline=None, derandomize=True)
problems = st.builds(
    Problem,
    world_size=st.sampled_from(WORLD_SIZES),
    rows=st.integers(1, 8192),
    cols=st.integers(1, 60_000),
    depth=st.integers(1, 16_384),
    itemsize=st.just(2),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)


def problem(size: int = 4, rows: int = 512, cols: int = 2560, depth: int = 8192, dtype: str = "bfloat16") -> Problem:
    return Problem(size, rows, cols, depth, 4 if dtype == "float32" else 2, dtype)


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def check_config(config: MatmulConfig) -> None:
    """What kernels take for granted."""
    for size in (config.tile_m, config.tile_n, config.tile_k, config.num_slices, config.num_warps):
        assert power_of_two(size), f"{config}: {size}"
    assert min(config.tile_m, config.tile_n, config.tile_k) >= 16, "tl.dot's least"
    assert config.num_slices <= MAX_SLICES
    assert config.num_producers >= 1
    assert config.num_stages >= 1
    assert config.group_m >= 1


@thorough
@given(problems, st.sampled_from([H200, SMALL_GPU]))
def test_a_gpu_plan_can_run(p: Problem, machine: Machine) -> None:
    plan = plan_all_gather_matmul(p, machine, interpreting=False)
    assert plan.reason
    assert plan.path in ("fused", "unfused")
    assert (plan.config is not None) == (plan.path == "fused")
    if plan.config is not None:
        config = plan.config
        check_config(config)
        ring = (config.tile_m + config.tile_n) * config.tile_k * p.itemsize * config.num_stages
        assert ring <= machine.shared_bytes, f"{config}: {ring} bytes of shared memory"
        assert config.kernel == "triton" or machine.arch == 90, "the Gluon kernel is Hopper's"
        schedule = schedule_for(p, config, p.world_size - 1, machine)
        assert 1 <= schedule.num_programs <= machine.num_sms, "programs must all be resident"


@thorough
@given(problems)
def test_a_cpu_plan_can_run(p: Problem) -> None:
    plan = plan_all_gather_matmul(p, CPU, interpreting=True)
    assert plan.path == "fused"
    check_config(plan.config)
    assert plan.config.kernel == "triton"
    assert plan.config.num_producers == 1, "interpreted programs run one after another: the first must push everything"


@thorough
@given(problems, st.sampled_from([H200, CPU]))
def test_ranks_plan_alike(p: Problem, machine: Machine) -> None:
    """Transport, slices and the number of programs are part of the protocol: they may not depend on the rank."""
    assert "rank" not in inspect.signature(plan_all_gather_matmul).parameters
    plans = {plan_all_gather_matmul(replace(p), machine, interpreting=True) for _ in range(3)}
    assert len(plans) == 1
    config = plans.pop().config
    if config is not None:
        schedules = [schedule_for(p, config, rank, machine) for rank in range(p.world_size)]
        assert len({replace(schedule, rank=0) for schedule in schedules}) == 1
        assert [schedule.rank for schedule in schedules] == list(range(p.world_size))


@pytest.mark.parametrize("machine", [H200, CPU], ids=lambda machine: machine.backend)
def test_world_sizes(machine: Machine) -> None:
    assert plan_all_gather_matmul(problem(1), machine, True).path == "local"
    for size in WORLD_SIZES:
        assert plan_all_gather_matmul(problem(size, rows=4096), machine, True).path == "fused"
    for size in (9, 16, 64):
        plan = plan_all_gather_matmul(problem(size), machine, True)
        assert plan.path == "unfused"
        assert str(size) in plan.reason


@pytest.mark.parametrize("machine", [H200, CPU], ids=lambda machine: machine.backend)
@pytest.mark.parametrize("which", ["rows", "cols", "depth"])
def test_an_empty_dimension_is_unfused(machine: Machine, which: str) -> None:
    plan = plan_all_gather_matmul(problem(**{which: 0}), machine, True)
    assert plan == Plan("unfused", plan.reason)
    assert "zero" in plan.reason


def test_float32_is_unfused_on_gpus_only() -> None:
    plan = plan_all_gather_matmul(problem(dtype="float32"), H200, False)
    assert plan.path == "unfused"
    assert "float32" in plan.reason
    assert plan_all_gather_matmul(problem(dtype="float32"), CPU, True).path == "fused"


def test_the_cpu_is_unfused_unless_interpreting() -> None:
    plan = plan_all_gather_matmul(problem(), CPU, False)
    assert plan.path == "unfused"
    assert "TRITON_INTERPRET=1" in plan.reason


def test_large_shards_go_by_copy_engine_and_small_ones_by_sm() -> None:
    for machine in (H200, CPU):
        large = plan_all_gather_matmul(problem(rows=4096, cols=10240), machine, True)
        small = plan_all_gather_matmul(problem(rows=16, cols=10240), machine, True)
        assert (large.config.transport, small.config.transport) == ("copy_engine", "sm")


def test_a_plan_reads_well() -> None:
    fused = plan_all_gather_matmul(problem(rows=16), CPU, True)
    for word in ("fused", "triton", fused.config.transport, "tile", fused.reason):
        assert word in str(fused)
    assert str(Plan("unfused", "a dimension is zero")) == "unfused: a dimension is zero"


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_gathered_bytes(size: int) -> None:
    assert problem(size, rows=3, depth=5).gathered_bytes == size * 3 * 5 * 2
