"""nn.MoE with replicated tokens, other activations, biases and routers, against the whole layer on
one device; and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.calls import refusal, run_either
from tests.support.tolerances import GRADIENT_ERROR, assert_near, assert_norm_near
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn.functional import gelu, linear, silu

import tileweave as tw
from tileweave.nn.gated_experts import ALPHA, LIMIT

E, K, H, WIDTH = 4, 2, 8, 6


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def gated(rows: torch.Tensor, act: str) -> torch.Tensor:
    gate, up = rows.chunk(2, -1)
    if act == "clamped_swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return {"silu": silu, "gelu": gelu}[act](gate) * up


def state_of(bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "gate.weight": (E, H),
        "experts.gate_up_proj": (E, 2 * WIDTH, H),
        "experts.down_proj": (E, H, WIDTH),
    }
    if bias:
        shapes |= {"experts.gate_up_proj_bias": (E, 2 * WIDTH), "experts.down_proj_bias": (E, H)}
    return {name: 2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole_layer(
    state: dict[str, torch.Tensor], x: torch.Tensor, act: str, bias: bool
) -> torch.Tensor:
    weights, ids = linear(x, state["gate.weight"]).softmax(-1).topk(K, -1)
    weights, y = weights / weights.sum(-1, keepdim=True), torch.zeros_like(x)
    for e in range(E):
        rows = linear(x, state["experts.gate_up_proj"][e])
        rows = rows + state["experts.gate_up_proj_bias"][e] if bias else rows
        out = linear(gated(rows, act), state["experts.down_proj"][e])
        out = out + state["experts.down_proj_bias"][e] if bias else out
        y = y + (weights * (ids == e)).sum(-1, keepdim=True) * out
    return y


def over_ranks(me: Member, tokens: str, act: str, bias: bool) -> None:
    state = state_of(bias)
    layer = tw.nn.MoE(H, WIDTH, E, K, tokens=tokens, hidden_act=act, bias=bias)
    layer.load_state_dict(state)
    leaves = {name: t.double().requires_grad_() for name, t in state.items()}
    x = torch.randn(me.world_size, 5, H, generator=torch.Generator().manual_seed(4))
    own = x if tokens == "replicated" else x[me.rank]
    mine, theirs = own.clone().requires_grad_(), x.double().requires_grad_()
    y, want = layer(mine), whole_layer(leaves, theirs.view(-1, H), act, bias).view_as(x)
    y.square().sum().backward()
    want.square().sum().backward()
    part = slice(None) if tokens == "replicated" else me.rank
    assert_near(y.double(), want[part], 1e-4, 1e-4, "y")
    assert_near(mine.grad.double(), theirs.grad[part], 1e-4, 1e-4, "gradient of x")
    for name, parameter in layer.named_parameters():
        got = parameter.grad.full_tensor()
        assert_norm_near(got, leaves[name].grad, GRADIENT_ERROR["float32"], name)


@pytest.mark.parametrize("tokens", ["own", "replicated"])
@pytest.mark.parametrize(
    ("act", "bias"), [("silu", False), ("gelu", False), ("clamped_swiglu", True)]
)
def test_forms_of_the_layer(world: World, tokens: str, act: str, bias: bool) -> None:
    run_either(world, False, over_ranks, tokens, act, bias)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_that_ranks_do_not_divide(worlds: Worlds, bias: bool) -> None:
    """Three ranks have 2, 2 and none of four experts; with biases in fused kernels."""
    run_either(worlds("gloo", 3), bias, over_ranks, "own", "silu", bias)


def test_replicated_tokens_with_fused_kernels(world: World) -> None:
    world.run(over_ranks, "replicated", "silu", True)


def as_deepseek(me: Member) -> None:
    """Against the router of DeepSeek-V3, token by token."""
    torch.manual_seed(0)
    router = tw.nn.SigmoidTopK(H, 8, 3, groups=4, top_groups=2, scale=2.5)
    nn.init.normal_(router.e_score_correction_bias, std=0.3)
    x = torch.randn(20, H)
    weights, ids = router(x)
    for t in range(20):
        scores = torch.sigmoid(router.weight.double() @ x[t].double())
        choice = scores + router.e_score_correction_bias.double()
        by_group = [choice[2 * g : 2 * g + 2].sum() for g in range(4)]
        kept = sorted(range(4), key=lambda g: -by_group[g])[:2]
        best = sorted((e for g in kept for e in (2 * g, 2 * g + 1)), key=lambda e: -choice[e])[:3]
        assert ids[t].tolist() == best
        assert_near(
            weights[t].double(), 2.5 * scores[best] / scores[best].sum(), 1e-5, 1e-6, "weights"
        )


def test_sigmoid_router_limits_groups(worlds: Worlds) -> None:
    worlds("gloo", 1).run(as_deepseek)


def refused(me: Member) -> list[str]:
    return [
        refusal(tw.nn.MoE, H, WIDTH, E, K, hidden_act="mish"),
        refusal(tw.nn.MoE, H, WIDTH, E, K, tokens="mine"),
        refusal(tw.nn.SigmoidTopK, H, 8, 3, groups=3),
    ]


def other_activations(me: Member) -> list[str]:
    made = {act: tw.nn.MoE(H, WIDTH, E, K, hidden_act=act) for act in ("silu", "swiglu", "gelu")}
    made["swiglu"].load_state_dict(made["silu"].state_dict())
    before = made["silu"].gate.weight.full_tensor()
    refused = refusal(made["silu"].load_state_dict, made["gelu"].state_dict())
    assert torch.equal(made["silu"].gate.weight.full_tensor(), before), "nothing was loaded"
    block = nn.Sequential(made["silu"])
    return [refused, refusal(block.load_state_dict, nn.Sequential(made["gelu"]).state_dict())]


def test_a_state_dict_of_another_activation_is_refused(world: World) -> None:
    for errors in world.run(other_activations):
        for error in errors:
            assert error.startswith("InputError: asked:") and "hidden_act='gelu'" in error, error


QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": H,
    "moe_intermediate_size": WIDTH,
    "num_experts": E,
    "num_experts_per_tok": K,
    "norm_topk_prob": False,
    "hidden_act": "gelu",
}
DEEPSEEK = {
    **QWEN,
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}


def configured(me: Member) -> list[str]:
    qwen = tw.nn.MoE.from_config(QWEN)
    assert qwen.hidden_act == "gelu" and not qwen.gate.normalize and qwen.gate.top_k == K
    assert tuple(qwen.experts.down_proj.shape) == (E, H, WIDTH)
    deep = tw.nn.MoE.from_config(SimpleNamespace(**DEEPSEEK), tokens="replicated")
    assert deep.gate.scale == 2.5 and deep.gate.groups == 2 and deep.tokens == "replicated"
    assert deep.shared_experts.up_proj.out_features == 2 * WIDTH
    return [
        refusal(tw.nn.MoE.from_config, {**QWEN, "hidden_act": "mish"}),
        refusal(tw.nn.MoE.from_config, {**QWEN, "model_type": "gpt_oss"}),
        refusal(tw.nn.MoE.from_config, {k: v for k, v in QWEN.items() if k != "hidden_act"}),
    ]


def test_configurations(world: World) -> None:
    for errors in world.run(configured):
        assert all(error.startswith("InputError: asked:") for error in errors), errors


def test_unknown_options_are_refused(world: World) -> None:
    for errors in world.run(refused):
        assert all(error.startswith("InputError: asked:") for error in errors), errors


def checkpoint(me: Member, folder: str) -> None:
    torch.manual_seed(1)
    layer, other = tw.nn.MoE(H, WIDTH, E, K), tw.nn.MoE(H, WIDTH, E, K)
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    for (name, a), b in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name
        assert a.shape[0] == E, name


def test_experts_are_resharded_by_checkpoints(world: World, tmp_path: Path) -> None:
    world.run(checkpoint, str(tmp_path))
