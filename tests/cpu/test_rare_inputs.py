"""Rare inputs that are allowed, and inputs that are refused because kernels would read past them;
two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import refusal, unfused
from tests.support.worlds import Member, Worlds, one_shot

import tileweave as tw
from tileweave.nn import ShardedEmbeddingBag
from tileweave.nn.shards import local
from tileweave.ops.core import collectives
from tileweave.ops.embedding.inputs import FusedOptimizer
from tileweave.planning.sharding import TableSpec


@pytest.fixture
def world(worlds: Worlds):
    return worlds("gloo", 2)


def module_of(me: Member, **options) -> tuple[ShardedEmbeddingBag, torch.Tensor, torch.Tensor]:
    module = ShardedEmbeddingBag([TableSpec(f"t{i}", 6, 4, 1.0) for i in range(4)], **options)
    return module, torch.ones(4 * 3, dtype=torch.int64), torch.arange(4 * 3) % 6


# --- Fused steps ---


def change_of_tables(me: Member, weighted: bool) -> list[tuple[bool, bool]]:
    module, lengths, values = module_of(me, optimizer="sgd", learning_rate=1.0)
    frozen = module.weights()[1].requires_grad_(False)
    before = [w.detach().clone() for w in module.weights()]
    if weighted:
        indices, offsets, weights = tw.distribute_indices(
            lengths, values, module.features, weights=torch.ones(12)
        )
        weights.requires_grad_()
        module.lookup(indices, offsets, weights, 6).sum().backward()
        assert float(weights.grad.abs().sum()) > 0
    else:
        module(lengths, values).sum().backward()
    assert not frozen.requires_grad
    return [
        (w.requires_grad, not torch.equal(w, old))
        for w, old in zip(module.weights(), before, strict=True)
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_step_leaves_frozen_tables_unchanged(world, weighted: bool) -> None:
    assert world.run(change_of_tables, weighted) == [[(True, True), (False, False)]] * 2


def optimizers_refused(me: Member) -> list[str]:
    tables = [torch.zeros(4, 4, requires_grad=True)]
    indices, offsets = torch.arange(4), torch.arange(5)
    wrong = [
        FusedOptimizer("adagrad", torch.ones(1), [torch.zeros(4, 2)[:, 0]]),
        FusedOptimizer("sgd", torch.ones(1, dtype=torch.float64)),
        FusedOptimizer("sgd", torch.ones(1, device="meta")),
    ]
    return [refusal(tw.embedding_bag, tables, indices, offsets, optimizer=o) for o in wrong]


def test_wrong_optimizer_states_are_refused(world) -> None:
    for errors in world.run(optimizers_refused):
        assert all(error.startswith("InputError") for error in errors), errors


def moved_and_saved(me: Member) -> list[object]:
    module, lengths, values = module_of(me, optimizer="adagrad")
    module(lengths, values).sum().backward()
    saved = module.state_dict()
    other, _, _ = module_of(me, optimizer="adagrad")
    other.load_state_dict(saved)
    moments = [m for name, m in saved.items() if name.rpartition(".")[2].startswith("moment")]
    same = all(torch.equal(a, b) for a, b in zip(moments, other.optimizer.states, strict=True))
    other.to(torch.bfloat16)
    kept = all(torch.equal(a, b) for a, b in zip(moments, other.optimizer.states, strict=True))
    empty, _, _ = module_of(me, optimizer="adagrad", device="meta")
    empty.to_empty(device="cpu")
    places = {
        str(t.device) for t in (*empty.weights(), empty.optimizer.rate, *empty.optimizer.states)
    }
    return [
        float(sum(m.sum() for m in moments)) > 0,
        same,
        kept,
        {w.dtype for w in other.weights()},
        places,
    ]


def test_moments_are_saved_and_move_with_the_tables(world) -> None:
    assert world.run(moved_and_saved) == [[True, True, True, {torch.bfloat16}, {"cpu"}]] * 2


def test_unknown_optimizer_is_refused(world) -> None:
    assert all("optimizer 'nope'" in error for error in world.run(unknown_optimizer))


def unknown_optimizer(me: Member) -> str:
    return refusal(module_of, me, optimizer="nope")


def dtype_of_whole_tables(me: Member) -> list[torch.dtype]:
    one = ShardedEmbeddingBag(
        [TableSpec("t", 4, 4, 1.0)], dtype=torch.bfloat16, out_dtype=torch.float32
    )
    return [t.dtype for t in one.whole_tables()]


def test_whole_tables_have_one_dtype(world) -> None:
    assert world.run(dtype_of_whole_tables) == [[torch.bfloat16]] * 2


def whole_tables_of_none(me: Member) -> list[torch.Tensor]:
    return ShardedEmbeddingBag([]).whole_tables()


def test_no_tables_are_allowed(world) -> None:
    assert world.run(whole_tables_of_none) == [[]] * 2


# --- Ids ---


def ids_refused(me: Member) -> list[str]:
    lengths, features = torch.ones(2, dtype=torch.int64), [[0], [1]]
    steps, weights = torch.arange(4)[::2], torch.ones(2, requires_grad=True)
    return [
        refusal(tw.distribute_indices, lengths, steps, features),
        refusal(
            tw.distribute_indices, lengths, torch.arange(2), features, weights=torch.ones(4)[::2]
        ),
        refusal(tw.distribute_indices, lengths, torch.arange(2), features, weights=weights),
    ]


def test_strided_ids_and_lost_weight_gradients_are_refused(world) -> None:
    for with_gaps, weights, tracked in world.run(ids_refused):
        assert "strides (2,)" in with_gaps and "strides (2,)" in weights and "gradient" in tracked


# --- Experts ---


def plans_refused(me: Member) -> list[str]:
    experts, ids = torch.ones(2, 8, 4), torch.zeros(4, 1, dtype=torch.int64)
    y, plan = tw.dispatch_grouped_matmul(torch.ones(4, 4), experts, ids)
    shared = torch.ones(plan.bound, 8)
    with torch.no_grad():
        return [
            refusal(tw.dispatch_grouped_matmul, torch.ones(2, 4), experts, plan=plan),
            refusal(tw.swiglu, y[:2], plan),
            refusal(
                tw.dispatch_grouped_matmul,
                shared.view(-1)[:16].view(4, 4),
                experts,
                plan=plan,
                out=shared,
            ),
        ]


def test_plan_of_other_tokens_and_aliased_result_are_refused(world) -> None:
    for tokens, rows, alias in world.run(plans_refused):
        assert (
            "2 tokens with ids of 4" in tokens and "plan" in rows and "storage of an input" in alias
        )


def changed_in_place(me: Member) -> float:
    y, plan = tw.dispatch_grouped_matmul(
        torch.ones(4, 4), torch.ones(2, 8, 4), torch.zeros(4, 1, dtype=torch.int64)
    )
    down = torch.ones(2, 4, 8, requires_grad=True)
    with unfused(me):
        tw.grouped_matmul_combine(y, down, plan).add_(1).sum().backward()
    return float(down.grad.abs().sum())


def test_unfused_sums_of_experts_may_be_changed(world) -> None:
    first, second = world.run(changed_in_place)
    assert first > 0 == second


# --- All operators ---


def of_autograd(me: Member) -> list[object]:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    out = torch.zeros(2 * me.world_size, 4)
    before = out._version
    tw.all_gather_matmul(x, w, out=out)
    table = torch.zeros(4, 4, requires_grad=True)
    counted = table._version
    y = tw.embedding_bag(
        [table], torch.arange(4), torch.arange(5), optimizer=FusedOptimizer("sgd", torch.ones(1))
    )
    y.sum().backward()
    x.requires_grad_()
    y = tw.all_gather_matmul(x, w)
    again = refusal(torch.autograd.grad, y.square().sum(), x, create_graph=True)
    return [out._version > before, table._version > counted, again.startswith("UnsupportedError")]


def test_autograd_tracks_writes_and_undifferentiable_inputs(world) -> None:
    assert world.run(of_autograd) == [[True] * 3] * 2


def layers_under_autocast(me: Member) -> list[tuple[torch.dtype, float, torch.dtype]]:
    """Per module: the dtype of its result, the distance of that from the result in fp32, and the
    dtype of its weight gradient."""
    torch.manual_seed(me.rank)
    found = []
    for layer, x in (
        (tw.nn.ColumnParallelLinear(16, 32), torch.randn(16, 16)),
        (tw.nn.RowParallelLinear(32, 16), torch.randn(32, 16)),
        (tw.nn.RowParallelLinear(32, 16, scatter=False), torch.randn(16, 16)),
        (tw.nn.MoE(16, 16, num_experts=4, top_k=2), torch.randn(4, 16)),
    ):
        with torch.no_grad():
            want = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.sum().backward()
        dtypes = {
            parameter.grad.dtype for parameter in layer.parameters() if parameter.grad is not None
        }
        assert len(dtypes) == 1
        found.append(
            (y.dtype, float((y.detach() - want).abs().max() / want.abs().max()), dtypes.pop())
        )
    return found


def test_layers_support_autocast(world) -> None:
    for found in world.run(layers_under_autocast):
        for dtype, error, gradient in found:
            assert dtype == torch.bfloat16 and error < 0.05 and gradient == torch.float32


def shapes_with_nothing_in_the_middle(me: Member) -> list[tuple[int, ...]]:
    y, gathered = tw.all_gather_matmul(torch.ones(2, 0, 8), torch.ones(4, 8), return_gathered=True)
    return [tuple(y.shape), tuple(gathered.shape)]


def test_a_dimension_of_zero_keeps_the_others(world) -> None:
    assert world.run(shapes_with_nothing_in_the_middle) == [[(4, 0, 4), (4, 0, 8)]] * 2


def rows_after_ranks_changed(me: Member, place: str) -> list[bool]:
    """A layer keeps the name of its group, and so does compiled code. The group is destroyed, and
    another one of that name has its ranks in reverse order."""
    layer = tw.nn.ColumnParallelLinear(8, 8, bias=False)
    compiled = torch.compile(layer, backend="aot_eager")
    right = []
    for turned in (False, True):
        rank = dist.get_rank()
        x = torch.full((16, 8), float(rank + 1))
        want = torch.cat([torch.full((16, 8), r + 1.0) for r in range(2)]) @ local(layer.weight).T
        right += [torch.allclose(call(x), want, atol=1e-4) for call in (compiled, layer)]
        if not turned:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", init_method=f"file://{place}", rank=1 - rank, world_size=2
            )
    return right


def test_layer_finds_a_new_group_of_the_same_name(tmp_path: Path) -> None:
    outcomes = one_shot("gloo", 2, rows_after_ranks_changed, str(tmp_path / "store"))
    assert [outcome.value for outcome in outcomes] == [[True] * 4] * 2


def odd_one_of_many_features(me: Member) -> str:
    """The list of features alone is longer than the text that ranks exchange."""
    features = [list(range(100)), list(range(100, 200))]
    lengths = torch.ones(200 * (1 + me.rank), dtype=torch.int64)
    with mock.patch.dict(os.environ, {"TILEWEAVE_DEBUG": "1"}):
        return refusal(
            tw.distribute_indices,
            lengths,
            torch.zeros(lengths.numel(), dtype=torch.int64),
            features,
        )


def test_mismatch_after_many_features_is_found(world) -> None:
    assert all(
        text.startswith("RankMismatchError: asked: rank")
        for text in world.run(odd_one_of_many_features)
    )


# --- Unfused calls that do not match: gloo would end the process ---


def unfused_calls_that_differ(me: Member) -> list[str]:
    rows, w = 4 + 2 * me.rank, torch.ones(6, 8)
    x, ids = torch.ones(rows, 8), torch.zeros(rows, 2, dtype=torch.int32)
    group, split = dist.group.WORLD, [3, 3 + me.rank]
    numbers = torch.ones(6, dtype=torch.int32 if me.rank else torch.float32)
    with unfused(me):
        found = [
            refusal(tw.all_gather_matmul, x, w),
            refusal(tw.matmul_reduce_scatter, x, w),
            refusal(tw.matmul_all_reduce, x, w),
            refusal(tw.matmul_all_to_all, x, w, scatter_dim=0, gather_dim=1),
            refusal(tw.dispatch_grouped_matmul, x, torch.ones(2, 6, 8), ids),
            refusal(tw.all_gather_matmul if me.rank else tw.matmul_all_reduce, x[:4], w),
            refusal(collectives.all_to_all_whole, numbers, [3, 3], [3, 3], group),
            refusal(collectives.all_to_all_whole, torch.ones(sum(split)), split, [3, 3], group),
        ]
        right = tw.all_gather_matmul(x[:4], w)
    return [
        *found,
        "" if bool((right == 8).all()) and right.shape[0] == 8 else "the group is of no more use",
    ]


def test_unfused_mismatch_raises_on_every_rank(world) -> None:
    first, second = world.run(unfused_calls_that_differ)
    assert first == second
    *refused, after = first
    assert after == "" and all(
        text.startswith("RankMismatchError: asked: rank") for text in refused
    ), refused
    assert "sends 4 elements to rank 1, which expects 3" in refused[-1]


# one per rank
SUMS = {
    torch.float16: (2048, 1, 1),
    torch.float32: (1e8, 1, -1e8),
    torch.float64: (1 + 2**-40, 1, 0),
}


def sums_of_all(me: Member) -> list[float]:
    mine = [torch.tensor([parts[me.rank]], dtype=dtype) for dtype, parts in SUMS.items()]
    return [float(collectives.all_reduce(x, dist.group.WORLD)) for x in mine]


def test_sums_are_in_rank_order_and_rounded_once(worlds: Worlds) -> None:
    assert worlds("gloo", 3).run(sums_of_all) == [[2050.0, 0.0, 2 + 2**-40]] * 3
