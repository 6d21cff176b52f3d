"""embedding_bag_all_to_all where ranks are on several nodes: 2 x 1, 2 x 2 and 3 x 2 emulated
nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.support import embedding, embedding_backward
from tests.support.dead_nodes import outlive, survive
from tests.support.embedding import Case
from tests.support.embedding_nodes import CASES, in_slices
from tests.support.tolerances import GRADIENT_ERROR, assert_norm_near
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.ops.embedding import bag_all_to_all_fused
from tileweave.transport.rail import GlooRail

SMALL = [replace(case, batch=min(case.batch, 7), longest=2) for case in CASES]
WORLDS = {"2x1": (2, 2), "2x2": (4, 2), "3x2": (6, 3)}


@pytest.fixture(params=list(WORLDS.values()), ids=list(WORLDS))
def nodes(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", *request.param)


def test_public_calls(nodes: World) -> None:
    nodes.run(embedding.public_calls, CASES, "fused")
    nodes.run(in_slices, CASES[:3], embedding.public_calls, "fused")


def test_gradients(nodes: World) -> None:
    nodes.run(in_slices, SMALL[:2], embedding_backward.gradients)


def test_other_gradients(worlds: Worlds) -> None:
    """Of few samples and of 2-byte results, sparse, in one slice, and by copy engines."""
    world = worlds("gloo", 4, 2)
    world.run(embedding_backward.gradients, SMALL[1:], True)
    world.run(by_copy_engines, SMALL[:1])


def by_copy_engines(me: Member, cases: list[Case]) -> None:
    with mock.patch.object(bag_all_to_all_fused, "gradient_carrier", return_value="copy_engine"):
        embedding_backward.gradients(me, cases)


def test_steps(worlds: Worlds) -> None:
    case = Case(((3, 5), (8,)), 7, longest=3, rows=2)  # a step of one slice leaves other tables
    worlds("gloo", 2, 2).run(in_slices, case, embedding_backward.fused_steps, "adagrad")


def late(me: Member, cases: list[Case]) -> None:
    """One rank after the other is late, or its network is; results are held until the end."""
    exchange, found = GlooRail.all_to_all_parts, []
    for number in range(me.world_size + 2):
        case, mine = cases[number % len(cases)], number % me.world_size == me.rank

        def slow(rail: GlooRail, *call: object, mine: bool = mine) -> None:
            time.sleep(0.05 if mine else 0.0)
            exchange(rail, *call)  # type: ignore[arg-type]

        bags = embedding.draw(case, me.rank, me.device, number)
        for table in bags.tables:
            table.requires_grad_()
        c = embedding_backward.coefficients(case, me.rank, me.world_size, me.device)
        time.sleep(0.05 if mine and number % 3 == 0 else 0.0)
        with mock.patch.object(GlooRail, "all_to_all_parts", slow):
            y = embedding.call(case, bags, me.world_size)
            time.sleep(0.05 if mine and number % 3 == 1 else 0.0)
            (y * c).sum().backward()
        found.append((number, case, y.detach(), bags.tables))
    for number, case, y, tables in found:
        what = f"rank {me.rank}, call {number}"
        embedding.verify(y, case, me.rank, me.world_size, number, what)
        want = embedding_backward.expected_gradients(case, me.rank, me.world_size, number)
        for table, right in zip(tables, want, strict=True):
            assert_norm_near(table.grad, right, GRADIENT_ERROR[case.dtype], what)


def test_late_ranks_and_networks(worlds: Worlds) -> None:
    worlds("gloo", 4, 2).run(in_slices, SMALL[:2], late)


def count(me: Member, case: Case) -> tuple[int, int, int, int]:
    """Bytes that this rank sends to other nodes, and that of its vectors for them; the same of the
    backward."""
    sent, exchange = [], GlooRail.all_to_all_parts

    def counted(rail: GlooRail, out, x, received: list[int], counts: list[int]) -> None:
        assert not any(counts[r] for r in near)
        sent.append(sum(counts) * x.element_size())
        exchange(rail, out, x, received, counts)

    each = me.world_size // 2
    near = range(me.rank // each * each, me.rank // each * each + each)
    bags = embedding.draw(case, me.rank, me.device, 0)
    for table in bags.tables:
        table.requires_grad_()
    with mock.patch.object(GlooRail, "all_to_all_parts", counted):
        y = embedding.call(case, bags, me.world_size)
        forward = sum(sent)
        y.sum().backward()
    rows = [embedding.rows_of(case.batch, me.world_size, r) for r in range(me.world_size)]
    far = sum(end - begin for r, (begin, end) in enumerate(rows) if r not in near)
    width = sum(sum(case.dims_of(r)) for r in range(me.world_size) if r not in near)
    size = y.element_size()
    needed = far * sum(case.dims_of(me.rank)) * size, len(y) * width * size
    return forward, needed[0], sum(sent) - forward, needed[1]


def test_a_vector_crosses_once(worlds: Worlds) -> None:
    for sent, needed, back, needed_back in worlds("gloo", 4, 2).run(count, CASES[0]):
        assert sent == needed and back == needed_back


def with_dead_node(me: Member, where: str) -> tuple[str, float]:
    case = CASES[1]
    bags = embedding.draw(case, me.rank, me.device, 0)
    for table in bags.tables:
        table.requires_grad_(where == "backward")
    y = embedding.call(case, bags, me.world_size)
    if where == "backward":
        return outlive(me, [y.sum().backward])
    return outlive(me, [lambda: embedding.call(case, bags, me.world_size)])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("size", [2, 4], ids=["2x1", "2x2"])
def test_node_that_dies(size: int, where: str) -> None:
    survive(size, with_dead_node, where)


def differing(me: Member) -> str:
    case = CASES[1] if me.rank * 2 < me.world_size else CASES[0]
    bags = embedding.draw(case, me.rank, me.device, 0)
    with pytest.raises(tw.RankMismatchError) as caught:
        embedding.call(case, bags, me.world_size)
    tw.close()
    embedding.call(CASES[1], embedding.draw(CASES[1], me.rank, torch.device("cpu"), 0), 4)
    return str(caught.value)


def test_another_layout_on_one_node(worlds: Worlds) -> None:
    for said in worlds("gloo", 4, 2).run(differing):
        assert "another node makes another call" in said or "calls something else" in said
