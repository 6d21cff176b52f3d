"""Embedding modules and lookups: mismatched ranks, modules on meta, tables that share memory,
compilers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.embedding.bag_all_to_all_fused import pieces_of
from tileweave.ops.embedding.distribute_indices import InTorch, _layout
from tileweave.ops.embedding.table_gradient import _on_device
from tileweave.planning.sharding import TableSpec

FOUR = [TableSpec(f"t{i}", 6, 4, 1.0) for i in range(4)]
ONE = FOUR[:1]  # so that one rank of two has none


@pytest.fixture
def world(worlds: Worlds):
    return worlds("gloo", 2)


def on_both(world: World, body: Callable[..., object], *arguments: object) -> list:
    """Results of all ranks, unfused and then with interpreted kernels."""
    return [
        found
        for interpreted in (False, True)
        for found in run_either(world, interpreted, body, *arguments)
    ]


def batch_of(tables: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(tables * 3, dtype=torch.int64), torch.arange(tables * 3) % 6


def first_bag(module: ShardedEmbeddingBag) -> torch.nn.Module:
    """What holds the first table of this rank."""
    return next(module.embedding_bags.children())


# --- How tables start ---


def started(me: Member) -> list[tuple[int, list[list[float]]]]:
    """(table, weight) of this rank, with equal seeds on all ranks."""
    torch.manual_seed(11)
    module = ShardedEmbeddingBag(FOUR, device="cpu")
    shards = module.plan.of_rank(me.rank)
    return [
        (shard.table, weight.tolist())
        for shard, weight in zip(shards, module.weights(), strict=True)
    ]


def test_equal_seeds_give_different_tables_per_rank(worlds: Worlds) -> None:
    two = dict(pair for found in worlds("gloo", 2).run(started) for pair in found)
    one = dict(worlds("gloo", 1).run(started)[0])
    assert len(two) == len(one) == 4
    for table, weight in two.items():
        assert weight == one[table], "on whichever rank"
        assert all(weight != other for number, other in two.items() if number != table)


# --- Ranks that pass different arguments ---

KINDS = {
    "values": (("int64", None), ("int32", None)),
    "weights": (("int64", "float16"), ("int64", "bfloat16")),
    "having weights": (("int64", None), ("int64", "float32")),
    "what no lookup reads": (("int16", None), ("int16", None)),
}


def other_kinds(me: Member, name: str) -> str:
    """Return the error; a call works afterwards."""
    module, (lengths, values) = ShardedEmbeddingBag(FOUR), batch_of(4)
    of_values, of_weights = KINDS[name][me.rank]
    weights = None if of_weights is None else torch.ones(12, dtype=getattr(torch, of_weights))
    found = refusal(module, lengths, values.to(getattr(torch, of_values)), weights)
    assert module(lengths, values).shape == (3, 16)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_different_arguments_on_one_rank_raise_on_all(world, name: str) -> None:
    error = "InputError" if name == "what no lookup reads" else "RankMismatchError"
    for said in on_both(world, other_kinds, name):
        assert said.startswith(f"{error}: asked: rank 0: ")
        for rank, (values, weights) in enumerate(KINDS[name]):
            assert f"rank {rank}: {values} values, {weights or 'no'} weights" in said


def results_of_other_dtypes(me: Member) -> str:
    dtype = (torch.float16, torch.bfloat16)[me.rank]
    layout = tw.EmbeddingLayout.in_rank_order([(8,)] * 2)
    return refusal(
        tw.embedding_bag_all_to_all,
        [torch.ones(4, 8)],
        *batch_of_bags(4),
        layout=layout,
        out_dtype=dtype,
    )


def batch_of_bags(bags: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(bags) % 4, torch.arange(bags + 1)


def test_different_half_dtypes_on_one_rank_raise_on_all(world) -> None:
    for said in world.run(results_of_other_dtypes):
        assert said.startswith("RankMismatchError")


# --- Modules on meta ---


def materialised(me: Member, specs: list[TableSpec], optimizer: str | None, way: str) -> None:
    donor = ShardedEmbeddingBag(specs, optimizer=optimizer, learning_rate=0.5)
    module = ShardedEmbeddingBag(specs, optimizer=optimizer, learning_rate=0.5, device="meta")
    if way == "assign":
        module.load_state_dict(donor.state_dict(), assign=True)
    else:
        garbage = partial(torch.full_like, fill_value=7e5)
        with mock.patch.object(torch, "empty_like", garbage):
            module.to_empty(device="cpu")
        if way == "reset":
            for number in module.buffers():
                number.fill_(7e5)
            module.reset_parameters()
        assert all(
            (number == (0.5 if name == "rate" else 0)).all()
            for name, number in module.named_buffers()
        )
        module.load_state_dict(donor.state_dict())
    assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    steps = [of(*batch_of(len(specs))) for of in (donor, module)]
    assert torch.equal(*steps)
    for y in steps:
        y.sum().backward()
    for one, other in zip(donor.whole_tables(), module.whole_tables(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["reset", "no reset", "assign"])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adagrad"])
def test_module_from_meta_trains_like_any_other(world, optimizer: str | None, way: str) -> None:
    for specs in (ONE, FOUR):
        on_both(world, materialised, specs, optimizer, way)


def converted(me: Member) -> list[object]:
    """Tables of another dtype, and a checkpoint with one, which the rank without tables does not
    see; then results."""
    module = ShardedEmbeddingBag(ONE).to(torch.bfloat16)
    other = ShardedEmbeddingBag(ONE, device="meta")
    other.load_state_dict(module.state_dict(), assign=True)
    found = [whole.dtype for of in (module, other) for whole in of.whole_tables()]
    given = ShardedEmbeddingBag(ONE, out_dtype=torch.float16).to(torch.bfloat16)
    found += [of(*batch_of(1)).dtype for of in (module, other, given)]
    return [*found, module.share_memory().float()(*batch_of(1)).dtype]


def test_converted_module_has_one_dtype_on_all_ranks(world) -> None:
    wanted = [torch.bfloat16] * 3 + [torch.float32, torch.float16, torch.float32]
    assert on_both(world, converted) == [wanted] * 4


# --- Options, tables, and modules changed by other code ---

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mode", {"mode": "max"}),
    ("float64", {"dtype": torch.float64}),
    ("int32", {"out_dtype": torch.int32}),
    ("optimizer", {"optimizer": "adam"}),
    ("learning_rate -1", {"learning_rate": -1}),
    ("epsilon nan", {"optimizer": "adagrad", "epsilon": float("nan")}),
]


def refused_in_modules(me: Member) -> None:
    for said, options in OPTIONS:
        with pytest.raises(tw.InputError, match=said):
            ShardedEmbeddingBag(FOUR, **options)
    module, right = ShardedEmbeddingBag(FOUR), [torch.ones(6, 4)] * 4
    before = [w.detach().clone() for w in module.weights()]
    for wrong in (
        [torch.ones(1, 4)] * 4,
        [torch.ones(6, 5)] * 4,
        right[:3],
        [*right, right[0]],
        [torch.ones(4, 6)] * 4,
    ):
        with pytest.raises(tw.InputError, match=r"allowed: \[\(6, 4\), \(6, 4\)"):
            module.load_tables(wrong)
    assert all(map(torch.equal, before, module.weights()))
    module.load_tables(right)
    assert all((w == 1).all() for w in module.weights())


def test_module_refuses_options_and_tables_that_do_not_fit(world) -> None:
    world.run(refused_in_modules)


def changed_modules(me: Member) -> None:
    lengths, values = batch_of(4)
    module = ShardedEmbeddingBag(FOUR)
    y = module(lengths, values)
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    assert torch.equal(torch.func.functional_call(module, doubled, (lengths, values)), 2 * y)
    torch.nn.utils.parametrizations.weight_norm(first_bag(module), "weight")
    assert torch.allclose(module(lengths, values), y, atol=1e-6)
    assert "load_tables of parametrized" in refusal(module.load_tables, [torch.ones(6, 4)] * 4)
    assert "reset_parameters of parametrized" in refusal(module.reset_parameters)
    stepping = ShardedEmbeddingBag(FOUR, optimizer="adagrad")
    stepping.register_buffer("seen", torch.zeros(1))
    stepping(lengths, values).sum().backward()
    moments = [t for name, t in stepping.named_buffers() if "moment" in name]
    assert len(moments) == 2 and all(t.sum() > 0 for t in moments)
    assert stepping.half().seen.dtype == torch.float16 and stepping.rate.dtype == torch.float32
    torch.nn.utils.parametrizations.weight_norm(first_bag(stepping), "weight")
    assert "fused step of parametrized" in refusal(stepping, lengths, values)


def test_modules_changed_by_other_code(world) -> None:
    on_both(world, changed_modules)


# --- Lookups ---


def steps_between(me: Member, kind: str) -> tuple[str, bool]:
    """The second lookup of a loss steps first. Its weight gradient is right, that of the first
    would not be."""
    layout = tw.EmbeddingLayout.in_rank_order([(4,), ()])
    tables = [torch.ones(6, 4, requires_grad=kind != "frozen")] if me.rank == 0 else []
    states = [torch.zeros(6) for _ in tables] if kind == "adagrad" else []
    optimizer = tw.FusedOptimizer("sgd" if kind == "frozen" else kind, torch.ones(1), states)
    bags = batch_of_bags(4 * len(tables))

    def lookup(scales: torch.Tensor) -> torch.Tensor:
        return tw.embedding_bag_all_to_all(
            tables,
            *bags,
            batch=4,
            layout=layout,
            per_sample_weights=scales,
            optimizer=optimizer,
            out_dtype=torch.float32,
        )

    scales = [torch.ones(4 * len(tables), requires_grad=True) for _ in range(2)]
    said = refusal((lookup(scales[0]) + lookup(scales[1])).sum().backward)
    again = torch.ones(4 * len(tables), requires_grad=True)
    lookup(again).sum().backward()
    return said[:60], again.grad is not None


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "frozen"])
def test_weight_gradient_after_a_later_step(world, kind: str) -> None:
    said = (
        "" if kind == "frozen" else "InputError: asked: embedding_bag_all_to_all: gradients of pe"
    )
    assert on_both(world, steps_between, kind) == [(said, True), ("", True)] * 2


def tables_that_share_memory(me: Member) -> None:
    layout = tw.EmbeddingLayout.in_rank_order([(4, 4)] * 2)
    memory, bags = torch.ones(12, 4), batch_of_bags(8)

    def lookup(tables: list[torch.Tensor], states: list[torch.Tensor]) -> str:
        tables = [t.detach().requires_grad_() for t in tables]
        optimizer = tw.FusedOptimizer("adagrad", torch.ones(1), states)
        return refusal(
            tw.embedding_bag_all_to_all, tables, *bags, layout=layout, optimizer=optimizer
        )

    own, both = [torch.zeros(6) for _ in range(2)], [memory[:6], memory[6:]]
    assert "share memory" in lookup([memory[:6]] * 2, own)
    assert "share memory" in lookup([memory[:6], memory[5:11]], own)
    assert "share memory" in lookup(both, own[:1] * 2)
    assert lookup(both, own) == ""
    nan = tw.FusedOptimizer("sgd", torch.ones(1), epsilon=float("nan"))
    with pytest.raises(tw.InputError, match="epsilon"):
        tw.embedding_bag_all_to_all(both, *bags, layout=layout, optimizer=nan)


def test_tables_that_share_memory_take_no_fused_step(world) -> None:
    on_both(world, tables_that_share_memory)


def shapes_and_results(me: Member) -> None:
    layout, bags = tw.EmbeddingLayout.in_rank_order([(4,)] * 2), batch_of_bags(4)
    flat = [torch.ones(4)]
    for attempt in (
        partial(tw.embedding_bag_all_to_all, flat, *bags),
        partial(tw.embedding_bag_all_to_all, flat, *bags, layout=layout),
        partial(tw.embedding_bag, flat, *bags),
        partial(tw.embedding_bag, flat, *bags, columns=[0]),
    ):
        with pytest.raises(tw.InputError, match="two dimensions"):
            attempt()
    out = torch.zeros(2, 8, requires_grad=True)
    with pytest.raises(tw.InputError, match="out= with tensors that require"):
        tw.embedding_bag_all_to_all([torch.ones(4, 4)], *bags, layout=layout, out=out)


def test_flat_tables_and_differentiable_results_are_refused(world) -> None:
    on_both(world, shapes_and_results)


def test_default_device_does_not_move_host_numbers() -> None:
    layout = tw.EmbeddingLayout.in_rank_order([(4,)] * 2)
    _on_device.cache_clear()
    _layout.cache_clear()
    with torch.device("meta"):
        where = _layout(((0,), (1,)), 2, 0, torch.device("cpu"))
        offsets, told, *_ = InTorch.unpack(
            torch.ones(2, 4, dtype=torch.int64, device="cpu").view(-1), 1, where
        )
        assert pieces_of(layout, 0, 2, True)[0].device.type == "cpu"
    assert {t.device.type for t in (where.mine, where.owners, offsets, told)} == {"cpu"}


def used_after_fake_tensors(me: Member) -> None:
    """The first call is on tensors without data. Whatever becomes of it, later calls work."""
    _on_device.cache_clear()
    _layout.cache_clear()
    module, batch = ShardedEmbeddingBag(FOUR), batch_of(4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, suppress(RuntimeError):
        module(*map(mode.from_tensor, batch))
    y = module(*batch)
    y.sum().backward()
    assert type(y) is torch.Tensor and all(w.grad is not None for w in module.weights())


def test_fake_tensors_are_not_kept(world) -> None:
    on_both(world, used_after_fake_tensors)


# --- Compilers ---


def compiled_without_tables(me: Member, kind: str, weighted: bool, anchored: bool) -> None:
    """Rank 1 has no tables: its part in backward has no result of its own."""
    torch._dynamo.reset()
    layout = tw.EmbeddingLayout.in_rank_order([(4,), ()])
    anchor = torch.zeros(0, requires_grad=True) if anchored else None
    results = []
    for compiled in (False, True):
        tables = [torch.ones(6, 4, requires_grad=True)] if me.rank == 0 else []
        bags = batch_of_bags(4 * len(tables))
        states = [torch.zeros(6) for _ in tables] if kind == "adagrad" else []
        fused = (
            {} if kind == "dense" else {"optimizer": tw.FusedOptimizer(kind, torch.ones(1), states)}
        )
        scales = torch.ones(4 * len(tables), requires_grad=True) if weighted else None

        def lookup(indices, offsets, scales, tables=tables, fused=fused):
            return tw.embedding_bag_all_to_all(
                tables,
                indices,
                offsets,
                batch=4,
                layout=layout,
                out_dtype=torch.float32,
                per_sample_weights=scales,
                anchor=anchor,
                **fused,
            )

        call = torch.compile(lookup, fullgraph=True, backend="aot_eager") if compiled else lookup
        for _ in range(2):
            call(*bags, scales).square().sum().backward()
        found = [
            *tables,
            *[t.grad for t in tables],
            *states,
            *([] if scales is None else [scales.grad]),
        ]
        results.append([t for t in found if t is not None])
    for plain, traced in zip(*results, strict=True):
        assert torch.allclose(plain, traced, atol=1e-6)


@pytest.mark.parametrize(("weighted", "anchored"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["dense", "sgd", "adagrad"])
def test_rank_without_tables_compiles_its_backward(
    world, kind: str, weighted: bool, anchored: bool
) -> None:
    on_both(world, compiled_without_tables, kind, weighted, anchored)


def batches_that_change(me: Member, train: bool) -> int:
    """How often a lookup of many batch sizes is compiled. Its results are right."""
    torch._dynamo.reset()
    layout, count = tw.EmbeddingLayout.in_rank_order([(4,)] * 2), 0
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(me.rank), requires_grad=train)

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable[..., object]:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def lookup(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return tw.embedding_bag_all_to_all([table], indices, offsets, layout=layout)

    compiled = torch.compile(lookup, fullgraph=True, backend=backend)
    for batch in (6, 7, 20, 33, 12):
        indices, offsets = torch.arange(batch) % 6, torch.arange(batch + 1)
        for t in (indices, offsets):
            torch._dynamo.mark_dynamic(t, 0)
        found = []
        for call in (lookup, compiled):
            y = call(indices, offsets)
            found.append(
                (y.detach(), torch.autograd.grad(y.square().sum(), table)[0]) if train else (y,)
            )
        assert all(map(torch.equal, *found)), batch
    return count


@pytest.mark.parametrize("train", [False, True], ids=["lookup", "gradient"])
def test_lookups_of_any_batch_are_compiled_once(world, train: bool) -> None:
    assert on_both(world, batches_that_change, train) == [1] * 4


# --- Tables that features share ---

SHARED = [
    TableSpec("user", 11, 8, 2.0, features=2),
    TableSpec("day", 7, 4, 1.0),
    TableSpec("item", 9, 16, 60.0, features=3),  # cut by columns
]


def features_share_tables(me: Member, sparse: bool) -> None:
    """Outputs, gradients and a step of SGD, against nn.EmbeddingBag on whole tables."""
    module = ShardedEmbeddingBag(SHARED, sparse=sparse)
    assert any(s.dim < SHARED[s.table].dim for s in module.plan.shards), "one is cut by columns"
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(s.rows, s.dim, generator=generator) for s in SHARED]
    module.load_tables(whole)
    bags = [torch.nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum") for w in whole]
    lists = []  # of each rank and feature
    for rank in range(me.world_size):
        draws = torch.Generator().manual_seed(50 + rank)
        lists.append(
            [
                (
                    lengths := torch.randint(0, 4, (3,), generator=draws),
                    torch.randint(0, s.rows, (int(lengths.sum()),), generator=draws),
                    number,
                )
                for number, s in enumerate(SHARED)
                for _ in range(s.features)
            ]
        )
    lengths, values, _ = zip(*lists[me.rank], strict=True)
    y = module(torch.cat(lengths), torch.cat(values))
    want = torch.stack(
        [torch.cat([bags[n](v, m.cumsum(0) - m) for m, v, n in mine], 1) for mine in lists]
    )
    torch.testing.assert_close(y, want[me.rank])
    y.square().sum().backward()
    want.square().sum().backward()
    for shard, weight in zip(module.plan.of_rank(me.rank), module.weights(), strict=True):
        grad, of = weight.grad, bags[shard.table].weight.grad
        assert grad is not None and of is not None
        found = grad.to_dense() if sparse else grad
        torch.testing.assert_close(found, of[:, shard.column : shard.column + shard.dim])
    for owner in (module, *bags):
        torch.optim.SGD(owner.parameters(), lr=0.1).step()
    for table, bag in zip(module.whole_tables(), bags, strict=True):
        torch.testing.assert_close(table, bag.weight.detach())


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_features_share_a_table(worlds: Worlds, ranks: int, interpreted: bool) -> None:
    run_either(worlds("gloo", ranks), interpreted, features_share_tables, ranks == 3)


def refused_step(me: Member) -> str:
    return refusal(partial(ShardedEmbeddingBag, SHARED, optimizer="sgd"))


def test_fused_steps_refuse_shared_tables(world) -> None:
    for said in world.run(refused_step):
        assert said.startswith("InputError") and "'user', 'item'" in said, said
        assert "optimizer=None" in said, said


# --- Checkpoints ---


def checkpoints_of_tables(me: Member, folder: str) -> list[str]:
    """Saved on some ranks, loaded where other ranks own the tables."""
    saved, specs = ShardedEmbeddingBag(FOUR, optimizer="adagrad"), tuple(FOUR)
    saved(*batch_of(4)).sum().backward()
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    plan = saved.plan
    turned = replace(plan, shards=tuple(replace(s, rank=1 - s.rank) for s in plan.shards))
    loaded = ShardedEmbeddingBag(specs, plan=turned, optimizer="adagrad")
    state = loaded.state_dict()
    assert not {*state} & {*saved.state_dict()}, "tables moved"
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    assert all(map(torch.equal, saved.whole_tables(), loaded.whole_tables()))
    assert all("embedding_bags.t" in name for name in state), list(state)
    twice = [TableSpec("t", 6, 4, 1.0)] * 2
    return [refusal(ShardedEmbeddingBag, twice), refusal(ShardedEmbeddingBag, [dotted()])]


def dotted() -> TableSpec:
    return TableSpec("a.b", 6, 4, 1.0)


def test_checkpoints_find_tables_on_other_ranks(world, tmp_path: Path) -> None:
    for errors in world.run(checkpoints_of_tables, str(tmp_path)):
        assert all("different names without dots" in error for error in errors), errors
        assert all("features that share a table are one TableSpec" in error for error in errors)
