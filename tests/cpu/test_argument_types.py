"""Arguments of types that no annotation allows: an error of ours, on the rank that passes them and
on its peers, and nothing of it remains."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from typing import Any

import pytest
import torch
from tests.support.calls import refusal
from tests.support.worlds import Member, World, Worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import tileweave as tw
from tileweave.ops.core.argument_types import checks_types, reading

WRONG: tuple[Any, ...] = ("row", 2.5, b"x", object(), {}, torch.zeros(4, 4).to_sparse())


def calls(me: Member) -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Public functions with arguments that fit, all by name."""
    x, w = torch.ones(4 * me.world_size, 16), torch.ones(8, 16)
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    experts = torch.ones(1, 8, 16)
    y, plan = tw.dispatch_grouped_matmul(x, experts, ids)
    tables, bags = [torch.ones(3, 8)], torch.arange(len(x) + 1)
    rows = torch.zeros(len(x), dtype=torch.int64)
    ends = {"scatter_dim": 1, "gather_dim": 0}
    features = [[rank] for rank in range(me.world_size)]
    return {
        "all_gather_matmul": (tw.all_gather_matmul, {"x": x, "w": w, "bias": None}),
        "matmul_reduce_scatter": (tw.matmul_reduce_scatter, {"x": x, "w": w, "out": None}),
        "matmul_all_reduce": (tw.matmul_all_reduce, {"x": x, "w": w, "residual": None}),
        "matmul_all_to_all": (tw.matmul_all_to_all, {"x": x, "w": w, **ends}),
        "all_to_all_matmul": (
            tw.all_to_all_matmul,
            {"x": x, "w": w.repeat(1, me.world_size), "scatter_dim": 0, "gather_dim": 1},
        ),
        "dispatch_grouped_matmul": (
            tw.dispatch_grouped_matmul,
            {"x": x, "experts": experts, "topk_ids": ids, "max_tokens": None},
        ),
        "grouped_matmul_combine": (
            tw.grouped_matmul_combine,
            {"y": y, "experts": torch.ones(1, 16, 8), "plan": plan, "topk_weights": None},
        ),
        "swiglu": (tw.swiglu, {"y": y, "plan": plan}),
        "embedding_bag_all_to_all": (
            tw.embedding_bag_all_to_all,
            {"tables": tables, "indices": rows, "offsets": bags, "mode": "sum"},
        ),
        "distribute_indices": (
            tw.distribute_indices,
            {"lengths": rows[: me.world_size], "values": rows[:0], "features": features},
        ),
        "quantize": (tw.quantize, {"x": x, "kind": "row"}),
        "warmup": (tw.warmup, {"op": "all_gather_matmul", "device": "cpu"}),
        "plan_sharding": (tw.plan_sharding, {"tables": [tw.TableSpec("a", 8, 8)], "memory": None}),
        "MoE": (tw.nn.MoE, {"hidden_size": 16, "intermediate_size": 16, "top_k": 1}),
        "SigmoidTopK": (tw.nn.SigmoidTopK, {"num_experts": 4, "scale": 1.0}),
        "ColumnParallelLinear": (tw.nn.ColumnParallelLinear, {"in_features": 16, "gather": True}),
        "ShardedEmbeddingBag": (tw.nn.ShardedEmbeddingBag, {"tables": [], "epsilon": 1e-8}),
        "parallelize": (tw.parallelize, {"model": torch.nn.Linear(2, 2), "sequence_dim": 1}),
    }


SIZES: dict[str, dict[str, Any]] = {  # what these need besides
    "warmup": {"rows": 4, "cols": 8, "depth": 16},
    "plan_sharding": {"world_size": 2},
    "MoE": {"num_experts": 4},
    "SigmoidTopK": {"hidden_size": 16, "top_k": 1},
    "ColumnParallelLinear": {"out_features": 16},
}


