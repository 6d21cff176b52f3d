"""Steps, tiles and exports: times add up, the maps are those of the kernels, and traces can be read
back."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tileweave.errors import InputError
from tileweave.planning.candidates import PLANNED
from tileweave.planning.costs import Costs, load_calibration
from tileweave.planning.machine import Machine
from tileweave.planning.matmul import scatter_schedule_for, schedule_for
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.gather import push_order
from tileweave.planning.schedules.scatter import ScatterSchedule
from tileweave.sim import chakra, dlrm, moe, perfetto, replay, serving, training
from tileweave.sim.advise import advise
from tileweave.sim.machine import Network, make_cluster, with_gpus
from tileweave.sim.operators import Operators
from tileweave.sim.schedules import one_f_one_b
from tileweave.sim.sensitivity import sensitivity
from tileweave.sim.step import Part, Step, Timeline
from tileweave.sim.tiles import gather_matmul, scatter_matmul
from tileweave.sim.workload import Scenario, simulate, simulate_all

FOUR = with_gpus(make_cluster("h200"), 4)
COSTS = Costs(FOUR.device)


def part(seconds: float, phase: str = "work", exposed: float = 0.0) -> Part:
    return Part(phase, phase, seconds, exposed, compute=seconds - exposed)


# --- Tiles ---


GATHERED = [(16, 2560, 8192), (128, 2560, 8192), (512, 2560, 8192), (1024, 7168, 8192)]


@pytest.mark.parametrize(
    ("config", "rows", "cols", "depth"),
    [
        (config, *shape)
        for config in PLANNED["all_gather_matmul"].configs
        for shape in GATHERED
        if config.kernel == "hopper" and config.fits_rows(shape[0])
    ],
    ids=str,
)
def test_gather_simulates_the_units_of_the_schedule(
    config: MatmulConfig, rows: int, cols: int, depth: int
) -> None:
    problem = Problem(4, rows, cols, depth, 2, "bfloat16")
    schedule = schedule_for(problem, config, 0, Machine("x", "cuda", 90, 132))
    run = gather_matmul(schedule, config, COSTS, FOUR, False, record=True)
    done = Counter((event.program, event.tile) for event in run.events if event.kind == "compute")
    wanted = Counter(
        (p, unit.tile) for p in range(schedule.num_programs) for unit in schedule.units(p)
    )
    assert done == wanted
    pushes = [event for event in run.events if event.kind == "push"]
    if config.transport == "copy_engine":
        assert [event.peer for event in pushes] == push_order(0, 4)
    else:
        assert len(pushes) == config.num_slices
    arrivals = max(event.end for event in pushes)
    last_waits = [event.end for event in run.events if event.kind == "wait"]
    assert all(end <= arrivals + 1e-12 for end in last_waits)


def test_slower_links_and_fewer_programs_cost_time() -> None:
    def fused(cluster: Any, m: int = 2048) -> float:
        return Operators(cluster).fused_all_gather_matmul(4, m, 2560, 8192)

    slow = replace(FOUR, device=replace(FOUR.device, link_rate=FOUR.device.link_rate / 8))
    assert fused(slow) > 1.5 * fused(FOUR)
    few = replace(
        FOUR,
        device=replace(
            FOUR.device,
            num_sms=66,
            flops=FOUR.device.flops / 2,
            memory_rate=FOUR.device.memory_rate / 2,
        ),
    )
    # many waves: 2048 rows fill three or five with whole tiles
    assert fused(few, 8192) > 1.6 * fused(FOUR, 8192)


def scattered(m: int, n: int, k: int) -> ScatterSchedule:
    config = MatmulConfig("triton", "sm", 128, 128, 64, 4, 8)
    return scatter_schedule_for(
        Problem(4, m // 4, n, k, 2, "bfloat16"), config, 0, Machine("x", "cuda", 90, 132)
    )


@pytest.mark.parametrize("combine", ["sum", "sum_and_gather", "one_shot", "keep"])
@pytest.mark.parametrize("m", [64, 2048])
def test_scatter_simulates_the_units_of_the_schedule(combine: Any, m: int) -> None:
    schedule = scattered(m, 4096, 2048)
    run = scatter_matmul(schedule, combine, COSTS, FOUR, True, record=True)
    done = Counter((event.program, event.tile) for event in run.events if event.kind == "compute")
    assert done == Counter(
        (p, unit.tile) for p in range(schedule.num_programs) for unit in schedule.units(p)
    )
    pushed = len([event for event in run.events if event.kind == "push"])
    tiles, own = schedule.num_tiles, schedule.per_source
    if combine == "one_shot" or schedule.spans_shards:
        assert pushed == tiles * (2 if combine == "sum_and_gather" else 1)
    else:
        assert pushed == tiles - own + (own if combine == "sum_and_gather" else 0)


@pytest.mark.parametrize("slices", [1, 2])
def test_copy_engines_copy_chunks_in_the_kernels_order(slices: int) -> None:
    config = MatmulConfig("hopper", "copy_engine", 128, 256, 64, 4, 8, num_slices=slices)
    schedule = scatter_schedule_for(
        Problem(4, 1024, 4096, 2048, 2, "bfloat16"), config, 0, Machine("x", "cuda", 90, 132)
    )
    run = scatter_matmul(schedule, "sum", COSTS, FOUR, False, record=True, by_engine=True)
    pushes = sorted(
        (event for event in run.events if event.kind == "push"), key=lambda event: event.begin
    )
    assert [event.peer for event in pushes] == [peer for peer in (1, 2, 3) for _ in range(slices)]
    assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(pushes)), "one after the other"
    made = {
        peer: max(e.end for e in run.events if e.kind == "compute" and e.peer == peer)
        for peer in (1, 2, 3)
    }
    for peer in (1, 2, 3):
        last = peer * slices - 1  # of this peer
        assert pushes[last].begin == pytest.approx(
            max(made[peer], pushes[last - 1].end if last else 0.0)
        )
    last = max(event.end for event in pushes)
    assert max(event.end for event in run.events if event.kind == "sum") >= last, (
        "own tiles wait for what peers send meanwhile"
    )


@pytest.mark.parametrize(
    ("combine", "m", "takes"),
    [
        ("sum", 64, 1),
        ("one_shot", 64, 1),
        ("sum_and_gather", 64, 4),
        ("sum_and_gather", 256, 2),
        ("keep", 512, 3),
    ],
)
def test_tile_reads_one_source_after_the_other(combine: Any, m: int, takes: int) -> None:
    """Two pieces per tile, one tile per program. The sum reads all sources concurrently; the owner
    of its rows sends each result."""
    schedule = scattered(m, 1024, 2048)
    assert schedule.num_tiles <= schedule.num_programs and schedule.tile_n == 128

    def seconds(take: float) -> float:
        return scatter_matmul(
            schedule, combine, Costs(COSTS.device, replace(COSTS.c, take=take)), FOUR, True
        ).inner

    assert seconds(1e-3) - seconds(0.0) == pytest.approx(takes * 2e-3, rel=0.02)


def test_the_second_shot_and_operands_past_the_l2_cost_time() -> None:
    schedule = scattered(512, 8192, 2048)
    one, two = (
        scatter_matmul(schedule, way, COSTS, FOUR, True).inner for way in ("sum", "sum_and_gather")
    )
    assert two > one
    small = replace(FOUR, device=replace(FOUR.device, l2=1e6))
    large = replace(FOUR, device=replace(FOUR.device, l2=1e9))
    wide = scattered(512, 8192, 8192)
    assert (
        scatter_matmul(wide, "sum", COSTS, small, True).inner
        > 1.01 * scatter_matmul(wide, "sum", COSTS, large, True).inner
    )


@pytest.mark.parametrize(
    ("combine", "copies"), [("sum", 3), ("keep", 3), ("one_shot", 12), ("sum_and_gather", 6)]
)
def test_scatter_time_is_bound_by_links_or_matmul(combine: Any, copies: int) -> None:
    schedule = scattered(4096, 4096, 1024)
    # as if it needed no programs
    costs = Costs(COSTS.device, replace(COSTS.c, scatter_tile=0.0, take=0.0))

    def seconds(factor: float) -> float:
        cluster = replace(
            FOUR, device=replace(FOUR.device, link_rate=FOUR.device.link_rate * factor)
        )
        return scatter_matmul(schedule, combine, costs, cluster, True).inner

    wire = copies * 1024 * 4096 * 2 / (FOUR.device.link_rate * COSTS.c.push_fraction)
    assert seconds(0.01) == pytest.approx(100 * wire, rel=0.1)
    assert seconds(100.0) < 2.5 * COSTS.matmul(4096, 4096, 1024)


def test_fused_time_is_between_bound_and_unfused() -> None:
    ops = Operators(FOUR)
    for m in (64, 512, 2048, 8192):
        for found in (
            ops.all_gather_matmul(4, m, 2560, 8192),
            ops.matmul_scatter("reduce_scatter", 4, m, 8192, 7168),
        ):
            assert found.bound <= found.fused <= found.unfused
            assert found.unfused > max(found.compute, found.comm)


# --- Steps ---


def test_streams_overlap_and_dependences_are_kept() -> None:
    step = Step("test")
    step.representative(0, 3, "all", {})
    first = step.add(0, "compute", "a", [part(1.0)])
    sent = step.add(0, "comm", "b", [part(2.0)], [first], "comm")
    step.add(0, "compute", "c", [part(1.5)])
    step.add(0, "compute", "d", [part(1.0, "end", 0.25)], [sent])
    found = step.run()
    assert found.seconds == pytest.approx(4.0)
    assert found.phases() == pytest.approx(
        {"work": 2.5, "end": 0.75, "exposed communication": 0.75}
    )


def test_dependence_cycle_is_an_error() -> None:
    step = Step("test")
    step.representative(0, 1, "all", {})
    step.add(0, "compute", "a", [part(1.0)], [1])
    step.add(0, "compute", "b", [part(1.0)], [0])
    with pytest.raises(InputError, match="never end"):
        step.run()


@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (4, 8), (4, 2), (8, 16)])
def test_pipeline_order_1f1b(stages: int, micro: int) -> None:
    for stage in range(stages):
        order = list(one_f_one_b(stage, stages, micro))
        assert sorted(order) == sorted((what, m, 0) for what in "FB" for m in range(micro))
        flying = [0]
        for what, _, _ in order:
            flying.append(flying[-1] + (1 if what == "F" else -1))
        assert max(flying) == min(stages - stage, micro)


def test_pipeline_bubble_of_1f1b() -> None:
    """Idle time over busy time is (stages - 1) / micro-batches (arXiv 2104.04473), apart from
    messages and the ends of the model."""
    work = training.by_name("llama2-70b", tp=8, pp=4, global_batch=16, overlap_gradients=True)
    found = simulate(Scenario("train", work, make_cluster("h200", nodes=4)), "unfused")
    assert found.phases()["idle"] / found.seconds == pytest.approx(3 / (16 + 3), rel=0.25)


@pytest.mark.parametrize("kind", ["train", "serve", "moe", "dlrm"])
def test_phase_times_add_up(kind: str) -> None:
    scenario = scenarios()[kind]
    for mode in ("unfused", "fused", "bound"):
        found = simulate(scenario, mode)  # type: ignore[arg-type]
        assert sum(found.phases().values()) == pytest.approx(found.seconds, rel=1e-6)


def scenarios() -> dict[str, Scenario]:
    return {
        "train": Scenario(
            "train", training.by_name("llama2-70b", tp=8, pp=2), make_cluster("h200", nodes=4)
        ),
        "serve": Scenario("serve", serving.by_name("llama3-70b", phase="decode", batch=16), FOUR),
        "moe": Scenario("moe", moe.by_name("qwen3-235b"), make_cluster("h200", nodes=2)),
        "dlrm": Scenario("dlrm", dlrm.by_name("dlrm-ours"), make_cluster("h200", nodes=8)),
    }


def test_split_tables_keep_all_their_work() -> None:
    """26 tables: on 24 ranks the busiest one has two, on 32 two halves. The work of all ranks is
    never less than that of the tables."""
    work, seconds = dlrm.by_name("dlrm-v2"), {}
    work = replace(work, model=replace(work.model, batch=0, batch_per_gpu=8192))
    for nodes in (3, 4, 5, 7, 16):
        cluster = make_cluster("h200", nodes=nodes)
        found = simulate(Scenario("dlrm", work, cluster), "unfused")
        sent = next(
            part.nbytes for task in found.tasks for part in task.parts if part.phase == "lookup"
        )
        assert sent >= 26 * 128 * 2 * work.model.batch_per_gpu
        seconds[cluster.world_size] = found.seconds
    assert seconds[32] > 24 / 32 * seconds[24]
    for model, said in (
        (replace(work.model, batch=1000, batch_per_gpu=0), "a batch of 1000 on 32 GPUs"),
        (replace(work.model, tables=0), "a model of no tables"),
        (replace(work.model, dim=1), "26 tables of 1"),
    ):
        with pytest.raises(InputError, match=said):
            simulate(
                Scenario("dlrm", replace(work, model=model), make_cluster("h200", nodes=4)),
                "unfused",
            )


def test_pipelines_run_on_tori_and_through_uplinks() -> None:
    work = training.by_name("llama2-70b", tp=8, pp=4, global_batch=4)

    def seconds(topology: Any, **fields: Any) -> float:
        network = Network("n", 50e9, 0.9, 5e-6, topology, **fields)
        return simulate(
            Scenario("train", work, make_cluster("h200", network, 4)), "unfused"
        ).seconds

    assert seconds("torus", dims=(1, 4)) == pytest.approx(seconds("torus", dims=(4,)))
    assert seconds("fat_tree", leaf=1, oversubscription=64.0) > 1.05 * seconds("fat_tree")
    assert seconds("rail", nics=1) > 1.01 * seconds("rail")


def test_sensitivity_moves_the_right_way() -> None:
    scenario = scenarios()["dlrm"]
    base = simulate_all(scenario, modes=("unfused",)).seconds("unfused")
    found = {variant.name: variant for variant in sensitivity(scenario)}
    assert (
        found["links between nodes x 0.5"].unfused > base > found["links between nodes x 2"].unfused
    )
    assert found["latencies x 2"].unfused > base > found["latencies x 0.5"].unfused
    assert (
        found["busiest rank 30 % above average"].unfused
        > found["busiest rank 10 % above average"].unfused
        > base
    )


def test_advice_ranks_layouts_that_fit() -> None:
    found = advise(Scenario("serve", serving.by_name("llama3-70b"), make_cluster("h200")))
    device = found.best.scenario.cluster.device
    assert found.too_large and all(one.memory.fits(device) for one in found.candidates)
    rates = [one.per_second for one in found.candidates]
    assert rates == sorted(rates, reverse=True)
    assert all(saved >= -1e-9 for saved in found.savings.values())
    with pytest.raises(InputError, match="what fits"):
        advise(Scenario("serve", serving.by_name("gpt3-175b"), with_gpus(make_cluster("mi210"), 1)))


def test_operators_are_fused_one_by_one() -> None:
    scenario = scenarios()["moe"]
    times = {
        fuse: simulate(scenario, "fused", fuse=fuse).seconds
        for fuse in ((), ("grouped_matmul_combine",))
    }
    assert times[("grouped_matmul_combine",)] < times[()] == simulate(scenario, "unfused").seconds


# --- Speed ---


def test_large_clusters_are_simulated_quickly() -> None:
    started = time.perf_counter()
    simulate_all(
        Scenario("dlrm", dlrm.by_name("dlrm-ours"), make_cluster("h200", "torus-400", nodes=128))
    )
    assert time.perf_counter() - started < 10.0
    started = time.perf_counter()
    big = training.by_name("llama3-405b", tp=8, pp=16, global_batch=512)
    simulate(Scenario("train", big, make_cluster("h200", nodes=128)), "fused")
    assert time.perf_counter() - started < 60.0


def test_symmetric_work_does_not_grow_with_ranks() -> None:
    """Data-parallel peers are replicas: eight times as many ranks, the same tasks."""
    counts = []
    for nodes in (8, 64):
        work = training.by_name("llama2-70b", tp=8, pp=4, global_batch=2 * nodes)
        counts.append(
            len(
                simulate(
                    Scenario("train", work, make_cluster("h200", nodes=nodes)), "unfused"
                ).tasks
            )
        )
    assert counts[0] == counts[1]


# --- Exports ---


def bare_fields(data: bytes) -> list[tuple[int, Any]]:
    """(field number, value) of a protobuf message, decoded by hand: an oracle that shares no code
    with the writer."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
        else:
            assert key & 7 == 2
            size = varint()
            found.append((key >> 3, data[at : at + size]))
            at += size
    return found


