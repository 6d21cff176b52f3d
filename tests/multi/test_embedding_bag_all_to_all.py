"""embedding_bag_all_to_all between GPUs: parity, held results, late ranks, graphs, gradients, an
absent peer.

Kernels compile for each dtype and config, which is most of the time here, so there are few cases.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import embedding, embedding_backward, gpu_behaviour, sharded_embedding
from tests.support.embedding import Case
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, one_shot

import tileweave as tw
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.embedding.call import OP
from tileweave.planning.sharding import EmbeddingConfig

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

CONFIG = EmbeddingConfig(8, 2, 4)
CASES = {
    "plain": Case(((32,), (32, 64)), 64, rows=97),
    "odd": Case(((3, 8), (17,)), 61, rows=97, weighted=True),
    "no_tables_somewhere": Case(((64,), ()), 64, rows=97, mode="mean"),
    "giant": Case(((32,), (32,)), 40, rows=97, giant=700),
    "half": Case(
        ((64, 32), (128,)), 50, rows=97, dtype="bfloat16", index_dtype=torch.int32, stray=True
    ),
    "narrow_wire": Case(((64, 64),), 50, rows=97, out_dtype="bfloat16", shuffled=True),
}


@pytest.mark.parametrize("name", CASES)
def test_parity(largest: World, name: str) -> None:
    largest.run(embedding.parity, [CASES[name]], CONFIG, timeout=120)


def test_parity_in_each_world(world: World) -> None:
    world.run(embedding.parity, [CASES["plain"]], EmbeddingConfig(16, 4, 4), timeout=120)


def test_public_calls(world: World) -> None:
    world.run(embedding.public_calls, [CASES["plain"], CASES["half"]], "fused", timeout=120)
    world.run(embedding.layout_by_default, CASES["plain"], timeout=120)


def test_many_calls_with_late_ranks_and_held_results(largest: World) -> None:
    cases = [Case(((32,), (32, 32)), batch, rows=97) for batch in (5, 64, 130)]
    largest.run(embedding.many_calls, cases, CONFIG, 200, 0.0005, timeout=200)


def test_results_are_lent(largest: World) -> None:
    largest.run(embedding.results_are_lent, CASES["plain"], CONFIG, timeout=120)


def test_calls_again(largest: World) -> None:
    larger = replace(CASES["plain"], batch=4 * CASES["plain"].batch)
    largest.run(embedding.calls_again, CASES["plain"], larger, timeout=120)


def on_two_streams(me: Member, case: Case) -> None:
    """Lookups of one group on two streams in turn. The reader of a result is still to come when the
    next lookup begins."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    drawn = [embedding.draw(case, me.rank, me.device, seed) for seed in (0, 1)]
    found = [torch.empty_like(embedding.call(case, drawn[0], me.world_size)) for _ in range(16)]
    torch.cuda.synchronize()
    for n, into in enumerate(found):
        with torch.cuda.stream(streams[n % 2]):
            if n % 4 < 2:
                y = embedding.call(case, drawn[n % 2], me.world_size)
                embedding.pause(me.device, 0.002)
                into.copy_(y)
                del y
            else:
                embedding.call(case, drawn[n % 2], me.world_size, out=into)
    torch.cuda.synchronize()
    for n, got in enumerate(found):
        embedding.verify(got, case, me.rank, me.world_size, n % 2, f"rank {me.rank}, call {n}")


def test_lookups_on_two_streams(largest: World) -> None:
    largest.run(on_two_streams, CASES["plain"], timeout=120)


def replay(me: Member, case: Case, replays: int) -> None:
    """Two calls in a graph, replayed with fresh indices. Eager results are held in the meantime and
    must not change."""
    drawn = [embedding.draw(case, me.rank, me.device, seed) for seed in (0, 1)]
    layout = case.layout(me.world_size)
    options = {"batch": case.batch, "layout": layout, "out_dtype": case.result_dtype}
    eager = [tw.embedding_bag_all_to_all(b.tables, b.indices, b.offsets, **options) for b in drawn]
    del eager[1]
    graph = torch.cuda.CUDAGraph()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ys = [tw.embedding_bag_all_to_all(b.tables, b.indices, b.offsets, **options) for b in drawn]
    for n in range(replays):
        if n % me.world_size == me.rank:
            embedding.pause(me.device, 0.0005)
        # the same bags in another order of table rows: indices change, lengths do not
        for bags in drawn:
            bags.indices.copy_((bags.indices + 1) % case.rows)
        graph.replay()
        kept = [y.clone() for y in ys]
        torch.cuda.synchronize()
        for seed, y in enumerate(kept):
            check_shifted(case, me, seed, n + 1, y)
        if n % 3 == 0:
            again = embedding.draw(case, me.rank, me.device, 2)
            y = tw.embedding_bag_all_to_all(again.tables, again.indices, again.offsets, **options)
            embedding.verify(
                y, case, me.rank, me.world_size, 2, f"rank {me.rank}, eager after replay {n}"
            )
            del y
    embedding.verify(eager[0], case, me.rank, me.world_size, 0, "held all the time")
    me.barrier()
    del graph
    tw.close()


