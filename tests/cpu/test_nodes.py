"""Groups whose ranks do not all share memory: worlds of 2 x 1 and 2 x 2 emulated nodes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import refusal
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.bench.samples import samples_of
from tileweave.bench.subjects import TOLERANCE
from tileweave.ops.core.nodes import topology_of
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.planning.topology import Topology
from tileweave.transport import host_memory

NAMES = {2: "2 nodes x 1", 4: "2 nodes x 2"}
ACROSS = ()  # operators that have a path between nodes


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


def each_operator(me: Member) -> dict[str, str]:
    said, group = {}, dist.group.WORLD
    for op in tw.OPERATORS:
        samples = samples_of(op)
        for seed, shape in enumerate(samples.check_on_cpu.shapes[:2]):
            operands = samples.subject.draw(
                shape, torch.float32, me.device, me.rank, me.world_size, seed, False
            )
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
