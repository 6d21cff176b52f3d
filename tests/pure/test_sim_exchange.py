"""Exchanges in the simulator: the chunks, parts and waits of the kernels, and collectives as
curves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tileweave.planning.costs import Costs, Curve
from tileweave.planning.machine import Machine
from tileweave.planning.matmul import exchange_schedule_for, scatter_schedule_for, schedule_for
from tileweave.planning.problem import MatmulConfig, Problem
from tileweave.planning.schedules.gather import Parts, TileSchedule
from tileweave.planning.schedules.scatter import Exchange
from tileweave.sim.collectives import Group, collective_time, protocol_of
from tileweave.sim.machine import Cluster, make_cluster, with_gpus
from tileweave.sim.operators import Operators
from tileweave.sim.tiles import KernelRun, gather_matmul, scatter_matmul
from tileweave.sim.tiles_exchange import exchange_matmul

FOUR = with_gpus(make_cluster("h200"), 4)
COSTS = Costs(FOUR.device)
H200 = Machine("x", "cuda", 90, 132)
ENGINE = MatmulConfig("hopper", "copy_engine", 128, 256, 64, 4, 8, num_slices=2, split_tail=False)
KERNEL = MatmulConfig("hopper", "sm", 64, 128, 128, 4, 4)


def slower(factor: float) -> Cluster:
    return replace(FOUR, device=replace(FOUR.device, link_rate=FOUR.device.link_rate / factor))


def run_of(
    config: MatmulConfig, m: int, cluster: Cluster = FOUR
) -> tuple[TileSchedule, Parts, KernelRun]:
    # x [M, K / 4] of a rank, rows scattered, columns gathered
    problem = Problem(4, m, 4096, 2048, 2, "bfloat16")
    schedule, parts = exchange_schedule_for(problem, config, Exchange(0, 1), 0, H200)
    return (
        schedule,
        parts,
        exchange_matmul(schedule, parts, config, COSTS, cluster, False, record=True),
    )


@pytest.mark.parametrize(
    ("config", "m"), [(ENGINE, 4096), (ENGINE, 2048), (KERNEL, 256), (KERNEL, 1024)]
)
def test_adjacent_parts_use_the_kernels_units(config: MatmulConfig, m: int) -> None:
    schedule, parts, run = run_of(config, m)
    assert parts.side_by_side and schedule.depth == 8192
    done = Counter((event.program, event.tile) for event in run.events if event.kind == "compute")
    assert done == Counter(
        (p, unit.tile) for p in range(schedule.num_programs) for unit in schedule.units(p)
    )
    pushes = [event for event in run.events if event.kind == "push"]
    if config.transport == "copy_engine":  # chunk by chunk, each to all peers in turn, in one lane
        assert [event.peer for event in pushes] == [1, 2, 3] * parts.chunks and parts.chunks == 2
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(pushes))
    else:
        assert len(pushes) == config.num_slices


def test_first_tiles_wait_only_for_the_first_chunk() -> None:
    schedule, parts, run = run_of(ENGINE, 4096, slower(4.0))
    arrived = {
        (i // 3, event.peer): event.end
        for i, event in enumerate(e for e in run.events if e.kind == "push")
    }
    rows = {
        unit.tile: unit.first_row
        for p in range(schedule.num_programs)
        for unit in schedule.units(p)
    }
    waits = [event for event in run.events if event.kind == "wait"]
    assert {rows[event.tile] // parts.chunk_rows for event in waits} == {0, 1}
    for event in waits:  # each ends when the chunk of its source is there, before all are
        assert event.end == pytest.approx(arrived[rows[event.tile] // parts.chunk_rows, event.peer])
    assert run.inner > max(arrived.values()) and run.waited > 0.0


def test_exchange_time_is_bound_by_links_or_matmul() -> None:
    wire = 3 * 1024 * 2048 * 2 / (FOUR.device.link_rate * COSTS.c.copy_fraction)
    assert run_of(ENGINE, 4096, slower(100.0))[2].inner == pytest.approx(100.0 * wire, rel=0.1)
    assert run_of(ENGINE, 4096, slower(0.01))[2].inner < 1.6 * COSTS.matmul(1024, 4096, 8192)


def test_pulls_end_a_matmul_before_an_exchange() -> None:
    schedule = scatter_schedule_for(Problem(4, 1024, 2560, 4096, 2, "bfloat16"), ENGINE, 0, H200)
    run = scatter_matmul(
        schedule, "keep", COSTS, slower(8.0), False, record=True, by_engine=True, by_columns=True
    )
    pushes = [event for event in run.events if event.kind == "push"]
    assert Counter(event.peer for event in pushes) == dict.fromkeys((1, 2, 3), schedule.chunks)
    assert run.inner == pytest.approx(max(event.end for event in pushes))
    made = scatter_matmul(
        schedule, "keep", COSTS, slower(0.01), False, by_engine=True, by_columns=True
    ).inner
    assert made < 1.6 * COSTS.matmul(1024, 10240, 4096) < run.inner


def test_stored_tiles_are_copied_out_of_the_slot() -> None:
    schedule = scatter_schedule_for(Problem(4, 256, 2560, 4096, 2, "bfloat16"), KERNEL, 0, H200)
    run = scatter_matmul(schedule, "keep", COSTS, FOUR, True, record=True, by_columns=True)
    last = max(event.end for event in run.events if event.kind == "push")
    assert max(event.end for event in run.events if event.kind == "sum") > last


def test_pushing_warps_do_not_block_multiplying_warps() -> None:
    """The Hopper kernel pushes concurrently with its matmul; the producers of the Triton kernel
    push first."""
    problem = Problem(4, 256, 2560, 8192, 2, "bfloat16")
    hopper = MatmulConfig("hopper", "sm", 128, 128, 64, 4, 8)
    times = {}
    for config in (hopper, replace(hopper, kernel="triton")):
        schedule = schedule_for(problem, config, 0, H200)
        run = gather_matmul(schedule, config, COSTS, FOUR, True, record=True)
        begins = [
            event.begin
            for event in run.events
            if event.kind == "compute" and event.program < config.num_producers
        ]
        times[config.kernel] = (min(begins), run.inner)
    assert (
        times["hopper"][0] == 0.0 < times["triton"][0] and times["hopper"][1] < times["triton"][1]
    )


def test_exchanges_are_planned_as_by_the_operators() -> None:
    ops = Operators(FOUR)
    after, before = Exchange(1, 0), Exchange(0, 1)
    assert ops.fused_matmul_all_to_all(after, 4, 4096, 10240, 4096) < ops.fused_matmul_all_to_all(
        after, 4, 4096, 24576, 4096
    )
    assert ops.fused_all_to_all_matmul(before, 4, 4096, 4096, 2048) < ops.fused_all_to_all_matmul(
        before, 4, 16384, 4096, 2048
    )
    # parts below each other: an all-gather's tiles
    below = ops.fused_all_to_all_matmul(Exchange(1, 0), 4, 4096, 4096, 2048)
    assert below > ops.costs.matmul(16384, 4096, 512)


# --- Collectives as curves ---


def test_curve_interpolates_knots_and_is_flat_outside() -> None:
    curve = Curve("all_gather", 4, 1e-5, (1e6, 4e6, 1.6e7), (0.2, 0.1, 0.4))
    assert [curve.fraction(n) for n in (1.0, 1e6, 4e6, 1.6e7, 1e12)] == pytest.approx(
        [0.2, 0.2, 0.1, 0.4, 0.4]
    )
    assert curve.fraction(2e6) == pytest.approx((0.2 * 0.1) ** 0.5)


def test_each_world_size_has_a_curve_and_larger_ones_extra_steps() -> None:
    two = Curve("all_gather", 2, 1e-5, (1e6,), (0.5,))
    four = Curve("all_gather", 4, 1.4e-5, (1e6,), (0.6,))
    c = replace(COSTS.c, nccl=(four, two))
    assert [protocol_of(c, "all_gather", 1e6, ranks).fraction for ranks in (2, 3, 4, 8)] == [
        0.5,
        0.6,
        0.6,
        0.6,
    ]
    # 2 us for each of four more steps, without a published curve
    for n, wanted in ((2, 1e-5), (4, 1.4e-5), (8, 2.2e-5)):
        found = protocol_of(c, "all_gather", 1.0, n, graph=True)
        assert found.latency + (n - 1) * found.step == pytest.approx(wanted)
    # before its three steps
    assert protocol_of(c, "all_gather", 1e6, 4).latency == pytest.approx(COSTS.c.nccl_eager + 8e-6)


def test_fixed_time_of_a_message_does_not_depend_on_the_links() -> None:
    """On links half as fast only the time on the wire doubles."""
    curve = Curve("all_gather", 4, 1e-5, (1e6, 1e9), (0.1, 0.8))
    for nbytes in (1e6, 3e7, 1e9):
        wire = nbytes / 450e9
        fixed = wire / curve.fraction(nbytes) - wire / 0.8
        assert 2 * wire / curve.fraction(nbytes, 0.5) == pytest.approx(fixed + 2 * wire / 0.8)


def test_eight_ranks_take_the_published_curve_of_their_switch() -> None:
    """Bus bandwidth of 8 GB on links of 450, 200 and 300 GB/s: NVLS reaches more than the links."""

    def bus(device: str) -> float:
        cluster = make_cluster(device)
        seconds = collective_time("all_reduce", 8e9, Group(8), cluster, COSTS.c)
        return 1.75 * 8e9 / seconds / cluster.device.link_rate

    assert bus("h100") == pytest.approx(bus("h800"), rel=0.01) and bus("h100") > 1.05
    assert bus("a100") < 0.8
