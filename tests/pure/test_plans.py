"""Plans: which path a call takes, with a reason for everything that is not fused."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileweave as tw
from tileweave.ops.core import registry
from tileweave.planning import choices
from tileweave.planning.candidates import can_run
from tileweave.planning.machine import CPU, H200, Machine
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_all_to_all_matmul,
    plan_matmul_all_reduce,
    plan_matmul_all_to_all,
    plan_matmul_reduce_scatter,
    scatter_schedule_for,
    schedule_for,
)
from tileweave.planning.measurements import Measurement, packaged
from tileweave.planning.predict import host_seconds
from tileweave.planning.problem import MatmulConfig, Plan, Problem

WORLD_SIZES = range(2, 9)
SMALL_GPU = Machine("some GPU", "cuda", 80, 108)
SHARED_BYTES = {H200: 232448, SMALL_GPU: 167936}  # shared memory that one program may use
MAX_SLICES = 32  # signals of a source in each peer

thorough = settings(max_examples=300, derandomize=True)
problems = st.builds(
    Problem,
    world_size=st.sampled_from(WORLD_SIZES),
    rows=st.integers(1, 8192),
    cols=st.integers(1, 60_000),
    depth=st.integers(1, 16_384),
    itemsize=st.just(2),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)


def problem(
    size: int = 4, rows: int = 512, cols: int = 2560, depth: int = 8192, dtype: str = "bfloat16"
) -> Problem:
    return Problem(size, rows, cols, depth, 4 if dtype == "float32" else 2, dtype)


PLANNERS = {
    "all_gather_matmul": plan_all_gather_matmul,
    "matmul_reduce_scatter": plan_matmul_reduce_scatter,
    "matmul_all_reduce": plan_matmul_all_reduce,
    "matmul_all_to_all": plan_matmul_all_to_all,
    "all_to_all_matmul": plan_all_to_all_matmul,
}


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def check_config(config: MatmulConfig) -> None:
    """Assumptions of kernels."""
    for size in (config.tile_m, config.tile_n, config.tile_k, config.num_slices, config.num_warps):
        assert power_of_two(size), f"{config!r}: {size}"
    assert min(config.tile_m, config.tile_n, config.tile_k) >= 16, "tl.dot's least"
    assert config.num_slices <= MAX_SLICES
    assert config.num_producers >= 1
    assert config.num_stages >= 1
    assert config.group_m >= 1


@thorough
@given(problems, st.sampled_from([H200, SMALL_GPU]))
def test_gpu_plan_satisfies_the_kernels(p: Problem, machine: Machine) -> None:
    plan = plan_all_gather_matmul(p, machine, interpreting=False)
    assert plan.reason
    assert plan.path in ("fused", "unfused")
    assert (plan.config is not None) == (plan.path == "fused")
    if plan.config is not None:
        config = plan.config
        check_config(config)
        ring = (config.tile_m + config.tile_n) * config.tile_k * p.itemsize * config.num_stages
        assert config.kernel == "library" or ring <= SHARED_BYTES[machine], f"{config!r}: {ring}"
        assert config.kernel != "hopper" or machine.arch == 90, "the Gluon kernel is Hopper's"
        schedule = schedule_for(p, config, p.world_size - 1, machine)
        assert 1 <= schedule.num_programs <= machine.num_sms, "programs must all be resident"


@thorough
@given(problems)
def test_cpu_plan_satisfies_the_kernels(p: Problem) -> None:
    plan = plan_all_gather_matmul(p, CPU, interpreting=True)
    assert plan.path == "fused"
    check_config(plan.config)
    assert plan.config.kernel == "triton"
    assert plan.config.num_producers == 1, (
        "interpreted programs run one after another: the first must push everything"
    )


@thorough
@given(problems, st.sampled_from([H200, CPU]))
def test_plan_does_not_depend_on_the_rank(p: Problem, machine: Machine) -> None:
    """Transport, slices and the number of programs are part of the protocol: they must not depend
    on the rank."""
    assert "rank" not in inspect.signature(plan_all_gather_matmul).parameters
    plans = {plan_all_gather_matmul(replace(p), machine, interpreting=True) for _ in range(3)}
    assert len(plans) == 1
    config = plans.pop().config
    if config is not None:
        schedules = [schedule_for(p, config, rank, machine) for rank in range(p.world_size)]
        assert len({replace(schedule, rank=0) for schedule in schedules}) == 1
        assert [schedule.rank for schedule in schedules] == list(range(p.world_size))


@thorough
@given(
    problems,
    st.sampled_from([plan_all_to_all_matmul, plan_matmul_all_to_all]),
    st.sampled_from([H200, SMALL_GPU, CPU]),
)
def test_every_exchange_has_a_plan(
    p: Problem, plan_for: Callable[..., Plan], machine: Machine
) -> None:
    """K of a part that no tile divides is unfused, and the plan says so."""
    plan = plan_for(p, machine, interpreting=False)
    assert plan.reason
    assert (plan.config is not None) == (plan.path == "fused")
    if plan.config is not None and machine is not CPU:
        op = "all_to_all_matmul" if plan_for is plan_all_to_all_matmul else "matmul_all_to_all"
        assert can_run(op, plan.config, p, machine)


@pytest.mark.parametrize("machine", [H200, CPU], ids=lambda machine: machine.backend)
def test_supported_world_sizes(machine: Machine) -> None:
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


def test_partial_sector_rows_use_cublas_or_wider_tiles() -> None:
    """5000 bf16 are 16 bytes more than whole sectors, which slows our main loop."""
    by_shards = plan_all_gather_matmul(
        problem(2, rows=2042, cols=5000, depth=5000, dtype="bfloat16"), H200, False
    )
    assert by_shards.config is not None and "each shard" in str(by_shards.config)
    wide = plan_all_gather_matmul(  # rows of the result for which cuBLAS is slow
        problem(2, rows=1021, cols=5004, depth=5000, dtype="bfloat16"), H200, False
    )
    assert wide.config is not None
    assert (wide.config.kernel, wide.config.tile_n) == ("hopper", 256)


def test_float32_is_unfused_on_gpus_only() -> None:
    plan = plan_all_gather_matmul(problem(dtype="float32"), H200, False)
    assert plan.path == "unfused"
    assert "float32" in plan.reason
    assert plan_all_gather_matmul(problem(dtype="float32"), CPU, True).path == "fused"


def test_the_cpu_is_unfused_unless_interpreting() -> None:
    plan = plan_all_gather_matmul(problem(), CPU, False)
    assert plan.path == "unfused"
    assert "TRITON_INTERPRET=1" in plan.reason


def test_large_shards_use_copy_engine_and_small_ones_sm() -> None:
    for machine in (H200, CPU):
        large = plan_all_gather_matmul(problem(rows=4096, cols=10240), machine, True)
        small = plan_all_gather_matmul(problem(rows=16, cols=10240), machine, True)
        assert (large.config.transport, small.config.transport) == ("copy_engine", "sm")


def test_plan_text() -> None:
    fused = plan_all_gather_matmul(problem(rows=16), CPU, True)
    for word in ("fused", "triton", fused.config.transport, "tile", fused.reason):
        assert word in str(fused)
    assert str(Plan("unfused", "a dimension is zero")) == "unfused: a dimension is zero"


# --- Matmuls whose result is reduced ---

REDUCTIONS = (plan_matmul_reduce_scatter, plan_matmul_all_reduce)
each_reduction = pytest.mark.parametrize(
    "plan_for", REDUCTIONS, ids=lambda plan_for: plan_for.__name__
)


def owned(p: Problem, plan_for: object) -> Problem:
    """The problem with the rows of one owner for a reduce-scatter, with all rows for an
    all-reduce."""
    return (
        p if plan_for is plan_matmul_reduce_scatter else replace(p, rows=-(-p.rows // p.world_size))
    )


@each_reduction
@thorough
@given(p=problems, machine=st.sampled_from([H200, SMALL_GPU, CPU]))
def test_reduction_plan_satisfies_the_kernels(
    plan_for: Callable[..., Plan], p: Problem, machine: Machine
) -> None:
    plan = plan_for(p, machine, interpreting=True)
    assert plan.reason
    assert (plan.config is not None) == (plan.path == "fused")
    if plan.config is None:
        return
    config, mine = plan.config, owned(p, plan_for)
    check_config(config)
    assert config.kernel != "hopper" or machine.arch == 90, "the Gluon kernel is Hopper's"
    if plan_for is plan_matmul_all_reduce:
        if config.transport == "copy_engine":
            assert config.kernel != "library"
            assert p.rows >= p.world_size * config.tile_m, "a tile for each rank"
        elif config.kernel == "triton":
            assert p.rows <= config.tile_m, "one shot of our matmul is one tile of rows"
    schedule = scatter_schedule_for(mine, config, p.world_size - 1, machine)
    assert 1 <= schedule.num_programs <= machine.num_sms, "programs must all be resident"
    if machine.backend == "cuda":
        ring = (config.tile_m + config.tile_n) * config.tile_k * p.itemsize * config.num_stages
        assert config.kernel == "library" or ring <= SHARED_BYTES[machine], f"{config!r}: {ring}"
    assert config.transport == "copy_engine" or schedule.chunks == 1
    if config.transport == "copy_engine":
        assert not schedule.spans_shards, "a copy engine takes whole tiles"
        assert schedule.chunks <= config.num_slices
        assert 0 <= schedule.pitch - p.cols < 8 and schedule.pitch % 8 == 0, (
            "rows begin where TMA can write"
        )


@each_reduction
@thorough
@given(p=problems, machine=st.sampled_from([H200, CPU]))
def test_reduction_plan_does_not_depend_on_the_rank(
    plan_for: Callable[..., Plan], p: Problem, machine: Machine
) -> None:
    assert "rank" not in inspect.signature(plan_for).parameters
    plans = {plan_for(replace(p), machine, interpreting=True) for _ in range(3)}
    assert len(plans) == 1
    config = plans.pop().config
    if config is not None:
        schedules = [
            scatter_schedule_for(owned(p, plan_for), config, rank, machine)
            for rank in range(p.world_size)
        ]
        assert len({replace(schedule, rank=0) for schedule in schedules}) == 1


@each_reduction
def test_unfused_reductions(plan_for: Callable[..., Plan]) -> None:
    assert plan_for(problem(1), H200, False).path == "local"
    for p, word in (
        (problem(9), "world size 9"),
        (problem(rows=0), "zero"),
        (problem(dtype="float32"), "float32"),
        (problem(depth=8188), "16 bytes"),
    ):
        plan = plan_for(p, H200, False)
        assert plan == Plan("unfused", plan.reason)
        assert word in plan.reason
    other = plan_for(problem(), SMALL_GPU, False)
    assert other.config is None or other.config.kernel == "library", (
        "kernels that were not measured on such a GPU are not chosen"
    )
    assert "TRITON_INTERPRET=1" in plan_for(problem(), CPU, False).reason


@pytest.mark.parametrize("cols", [2560, 2561])
def test_many_rows_use_the_copy_engine(cols: int) -> None:
    few, many = (
        plan_matmul_reduce_scatter(problem(rows=rows, cols=cols), H200, False).config
        for rows in (16, 2048)
    )
    assert many is not None and many.transport == "copy_engine"
    # rows of 2561 columns are no multiple of 16 bytes: unfused is as fast as our kernel there
    assert (few is None and cols == 2561) or few.transport == "sm"


@pytest.mark.parametrize(
    "plan_for",
    [plan_all_gather_matmul, plan_matmul_reduce_scatter],
    ids=lambda plan_for: plan_for.__name__,
)
def test_cublas_multiplies_where_its_result_rows_are_aligned(
    plan_for: Callable[..., Plan],
) -> None:
    """Aligned to 16 bytes: otherwise it takes 2 to 3 times as long (decision 0017)."""
    for rows in (32, 64, 128):
        whole, odd = (
            {one.config.kernel for one in plan_for(p, H200, False).candidates if one.config}
            for p in (problem(2, rows, cols) for cols in (7168, 7164))
        )
        assert "library" in whole and "library" not in odd


@thorough
@given(p=problems, op=st.sampled_from(sorted(PLANNERS)))
def test_what_is_planned_can_run_and_is_the_fastest_known(p: Problem, op: str) -> None:
    """Shards below a tile are not copied by engines, few rows are one tile of a one-shot kernel."""
    plan = PLANNERS[op](p, H200, False)
    found = plan.candidates
    if plan.config is not None:
        assert can_run(op, plan.config, p, H200)
    if found:
        assert [one.expected_us for one in found] == sorted(one.expected_us for one in found)
        assert sum(one.config is None for one in found) == 1, "unfused is always a candidate"
        assert all(one.expected_us > 0 for one in found)


@pytest.mark.parametrize("op", sorted(PLANNERS))
def test_calls_in_cuda_graphs_need_no_host(op: str) -> None:
    """A plan of their own has a candidate whose eager calls wait for the host."""
    of_their_own = 0
    for rows, cols, depth in ((221, 2304, 27520), (359, 2016, 25344), (990, 2432, 7168)):
        p = problem(2, rows, cols, depth)
        plan = PLANNERS[op](p, H200, False)
        times = {one.config: one for one in plan.candidates}
        assert plan.candidates[0].expected_us == min(one.expected_us for one in times.values())
        fastest = min(one.captured_us for one in times.values())
        if plan.captured is None:
            assert plan.config is None or times[plan.config].captured_us == fastest
            continue
        of_their_own += 1
        assert times[plan.captured].captured_us == fastest < times[plan.config].captured_us
        assert times[plan.captured].host_us > times[plan.config].expected_us
        assert f"in a CUDA graph {plan.captured}" in str(plan)
    assert of_their_own == {"all_gather_matmul": 3}.get(op, 0)


def test_one_shot_of_our_matmul_is_for_few_rows() -> None:
    for rows in (1, 8, 256, 4096):
        plan = plan_matmul_all_reduce(problem(2, rows, 8192), H200, False)
        kernels = {one.config.kernel for one in plan.candidates if one.config is not None}
        assert ("triton" in kernels) == (rows <= 32)
        assert ("hopper" in kernels) == (rows >= 256)
    assert [
        plan_matmul_all_reduce(problem(rows=rows), CPU, True).config.shots for rows in (16, 17)
    ] == [1, 2]


# --- Exchanges ---


def test_ragged_column_parts_are_unfused() -> None:
    """Tiles leave by TMA."""
    plans = [
        plan_matmul_all_to_all(problem(rows=512, cols=cols), H200, False) for cols in (2560, 2564)
    ]
    assert [plan.path for plan in plans] == ["fused", "unfused"]


# --- Measured shapes ---


@pytest.mark.parametrize("world", [2, 4])
def test_of_a_measured_shape_its_own_times_decide(world: int) -> None:
    measured = [
        one
        for one in packaged("matmul_reduce_scatter")
        if one.device == "H200" and one.problem.world_size == world and not one.problem.fp8
    ]
    for one in measured:
        chosen = plan_matmul_reduce_scatter(one.problem, H200, False).candidates[0]
        for config, us in one.us.items():
            assert chosen.expected_us <= max(us, 1e6 * host_seconds(config, world)) + 1e-3
    assert len(measured) > 20


@pytest.mark.parametrize(
    ("rows", "cols", "depth"),
    [(6, 14912, 2992), (1, 22208, 4272), (3, 9216, 6352)],
    ids=str,
)
def test_few_rows_of_other_columns_are_predicted(rows: int, cols: int, depth: int) -> None:
    """By the kernel that was fastest for other columns they took 1.05 to 1.23 times as long as NCCL
    and cuBLAS on four H200."""
    plan = plan_matmul_all_reduce(Problem(4, rows, cols, depth, 2, "bfloat16"), H200, False)
    assert "predicted" in plan.reason


def test_a_measured_problem_is_planned_as_measured() -> None:
    p = problem(2, rows=1024, cols=5120, depth=4096, dtype="bfloat16")
    before = plan_all_gather_matmul(p, H200, False)
    slow, *_, slowest = [one.config for one in before.candidates if one.config is not None][1:]
    try:
        choices.install(
            [Measurement("all_gather_matmul", p, {None: 90.0, slow: 50.0, slowest: 60.0})]
        )
        after = plan_all_gather_matmul(p, H200, False)
        assert after.config == slow and "measured here 50.0 us" in after.reason
        choices.install([Measurement("all_gather_matmul", p, {None: 40.0, slow: 50.0})])
        assert plan_all_gather_matmul(p, H200, False).path == "unfused"
    finally:
        choices.clear()
    assert plan_all_gather_matmul(p, H200, False).config == before.config


def test_measurements_nearby_correct_a_prediction() -> None:
    """All shapes in a neighbourhood took twice as long with the config that was expected best."""
    p = problem(2, rows=1040, cols=5056, depth=4160, dtype="bfloat16")
    assert p not in [one.problem for one in packaged("all_gather_matmul")], "plans by its own times"
    before = plan_all_gather_matmul(p, H200, False)
    best = before.candidates[0]
    near = [replace(p, cols=cols) for cols in (4800, 4928, 5184)]
    try:
        choices.install(
            Measurement("all_gather_matmul", q, {None: 400.0, best.config: 2 * best.predicted_us})
            for q in near
        )
        after = {
            one.config: one.predicted_us
            for one in plan_all_gather_matmul(p, H200, False).candidates
        }
        assert after[best.config] > 1.15 * best.predicted_us
        assert plan_all_gather_matmul(p, H200, False).config != best.config
    finally:
        choices.clear()


@pytest.mark.parametrize("fp8", [False, True])
def test_what_a_tuner_gave_no_time_is_never_planned(fp8: bool) -> None:
    """Its result was wrong on this machine, however fast it is elsewhere."""
    p = problem(2, rows=1040, cols=5056, depth=4160, dtype="bfloat16")
    if fp8:
        p = replace(p, itemsize=1, dtype="float8_e4m3fn", scales="row")
    wrong, slower = plan_all_gather_matmul(p, H200, False).candidates[:2]
    times = {None: 900 * slower.predicted_us, slower.config: 800 * slower.predicted_us}
    try:
        choices.install([Measurement("all_gather_matmul", p, times)])
        plan = plan_all_gather_matmul(p, H200, False)
        assert plan.config == slower.config != wrong.config
        assert {one.config for one in plan.candidates} == {None, slower.config}
        near = plan_all_gather_matmul(replace(p, cols=5184), H200, False)
        assert wrong.config in {one.config for one in near.candidates}
    finally:
        choices.clear()


def test_rows_at_odd_multiples_of_16_bytes_are_planned_as_tuned() -> None:
    p = problem(2, rows=2042, cols=5000, depth=5000, dtype="bfloat16")
    untuned = plan_all_gather_matmul(p, H200, False)
    copying = next(
        one.config
        for one in untuned.candidates
        if one.config and one.config.kernel == "hopper" and one.config.transport == "copy_engine"
    )
    assert untuned.config != copying
    try:
        choices.install([Measurement("all_gather_matmul", p, {None: 900.0, copying: 500.0})])
        assert plan_all_gather_matmul(p, H200, False).config == copying
    finally:
        choices.clear()


def test_shards_beyond_32_bits_are_unfused() -> None:
    plans = [
        plan_all_gather_matmul(problem(4, rows=rows, cols=512, depth=4096), H200, False)
        for rows in (2**19 - 2**10, 2**19)
    ]
    assert [plan.path for plan in plans] == ["fused", "unfused"] and "32 bits" in plans[1].reason


def test_interpreter_that_is_asked_for_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton is imported here without it."""
    language = pytest.importorskip("triton.language")
    if type(language.sigmoid).__name__ == "InterpretedFunction":
        pytest.skip("triton interprets in this process")
    for text in ("1", "True", "yes"):
        monkeypatch.setenv("TRITON_INTERPRET", text)
        with pytest.raises(tw.InputError, match=f"asked: TRITON_INTERPRET={text} .*remedy: "):
            registry.interpreting()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not registry.interpreting()


def test_few_rows_take_a_kernel_that_was_fast_for_nearly_as_many() -> None:
    """All fit one row of tiles. 4 and 16 rows were measured; for others times are interpolated."""
    four, sixteen = (
        one.us
        for rows in (4, 16)
        for one in packaged("matmul_all_reduce")
        if one.device == "H200" and one.problem == Problem(4, rows, 4096, 3584, 2, "bfloat16")
    )
    slower = []
    for rows in range(1, 17):
        plan = plan_matmul_all_reduce(Problem(4, rows, 4096, 3584, 2, "bfloat16"), H200, False)
        part = max(rows - 4, 0) / 12
        us = {c: four[c] * (1 - part) + sixteen[c] * part for c in four.keys() & sixteen.keys()}
        assert plan.config is not None and plan.config.kernel == "triton"
        slower.append(us[plan.config] / min(us.values()))
    assert max(slower) <= 1.07 and statistics.geometric_mean(slower) <= 1.04
    assert slower[3] == slower[15] == 1.0
