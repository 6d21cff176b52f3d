"""Backward of embeddings: ranks that run different ones or leave one out, empty batches and tables.
Two ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.transport.call_ledger import Ledger

PATHS = pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])
IN_ORDER = tw.EmbeddingLayout.in_rank_order


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def lookup(
    table: torch.Tensor, batch: int, layout: tw.EmbeddingLayout, rank: int, **options: Any
) -> torch.Tensor:
    """Sample s reads row s % 5 of every table. All ranks have equal tables."""
    tables = [table] * len(layout.dims[rank])
    count = batch * len(tables)
    bags = (
        torch.arange(count) % batch % 5 if batch else torch.zeros(3, dtype=torch.int64),
        torch.arange(count + 1),
    )
    options.setdefault("out_dtype", torch.float32)
    return tw.embedding_bag_all_to_all(tables, *bags, batch=batch, layout=layout, **options)


# --- Ranks that do not run the same ---

# (layout, batch, dtype of the exchange) of the second lookup; the first has ((4, 4), 4, float32).
OTHERS = {
    "layout": (IN_ORDER([(8,), (4,)]), 4, torch.float32),
    "batch": (IN_ORDER([(4,), (4,)]), 6, torch.float32),
    "dtype": (IN_ORDER([(4,), (4,)]), 4, torch.bfloat16),
}


def runs_another_backward(me: Member, what: str, debugging: bool) -> str:
    """Rank 1 differentiates the second lookup first."""
    tw.close()
    me.barrier()
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="2", TILEWEAVE_DEBUG=str(int(debugging))):
        ys = []
        for layout, batch, dtype in ((IN_ORDER([(4,), (4,)]), 4, torch.float32), OTHERS[what]):
            table = torch.zeros(5, layout.dims[me.rank][0], requires_grad=True)
            ys.append(lookup(table, batch, layout, me.rank, out_dtype=dtype))
        said = refusal(ys[me.rank].sum().backward)
    me.barrier()
    tw.close()
    return said


@pytest.mark.parametrize("debugging", [False, True], ids=["ledger", "debugging"])
@pytest.mark.parametrize("what", OTHERS)
def test_different_backward_on_one_rank_raises_on_all(
    world: World, what: str, debugging: bool
) -> None:
    for said in world.run(runs_another_backward, what, debugging):
        assert said.startswith("RankMismatchError") and (not debugging or "gradient of" in said), (
            said
        )


def leaves_out_a_backward(me: Member) -> tuple[str, list[float]]:
    """Rank 0, which has the table, skips the backward of one sample. Rank 1, which does not have
    that sample, gives it up."""
    tw.close()
    me.barrier()
    layout = IN_ORDER([(4,), ()])
    table, optimizer = (
        torch.zeros(5, 4, requires_grad=True),
        tw.FusedOptimizer("sgd", torch.ones(1)),
    )
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="2"), mock.patch.object(Ledger, "post"):
        lookup(table, 8, layout, me.rank, optimizer=optimizer).mul(100).sum().backward()
        first, second = (
            lookup(table, batch, layout, me.rank, optimizer=optimizer) for batch in (1, 8)
        )
        before = table.detach().sum(1)
        said = refusal(first.sum().backward) if me.rank else ""
        me.barrier()
        said += "" if me.rank else refusal(second.sum().backward)
    me.barrier()
    tw.close()
    return said, (before - table.detach().sum(1)).tolist()


def test_skipped_backward_of_a_rank_without_samples(world: World) -> None:
    """As where ranks share no host memory for comparing calls."""
    (said, _), (other, _) = world.run(leaves_out_a_backward)
    assert said.startswith("PeerTimeout") and other.startswith("PeerTimeout"), (said, other)


def leaves_out_a_lookup(me: Member) -> str:
    """Rank 0 skips a backward in which rank 1 has no table, and rank 1 gives it up. In the next one
    it has a table."""
    tw.close()
    me.barrier()
    without, both = IN_ORDER([(4,), ()]), IN_ORDER([(4,), (4,)])
    with mock.patch.dict(os.environ, TILEWEAVE_TIMEOUT="2"), mock.patch.object(Ledger, "post"):
        lookup(torch.full((5, 4), 7.0), 8, both, me.rank)
        said = refusal(lookup, torch.ones(5, 4), 8, without, me.rank) if me.rank else ""
        me.barrier()
        said += "" if me.rank else refusal(lookup, torch.ones(5, 4), 8, both, me.rank)
    me.barrier()
    tw.close()
    return said


def test_skipped_backward_of_a_rank_without_tables(world: World) -> None:
    said, other = world.run(leaves_out_a_lookup)
    assert said.startswith("PeerTimeout") and other.startswith("PeerTimeout"), (said, other)


# --- Nothing to sum ---


def nothing_pooled(me: Member) -> None:
    table = torch.ones(5, 4, requires_grad=True)
    lookup(table, 0, IN_ORDER([(4,)] * 2), me.rank, mode="mean").sum().backward()
    assert table.grad is not None and not table.grad.any()


@PATHS
def test_mean_of_no_samples_with_spare_indices(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, nothing_pooled)


def no_columns(me: Member) -> list[float]:
    tables = [torch.ones(5, dim, requires_grad=True) for dim in (0, 4)]
    states = [torch.zeros(5) for _ in tables]
    optimizer = tw.FusedOptimizer("adagrad", torch.ones(1), states)
    bags = torch.arange(8) % 4, torch.arange(9)
    tw.embedding_bag_all_to_all(
        tables, *bags, layout=IN_ORDER([(0, 4)] * 2), optimizer=optimizer
    ).sum().backward()
    return [*states[0].tolist(), float(states[1][0])]


@PATHS
def test_adagrad_of_a_table_without_columns(world: World, interpreted: bool) -> None:
    assert run_either(world, interpreted, no_columns) == [[0.0] * 5 + [1.0]] * 2


# --- Offsets that fall ---


def falling(me: Member, offsets: list[int]) -> str:
    layout, said = IN_ORDER([(4,)] * 2), ""
    if me.rank:  # raised before anything is sent
        bags = torch.arange(4), torch.tensor(offsets)
        said = refusal(
            tw.embedding_bag_all_to_all, [torch.ones(5, 4)], *bags, batch=4, layout=layout
        )
    tw.close()
    return said


@PATHS
@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([0, 3, 1, 3, 4], "fall from 3 to 1"),
        ([-1, 1, 2, 3, 4], "from -1 to 4"),
        ([0, 1, 2, 3, 5], "to 5"),
    ],
)
def test_invalid_offsets_are_refused(
    world: World, interpreted: bool, offsets: list[int], text: str
) -> None:
    said = run_either(world, interpreted, falling, offsets)[1]
    assert said.startswith("InputError: asked: offsets ") and text in said, said