def test_traces_have_the_schemas_field_numbers() -> None:
    target = BytesIO()
    attributes = {"is_cpu_op": False, "comm_type": 6, "comm_size": 1 << 33, "pg_name": "g"}
    chakra.write_trace(
        target, [chakra.Node(300, "exchange", chakra.COLL, [1, 2], 5, 7, attributes)]
    )
    data = target.getvalue()
    size = data[0]
    assert bare_fields(data[1 : 1 + size]) == [(1, b"0.0.4")]
    rest = data[1 + size :]
    fields = bare_fields(rest[1:])
    assert rest[0] == len(rest) - 1
    plain = [(number, value) for number, value in fields if number not in (5, 10)]
    assert plain == [(1, 300), (2, b"exchange"), (3, 7), (6, 7), (7, 5)]
    assert (5, b"\x01\x02") in fields
    decoded = [bare_fields(value) for number, value in fields if number == 10]
    assert decoded == [
        [(1, b"is_cpu_op"), (27, 0)],
        [(1, b"comm_type"), (9, 6)],
        [(1, b"comm_size"), (9, 1 << 33)],
        [(1, b"pg_name"), (29, b"g")],
    ]


def test_traces_are_read_back(tmp_path: Path) -> None:
    work = training.by_name("llama2-70b", tp=2, pp=2, global_batch=4, seq=512)
    scenario = Scenario(
        "train",
        replace(work, model=replace(work.model, layers=4)),
        with_gpus(make_cluster("h200"), 8),
    )
    found = simulate(scenario, "fused")
    paths = chakra.export(found, tmp_path, slices=3)
    assert len(paths) == 8 + 1
    groups = json.loads((tmp_path / "comm_group.json").read_text("utf-8"))
    assert sorted(map(tuple, groups.values()))[:3] == [(0, 1), (0, 2), (1, 3)]
    sends: Counter[Any] = Counter()
    for rank, path in enumerate(paths[:8]):
        version, nodes = chakra.read_trace(path.read_bytes())
        assert version == "0.0.4" and len({node.number for node in nodes}) == len(nodes)
        assert all(before < node.number for node in nodes for before in node.after)
        for node in nodes:
            if node.kind == chakra.COLL:
                assert rank in groups[node.attributes["pg_name"]]
            if node.kind in (chakra.SEND, chakra.RECV):
                message = tuple(
                    node.attributes[name]
                    for name in ("comm_src", "comm_dst", "comm_tag", "comm_size")
                )
                sends[message] += 1 if node.kind == chakra.SEND else -1
                assert (
                    node.attributes["comm_src" if node.kind == chakra.SEND else "comm_dst"] == rank
                )
        computed = sum(node.micros for node in nodes if node.kind == chakra.COMP) * 1e-6
        stage = 0 if rank < 4 else 1
        wanted = sum(p.compute for task in found.tasks if task.rank == stage for p in task.parts)
        assert computed == pytest.approx(wanted, rel=0.05)
    assert sends and not any(sends.values()), "every message that is sent is received"
    again = replay.replay(paths[:8], scenario.cluster, load_calibration().coefficients)
    assert 0.9 * found.seconds < again.seconds < 1.5 * found.seconds  # each slice pays a latency


def test_broken_trace_is_refused_by_name(tmp_path: Path) -> None:
    for data in (b"", b"\xff\xff", b"not a trace at all"):
        with pytest.raises(InputError, match=r"x\.et.*allowed: a Chakra"):
            chakra.read_trace(data, "x.et")
    found = simulate(scenarios()["train"], "unfused")
    with pytest.raises(InputError, match="--detail tasks"):
        chakra.export(replace_count(found, 10**6), tmp_path)


def replace_count(found: Timeline, ranks: int) -> Timeline:
    return replace(found, replicas=dict.fromkeys(found.replicas, ranks))


def test_perfetto_rows_are_complete() -> None:
    found = simulate(scenarios()["dlrm"], "fused")
    events = perfetto.timeline_events(found)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} >= {
        "lookup and all-to-all",
        "indices",
        "dense gradients, top",
    }
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(found.seconds * 1e6)


def test_calibration_names_its_sources() -> None:
    used = load_calibration()
    assert len(used.fitted_on) > 50 and set(used.not_fitted) >= {"attention"}
