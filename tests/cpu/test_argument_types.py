"""Arguments of types that no annotation allows: an error of ours, on the rank that passes them and
on its peers, and nothing of it remains."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest
import torch
from tests.support.calls import refusal
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.ops.core.argument_types import checks_types

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
    for size in (-16, 10**30):
        assert "sizes of 0 or more" in refusal(tw.nn.RowParallelLinear, 32, size)
    assert "a device of torch" in refusal(tw.nn.ColumnParallelLinear, 32, 16, device="gpu")
    assert "0 to 1, or None" in refusal(tw.parallelize, torch.nn.Linear(2, 2), src_data_rank=2)


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def test_layers_with_a_shared_expert(world: World) -> None:
    world.run(other_dtypes)


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
