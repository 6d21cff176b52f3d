"""What ranks must agree on in expert operators: plans of one group, matching calls, gradients that
all ranks want."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import on_path, refusal, run_either
from tests.support.worlds import Member, World, Worlds, one_shot
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tileweave.nn import MoE
from tileweave.ops.core.registry import name_of, workspace_of
from tileweave.ops.experts.routing_plan import RoutingPlan, reference_plan

PATHS = pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def draw(me: Member, tokens: int = 4, experts: int = 2) -> tuple[torch.Tensor, ...]:
    """x, ids, and weights of the experts of this rank, up and down."""
    generator = torch.Generator().manual_seed(me.rank)
    ids = torch.randint(0, experts * me.world_size, (tokens, 2), generator=generator)
    sizes = ((tokens, 8), (experts, 6, 8), (experts, 8, 6))
    x, up, down = (torch.randn(size, generator=generator) for size in sizes)
    return x, ids, up, down


# --- Plans ---


def plans_of_others(me: Member) -> list[str]:
    """A plan of ranks 0 and 1 (2 and 3) in the group of ranks 0 and 2 (1 and 3): of the same size,
    but with other rows."""
    one = me.group(0, 1) or me.group(2, 3) if me.rank < 2 else [me.group(0, 1), me.group(2, 3)][1]
    if me.rank < 2:
        me.group(2, 3)
    first, second = me.group(0, 2), me.group(1, 3)
    other = second if first is None else first
    x, ids, up, down = draw(me)
    y, plan = tw.dispatch_grouped_matmul(x, up, ids, group=one)
    assert plan.group_name == name_of(one)
    found = [
        refusal(tw.dispatch_grouped_matmul, x, up, plan=plan, group=other),
        refusal(tw.grouped_matmul_combine, y, down, plan, group=other),
    ]
    tw.grouped_matmul_combine(y, down, plan, group=one)
    return found


def test_a_plan_of_another_group_is_refused(worlds: Worlds) -> None:
    for errors in worlds("gloo", 4).run(plans_of_others):
        assert all(
            error.startswith("InputError") and "made in group" in error for error in errors
        ), errors


def plans_of_other_experts(me: Member) -> list[str]:
    x, ids, up, down = draw(me, experts=4)
    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    more = torch.cat([down, down[:1]])  # its table has the same size
    calls: list[Callable[..., object]] = [
        tw.grouped_matmul_combine,
        lambda *a: tw.explain("grouped_matmul_combine", *a),
    ]
    return [refusal(call, y, experts, plan) for call in calls for experts in (more, down[:3])]


@PATHS
def test_a_plan_of_other_experts_is_refused(world: World, interpreted: bool) -> None:
    for errors in run_either(world, interpreted, plans_of_other_experts):
        assert all(error.startswith("InputError") and "a plan of 4" in error for error in errors), (
            errors
        )


def plans_go_everywhere(me: Member) -> list[bool]:
    """Plans are inputs of compiled functions and of checkpoints, and are copied. A plan without a
    group fits any group."""
    x, ids, up, down = draw(me)
    up.requires_grad_()
    torch._dynamo.reset()

    def products(plan: RoutingPlan) -> torch.Tensor:
        y, _ = tw.dispatch_grouped_matmul(x, up, plan=plan)
        return tw.grouped_matmul_combine(y, down, plan)

    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    want = tw.grouped_matmul_combine(y, down, plan)
    (gradient,) = torch.autograd.grad(want.sum(), up)
    everyone = [torch.empty_like(ids) for _ in range(me.world_size)]
    dist.all_gather(everyone, ids)
    calls = [
        torch.compile(products, fullgraph=True, backend="aot_eager"),
        lambda plan: products(copy.deepcopy(plan)),
        lambda plan: checkpoint(products, plan, use_reentrant=False),
        lambda plan: products(reference_plan(torch.stack(everyone), me.rank, 2 * me.world_size)),
    ]
    found = []
    for call in calls:
        z = call(plan)
        found += [torch.equal(z, want), torch.equal(torch.autograd.grad(z.sum(), up)[0], gradient)]
    return found


def test_plans_are_ordinary_inputs(world: World) -> None:
    assert world.run(plans_go_everywhere, timeout=100) == [[True] * 8] * 2


def test_plans_are_compared_by_identity() -> None:
    """Values of tables are not compared: that would give a tensor, or wait for the device."""
    one, other = (reference_plan(torch.zeros(1, 3, 2, dtype=torch.int64), 0, 2) for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2


def test_plan_fields_are_aligned_to_16_bytes() -> None:
    """Kernels are compiled for this alignment."""
    plan = reference_plan(torch.zeros(3, 5, 3, dtype=torch.int64), 1, 18)
    assert all(field.storage_offset() % 4 == 0 for field in plan.fields)


# --- Debugging ---


def calls_to_compare(me: Member) -> dict[str, Callable[[], object]]:
    x, ids, up, down = draw(me)
    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    odd = me.rank == 1
    call, combine = tw.dispatch_grouped_matmul, tw.grouped_matmul_combine
    wide = torch.randn(2, 7 if odd else 6, 8)
    deep = 9 if odd else 8
    kind = torch.float16 if odd else torch.float32
    many = 5 if odd else 4
    out, other = torch.empty(4, 8), replace(plan, group_name="another" if odd else plan.group_name)
    return {
        "N": lambda: call(x, wide, plan=plan),
        "K": lambda: call(torch.randn(4, deep), torch.randn(2, 6, deep), plan=plan),
        "dtype": lambda: call(x.to(kind), up.to(kind), plan=plan),
        "max_tokens": lambda: call(
            torch.randn(many, 8), up, torch.zeros(many, 2, dtype=torch.int64), max_tokens=4
        ),
        "ids": lambda: call(x, up, ids.float() if odd else ids),
        "dimensions": lambda: call(x[0] if odd else x, up, ids),
        "tokens": lambda: call(x[:3] if odd else x, up, ids),
        "strides": lambda: call(x, torch.randn(2, 6, 16)[..., ::2] if odd else up, plan=plan),
        "the plan's group": lambda: call(x, up, plan=other),
        "y": lambda: combine(y[1:] if odd else y, down, plan),
        "experts": lambda: combine(y, down[:1] if odd else down, plan),
        "weights": lambda: combine(
            y, down, plan, torch.ones(4, 2, dtype=torch.float64 if odd else torch.float32)
        ),
        "out": lambda: combine(y, down, plan, out=out[:3] if odd else out),
        "memory": lambda: combine(y, down, plan, out=y[:4, :6].view(-1)[:0] if odd else out),
    }


def compared(me: Member, name: str) -> tuple[str, float]:
    call = calls_to_compare(me)[name]
    me.barrier()
    began = time.monotonic()
    with mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"):
        said = refusal(call)
    return said, time.monotonic() - began


NAMES = (
    "N",
    "K",
    "dtype",
    "max_tokens",
    "ids",
    "dimensions",
    "tokens",
    "strides",
    "the plan's group",
    "y",
    "experts",
    "weights",
    "out",
    "memory",
)
DIFFER = ("N", "K", "dtype")  # each is valid by itself


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_raise_when_debugging(world: World, name: str) -> None:
    """The rank that made the mistake raises its own error, the others report it."""
    (first, _), (second, _) = found = world.run(compared, name)
    assert first.startswith("RankMismatchError"), first
    assert second.startswith("RankMismatchError" if name in DIFFER else "InputError"), second
    assert name in DIFFER or ("rank 1" in first and "refused" in first), first
    assert max(seconds for _, seconds in found) < 10, found


# --- Gradients ---


def weights_that_one_rank_trains(me: Member, interpreted: bool) -> str:
    with on_path(me, interpreted):
        return _weights_that_one_rank_trains(me)


def _weights_that_one_rank_trains(me: Member) -> str:
    x, ids, up, down = draw(me)
    down.requires_grad_()
    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    z = tw.grouped_matmul_combine(y, down, plan, torch.ones(4, 2, requires_grad=me.rank == 1))
    me.barrier()
    return refusal(z.sum().backward) or refusal(tw.synchronize)


@pytest.mark.parametrize(
    ("debug", "interpreted"), [("0", True), ("1", False)], ids=["fused", "debugging"]
)
def test_weights_trained_on_one_rank_raise(debug: str, interpreted: bool) -> None:
    """Without an error, one rank would wait in an exchange of gradients that the other skips."""
    extra = {"TILEWEAVE_TIMEOUT": "5", "WORLD_ENDS_WELL": "0", "TILEWEAVE_DEBUG": debug}
    ends = one_shot("gloo", 2, weights_that_one_rank_trains, interpreted, extra=extra)
    assert all(str(end.value).startswith("RankMismatchError") for end in ends), ends


def forward_alone(me: Member) -> bool:
    """One rank evaluates under no_grad, on an empty batch that needs no gradient, while the other
    one keeps a graph."""
    torch.manual_seed(0)
    layer = MoE(8, 6, 4, 2, max_tokens=3)
    x = torch.randn(3, 8)
    if me.rank:
        with torch.no_grad():
            return layer(x[:0]).shape == (0, 8)
    return bool(layer(x.requires_grad_()).isfinite().all())


@PATHS
def test_a_forward_alone_may_differ_in_gradients(world: World, interpreted: bool) -> None:
    assert run_either(world, interpreted, forward_alone) == [True, True]


# --- What is kept between calls ---


def kept_for_sizes(me: Member) -> list[int]:
    """Entries of all caches after calls of few sizes, and after calls of many."""
    _, _, up, down = draw(me)
    tw.close()
    counts = []
    for sizes in ((1, 2, 3), range(4, 16)):
        for tokens in sizes:
            x, ids = (
                torch.randn(tokens, 8, requires_grad=True),
                torch.zeros(tokens, 2, dtype=torch.int64),
            )
            y, plan = tw.dispatch_grouped_matmul(x, up, ids, max_tokens=16)
            tw.grouped_matmul_combine(y, down, plan, torch.ones(tokens, 2)).sum().backward()
            with torch.no_grad():
                tw.grouped_matmul_combine(y, down, plan, out=torch.empty(tokens, 8))
        workspace = workspace_of(name_of(None), me.device)
        counts.append(
            len(workspace.accepted)
            + sum(len(instance.cache) for instance in workspace.instances.values())
        )
    return counts


def test_caches_do_not_grow_with_token_counts(world: World) -> None:
    for few, many in world.run(kept_for_sizes):
        assert 0 < few == many


def tokens_on_later_calls(me: Member) -> list[str]:
    """What depends on the number of tokens is checked on every call, and the rest once."""
    x, ids, up, down = draw(me)
    y, plan = tw.dispatch_grouped_matmul(x, up, ids)
    weights = torch.ones(4, 2)
    with torch.no_grad():
        tw.grouped_matmul_combine(y, down, plan, weights, out=torch.empty(4, 8))
        return [
            refusal(tw.grouped_matmul_combine, y, down, plan, weights[:3], out=torch.empty(4, 8)),
            refusal(
                tw.grouped_matmul_combine,
                y,
                down,
                plan,
                torch.ones(2, 4).t(),
                out=torch.empty(4, 8),
            ),
            refusal(tw.grouped_matmul_combine, y, down, plan, weights, out=torch.empty(3, 8)),
            refusal(tw.grouped_matmul_combine, y, down, plan, weights, out=torch.empty(8, 4).t()),
            refusal(
                tw.grouped_matmul_combine,
                y,
                down,
                replace(plan, tokens=5),
                torch.ones(5, 2),
                out=torch.empty(5, 8),
            ),
        ]


def test_tokens_are_checked_on_later_calls(world: World) -> None:
    for errors in world.run(tokens_on_later_calls):
        assert all(error.startswith("InputError") for error in errors), errors
