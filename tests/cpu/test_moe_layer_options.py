"""nn.MoE apart from its arithmetic: initial weights (of linear layers, too), state_dict, tokens and
routers it accepts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support import moe_layer as moe
from tests.support.calls import refusal, run_either
from tests.support.moe_layer import Layer
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, MoE, RowParallelLinear
from tileweave.nn.shards import local

PATHS = pytest.mark.parametrize("interpreted", [True, False], ids=["fused", "unfused"])


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


# --- Initial weights ---

MAKERS = {
    "experts": lambda **how: MoE(8, 6, 4, 2, shared_intermediate_size=6, **how),
    "columns": lambda **how: ColumnParallelLinear(8, 12, **how),
    "rows": lambda **how: RowParallelLinear(8, 12, **how),
}
REPLICATED = {"experts": ("gate.", "shared_experts."), "columns": (), "rows": ("bias",)}


def start(me: Member, kind: str, on_meta: bool) -> dict[str, list]:
    torch.manual_seed(7)
    layer = MAKERS[kind](device="meta" if on_meta else None)
    if on_meta:
        layer.to_empty(device="cpu")
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return {name: local(p).tolist() for name, p in layer.named_parameters()} | {
        "what is drawn next": torch.rand(3).tolist()
    }


@pytest.mark.parametrize("on_meta", [False, True], ids=["", "meta"])
@pytest.mark.parametrize("kind", MAKERS)
def test_equal_seeds_give_equal_copies_and_different_shards(
    world: World, kind: str, on_meta: bool
) -> None:
    first, second = world.run(start, kind, on_meta)
    again, _ = world.run(start, kind, on_meta)
    for name, value in first.items():
        assert (value == second[name]) == name.startswith(("what", *REPLICATED[kind])), name
        assert value == again[name], name
        bound = 6**-0.5 if "down_proj" in name else 8**-0.5
        assert (
            name.startswith("what") or 0.5 * bound < float(torch.tensor(value).abs().max()) <= bound
        ), name
        assert not name.startswith("experts.") or value[0] != value[1], (
            f"{name}: experts of one rank"
        )


def shapes_in_fake_mode(me: Member) -> list[tuple[int, ...]]:
    with FakeTensorMode():
        return [tuple(local(p).shape) for kind in MAKERS for p in MAKERS[kind]().parameters()]


def test_layers_can_be_made_of_fake_tensors(world: World) -> None:
    """Fake tensors have no memory, so a random draw has no value."""
    for shapes in world.run(shapes_in_fake_mode):
        assert (2, 12, 8) in shapes and (6, 8) in shapes and (12, 4) in shapes, shapes


# --- States ---


def loaded(me: Member) -> list[str]:
    layer = Layer((4,))
    module = MoE(layer.hidden, layer.width, layer.experts * me.world_size, layer.topk)
    whole = moe.whole_state(layer, me.world_size)
    module.load_whole_state_dict(whole)

    def with_experts(change) -> dict[str, torch.Tensor]:
        return {name: change(t) if name.startswith("experts.") else t for name, t in whole.items()}

    wrong = [
        with_experts(lambda t: torch.cat([t, t])),  # of a larger layer: its first experts would fit
        with_experts(lambda t: t[:3]),  # would fit on the first rank
        with_experts(lambda t: t.sum()),
        {name: local(t) for name, t in module.state_dict().items()},  # a shard
    ]
    return [refusal(module.load_whole_state_dict, state) for state in wrong]


def test_only_states_of_the_whole_layer_are_loaded(world: World) -> None:
    for errors in world.run(loaded):
        assert all(
            error.startswith("InputError") and "all 4 experts" in error for error in errors
        ), errors


# --- Tokens and routers ---


class Router(nn.Module):
    """All weights are 1 / k, and tokens choose experts in turn; not contiguous."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (torch.arange(2 * len(x)) % 4).view(2, len(x)).t()
        return torch.full((2, len(x)), 0.5).t(), ids


