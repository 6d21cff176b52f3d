"""Options of layers and calls have their effect; accepted calls are checked again when they
change."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support import combine, experts
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, Worlds, one_shot

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, MoE, RowParallelLinear, ShardedEmbeddingBag
from tileweave.nn.shards import local
from tileweave.ops.core.registry import name_of


@pytest.fixture
def world(worlds: Worlds):
    return worlds("gloo", 2)


def inference_results(me: Member) -> list[str]:
    """``out=`` made under inference_mode is accepted or refused independently of the path of a
    call."""
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    with torch.inference_mode():
        out, wide = torch.empty(4, 6), torch.empty(4 * me.world_size, 6)
        taken = tw.matmul_all_reduce(x, w, out=out)
    assert torch.equal(taken, torch.full((4, 6), 8.0 * me.world_size))
    calls = (
        lambda: tw.matmul_all_reduce(x, w, out=out),
        lambda: tw.all_gather_matmul(x, w, out=wide),
    )
    with torch.no_grad():
        return [refusal(call) for call in calls]


@pytest.mark.parametrize("interpreted", [True, False])
def test_results_made_under_inference_mode(world, interpreted: bool) -> None:
    for said in run_either(world, interpreted, inference_results):
        assert all(
            text.startswith("InputError: asked:") and "inference_mode" in text for text in said
        ), said


# --- Layers ---


def flattened(me: Member) -> list[str]:
    """Layers whose rows are in dimension 1, of x without a dimension for the batch."""
    column, row = ColumnParallelLinear(8, 8, dim=1), RowParallelLinear(8, 8, dim=1)
    row.path = "layers.0.fc2"
    x, part = torch.ones(4, 8), torch.ones(4, 8 // me.world_size)
    return [refusal(lambda: column(x)), refusal(lambda: row(part))]


def test_layers_name_x_without_rows(world) -> None:
    for column, row in world.run(flattened):
        rest = "whose rows are in dimension 1; allowed: x [B, S, ..., K]; remedy: keep that"
        assert f"asked: ColumnParallelLinear of x (4, 8), {rest}" in column, column
        assert f"asked: layers.0.fc2 of x (4, 4), {rest}" in row, row


def options_of_bags(me: Member) -> None:
    specs, whole = (
        [tw.TableSpec(f"t{i}", 6, 4, 1.0) for i in range(4)],
        [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)],
    )
    lengths, values, scales = torch.full((12,), 2), torch.arange(24) % 6, torch.linspace(0.5, 2, 24)

    def made(**options: Any) -> ShardedEmbeddingBag:
        module = ShardedEmbeddingBag(specs, **options)
        module.load_tables(whole)
        return module

    def stepped(**options: Any) -> list[torch.Tensor]:
        module = made(**options)
        module(lengths, values).square().sum().backward()
        return [w.detach() if w.grad is None else w.grad for w in module.weights()]

    def rows(factors: torch.Tensor) -> torch.Tensor:
        picked = torch.stack([whole[i // 6][values[i]] * factors[i] for i in range(24)])
        return picked.view(4, 3, 2, 4).sum(2).transpose(0, 1).reshape(3, 16)

    once, gradients = rows(torch.ones(24)), stepped()
    assert torch.allclose(made()(lengths, values), once, atol=1e-5)
    assert torch.allclose(made(mode="mean")(lengths, values), once / 2, atol=1e-5)
    assert made(out_dtype=torch.bfloat16)(lengths, values).dtype == torch.bfloat16
    assert torch.allclose(made()(lengths, values, scales), rows(scales), atol=1e-5)
    before = [w.detach() for w in made().weights()]
    steps = stepped(optimizer="adagrad", learning_rate=1.0, epsilon=10.0)
    found = zip(
        gradients, stepped(sparse=True), stepped(divide_gradient=True), before, steps, strict=True
    )
    for gradient, sparse, divided, old, new in found:
        assert sparse.is_sparse and torch.allclose(sparse.to_dense(), gradient, atol=1e-5)
        assert torch.allclose(divided, gradient / me.world_size, atol=1e-5)
        assert torch.allclose(
            new, old - gradient / (gradient.square().mean(1).sqrt() + 10.0)[:, None], atol=1e-5
        )


def test_bag_options(world) -> None:
    world.run(options_of_bags)


def kept_of_a_gather(me: Member, save: bool) -> bool:
    layer, held = ColumnParallelLinear(8, 4 * me.world_size, save_gathered=save), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.append(tuple(t.shape)) or t, lambda t: t
    ):
        layer(torch.randn(16, 8))
    return (16 * me.world_size, 8) in held


@pytest.mark.parametrize("save", [False, True])
def test_save_gathered_keeps_the_gathered_input(world, save: bool) -> None:
    assert world.run(kept_of_a_gather, save) == [save] * 2


def bound_of_weights(me: Member) -> float:
    torch.manual_seed(0)
    return float(local(RowParallelLinear(512, 64).weight.detach()).abs().max()) * 512**0.5


def test_initial_weights_match_the_whole_layer(world) -> None:
    assert all(0.95 < found <= 1 for found in world.run(bound_of_weights))


class AlwaysTheSecond(torch.nn.Module):
    """A router: half of the weight for expert 1, for every token."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((x.shape[0], 1), 0.5), torch.full((x.shape[0], 1), 1)


