"""What training frameworks do with layers: seeds that ranks share, compilation of whole modules,
modes below autograd."""

from __future__ import annotations

import pytest
import torch
from tests.support.calls import run_either
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, Worlds
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tileweave.nn import MoE, ShardedEmbeddingBag
from tileweave.planning.sharding import TableSpec

PATHS = pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def tables_of(count: int) -> list[TableSpec]:
    return [TableSpec(f"t{i}", 8, 4, 1.0) for i in range(count)]


# --- Seeds ---


def drawn_after(me: Member, tables: int, on_meta: bool) -> list[list[float]]:
    torch.manual_seed(7)
    bags = ShardedEmbeddingBag(tables_of(tables), device="meta" if on_meta else None)
    if on_meta:
        bags.to_empty(device="cpu").reset_parameters()
    first = torch.rand(3).tolist()
    bags.reset_parameters()
    return [first, torch.rand(3).tolist()]


@pytest.mark.parametrize("on_meta", [False, True], ids=["", "meta"])
@pytest.mark.parametrize("tables", [1, 2], ids=["a rank without", "both with"])
def test_ranks_draw_the_same_numbers_after_tables(world: World, tables: int, on_meta: bool) -> None:
    first, second = world.run(drawn_after, tables, on_meta)
    assert first == second


# --- Compilers ---


def compiled_module(me: Member, tables: int) -> list[int]:
    """Several batch sizes through one compiled module, compared with the eager one. Return the
    number of graphs after each batch."""
    torch._dynamo.reset()
    counters.clear()
    bags = ShardedEmbeddingBag(tables_of(tables))
    compiled = torch.compile(bags, backend="eager")
    seen = []
    for samples in (4, 4, 6, 3, 5):
        lengths = torch.ones(tables * samples, dtype=torch.int64)
        values = torch.arange(tables * samples) % 8
        assert_near(
            compiled(lengths, values), bags(lengths, values), 0.0, 0.0, f"{samples} samples"
        )
        seen.append(int(counters["stats"]["unique_graphs"]))
    return seen


@PATHS
@pytest.mark.parametrize("tables", [1, 3])
def test_compiled_embedding_module_bounds_recompilation(
    world: World, interpreted: bool, tables: int
) -> None:
    for seen in run_either(world, interpreted, compiled_module, tables):
        assert seen[-1] <= 8, f"graphs after each batch: {seen}"


# --- Modes below autograd ---


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def gradients_below_a_mode(me: Member) -> None:
    torch.manual_seed(3)
    layer, x = MoE(8, 6, 4, 2), torch.randn(5, 8)
    layer(x).square().sum().backward()
    wanted = [
        (name, p.grad.to_local().clone())
        for name, p in layer.named_parameters()
        if p.grad is not None
    ]
    layer.zero_grad()
    with PassThrough():
        layer(x).square().sum().backward()
    assert len(wanted) > 2
    for name, gradient in wanted:
        assert_near(layer.get_parameter(name).grad.to_local(), gradient, 0.0, 0.0, name)


@PATHS
def test_expert_gradients_under_a_dispatch_mode(world: World, interpreted: bool) -> None:
    run_either(world, interpreted, gradients_below_a_mode)