def refused(me: Member) -> list[str]:
    """Texts of the calls of which each has one argument of a wrong type; "" if it was taken."""
    found = []
    for name, (call, given) in calls(me).items():
        for at, argument in enumerate(given):
            wrong = [value for value in WRONG if not fits(argument, value)]
            named = given | {argument: wrong[at % len(wrong)]} | SIZES.get(name, {})
            found.append(f"{name} {argument} {named[argument]!r:.30}: {refusal(call, **named)}")
            tw.close()
    return found


def fits(argument: str, value: object) -> bool:
    """A value that the argument may have, or that flags and modes refuse by themselves."""
    return (
        (isinstance(value, str) and argument in ("op", "mode", "kind", "device"))
        or (isinstance(value, float) and argument in ("scale", "epsilon", "memory"))
        or (isinstance(value, torch.Tensor) and argument == "x")
        or (value == {} and argument in ("bias", "out", "residual", "topk_weights", "max_tokens"))
    )


def test_wrong_types_are_refused(worlds: Worlds) -> None:
    for text in worlds("gloo", 2).run(refused, timeout=120)[0]:
        at = [text.find(part) for part in (": InputError: asked: ", "; allowed: ", "; remedy: ")]
        assert -1 < at[0] < at[1] < at[2], text


def wrong_here_only(me: Member) -> None:
    """A list of biases for one weight, which lists of weights have; more ranks than can be."""
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    for bias in ([], [torch.ones(8)], range(3)):
        said = refusal(tw.all_gather_matmul, x, w, bias)
        assert "with one w; allowed: a tensor or None" in said, said
        tw.close()
    tables = [tw.TableSpec("a", 8, 8)]
    assert "at most 65536 ranks" in refusal(tw.plan_sharding, tables, 10**30)


def test_lists_for_one_weight_are_refused(worlds: Worlds) -> None:
    worlds("gloo", 2).run(wrong_here_only)


def quantized_without_numbers(me: Member) -> None:
    for kind, scale in (("row", (4, 1)), ("block", (4, 0))):
        data, scales = tw.quantize(torch.empty(4, 0), kind)
        assert data.shape == (4, 0) and scales.shape == scale
    for kind, scale in (("tensor", (1,)), ("row", (4, 1)), ("block", (4, 2))):
        data, scales = tw.quantize(torch.empty(4, 200, device="meta"), kind)
        assert data.is_meta and data.shape == (4, 200) and scales.shape == scale
        assert data.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32


def test_meta_and_empty_tensors_are_quantized(worlds: Worlds) -> None:
    worlds("gloo", 2).run(quantized_without_numbers)


def one_rank_only(me: Member) -> str:
    """Rank 1 passes a number for the bias, is refused, and calls again; rank 0 does not know."""
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    tw.all_gather_matmul(x, w)
    if me.rank == 1:
        assert "bias=2.5" in refusal(tw.all_gather_matmul, x, w, 2.5)
    found = refusal(tw.all_gather_matmul, x, w) or refusal(tw.all_gather_matmul, x, w)
    tw.close()
    y = tw.all_gather_matmul(x, w)
    assert torch.equal(y, torch.full((8, 8), 16.0))
    return found


def test_peers_learn_of_a_wrong_type(worlds: Worlds) -> None:
    for text in worlds("gloo", 2).run(one_rank_only):
        assert text.startswith(("RankMismatchError", "PeerTimeout")), text