def views(me: Member) -> list[bool]:
    torch.manual_seed(me.rank)
    found = []
    for router in (None, Router()):
        layer = MoE(8, 6, 4, 2, router=router)
        for x in (torch.randn(5, 16)[:, :8], torch.randn(1, 8).expand(5, 8), torch.randn(8, 5).t()):
            leaf, same = x.detach().requires_grad_(), x.contiguous().requires_grad_()
            y, want = layer(leaf), layer(same)
            (gradient,), (wanted,) = (
                torch.autograd.grad(z.square().sum(), t) for z, t in ((y, leaf), (want, same))
            )
            found += [torch.equal(y, want), torch.equal(gradient, wanted)]
    return found


@PATHS
def test_tokens_may_be_views(world: World, interpreted: bool) -> None:
    assert run_either(world, interpreted, views) == [[True] * 12] * 2


def gates_in_fp32(me: Member) -> list[object]:
    torch.manual_seed(0)
    layer = MoE(8, 6, 4, 2, dtype=torch.bfloat16)
    layer.gate.float()
    with torch.no_grad():  # experts whose logits differ in fp32 only
        local(layer.gate.weight).copy_(
            torch.ones(4, 8) + 1e-4 * torch.tensor([3.0, 0.0, 2.0, 1.0])[:, None]
        )
    x = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.float().square().sum().backward()
    chosen = layer.gate(x)[1].sort(1).values.tolist()
    return [
        y.dtype,
        x.grad.dtype,
        layer.gate.weight.grad.dtype,
        layer.experts.down_proj.grad.dtype,
        chosen,
    ]


def test_gate_may_be_wider_than_its_tokens(world: World) -> None:
    half = torch.bfloat16
    assert world.run(gates_in_fp32) == [[half, half, torch.float32, half, [[0, 2]] * 3]] * 2


# --- Rows ---


def biased(me: Member) -> list[bool]:
    """A bias per expert, added to each row as in the docstring of dispatch, where memory is
    uninitialized."""
    torch.manual_seed(me.rank)
    found = []
    for _ in range(4):
        junk = [torch.full((20, 16), float("nan")) for _ in range(8)]
        del junk
        up, down = torch.randn(2, 16, 8), torch.randn(2, 8, 8)
        bias = torch.randn(2, 16, requires_grad=True)
        x, ids, upstream = torch.randn(5, 8), torch.randint(0, 4, (5, 2)), torch.randn(5, 8)
        y, plan = tw.dispatch_grouped_matmul(x, up, ids)
        rows = torch.arange(plan.bound, dtype=torch.int32)
        expert = torch.searchsorted(plan.offsets[1:], rows, right=True)
        y = y + torch.cat([bias, bias.new_zeros(1, 16)])[expert]
        z = tw.grouped_matmul_combine(tw.swiglu(y, plan), down, plan)
        (gradient,) = torch.autograd.grad(z, bias, upstream)

        everyone = [[torch.empty_like(t) for _ in range(me.world_size)] for t in (x, ids, upstream)]
        for into, t in zip(everyone, (x, ids, upstream), strict=True):
            dist.all_gather(into, t)
        own, wanted = bias.detach().double().requires_grad_(), 0
        for tokens, choices, weights in zip(*everyone, strict=True):
            for t in range(5):
                for e in (choices[t] - 2 * me.rank).tolist():
                    if e in (0, 1):
                        gate, value = (up[e].double() @ tokens[t].double() + own[e]).chunk(2)
                        wanted = (
                            wanted
                            + (down[e].double() @ (nn.functional.silu(gate) * value))
                            @ weights[t].double()
                        )
        (want,) = (
            torch.autograd.grad(wanted, own) if torch.is_tensor(wanted) else (torch.zeros(2, 16),)
        )
        found.append(torch.allclose(gradient.double(), want.double(), rtol=1e-4, atol=1e-4))
    return found


@PATHS
def test_bias_per_row_covers_undefined_rows(world: World, interpreted: bool) -> None:
    assert run_either(world, interpreted, biased) == [[True] * 4] * 2
