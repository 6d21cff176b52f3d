"""embedding_bag_all_to_all where ranks are on several nodes: 2 x 1, 2 x 2 and 3 x 2 emulated
nodes."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch
from tests.support import embedding, embedding_backward
from tests.support.embedding import Case
from tests.support.embedding_nodes import CASES, in_slices
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.transport.rail import GlooRail

WORLDS = {"2x1": (2, 2), "2x2": (4, 2), "3x2": (6, 3)}


@pytest.fixture(params=list(WORLDS.values()), ids=list(WORLDS))
def nodes(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds("gloo", *request.param)


def test_public_calls(nodes: World) -> None:
    nodes.run(embedding.public_calls, CASES, "fused")
    nodes.run(in_slices, CASES[:3], embedding.public_calls, "fused")


def test_gradients(nodes: World) -> None:
    nodes.run(embedding_backward.gradients, CASES[:1])


def late(me: Member, cases: list[Case]) -> None:
    """One rank after the other is late, or its network is; results are held until the end."""
    exchange, found = GlooRail.all_to_all_parts, []
    for number in range(2 * me.world_size):
        case, mine = cases[number % len(cases)], number % me.world_size == me.rank

        def slow(rail: GlooRail, *call: object, mine: bool = mine) -> None:
            time.sleep(0.05 if mine else 0.0)
            exchange(rail, *call)  # type: ignore[arg-type]

        bags = embedding.draw(case, me.rank, me.device, number)
        time.sleep(0.05 if mine and number % 3 == 0 else 0.0)
        with mock.patch.object(GlooRail, "all_to_all_parts", slow):
            found.append((number, case, embedding.call(case, bags, me.world_size)))
    for number, case, y in found:
        what = f"rank {me.rank}, call {number}"
        embedding.verify(y, case, me.rank, me.world_size, number, what)


def test_late_ranks_and_networks(worlds: Worlds) -> None:
    worlds("gloo", 4, 2).run(in_slices, CASES[:3], late)


def count(me: Member, case: Case) -> tuple[int, int]:
    """Bytes that this rank sends to other nodes, and that of its vectors for them."""
    sent, exchange = [], GlooRail.all_to_all_parts

    def counted(rail: GlooRail, out, x, received: list[int], counts: list[int]) -> None:
        assert not any(counts[r] for r in near)
        sent.append(sum(counts) * x.element_size())
        exchange(rail, out, x, received, counts)

    each = me.world_size // 2
    near = range(me.rank // each * each, me.rank // each * each + each)
    bags = embedding.draw(case, me.rank, me.device, 0)
    with mock.patch.object(GlooRail, "all_to_all_parts", counted):
        y = embedding.call(case, bags, me.world_size)
    rows = [embedding.rows_of(case.batch, me.world_size, r) for r in range(me.world_size)]
    far = sum(end - begin for r, (begin, end) in enumerate(rows) if r not in near)
    return sum(sent), far * sum(case.dims_of(me.rank)) * y.element_size()


def test_a_vector_crosses_once(worlds: Worlds) -> None:
    for sent, needed in worlds("gloo", 4, 2).run(count, CASES[0]):
        assert sent == needed


SECONDS, SLACK = 3.0, 2.0


def outlive(me: Member) -> tuple[str, float]:
    case = CASES[1]
    bags = embedding.draw(case, me.rank, me.device, 0)
    embedding.call(case, bags, me.world_size)
    me.barrier()
    if me.rank * 2 // me.world_size == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(3):
            started = time.monotonic()
            embedding.call(case, bags, me.world_size)
    except tw.PeerTimeout as error:
        taken = time.monotonic() - started
        tw.close()
        return str(error), taken
    return "", 0.0


@pytest.mark.parametrize("size", [2, 4], ids=["2x1", "2x2"])
def test_node_that_dies(size: int) -> None:
    extra = {"TILEWEAVE_TIMEOUT": str(SECONDS)}
    ends = one_shot("gloo", size, outlive, extra=extra, timeout=60, nodes=2)
    for rank, end in enumerate(ends):
        if rank * 2 // size == 1:
            assert end.exit_code == -signal.SIGKILL
            continue
        seen, taken = end.value  # type: ignore[misc]
        assert f"rank {rank} waited" in seen, seen
        assert taken < SECONDS + SLACK, f"rank {rank} knew after {taken:.1f} s"


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
