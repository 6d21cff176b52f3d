"""The planner: how close its choices are to the fastest candidate, and files of measurements."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from tileweave import OPERATORS
from tileweave.errors import InputError
from tileweave.planning import choices
from tileweave.planning.candidates import TUNABLE, candidates
from tileweave.planning.costs import Costs, data_sheet, load_calibration
from tileweave.planning.machine import H200, Machine
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_matmul_all_reduce,
    plan_matmul_reduce_scatter,
    scatter_schedule_for,
    schedule_for,
)
from tileweave.planning.measurements import (
    Measurement,
    packaged,
    read_measurements,
    write_measurements,
)
from tileweave.planning.planner import Planner, _place, planner_by, planner_of
from tileweave.planning.predict import _Tiles, host_seconds, seconds, work_of
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.sim.machine import presets
from tileweave.sim.modelled import is_matmul

H100 = Machine("NVIDIA H100 80GB HBM3", "cuda", 90, 132)
CONFIG = MatmulConfig("library", "sm", 16, 128, 64, 1, 8)
PROBLEM = Problem(2, 512, 4096, 2048, 2, "bfloat16")


def test_the_more_uncertain_a_time_is_the_longer_it_is_predicted() -> None:
    """By how far measured times nearby are apart, and by how few there are. Each time here is its
    closed form times one and the same factor up or down, so the mean of logarithms is that form."""
    op, ours = "matmul_reduce_scatter", MatmulConfig("triton", "sm", 64, 64, 64, 4, 4)

    def caution(config: MatmulConfig, shapes: int, apart: float) -> float:
        known = []
        for number in range(shapes):
            one = replace(PROBLEM, depth=PROBLEM.depth + (number + 1) // 2)
            off = apart if number % 2 else -apart
            us = Planner(op, H200, ()).closed_form(one, config) * 1e6 * math.exp(off)
            known.append(Measurement(op, one, {config: us}))
        planner = Planner(op, H200, tuple(known))
        place = replace(PROBLEM, rows=PROBLEM.rows + 1)
        return planner.predict(place, config) / planner.closed_form(place, config)

    assert caution(ours, 40, 0.0) < 1.01 < 1.04 < caution(ours, 2, 0.0) < 1.05
    assert caution(ours, 40, 0.3) > 1.15 > 1.1 > caution(ours, 40, 0.1) > 1.015
    assert caution(CONFIG, 40, 0.0) < caution(CONFIG, 2, 0.0) < 1.005


@pytest.mark.parametrize("op", [op for op in TUNABLE if op != "all_to_all_matmul"])
def test_as_many_tiles_are_predicted_as_a_schedule_has(op: str) -> None:
    rng, costs, tried = random.Random(op), Costs(data_sheet(H200)), 0
    for _ in range(60):
        size, rows = rng.choice((2, 3, 4, 8)), rng.randint(1, 3000)
        p = Problem(size, rows, rng.randint(1, 600) * 16, rng.randint(1, 300) * 16, 2, "bfloat16")
        of_owner = replace(p, rows=-(-rows // size)) if op == "matmul_all_reduce" else p
        for config in candidates(op, p, H200):
            if config.kernel != "library":
                made = schedule_for if op == "all_gather_matmul" else scatter_schedule_for
                schedule = made(of_owner, config, 0, H200)
                assert _Tiles(op, p, work_of(op, p), config, costs).count == schedule.num_tiles
                tried += 1
    assert tried > 100


@pytest.mark.parametrize("device", ["H100", "H200"])
@pytest.mark.parametrize("op", TUNABLE)
def test_a_shape_that_was_not_measured_is_planned_well(op: str, device: str) -> None:
    """Each measured shape in turn is planned from the others. Times are of one run, whose noise is
    about 2 %."""
    known = [one for one in packaged(op) if not one.problem.fp8]
    planner = Planner(op, H100 if device == "H100" else H200, tuple(known))
    regrets = regrets_of(planner, [one for one in known if one.device == device][::2])
    assert math.exp(sum(regrets) / len(regrets)) < 1.03
    assert sum(regret > math.log(1.12) for regret in regrets) < 0.08 * len(regrets)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("scales", ["row", "row+fast"])
def test_fp8_that_was_not_measured_is_planned_well(op: str, scales: str) -> None:
    """As above, of fewer shapes, which are farther apart."""
    known = [one for one in packaged(op) if one.problem.scales == scales]
    regrets = regrets_of(planner_of(op, H200, True, scales), known)
    # between 23 shapes of all-gathers that are far apart, ours and cuBLAS are close
    assert math.exp(sum(regrets) / len(regrets)) < (1.09 if op == "all_gather_matmul" else 1.06)
    assert sorted(regrets)[int(0.9 * len(regrets))] < math.log(1.3)


def regrets_of(planner: Planner, known: list[Measurement]) -> list[float]:
    """log(time of what is chosen / of the fastest), each without its own measurement. A call takes
    as long as its host, at least; what was measured are graphs."""
    regrets, everything, here = [], planner._points, planner._here
    planner._here = {}  # times of exactly this problem are what is left out
    for one in known:
        place = _place(one.problem)
        planner._points = {
            config: [point for point in points if planner._shapes[point.shape][0] != place]
            for config, points in everything.items()
        }
        us = {
            config: max(time, 1e6 * host_seconds(config, one.problem.world_size))
            for config, time in one.us.items()
        }
        timed = [c for c in us if planner._points.get(c)]
        chosen = min(timed, key=lambda config: planner.predict(one.problem, config))
        regrets.append(math.log(us[chosen] / min(us.values())))
    planner._points, planner._here = everything, here
    assert max(regrets) > 0, "what was left out is not known"
    return regrets


def test_every_operator_that_is_one_matmul_is_planned() -> None:
    assert list(TUNABLE) == [op for op in OPERATORS if is_matmul(op)]


@pytest.mark.parametrize("op", TUNABLE)
def test_interpreted_candidates_have_a_time(op: str) -> None:
    """A tuner measures them on a CPU, and plans compare with the closed form."""
    costs = Costs(data_sheet(H200), load_calibration("h100").coefficients)
    p = Problem(2, 8, 64, 64, 4, "float32")
    tried = candidates(op, p, replace(H200, backend="cpu"))
    assert tried and all(seconds(op, p, one, costs, 4e11) > 0 for one in tried)


@pytest.mark.parametrize("op", TUNABLE)
def test_more_work_takes_longer(op: str) -> None:
    """The closed form of each candidate, with twice the columns, K, or bytes per second."""
    sheet = data_sheet(H100)
    costs = Costs(sheet, load_calibration("h100").coefficients)
    large = Problem(2, 2048, 4096, 4096, 2, "bfloat16")
    for config in (None, *candidates(op, large, H100)):
        times = [
            seconds(op, Problem(2, 2048, cols, depth, 2, "bfloat16"), config, costs, rate)
            for cols, depth, rate in (
                (4096, 4096, 450e9),
                (16384, 4096, 450e9),
                (4096, 16384, 450e9),
                (4096, 4096, 900e9),
            )
        ]
        assert times[0] < times[1] and times[0] < times[2] and times[3] <= times[0], config


@pytest.mark.parametrize("tile_n", [128, 256])
def test_a_last_wave_of_few_tiles_is_short(tile_n: int) -> None:
    """It has L2 for itself. But a tile is not faster than its multiplication."""
    config = MatmulConfig("hopper", "copy_engine", 128, tile_n, 64, 4, 8, split_tail=False)
    costs = Costs(data_sheet(H100), load_calibration("h100").coefficients)
    p = Problem(2, 4096, 8192, 8192, 2, "bfloat16")
    tiles = _Tiles("all_gather_matmul", p, work_of("all_gather_matmul", p), config, costs)
    wave, few, two = (tiles.seconds(number) for number in (132, 133, 264))
    assert math.isclose(two, 2.0 * wave)
    assert 0.4 * wave < few - wave < 0.8 * wave


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_to_all"])
def test_each_slice_of_a_shard_is_a_copy(op: str) -> None:
    """Where links decide, more slices only add copies; there are no more than rows of tiles."""
    costs, taken = Costs(data_sheet(H100), load_calibration("h100").coefficients), []
    for rows, slices in ((4096, 1), (4096, 8), (128, 1), (128, 8)):
        config = MatmulConfig("hopper", "copy_engine", 128, 256, 64, 4, 8, num_slices=slices)
        p = Problem(4, rows, 1024, 64, 2, "bfloat16")
        taken.append(seconds(op, p, config, costs, 450e9))
    more = 3 * 7 * costs.c.copy_queued  # to three peers
    assert 0.95 * more < taken[1] - taken[0] <= more and taken[2] == taken[3]


def test_measurements_are_kept_as_written() -> None:
    written = [
        Measurement("op", PROBLEM, {None: 20.0, CONFIG: 12.5}),
        Measurement("op", Problem(4, 8, 64, 64, 2, "float16"), {None: 3.0}),
    ]
    other = Measurement("other", PROBLEM, {None: 1.0})
    text = write_measurements("op", [*written, other])
    assert read_measurements(text, "a file") == tuple(written)
    assert written[0].fastest() == CONFIG
    assert Measurement("op", PROBLEM, {CONFIG: 12.5, None: 12.5}).fastest() is None


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("shapes", 0, "us"), [1.0]),
        (("shapes", 0, "us"), [None, 12.5]),
        (("shapes", 0, "us"), [float("nan"), 12.5]),
        (("shapes", 0, "us"), [1.0, -1.0]),
        (("shapes", 0, "rows"), 0),
        (("shapes", 0, "rows"), True),
        (("shapes", 0, "dtype"), "int8"),
        (("shapes", 0, "world_size"), 1),
        (("shapes", 0), []),
        (("shapes",), {}),
        (("configs", 0, "tile_m"), 17),
        (("configs", 0, "kernel"), "cutlass"),
        (("configs", 0, "tile"), 16),
        (("op",), None),
    ],
    ids=str,
)
def test_a_broken_file_is_refused(where: tuple[str | int, ...], value: object) -> None:
    data = json.loads(
        write_measurements("op", [Measurement("op", PROBLEM, {None: 20.0, CONFIG: 12.5})])
    )
    at = data
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    with pytest.raises(InputError, match="a file") as error:
        read_measurements(json.dumps(data), "a file")
    assert "remedy" in str(error.value)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("h100", "H100 80GB HBM3"),
        ("h200", "H200"),
        ("h800", "H800"),
        ("b200", "B200"),
        ("mi300x", "MI300X"),
    ],
)
def test_data_sheets_are_those_of_the_simulator(preset: str, name: str) -> None:
    """Its file needs a reader of YAML, which the planner must not need."""
    device = presets()["devices"][preset]
    sheet = data_sheet(Machine(name, "cuda", 90, device.num_sms))
    assert (sheet.flops, sheet.memory_rate, sheet.num_sms, sheet.link_rate) == (
        device.flops,
        device.memory_rate,
        device.num_sms,
        device.link_rate,
    )


def test_machines_that_are_not_known_have_a_part_of_a_h100() -> None:
    assert data_sheet(H200).memory_rate == 4.8e12
    half = data_sheet(Machine("some GPU", "cuda", 80, 66))
    assert half.num_sms == 66 and half.flops == data_sheet(H100).flops / 2


# --- FP8 operands ---

FP8 = "float8_e4m3fn"
PLAN = {
    "all_gather_matmul": plan_all_gather_matmul,
    "matmul_reduce_scatter": plan_matmul_reduce_scatter,
    "matmul_all_reduce": plan_matmul_all_reduce,
}


@pytest.mark.parametrize("op", PLAN)
@pytest.mark.parametrize("rows", [8, 256, 4096])
def test_fp8_is_predicted_and_said_to_be(op: str, rows: int) -> None:
    """What is chosen is cuBLAS, or a kernel that was measured with FP8, or with 16-bit operands of
    the same bytes; other candidates wait for a tuner."""
    plan = PLAN[op](Problem(2, rows, 8192, 8192, 1, FP8), H100, False)
    assert plan.reason.startswith("predicted")
    measured = {config for one in packaged(op) for config in one.us}
    chosen = [one.config for one in plan.candidates]
    assert plan.config in chosen
    for config in chosen:
        wide = config and replace(config, tile_k=64)
        assert {config, wide} & measured or (config is not None and config.kernel == "library")
    unfused = next(one for one in plan.candidates if one.config is None)
    assert min(one.predicted_us for one in plan.candidates) <= unfused.predicted_us
    if plan.config is None:
        assert plan.candidates[0].config is None


@pytest.mark.parametrize(
    ("machine", "rows", "depth"),
    [
        *((H200, rows, depth) for rows in (1024, 4096) for depth in (4096, 14336)),
        # not 4096 rows of the long K: cuBLAS is as fast there by times of H200, which are all
        *((H100, rows, depth) for rows, depth in ((1024, 4096), (1024, 14336), (4096, 4096))),
    ],
)
def test_a_scatter_of_fp8_that_keeps_sums_runs_its_own_kernel(
    machine: Machine, rows: int, depth: int
) -> None:
    """Tiles of 256 columns are candidates with and without ``fast_accum``. Of a short K copy
    engines send, which hides more."""
    row, fast = (
        plan_matmul_reduce_scatter(
            Problem(2, rows, 8192, depth, 1, FP8, scales=kind), machine, False
        )
        for kind in ("row", "row+fast")
    )
    assert row.config is not None and fast.config is not None
    assert row.config.transport == "copy_engine" or depth > 4096
    own = [one.config for one in row.candidates if one.config and one.config.kernel == "hopper"]
    assert {config.tile_n for config in own} == {128, 256}
    eight = Problem(2, rows, 8192, depth, 1, FP8, scales="row")
    assert fast.config in candidates("matmul_reduce_scatter", eight, machine)
    assert fast.config.kernel == "hopper" and fast.config.tile_n == 256


@pytest.mark.parametrize("kind", ["row", "row+fast", "block"])
def test_an_all_reduce_of_fp8_may_run_by_chunks(kind: str) -> None:
    eight = Problem(2, 8192, 8192, 4096, 1, FP8, scales=kind)
    plan = plan_matmul_all_reduce(eight, H200, False)
    kernels = {one.config.kernel for one in plan.candidates if one.config is not None}
    assert kernels == {"library", "hopper"}
    chunks = [c for c in candidates("matmul_all_reduce", eight, H200) if c.kernel == "hopper"]
    assert {c.tile_n for c in chunks} == ({128} if kind == "block" else {128, 256})


def test_fp8_matmuls_are_predicted_near_what_was_measured() -> None:
    """torch._scaled_mm of 4096 to 8192 rows: 1,340 to 1,490 TFLOP/s on H100."""
    costs = Costs(data_sheet(H100), load_calibration("h100").coefficients)
    for m, n, k in ((4096, 10240, 8192), (8192, 10240, 8192), (8192, 28672, 8192)):
        rate = 2e-12 * m * n * k / costs.matmul(m, n, k, 1)
        assert 1340 <= rate <= 1490, f"{m, n, k}: {rate:.0f}"


def test_a_gather_of_fp8_sends_half_and_partial_sums_stay() -> None:
    sixteen, eight = (Problem(2, 512, 4096, 8192, size, "") for size in (2, 1))
    gather, reduce = "all_gather_matmul", "matmul_reduce_scatter"
    assert work_of(gather, eight).nbytes * 2 == work_of(gather, sixteen).nbytes
    assert work_of(reduce, eight).nbytes == work_of(reduce, sixteen).nbytes


def test_times_of_fp8_say_nothing_about_other_operands() -> None:
    op, eight = "all_gather_matmul", Problem(2, 512, 4096, 8192, 1, FP8)
    sixteen = replace(eight, itemsize=2, dtype="bfloat16")
    before = planner_of(op, H100).predict(sixteen, None)
    own = next(c for c in candidates(op, eight, H100) if c.kernel == "hopper")
    try:
        choices.install([Measurement(op, eight, {None: 9e3, own: 50.0})])
        assert planner_of(op, H100).predict(sixteen, None) == before
        plan = plan_all_gather_matmul(eight, H100, False)
        assert plan.config == own and "measured here" in plan.reason
        text = write_measurements(op, choices.installed(op))
        assert read_measurements(text, "a file") == choices.installed(op)
    finally:
        choices.clear()


def test_times_of_fp8_are_those_of_one_kind_of_scales() -> None:
    """Only calls with fast_accum get wide tiles; what was tuned for one kind is for no other."""
    op = "all_gather_matmul"
    row, fast, block = (
        Problem(2, 512, 4096, 8192, 1, FP8, scales=kind) for kind in ("row", "row+fast", "block")
    )
    own = {p: [c for c in candidates(op, p, H100) if c.kernel == "hopper"] for p in (row, fast)}
    assert {c.tile_n for c in own[row]} == {128} and {c.tile_n for c in own[fast]} == {128, 256}
    wide = next(c for c in own[fast] if c.tile_n == 256)
    plans = {p: plan_all_gather_matmul(p, H100, False) for p in (row, block)}
    try:
        choices.install([Measurement(op, fast, {None: 9e3, wide: 50.0})])
        assert plan_all_gather_matmul(fast, H100, False).config == wide
        for p, plan in plans.items():
            assert plan_all_gather_matmul(p, H100, False) == plan
        text = write_measurements(op, choices.installed(op))
        assert read_measurements(text, "a file") == choices.installed(op)
        for broken in (text.replace("row+fast", "col"), text.replace(FP8, "bfloat16")):
            with pytest.raises(InputError, match="scales"):
                read_measurements(broken, "a file")
    finally:
        choices.clear()


def test_our_kernels_are_other_programs_with_other_scales() -> None:
    """Their times with scales of blocks say little about scales of rows, those of cuBLAS more."""
    op, place = "matmul_all_reduce", Problem(2, 32, 16384, 8192, 1, "float8_e4m3fn", 1, "row")
    ours = MatmulConfig("triton", "sm", 32, 64, 128, 8, 4, shots=1)
    form = {config: Planner(op, H200, ()).closed_form(place, config) for config in (CONFIG, ours)}

    def slower(config: MatmulConfig) -> float:
        """How much longer the prediction is, if scales of blocks take twice as long."""
        known = [
            Measurement(
                op,
                replace(place, depth=depth, scales=scales),
                {c: 1e6 * form[c] * (2.0 if scales == "block" else 1.0) for c in form},
                "H200",
            )
            for depth in (8064, 8320)
            for scales in ("row", "block")
        ]
        with_blocks, without = (
            planner_by(op, H200, tuple(times), scales="row").predict(place, config)
            for times in (known, [one for one in known if one.problem.scales == "row"])
        )
        return with_blocks / without

    assert slower(ours) < 1.1 < 1.2 < slower(CONFIG)


def test_fp8_needs_its_tensor_cores_and_columns() -> None:
    a100 = Machine("NVIDIA A100", "cuda", 80, 108)
    problem = Problem(2, 512, 4096, 8192, 1, FP8)
    assert plan_all_gather_matmul(problem, a100, False).path == "unfused"
    assert plan_all_gather_matmul(replace(problem, cols=4104), H100, False).path == "unfused"
