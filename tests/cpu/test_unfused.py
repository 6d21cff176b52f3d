"""Operators and gradients on a CPU that does not interpret kernels: unfused, over three ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support import (
    backward,
    behaviour,
    combine,
    embedding,
    embedding_backward,
    experts,
    sharded_embedding,
)
from tests.support import moe_layer as moe
from tests.support.calls import call_unfused
from tests.support.matmul_cases import AG, AR, IN, OUT, RS, Case
from tests.support.worlds import Member, Worlds

from tileweave.transport.torch_collectives import (
    queue_all_gather,
    queue_all_reduce,
    queue_all_to_all,
    queue_reduce_scatter,
)

TABLES = [
    embedding.Case(((3, 8), (16,)), 7),
    embedding.Case(((8,), (4,)), 9, mode="mean", rows=3),
    embedding.Case(((8,), (4,)), 5, weighted=True),
    embedding.Case(((8,), (4,)), 6, stray=True),
    embedding.Case(((4,), ()), 6),
]
LOOKED_UP = [*TABLES, embedding.Case(((8,), (4,)), 6, stray=True, weighted=True)]
STEPS = embedding.Case(((8,), (4, 4)), 10, longest=3, rows=5)
ROUTED = [experts.Case((4, 0, 5), depth=16), experts.Case((3,), routing="holes")]
DISPATCHED = [experts.Case((5, 0, 9)), experts.Case((5,), depth=16, routing="holes")]
COMBINED = [experts.Case((3, 0, 6), experts=2, depth=16, cols=24)]
SPARE = [experts.Case((3, 0, 6), experts=2, depth=16, cols=24, spare=2)]
LAYERS = [moe.Layer((5,), shared=8), moe.Layer((3, 0, 4), topk=3, normalize=False)]
NORMED = Case(7, 18, 40, bias=True, residual=True, norm=True, op=AR)


def dense(op: str, how: tuple[int, int] | None) -> list[Case]:
    return [Case(7, 18, 40, bias=True, op=op, how=how)]


CALLS: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    AG: (backward.gradients, (dense(AG, None),)),
    RS: (backward.gradients, (dense(RS, None),)),
    AR: (backward.gradients, (dense(AR, None),)),
    OUT: (backward.gradients, (dense(OUT, (1, 0)),)),
    IN: (backward.gradients, (dense(IN, (0, 1)),)),
    "results of a gather": (behaviour.public_calls, (dense(AG, None), "unfused")),
    "results of a reduction": (behaviour.public_calls, (dense(RS, None), "unfused")),
    "results of an all-reduce": (behaviour.public_calls, ([*dense(AR, None), NORMED], "unfused")),
    "results of an exchange": (
        behaviour.public_calls,
        ([*dense(OUT, (1, 0)), *dense(OUT, (0, 1))], "unfused"),
    ),
    "results after an exchange": (
        behaviour.public_calls,
        ([*dense(IN, (0, 1)), *dense(IN, (1, 0))], "unfused"),
    ),
    "lookups": (embedding.public_calls, (LOOKED_UP, "unfused")),
    "tables": (embedding_backward.gradients, (TABLES, False)),
    "tables, sparse": (embedding_backward.gradients, (TABLES, True)),
    "sgd": (embedding_backward.fused_steps, (STEPS, "sgd")),
    "adagrad": (embedding_backward.fused_steps, (STEPS, "adagrad")),
    "bags": (sharded_embedding.sharded_embedding_bag, ("adagrad",)),
    "dispatch": (experts.public_calls, (DISPATCHED, "unfused")),
    "gradients of a dispatch": (experts.gradients, (ROUTED,)),
    "combine": (combine.public_calls, (SPARE, "unfused")),
    "gradients of a combine": (combine.gradients, (COMBINED,)),
    "layers of experts": (moe.layer_over_ranks, (LAYERS,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_and_gradients_unfused(worlds: Worlds, name: str) -> None:
    body, arguments = CALLS[name]
    worlds("gloo", 3).run(call_unfused, body, *arguments)


def queued_collectives(me: Member) -> None:
    """The methods of a group that collectives of a GPU go to, on gloo: same order of ranks, same
    sums."""
    group, size = dist.group.WORLD, me.world_size
    assert group is not None
    mine = torch.arange(2.0 * size) + 100 * me.rank
    everyone = torch.stack([torch.arange(2.0 * size) + 100 * rank for rank in range(size)])
    gathered, part, parts = (torch.empty(n) for n in (2 * size * size, 2, 2 * size))
    queue_all_gather(gathered, mine, group)
    queue_reduce_scatter(part, mine, group)
    queue_all_to_all(parts, mine, group)
    total = mine.clone()
    queue_all_reduce(total, group)
    own = slice(2 * me.rank, 2 * me.rank + 2)
    assert torch.equal(gathered.view(size, -1), everyone)
    assert torch.equal(total, everyone.sum(0)) and torch.equal(part, everyone.sum(0)[own])
    assert torch.equal(parts.view(size, 2), everyone[:, own])


def test_queued_collectives(worlds: Worlds) -> None:
    worlds("gloo", 3).run(queued_collectives)
