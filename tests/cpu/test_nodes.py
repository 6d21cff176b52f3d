"""Groups whose ranks do not all share memory: worlds of 2 x 1 and 2 x 2 emulated nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import backward, behaviour, parity
from tests.support.calls import refusal
from tests.support.delays import stall_in_the_copy_engine
from tests.support.matmul_cases import RS, Case, prepare
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE, Draw
from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.topology import Topology
from tileweave.transport import host_memory
from tileweave.transport.rail import GlooRail

NAMES = {2: "2 nodes x 1", 4: "2 nodes x 2"}
ACROSS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "dispatch_grouped_matmul",
    "grouped_matmul_combine",
    "embedding_bag_all_to_all",
)  # operators that have a path between nodes


@pytest.fixture(params=NAMES, ids=["2x1", "2x2"])
def nodes(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", request.param, 2)


# --- Topology ---


def found_topology(me: Member) -> tuple[Topology, tuple[int, ...], int, str]:
    group = dist.group.WORLD
    ranks = topology_of(group, me.device)
    workspace = workspace_of(name_of(group), me.device)
    with mock.patch.object(host_memory, "_open", wraps=host_memory._open) as opened:
        addresses = workspace.transport.allocate(64).addresses
    refused = refusal(workspace.instance, "all_gather_matmul", "sm")
    tw.close()
    mapped = tuple(rank for rank, address in enumerate(addresses) if address)
    return ranks, mapped, opened.call_count, refused


def test_ranks_map_memory_of_their_node_only(nodes: World) -> None:
    size = nodes.size
    for rank, (ranks, mapped, opened, refused) in enumerate(nodes.run(found_topology)):
        assert ranks == Topology(tuple(r * 2 // size for r in range(size)))
        assert mapped == ranks.near(rank)
        assert opened == size // 2 - 1
        assert NAMES[size] in refused


def one_node(me: Member) -> tuple[Topology, tuple[int, ...]]:
    group = me.group(0, 1)
    if group is None:
        return Topology((0,)), ()
    ranks = topology_of(group, me.device)
    x, w = torch.ones(20, 16), torch.ones(8, 16)
    plan = tw.explain("all_gather_matmul", x, w, group=group)
    assert plan.path == "fused" and "node" not in plan.reason
    torch.testing.assert_close(tw.all_gather_matmul(x, w, group=group), torch.full((40, 8), 16.0))
    return ranks, ranks.near(me.rank)


def test_groups_inside_a_node_are_as_on_one_host(worlds: Worlds) -> None:
    found = worlds("gloo", 4, 2).run(one_node)
    assert found[0] == (Topology((0, 0)), (0, 1)) and found[1][0].nodes == 1


# --- Every operator ---


def each_operator(me: Member, ops: Iterable[str] = tw.OPERATORS, shapes: int = 2) -> dict[str, str]:
    said, group = {}, dist.group.WORLD
    for op in ops:
        samples = samples_of(op)
        for seed, shape in enumerate(samples.check_on_cpu.shapes[:shapes]):
            draw = Draw(torch.float32, me.device, me.rank, me.world_size, seed)
            operands = samples.subject.draw(shape, draw)
            if op == "grouped_matmul_combine":  # its plan says in which group
                plan = replace(operands.plan, group_name=name_of(group))
                operands = replace(operands, plan=plan)
            out, second = samples.subject.call(operands, group, None, False)
            error = samples.subject.error(operands, out, second)
            assert error <= TOLERANCE[torch.float32], f"{op} {shape}: {error}"
            said[op] = str(samples.subject.explain(operands, group))
    return said


def test_each_operator_is_right(nodes: World) -> None:
    for said in nodes.run(each_operator):
        assert said.keys() == set(tw.OPERATORS)
        for op, plan in said.items():
            path = "fused" if op in ACROSS else "unfused"
            assert plan.startswith(path) and NAMES[nodes.size] in plan, f"{op}: {plan}"


# --- all_gather_matmul between nodes ---

CHUNKS = MatmulConfig("triton", "nodes", 16, 32, 16, 1, 4, group_m=2, num_slices=3)
CONFIGS = {
    "chunks": CHUNKS,
    "one chunk": replace(CHUNKS, num_slices=1, tile_k=64),
    "whole tiles": replace(CHUNKS, num_slices=32, split_tail=False, group_m=3, tile_k=128),
}
CASES = [
    # the last chunk is shorter than the others, and its last tile
    Case(70, 40, 50, bias=True, gathered=True),
    Case(16, 33, 20, "float16", integers=True),
    Case(37, 1, 32),
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parity(nodes: World, config: MatmulConfig) -> None:
    nodes.run(parity.parity, CASES, config, 5)


def test_three_nodes(worlds: Worlds) -> None:
    worlds("gloo", 6, 3).run(parity.parity, CASES[:2], replace(CHUNKS, tile_k=64))


CHANGING = [Case(16, 17, 24), Case(33, 20, 33), Case(20, 9, 50, gathered=True), Case(50, 7, 20)]


def test_many_calls_with_late_ranks(nodes: World) -> None:
    config = replace(CHUNKS, tile_k=64)
    nodes.run(parity.many_calls, CHANGING, config, 8, 0.004, None, stall_in_the_copy_engine)


def late_network(me: Member) -> None:
    """The network of one rank after the other is slow: data of a call comes when others are in the
    next one."""
    exchange = GlooRail.exchange
    for number in range(2 * me.world_size):

        def slow(rail: GlooRail, *call: object, number: int = number) -> None:
            time.sleep(0.1 if number % me.world_size == me.rank else 0.0)
            exchange(rail, *call)  # type: ignore[arg-type]

        call = prepare(CHANGING[number % 4], me.rank, me.world_size, me.device, number)
        with mock.patch.object(GlooRail, "exchange", slow):
            parity.run(call, dist.group.WORLD, CHUNKS)
        call.verify(f"rank {me.rank}, call {number}")


def test_a_late_network(nodes: World) -> None:
    nodes.run(late_network)


def test_the_epoch_wraps_around(nodes: World) -> None:
    nodes.run(parity.calls_around_the_wrap, Case(18, 20, 40), CHUNKS)


def test_public_calls(nodes: World) -> None:
    nodes.run(behaviour.public_calls, [Case(35, 17, 70, bias=True), Case(64, 9, 40)], "fused")


def test_gradients(nodes: World) -> None:
    nodes.run(backward.gradients, [Case(35, 18, 40, bias=True, gathered=g) for g in (False, True)])
    nodes.run(backward.gradients, [Case(32, 18, 40, op=RS, bias=True)])


def warmed(me: Member) -> list[str]:
    plans = tw.warmup(
        "all_gather_matmul", rows=[32, 50], cols=18, depth=40, dtype=torch.float32, device="cpu"
    )
    assert isinstance(plans, dict)
    tw.close()
    return [plan.summary for plan in plans.values()]


def test_warmup_of_several_sizes(worlds: Worlds) -> None:
    """The first call of a group: its kernels are compiled before it maps memory."""
    for plans in worlds("gloo", 4, 2).run(warmed):
        assert len(plans) == 2 and all("fused" in plan and NAMES[4] in plan for plan in plans)


def explained(me: Member) -> list[str]:
    w = torch.zeros(18, 40)
    tw.all_gather_matmul(torch.zeros(32, 40), w)
    return [tw.explain("all_gather_matmul", torch.zeros(rows, 40), w).summary for rows in (32, 3)]


def test_explain_says_the_nodes(nodes: World) -> None:
    for fused, unfused in nodes.run(explained):
        assert fused.startswith("fused") and f"{NAMES[nodes.size]}, interpreted" in fused
        assert unfused.startswith("unfused") and "shards of 3 rows are no tile of 16" in unfused


def uneven(me: Member) -> str:
    x, w = torch.ones(32, 16), torch.ones(8, 16)
    torch.testing.assert_close(tw.all_gather_matmul(x, w), torch.full((96, 8), 16.0))
    plan = tw.explain("all_gather_matmul", x, w)
    assert plan.path == "unfused"
    return plan.reason


def test_uneven_nodes_run_unfused(worlds: Worlds) -> None:
    for reason in worlds("gloo", 3, 2).run(uneven):
        assert "2 nodes with ranks 0+1, 2" in reason


# --- Faults ---

SECONDS, SLACK, VICTIM = 3.0, 2.0, 1
ALIVE = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
ROWS = (32, 48)


def good_call(me: Member, number: int = 0) -> None:
    call = prepare(Case(32, 18, 40), me.rank, me.world_size, me.device, number)
    y = tw.all_gather_matmul(call.operands.x, call.operands.w)
    call.out.copy_(y)
    call.verify(f"rank {me.rank}, good call {number}")


def raises(me: Member) -> None:
    if me.rank == VICTIM:
        tw.all_gather_matmul(torch.zeros(32, 40, dtype=torch.float64), torch.zeros(18, 40))
    good_call(me)


def is_stuck(me: Member) -> None:
    time.sleep(2.5 * SECONDS if me.rank == VICTIM else 0.0)
    good_call(me)


def calls_another_shape(me: Member) -> None:
    """All shapes were called before, and each rank of a node makes another call than those of the
    other node."""
    w = torch.zeros(18, 40)
    for rows in (*ROWS, ROWS[me.rank * 2 // me.world_size]):
        tw.all_gather_matmul(torch.zeros(rows, 40), w)


LIVE = {
    # ranks of its node read its ledger
    raises: ("InputError", ("PeerTimeout", "RankMismatchError")),
    is_stuck: ("PeerTimeout", "PeerTimeout"),
    calls_another_shape: ("RankMismatchError", "RankMismatchError"),
}


def suffer(me: Member) -> list[tuple[str, float]]:
    found = []
    for fault in LIVE:
        good_call(me)
        me.barrier()
        seen, started = "", time.monotonic()
        try:
            fault(me)
        except tw.TileweaveError as error:
            seen = f"{type(error).__name__}: {error}"
        found.append((seen, time.monotonic() - started))
        tw.close()
        me.barrier()
        good_call(me, 1)
        tw.close()
        me.barrier()
    return found


def test_faults_that_all_ranks_survive() -> None:
    ends = one_shot("gloo", 4, suffer, extra=ALIVE, timeout=90, nodes=2)
    for rank, end in enumerate(ends):
        for (fault, (own, others)), (seen, taken) in zip(LIVE.items(), end.value, strict=True):  # type: ignore[arg-type]
            assert seen.startswith(own if rank == VICTIM else others), f"{fault} {rank}: {seen}"
            stuck = 2.5 * SECONDS if rank == VICTIM and fault is is_stuck else 0.0
            assert taken < SECONDS + SLACK + stuck, f"{fault} {rank}: {taken:.1f} s"


def outlive(me: Member, node: int) -> tuple[str, float]:
    """All ranks of a node end in the middle of calls."""
    good_call(me)
    me.barrier()
    if me.rank * 2 // me.world_size == node:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for number in range(3):
            started = time.monotonic()
            good_call(me, number)
    except tw.PeerTimeout as error:
        taken = time.monotonic() - started
        tw.close()
        return str(error), taken
    return "", 0.0


@pytest.mark.parametrize("size", NAMES, ids=["2x1", "2x2"])
def test_node_that_dies(size: int) -> None:
    ends = one_shot("gloo", size, outlive, 1, extra=ALIVE, timeout=60, nodes=2)
    for rank, end in enumerate(ends):
        if rank * 2 // size == 1:
            assert end.exit_code == -signal.SIGKILL
            continue
        seen, taken = end.value  # type: ignore[misc]
        assert f"rank {rank} waited" in seen, seen
        assert any(f"for rank {dead} " in seen for dead in range(size // 2, size)), seen
        assert taken < SECONDS + SLACK, f"rank {rank} knew after {taken:.1f} s"