def replay_many(me: Member, case: Case, replays: int) -> None:
    """Four calls in a graph, each result gone before the next call: they share a region. The fifth
    result is kept."""
    drawn = [embedding.draw(case, me.rank, me.device, seed) for seed in range(5)]
    layout = case.layout(me.world_size)
    options = {"batch": case.batch, "layout": layout, "out_dtype": case.result_dtype}
    found = []
    for bags in drawn:  # outside of the capture: addresses of tables
        y = tw.embedding_bag_all_to_all(bags.tables, bags.indices, bags.offsets, **options)
        found.append(torch.empty_like(y))
        del y
    graph = torch.cuda.CUDAGraph()
    me.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for into, bags in zip(found[:4], drawn[:4], strict=True):
            y = tw.embedding_bag_all_to_all(bags.tables, bags.indices, bags.offsets, **options)
            into.copy_(y)
            del y
        bags = drawn[4]
        found[4] = tw.embedding_bag_all_to_all(bags.tables, bags.indices, bags.offsets, **options)
    regions = workspace_of(name_of(None), me.device).instance(OP, "sm").regions
    assert len(regions.captured) == 1, f"one region serves the capture: {regions.captured}"
    for n in range(replays):
        if n % me.world_size == me.rank:
            embedding.pause(me.device, 0.0005)
        for bags in drawn:
            bags.indices.copy_((bags.indices + 1) % case.rows)
        graph.replay()
        torch.cuda.synchronize()
        for seed, y in enumerate(found):
            check_shifted(case, me, seed, n + 1, y)
    me.barrier()
    del graph
    tw.close()


def check_shifted(case: Case, me: Member, seed: int, shift: int, got: torch.Tensor) -> None:
    begin, end = embedding.rows_of(case.batch, me.world_size, me.rank)
    layout = case.layout(me.world_size)
    for source in range(me.world_size):
        bags = embedding.draw(case, source, torch.device("cpu"), seed)
        bags.indices = (bags.indices + shift) % case.rows
        block, at = embedding.pooled(bags, case)[begin:end], 0
        for column, dim in zip(layout.columns[source], layout.dims[source], strict=True):
            part = got[:, column : column + dim].double().cpu()
            assert_near(part, block[:, at : at + dim], 1e-4, 1e-4, f"from rank {source}")
            at += dim


def test_replays_with_changing_inputs(largest: World) -> None:
    largest.run(replay, Case(((32,), (32, 64)), 24, rows=97), 8, timeout=200)


def test_calls_of_a_capture_share_a_region(largest: World) -> None:
    largest.run(replay_many, Case(((32,), (32, 64)), 24, rows=97), 6, timeout=200)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients(largest: World, sparse: bool) -> None:
    cases = [
        CASES["plain"],
        CASES["odd"],
        Case(((32,), (32,)), 64, longest=9, rows=3),
        CASES["no_tables_somewhere"],
    ]
    largest.run(embedding_backward.gradients, cases, sparse, timeout=200)
    largest.run(
        embedding_backward.by_copy_engines, embedding_backward.gradients, cases, sparse, timeout=200
    )


def test_sums_of_runs(largest: World) -> None:
    largest.run(embedding_backward.sums_of_runs, tuple(range(8)), timeout=120)


def test_gradients_in_half(world: World) -> None:
    world.run(embedding_backward.gradients, [CASES["half"]], timeout=120)


def test_compiled_gradients(largest: World) -> None:
    largest.run(embedding_backward.gradients, [CASES["plain"]], False, "inductor", timeout=200)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_fused_steps(largest: World, kind: str) -> None:
    case = Case(((32,), (32, 64)), 60, rows=5)
    largest.run(embedding_backward.fused_steps, case, kind, timeout=120)
    largest.run(
        embedding_backward.by_copy_engines, embedding_backward.fused_steps, case, kind, timeout=120
    )


def test_distribution(largest: World) -> None:
    features = [*[[2, 0], [], [1, 2], [0]][: largest.size - 1], [0, 1, 2]]
    largest.run(sharded_embedding.distribution, features, 3, 4, True)


@pytest.mark.own_gpu  # torch's gather of a whole DTensor crashes with gloo
def test_sharded_embedding_bag(largest: World) -> None:
    largest.run(sharded_embedding.sharded_embedding_bag, "adagrad", timeout=120)


def test_bad_input(largest: World) -> None:
    largest.run(embedding.bad_input, timeout=120)


def call_without(me: Member, absent: int) -> dict | None:
    case = CASES["plain"]

    def call(number: int) -> torch.Tensor:
        return embedding.call(case, embedding.draw(case, me.rank, me.device, number), me.world_size)

    return gpu_behaviour.call_without_peer(me, absent, call, lambda y: bool(y.isnan().all()))


def test_a_peer_that_never_calls() -> None:
    ends = one_shot("nccl", 2, call_without, 1, timeout=150)
    assert ends[0].value == {"op": embedding.OP, "peer": 1, "poisoned": True}, ends