def layer_with_a_router(me: Member) -> None:
    layer, x = MoE(16, 8, 2 * me.world_size, 2, router=AlwaysTheSecond()), torch.randn(3, 16)
    up, down = (
        local(layer.experts.gate_up_proj.detach())[1].clone(),
        local(layer.experts.down_proj.detach())[1].clone(),
    )
    for weight in (up, down):
        dist.broadcast(weight, 0)
    gate, value = (x @ up.t()).chunk(2, -1)
    assert torch.allclose(
        layer(x), 0.5 * (torch.nn.functional.silu(gate) * value) @ down.t(), atol=1e-5
    )


def test_custom_router(world) -> None:
    world.run(layer_with_a_router)


def columns_of_a_lookup(me: Member) -> None:
    tables = [torch.randn(5, 4), torch.randn(5, 2)]
    y = tw.embedding_bag(tables, torch.arange(4) % 5, torch.arange(5), columns=[2, 0])
    assert torch.equal(y[:, 2:6], tables[0][[0, 1]]) and torch.equal(y[:, :2], tables[1][[2, 3]])


def test_lookup_columns(worlds: Worlds) -> None:
    worlds("gloo", 1).run(columns_of_a_lookup)


def gradients_without_weights(me: Member, case: experts.Case) -> None:
    """Gradients of a combine in which all rows have weight one."""
    drawn = combine.draw_all(case, me.world_size, 0)
    once = [combine.Drawn(d.values, d.experts, d.ids, torch.ones_like(d.weights)) for d in drawn]
    c = combine.prepare(case, me.rank, me.world_size, me.device, 0)
    rows = int(c.plan.offsets[-1])
    c.y[rows:] = 0
    y, weights = c.y.requires_grad_(), c.experts.requires_grad_()
    by = combine.coefficients(case, me.rank).float()
    (tw.grouped_matmul_combine(y, weights, c.plan).float() * by).sum().backward()
    with mock.patch.object(combine, "draw_all", return_value=once):
        wanted_y, wanted_weights, _ = combine.expected_gradients(case, me.rank, me.world_size, 0)
    combine.verify_near(y.grad[:rows], wanted_y, case, "y")
    combine.verify_near(weights.grad, wanted_weights, case, "experts")


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_combine_without_weights(worlds: Worlds, size: int) -> None:
    worlds("gloo", size).run(
        gradients_without_weights, experts.Case((4,), experts=2, depth=16, cols=24)
    )


# --- Calls that change ---


def changed_after_accepted(me: Member) -> None:
    x, w, rows = torch.randn(4, 8), torch.randn(6, 8), 4 * me.world_size
    tw.all_gather_matmul(x, w)
    tw.all_gather_matmul(x, w, out=torch.empty(rows, 6))
    me.barrier()

    def into(out: torch.Tensor) -> None:
        torch.ops.tileweave.all_gather_matmul.out(x, w, None, name_of(None), out=out)

    with pytest.raises(tw.InputError, match="contiguous"):
        torch.ops.tileweave.all_gather_matmul(torch.randn(8, 4).t(), w, None, name_of(None))
    for out in (torch.empty(6, rows).t(), torch.empty(rows + 1, 6)):
        with pytest.raises(tw.InputError, match="contiguous"):
            into(out)


def test_changed_calls_are_checked_again(world) -> None:
    world.run(changed_after_accepted)


def another_call(me: Member, what: str) -> str:
    """After matching calls, rank 1 makes one that does not match. Return the error of this rank."""
    odd, tables = me.rank == 1, [torch.zeros(5, 4)]
    layout = tw.EmbeddingLayout.in_rank_order([(4,)] * me.world_size)
    x, ids, w = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(2, 6, 8)

    def bags(mode: str) -> None:
        tw.embedding_bag_all_to_all(
            tables, torch.arange(4), torch.arange(5), layout=layout, mode=mode
        )

    y, plan = tw.dispatch_grouped_matmul(x, w, ids, max_tokens=6)
    bags("sum")
    tw.grouped_matmul_combine(y, torch.zeros(2, 9, 6), plan)
    me.barrier()
    calls = {
        "embedding": lambda: bags("mean" if odd else "sum"),
        "route": lambda: tw.dispatch_grouped_matmul(x, w, ids, max_tokens=5 if odd else 6),
        "dispatch": lambda: tw.dispatch_grouped_matmul(
            x, torch.zeros(2, 7 if odd else 6, 8), plan=plan
        ),
        "combine": lambda: tw.grouped_matmul_combine(y, torch.zeros(2, 8 if odd else 9, 6), plan),
    }
    try:
        calls[what]()
        time.sleep(0.5)
        tw.synchronize()
    except tw.TileweaveError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("what", ["embedding", "route", "dispatch", "combine"])
def test_mismatched_calls_raise(what: str) -> None:
    ends = one_shot("gloo", 2, another_call, what, extra={"TILEWEAVE_TIMEOUT": "2"})
    assert "RankMismatchError" in [end.value for end in ends]
