"""embedding_bag_all_to_all in CPU worlds: the real kernels, interpreted, over shared host
memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support import embedding, embedding_backward, sharded_embedding
from tests.support.delays import stall_in_the_kernel
from tests.support.embedding import Case
from tests.support.worlds import Member, World, Worlds, one_shot

import tileweave as tw
from tileweave.ops.embedding import bag_all_to_all_fused as fused
from tileweave.planning.sharding import EmbeddingConfig

CONFIG = EmbeddingConfig(4, 2, 1, 2, 1)

CASES = {
    "plain": Case(((8,), (8, 8)), 6, longest=3),
    "mixed_dims": Case(((3, 8), (16,)), 7),
    "no_tables_somewhere": Case(((4,), ()), 6),
    "mean": Case(((8,), (4,)), 9, mode="mean"),
    "weighted": Case(((8,), (4,)), 5, weighted=True),
    "giant": Case(((8,), (4,)), 6, giant=50),
    "stray": Case(((8, 4), (4, 4, 4)), 6, stray=True),
    "half": Case(((8,), (4,)), 6, dtype="float16", index_dtype=torch.int32),
    "narrow_wire": Case(((8, 8),), 6, out_dtype="bfloat16", shuffled=True),
    "few_samples": Case(((8,),), 2),
    "empty_bags": Case(((8,),), 5, longest=0),
}


@pytest.mark.parametrize("name", CASES)
def test_parity(worlds: Worlds, name: str) -> None:
    worlds("gloo", 3).run(embedding.parity, [CASES[name]], CONFIG)


def test_parity_in_each_world(world: World) -> None:
    world.run(embedding.parity, [CASES["mixed_dims"]], CONFIG)


@pytest.mark.parametrize(
    "config",
    [EmbeddingConfig(8, 1, 1, 1, 0, run=1), EmbeddingConfig(2, 4, 1, 5, 3, run=2)],
    ids=str,
)
def test_other_cuts(worlds: Worlds, config: EmbeddingConfig) -> None:
    worlds("gloo", 2).run(
        embedding.parity,
        [CASES["mean"], CASES["giant"], replace(CASES["mixed_dims"], batch=9)],
        config,
    )


def tables_one_by_one(me: Member) -> None:
    """As on a GPU where L2 holds each of the tables, but not all of them."""
    alternate, chosen = EmbeddingConfig(2, 2, 1, 2, 1, run=2), []

    def launcher(*given: Any) -> Any:
        chosen.append(given[-1].run)
        return made(*given)

    made = fused._launcher
    case = Case(((8, 8, 8), (8, 8)), 40)
    with (
        mock.patch.object(fused, "_launcher", launcher),
        mock.patch.object(fused, "l2_bytes", return_value=600),
    ):
        embedding.parity(me, [case, replace(case, rows=1), replace(case, rows=99)], alternate)
    # one after the other; all fit; none fits
    assert chosen == [0, 0, 2, 2, 0, 2, 2], chosen


def test_tables_one_by_one(worlds: Worlds) -> None:
    worlds("gloo", 2).run(tables_one_by_one)


def test_public_calls(worlds: Worlds) -> None:
    worlds("gloo", 2).run(
        embedding.public_calls, [CASES["mixed_dims"], CASES["narrow_wire"]], "fused"
    )
    worlds("gloo", 1).run(embedding.public_calls, [CASES["mixed_dims"], CASES["stray"]], "local")


def test_layout_by_default(worlds: Worlds) -> None:
    worlds("gloo", 3).run(embedding.layout_by_default, CASES["no_tables_somewhere"])


# --- Time ---


def test_many_calls_with_late_ranks_and_held_results(world: World) -> None:
    cases = [Case(((4,), (4, 4)), batch, longest=2) for batch in (1, 4, 6)]
    world.run(
        embedding.many_calls, cases, CONFIG, 16, 0.004, partial(stall_in_the_kernel, period=3)
    )


def test_calls_again(worlds: Worlds) -> None:
    larger = replace(CASES["plain"], batch=4 * CASES["plain"].batch)
    worlds("gloo", 2).run(embedding.calls_again, CASES["plain"], larger)
    worlds("gloo", 3).run(embedding.calls_again, CASES["weighted"], larger)


def test_results_are_lent(worlds: Worlds) -> None:
    worlds("gloo", 2).run(embedding.results_are_lent, CASES["plain"], CONFIG)


def wrap(me: Member) -> None:
    embedding.parity(me, [CASES["few_samples"]], CONFIG)
    instance = embedding.workspace_of(embedding.name_of(None), me.device).instance(
        embedding.OP, "sm"
    )
    instance.transport.barrier()
    instance.control[0] = 2**31 - 3
    instance.signals.fill_(2**31 - 4)
    instance.transport.barrier()
    embedding.parity(me, [CASES["few_samples"]] * 2, CONFIG)
    assert int(instance.control[0]) < 0
    tw.close()


def test_the_epoch_wraps_around(worlds: Worlds) -> None:
    worlds("gloo", 2).run(wrap)


def call_without(me: Member, absent: int) -> str | None:
    case = CASES["plain"]
    embedding.call(case, embedding.draw(case, me.rank, me.device, 0), me.world_size)
    me.barrier()
    if me.rank == absent:
        time.sleep(4)
        return None
    with pytest.raises(tw.PeerTimeout) as caught:
        embedding.call(case, embedding.draw(case, me.rank, me.device, 1), me.world_size)
    tw.close()
    return f"{caught.value.op} {caught.value.peer}"


def test_a_peer_that_stops_calling() -> None:
    ends = one_shot("gloo", 3, call_without, 1, extra={"TILEWEAVE_TIMEOUT": "1.5"})
    assert [end.value for end in ends] == [f"{embedding.OP} 1", None, f"{embedding.OP} 1"]


# --- Gradients ---

LEARNED = [
    CASES["mixed_dims"],
    replace(CASES["mean"], rows=3),
    CASES["weighted"],
    CASES["stray"],
    CASES["no_tables_somewhere"],
]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients(worlds: Worlds, sparse: bool) -> None:
    worlds("gloo", 3).run(embedding_backward.gradients, LEARNED, sparse)


def test_gradients_of_rows_that_many_bags_share(worlds: Worlds) -> None:
    """Runs of equal rows that are much longer than a tile: partial sums span several tiles."""
    cases = [Case(((4,), (2,)), 24, longest=6, rows=rows) for rows in (1, 3)]
    worlds("gloo", 2).run(embedding_backward.gradients, cases)


def test_sums_of_runs(worlds: Worlds) -> None:
    worlds("gloo", 1).run(embedding_backward.sums_of_runs, (0, 5))


def test_sums_of_a_run_that_ends_all_positions(worlds: Worlds) -> None:
    """The last tile has one position of the run, or is full."""
    for last in (16, 17, 25):
        worlds("gloo", 1).run(embedding_backward.sums_of_runs, (0,), last)


def test_gradients_in_half(worlds: Worlds) -> None:
    worlds("gloo", 2).run(embedding_backward.gradients, [CASES["half"]])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients_by_copy_engines(worlds: Worlds, sparse: bool) -> None:
    worlds("gloo", 3).run(
        embedding_backward.by_copy_engines, embedding_backward.gradients, LEARNED, sparse
    )


def test_gradients_on_one_rank(worlds: Worlds) -> None:
    worlds("gloo", 1).run(embedding_backward.gradients, [CASES["mixed_dims"], CASES["weighted"]])


def test_compiled_gradients(worlds: Worlds) -> None:
    worlds("gloo", 2).run(embedding_backward.gradients, [CASES["plain"]], False, "aot_eager")


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_fused_steps(worlds: Worlds, kind: str) -> None:
    world, case = worlds("gloo", 2), Case(((8,), (4, 4)), 10, longest=3, rows=5)
    world.run(embedding_backward.fused_steps, case, kind)
    world.run(embedding_backward.by_copy_engines, embedding_backward.fused_steps, case, kind)


def opcheck(me: Member) -> None:
    case = CASES["plain"]
    bags = embedding.draw(case, me.rank, me.device, 0)
    numbers, name = case.layout(me.world_size).flat(), embedding.name_of(None)
    args = (
        bags.tables,
        bags.indices,
        bags.offsets,
        None,
        numbers,
        case.batch,
        False,
        torch.float32,
        name,
    )
    for t in bags.tables:
        t.requires_grad_()
    op = torch.ops.tileweave.embedding_bag_all_to_all
    torch.library.opcheck(op.default, (*args, True, "dense", False, [], None, 0.0, None))
    out = torch.empty_like(embedding.call(case, bags, me.world_size).detach())
    torch.library.opcheck(op.out, ([t.detach() for t in bags.tables], *args[1:]), {"out": out})


def test_opcheck(worlds: Worlds) -> None:
    worlds("gloo", 2).run(opcheck, timeout=100)


# --- Input distribution, module, bad input ---


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_distribution(worlds: Worlds, weighted: bool) -> None:
    worlds("gloo", 3).run(sharded_embedding.distribution, [[2, 0], [], [1, 2]], 3, 4, weighted)


@pytest.mark.parametrize("optimizer", [None, "sgd", "adagrad"])
def test_sharded_embedding_bag(worlds: Worlds, optimizer: str | None) -> None:
    worlds("gloo", 3).run(sharded_embedding.sharded_embedding_bag, optimizer)


def test_bad_input(worlds: Worlds) -> None:
    worlds("gloo", 2).run(embedding.bad_input)


def debugging(me: Member) -> None:
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        embedding.out_of_range_raises(me, 1)


def test_out_of_range_raises_when_debugging(worlds: Worlds) -> None:
    worlds("gloo", 3).run(debugging)
