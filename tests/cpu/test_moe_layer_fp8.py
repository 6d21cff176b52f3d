"""nn.MoE with FP8 experts in CPU worlds: what it computes, loads, and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.calls import refusal, run_either
from tests.support.moe_layer_fp8 import (
    HIDDEN,
    INNER,
    KINDS,
    WEIGHTS,
    Kind,
    error,
    quantized,
    tokens,
)
from tests.support.worlds import Member, World, Worlds

import tileweave as tw
from tileweave.nn.shards import local


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_computes_what_it_represents(world: World, name: str) -> None:
    for interpreted in (True, False):
        found = run_either(world, interpreted, error, KINDS[name], interpreted)
        # tokens or activations that were not quantised would be off by 3e-2
        assert max(found) < 1e-2, interpreted


def ways(me: Member) -> None:
    """All ways to quantise give the bits of the checkpoint, also with DTensors and a state_dict."""
    for kind in (Kind(), Kind(experts=3)):
        state = kind.state()
        checkpoint, plain = quantized(state), kind.make(fp8=None)
        plain.load_state_dict(state)
        loaded, from_plain, again, from_dtensors = (kind.make() for _ in range(4))
        loaded.load_state_dict(checkpoint)
        from_plain.load_state_dict(state)
        from_dtensors.load_state_dict(plain.state_dict())
        again.load_state_dict(loaded.state_dict())
        kept = plain.experts.gate_up_proj
        assert plain.quantize_experts() is plain and plain.quantize_experts().experts is not kept
        for other in (from_plain, from_dtensors, again, plain):
            assert other.state_dict().keys() == checkpoint.keys() and "fp8" in repr(other)
            for (name, a), b in zip(loaded.named_parameters(), other.parameters(), strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape == checkpoint[name].shape, name
                mine, theirs = (local(t).detach().contiguous().view(torch.uint8) for t in (a, b))
                assert torch.equal(mine, theirs), name
                assert not a.requires_grad or "experts" not in name
        first = loaded.experts.each * me.rank
        own = local(loaded.experts.gate_up_proj).view(torch.uint8)
        want = checkpoint[WEIGHTS[0]].view(torch.uint8)[first : first + len(own)]
        assert torch.equal(own, want)


def test_all_ways_to_quantize_give_the_same_bits(world: World) -> None:
    world.run(ways)


def fresh(me: Member) -> list[float]:
    """The largest numbers of new experts, and of the router after them."""
    torch.manual_seed(3)
    layer = Kind(experts=3, shared=16).make()
    w = local(layer.experts.down_proj).float() * 1.0
    scale = local(layer.experts.down_proj_scale_inv)
    wide = scale.repeat_interleave(128, 1)[:, :HIDDEN].repeat_interleave(128, 2)[..., :INNER]
    on_meta = Kind().make(device="meta")
    on_meta.to_empty(device="cpu").load_state_dict(quantized(Kind().state()))
    assert layer.shared_experts is not None
    return [
        float((w * wide).abs().max()),
        float(layer.shared_experts.down_proj.weight.to_local().sum()),
    ]


def test_new_experts_are_drawn_and_quantized(world: World) -> None:
    (first, shared), (second, same) = world.run(fresh)
    assert shared == same, "the default generators of ranks went apart"
    for greatest in (first, second):
        assert 0.9 * INNER**-0.5 < greatest < 1.02 * INNER**-0.5
    assert first != second


def compiled_and_cast(me: Member) -> None:
    layer, x = Kind(bias=True).make(), tokens(Kind(), me.rank)
    layer.load_state_dict(Kind(bias=True).state())
    with torch.no_grad():
        z = layer(x)
        whole_graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(whole_graph(x), z)
        layer.float().bfloat16()  # neither FP8 nor its scales are cast
        assert torch.equal(layer(x), z)
    kinds = {name: p.dtype for name, p in layer.experts.named_parameters()}
    assert kinds["down_proj"] == torch.float8_e4m3fn
    assert kinds["down_proj_scale_inv"] == torch.float32
    assert kinds["down_proj_bias"] == torch.bfloat16


def test_compiled_and_cast(world: World) -> None:
    world.run(compiled_and_cast)


def refused(me: Member) -> list[str]:
    kind, x = Kind(shared=16), tokens(Kind(), me.rank)
    layer, plain = kind.make(), kind.make(fp8=None)
    checkpoint = quantized(kind.state())

    def without(name: str) -> dict[str, torch.Tensor]:
        return {n: t for n, t in checkpoint.items() if n != name}

    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 144,
        "moe_intermediate_size": 80,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "norm_topk_prob": True,
    }

    def of(**options: Any) -> Any:
        return tw.nn.MoE.from_config(config | {"quantization_config": options})

    fine = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert "fp8" in repr(of(**fine)) and "fp8" not in repr(of(**fine, dequantize=True))
    assert "fp8" in repr(tw.nn.MoE.from_config(config, fp8="block"))
    return [
        refusal(layer, x),  # its router has gradients
        refusal(plain.load_state_dict, checkpoint),
        refusal(layer.load_state_dict, without(f"{WEIGHTS[1]}_scale_inv")),
        refusal(layer.load_state_dict, without("shared_experts.up_proj.weight_scale_inv")),
        refusal(lambda: tw.nn.MoE(144, 40, 4, 2, fp8="block")),
        refusal(lambda: tw.nn.MoE(144, 80, 4, 2, fp8="row")),
        refusal(of, **fine | {"weight_block_size": [64, 128]}),
        refusal(of, **fine | {"activation_scheme": "static"}),
        refusal(of, quant_method="gptq"),
    ]


def test_what_does_not_fit_is_refused(world: World) -> None:
    texts = [
        "gradients through FP8 experts",
        "without fp8=",
        "down_proj_scale_inv",
        "up_proj.weight_scale_inv",
        "multiples of 16",
        "fp8='row'",
        "128 x 128",
        "static",
        "gptq",
    ]
    for found in world.run(refused):
        for said, text in zip(found, texts, strict=True):
            assert said.startswith("InputError") and text in said, (said, text)