def other_dtypes(me: Member) -> None:
    """With a shared expert: tokens of other dtypes, and an activation that only experts have."""
    torch.manual_seed(me.rank)  # of 300 draws one had a token that a rounding sends elsewhere
    layer = tw.nn.MoE(
        32, 16, 4, 2, fp8="block", shared_intermediate_size=16, dtype=torch.bfloat16
    ).eval()
    x = torch.randn(3, 32)
    with torch.no_grad():
        want = layer(x.bfloat16()).float()
        for dtype in (torch.float32, torch.float16):
            z = layer(x.to(dtype))
            assert z.dtype == dtype and (z.float() - want).norm() < 0.05 * want.norm()
    text = refusal(
        tw.nn.MoE, 32, 16, 4, 2, shared_intermediate_size=16, hidden_act="clamped_swiglu"
    )
    assert "without a shared expert also clamped_swiglu" in text
    for sizes in ((-32, 16, 4, 2), (32, 0, 4, 2)):
        assert "sizes of 1 or more" in refusal(tw.nn.MoE, *sizes), sizes
    for size in (-16, 2**31):
        assert "sizes of 0 or more" in refusal(tw.nn.RowParallelLinear, 32, size)
    assert "whole numbers 64 bits" in refusal(tw.nn.RowParallelLinear, 32, 10**30)
    assert "fewer than 2**59" in refusal(tw.nn.RowParallelLinear, 2**30, 2**30)
    assert "a device of torch" in refusal(tw.nn.ColumnParallelLinear, 32, 16, device="gpu")
    assert "0 to 1, or None" in refusal(tw.parallelize, torch.nn.Linear(2, 2), src_data_rank=2)


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def test_layers_with_a_shared_expert(world: World) -> None:
    world.run(other_dtypes)


NESTED, MAPPING = [[1]], {1: 2}
SPARSE, SCALAR = torch.zeros(4, 16).to_sparse(), torch.tensor(1.0)
COMPLEX = torch.ones(4, 16, dtype=torch.complex64)
TENSORS = (SPARSE, SCALAR, COMPLEX, torch.ones(4, 16, device="meta"))
OTHERS = (None, "x", 3, float("nan"), 10**30, -1, NESTED, MAPPING, object(), range(3), b"x", len)
NONSENSE: tuple[Any, ...] = OTHERS + TENSORS
Take = Callable[[Any], object]


class Router(torch.nn.Module):
    """Returns ``made``, whatever the tokens are."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, _: torch.Tensor) -> Any:
        return self.made


def pair() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def planned(**options: Any) -> torch.nn.Module:
    styles = {"0": tw.parallel.Colwise(**options), "1": tw.parallel.Rowwise()}
    return tw.parallelize(pair(), plan=styles, check=False)


def places(me: Member) -> dict[str, tuple[Take, tuple[Any, ...]]]:
    """What takes one argument, and what of ``NONSENSE`` it may take."""
    whole = torch.nn.Linear(16, 16)
    layers = {
        "ColumnParallelLinear": tw.nn.ColumnParallelLinear(16, 16),
        "a layer that gathers nothing": tw.nn.ColumnParallelLinear(16, 16, gather=False),
        "RowParallelLinear": tw.nn.RowParallelLinear(16, 16),
        "RowParallelLinear(scatter=False)": tw.nn.RowParallelLinear(16, 16, scatter=False),
        "MoE": tw.nn.MoE(16, 16, 4, 1),
        "SoftmaxTopK": tw.nn.SoftmaxTopK(16, 4, 1),
        "SigmoidTopK": tw.nn.SigmoidTopK(16, 4, 1),
        "a parallel model": tw.parallelize(pair(), plan={"0": "colwise", "1": "rowwise"}),
    }
    x, split = torch.ones(4, 16), planned(parts={"q": 8, "k": 8})
    x.requires_grad_()
    bag, rows = tw.nn.ShardedEmbeddingBag([tw.TableSpec("a", 8, 8)]), torch.zeros(4).long()
    bags, tables, rate = torch.arange(5), [torch.ones(3, 8, requires_grad=True)], torch.ones(1)
    lookup = partial(tw.embedding_bag_all_to_all, tables, rows, bags)
    join, spec = tw.parallel.join_projections, tw.TableSpec
    numbers, texts = (3, 10**30, -1), ("x",)
    config = {"hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 4}
    config |= {"model_type": "qwen3_moe", "num_experts_per_tok": 1, "hidden_act": "silu"}
    config |= {"norm_topk_prob": True}
    made = tw.nn.MoE.from_config
    takes: dict[str, tuple[Take, tuple[Any, ...]]] = {
        "explain op": (tw.explain, ()),
        "warmup op": (tw.warmup, ()),
        "warmup tune": (
            lambda v: tw.warmup("swiglu", tune=v),
            OTHERS,
        ),
        "copy_to_group x": (tw.copy_to_group, TENSORS),
        "tables": (lambda v: tw.embedding_bag(v, rows, bags), ()),
        "tables of ranks": (lambda v: tw.embedding_bag_all_to_all(v, rows, bags), ()),
        "replicate": (lambda v: tw.nn.replicate(v, sums=True), ()),
        "replicate sums": (lambda v: tw.nn.replicate(whole, sums=v), (None, *numbers)),
        "FusedOptimizer kind": (lambda v: lookup(optimizer=tw.FusedOptimizer(v, rate)), ()),
        "FusedOptimizer rate": (lambda v: lookup(optimizer=tw.FusedOptimizer("sgd", v)), (SCALAR,)),
        "states": (lambda v: lookup(optimizer=tw.FusedOptimizer("adagrad", rate, v)), ()),
        "layout": (lambda v: lookup(layout=tw.EmbeddingLayout(v, ((8,), (8,)))), ()),
        "columns": (
            lambda v: lookup(layout=tw.EmbeddingLayout(((v,), (v,)), ((8,), (8,)))),
            (),
        ),
        "in_rank_order": (tw.EmbeddingLayout.in_rank_order, (NESTED,)),
        "Colwise parts": (lambda v: tw.parallel.Colwise(parts=v), (None,)),
        "Colwise fp8": (lambda v: tw.parallel.Colwise(fp8=v), (None,)),
        "Rowwise fp8": (lambda v: tw.parallel.Rowwise(fp8=v), (None,)),
        "sequence_dim": (lambda v: tw.parallel.Experts(sequence_dim=v), (None, 3, -1)),
        "size of a part": (lambda v: planned(parts={"q": v, "k": 8}), ()),
        "plan": (lambda v: tw.parallelize(pair(), plan=v), ()),
        "style": (lambda v: tw.parallelize(pair(), plan={"0": v}), ()),
        "mesh": (lambda v: tw.parallelize(pair(), v, {"0": "colwise"}), (None,)),
        "join model": (lambda v: join(v, {}), ()),
        "join state": (lambda v: join(whole, v), (MAPPING,)),
        "join groups": (lambda v: join(whole, {"state": {}, "param_groups": v}), ()),
        "join values": (lambda v: join(split, {"0.q.weight": x, "0.k.weight": v}), (COMPLEX,)),
        "from_linear": (tw.nn.ColumnParallelLinear.from_linear, ()),
        "train_in_fp8": (tw.nn.ColumnParallelLinear(16, 16).train_in_fp8, (None,)),
        "router": (lambda v: tw.nn.MoE(16, 16, 4, 1, router=Router(v))(x), ()),
        "weights": (lambda v: tw.nn.MoE(16, 16, 4, 1, router=Router((v, rows)))(x), ()),
        "config": (made, ()),
        "config size": (lambda v: made(config | {"hidden_size": v}), (3,)),
        "config type": (lambda v: made(config | {"model_type": v}), ()),
        "config blocks": (
            lambda v: made(
                config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": v}}
            ),
            (),
        ),
        "load_tables": (bag.load_tables, ()),
        "lengths": (lambda v: bag(v, rows), ()),
        "rows": (lambda v: tw.nn.ShardedEmbeddingBag([spec("a", v, 8)]), (3,)),
        "name": (lambda v: tw.nn.ShardedEmbeddingBag([spec(v, 8, 8)]), texts),
        "hidden_size": (lambda v: tw.nn.SoftmaxTopK(v, 4, 1), (3,)),
        "num_experts": (lambda v: tw.nn.SigmoidTopK(16, v, 1), (3,)),
        "size of MoE": (lambda v: tw.nn.MoE(v, 16, 4, 1), (3,)),
    }
    # torch multiplies sparse tensors, too
    may = {name: () if name == "MoE" or "Parallel" in name else (SPARSE,) for name in layers}
    return takes | {f"x of {name}": (layer, may[name]) for name, layer in layers.items()}


def nonsense(me: Member) -> list[str]:
    """Texts of refusals, each in a group of no earlier calls."""
    found = []
    for name, (take, may) in places(me).items():
        for value in NONSENSE:
            if any(value is one for one in may):
                continue
            found.append(f"{name} {value!r:.40}: {refusal(take, value)}")
            tw.close()
    return found


def test_nonsense_is_refused(worlds: Worlds) -> None:
    """Of layers, styles, plans and descriptions, also of what is in them."""
    texts = worlds("gloo", 2).run(nonsense, timeout=240)[0]
    assert len(texts) > 600
    three_parts = re.compile(r".*Error: asked: .+; allowed: .+; remedy: .+", re.DOTALL)
    assert [text for text in texts if not three_parts.fullmatch(text)] == []


def as_dtensors(me: Member) -> None:
    """Operators and layers that take plain tensors say which argument is a DTensor."""
    x = torch.ones(4, 16)
    mesh = init_device_mesh("cpu", (me.world_size,))
    given = DTensor.from_local(x, mesh, [Replicate()])
    for take in (
        tw.nn.MoE(16, 16, 4, 1),
        tw.nn.MoE(16, 16, 4, 1, tokens="replicated"),
        tw.nn.SoftmaxTopK(16, 4, 1),
        lambda x: tw.quantize(x, "row"),
    ):
        text = refusal(take, given)
        assert "asked: x as a DTensor with placements" in text, text
        assert "pass x.to_local()" in text, text
        tw.close()
    w, other = torch.ones(16, 16), DTensor.from_local(x, mesh, [Replicate()])
    text = refusal(tw.matmul_all_reduce, x, w, residual=other)
    assert "residual as a DTensor" in text, text


def test_dtensors_of_operators_that_take_none(world: World) -> None:
    world.run(as_dtensors)


def layer_breaks_off(me: Member) -> str:
    """Rank 1 passes no tensor to a layer, is refused, and calls again; rank 0 does not know."""
    layer, x = tw.nn.MoE(16, 16, 4, 1), torch.ones(4, 16)
    layer(x)
    if me.rank == 1:
        assert "MoE.forward with x='x'" in refusal(layer, "x")
    found = refusal(layer, x) or refusal(layer, x)
    tw.close()
    assert layer(x).shape == x.shape
    return found


def test_peers_learn_of_a_wrong_type_in_a_layer(world: World) -> None:
    for text in world.run(layer_breaks_off):
        assert text.startswith(("RankMismatchError", "PeerTimeout")), text


def test_a_layer_passes_memory_errors_on() -> None:
    """Also where nested data is read."""
    for error in (torch.OutOfMemoryError("full"), tw.UnsupportedError("no")):
        with pytest.raises(type(error)) as caught, reading("a", "b", "c"):
            raise error
        assert caught.value is error
    said = "asked: a; allowed: b; remedy: c"
    with pytest.raises(tw.InputError, match=said), reading("a", "b", "c"):
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError]
)
def test_errors_of_other_reasons_are_passed_on(error: type[Exception]) -> None:
    """Callers catch them. One tensor of three dimensions serves as a list of tables."""

    def call(tables: list[torch.Tensor]) -> None:
        raise raised

    raised = error.__new__(error)
    with pytest.raises(error):
        checks_types(call)(torch.ones(2, 3, 4))  # type: ignore[arg-type]
    raised = RuntimeError()  # type: ignore[assignment]
    with pytest.raises(tw.InputError) as caught:
        checks_types(call)(torch.ones(2, 3, 4))  # type: ignore[arg-type]
    assert caught.value.__cause__ is raised


def test_functions_are_pickled() -> None:
    for name in tw.__all__:
        if isfunction(function := getattr(tw, name)):
            assert pickle.loads(pickle.dumps(function)) is function, name


def test_a_decorated_function_is_compiled_whole() -> None:
    @checks_types
    def call(x: torch.Tensor, scale: int = 1) -> torch.Tensor:
        return x * scale + 1

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2), scale=3), torch.full((2,), 4.0))
