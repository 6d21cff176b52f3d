"""Fine-grained FP8 layers of transformers, split over ranks, against the numbers they represent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.scaled_experts import by_tiles, value
from tests.support.worlds import Member, World
from torch.distributed.device_mesh import init_device_mesh

transformers = pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
from transformers.integrations.finegrained_fp8 import (  # noqa: E402
    ALL_FP8_EXPERTS_FUNCTIONS,
    FP8Experts,
    FP8Linear,
)
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import tileweave as tw  # noqa: E402
import tileweave.integrations.transformers as adapter  # noqa: E402
from tileweave.errors import InputError  # noqa: E402
from tileweave.integrations import _scaled_linear as fp8  # noqa: E402
from tileweave.integrations._experts import ExpertParallel  # noqa: E402
from tileweave.ops.matmul.quantize import _in_torch  # noqa: E402
from tileweave.ops.matmul.scaled import Scaled  # noqa: E402


def layer(whole: torch.Tensor, bias: torch.Tensor, **options: Any) -> Any:
    """A layer of transformers with this weight [N, K], quantised as checkpoints have it."""
    cols, depth = whole.shape
    given = {"block_size": (128, 128), "has_bias": True} | options
    made = FP8Linear(depth, cols, **given)
    data, scale = _in_torch(whole, "tile")
    made.weight = torch.nn.Parameter(data, requires_grad=False)
    if made.block_size is not None:
        made.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    made.bias = torch.nn.Parameter(bias)
    made._hf_quantized_needs_local_tp = True  # as transformers marks layers that it replaces
    return made


def split(me: Member) -> float:
    """How far the layer is from fp64 of its quantised operands."""
    mesh, style = init_device_mesh("cpu", (me.world_size,)), adapter.Rowwise()
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(144, 512, generator=generator) / 20
    bias = torch.randn(144, generator=generator).bfloat16()
    module = layer(whole, bias)
    for name in ("weight", "weight_scale_inv", "bias"):
        style.shard_param(module, name, mesh)
    style.install_forward(module, mesh)
    x = torch.randn(2, 3, 512, generator=generator).bfloat16()
    with torch.no_grad():
        y = module(x.chunk(me.world_size, -1)[me.rank])
    assert y.shape == (2, 3, 144) and y.dtype == x.dtype
    rows = Scaled(*_in_torch(x.view(6, 512), "block"), "block").value().double()
    columns = Scaled(*_in_torch(whole, "tile"), "block").value().double()
    want = (rows @ columns.t() + bias.double()).view(2, 3, 144)
    tw.close()
    return float((y.double() - want).norm() / want.norm())


def test_a_split_layer_is_one_operator(pair: World) -> None:
    assert max(pair.run(split)) < 6e-3


def test_what_keeps_the_forward_of_transformers() -> None:
    whole, bias = torch.randn(64, 512), torch.zeros(64)
    assert fp8.is_fp8_linear(layer(whole, bias)) and not fp8.is_fp8_linear(torch.nn.Linear(2, 2))
    assert fp8.why_stock(layer(whole, bias), 2) is None
    for made, size, reason in (
        (layer(whole, bias), 3, "divide blocks"),
        (layer(whole, bias), 8, "divide blocks"),
        (layer(whole[:60], bias[:60]), 2, "divide blocks"),
        (layer(whole, bias, block_size=None), 2, "block size"),
        (layer(whole, bias, activation_scheme="static"), 2, "static"),
    ):
        assert reason in (fp8.why_stock(made, size) or ""), reason
    with torch.no_grad():
        made = layer(whole, bias)
        made.weight_scale_inv = torch.nn.Parameter(made.weight_scale_inv.half())
    assert "scales are" in (fp8.why_stock(made, 2) or "")


# --- Experts ---

HIDDEN, INNER, EXPERTS, TOPK = 160, 128, 4, 2
FP8_EXPERTS = use_experts_implementation(
    experts_class=type("Made", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
)


def experts_of(rank: int, size: int, **options: Any) -> tuple[Any, list[Any]]:
    """This rank's experts as transformers has them, and what the weights of all represent."""
    limit = options.pop("limit", None)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, hidden_act="silu"
    )
    made = FP8_EXPERTS(config, **{"block_size": (128, 128)} | options)
    made.limit = limit
    generator = torch.Generator().manual_seed(4)
    values, each = [], EXPERTS // size
    for name, shape in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
        whole = torch.randn(EXPERTS, *shape, generator=generator) * shape[1] ** -0.5
        data, scale = by_tiles(whole)
        values.append([value(d, s) for d, s in zip(data, scale, strict=True)])
        own = slice(rank * each, (rank + 1) * each)
        setattr(made, name, torch.nn.Parameter(data[own].contiguous()))
        setattr(made, f"{name}_scale_inv", torch.nn.Parameter(scale[own].contiguous()))
    return made, values


def shared_experts(me: Member, limit: float | None) -> float:
    """How far expert-parallel FP8 experts are from fp64 of their quantised operands."""
    group: Any = torch.distributed.group.WORLD
    made, (up, down) = experts_of(me.rank, me.world_size, limit=limit)
    call = ExpertParallel(made, group, group)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(7, HIDDEN, generator=generator).bfloat16() * 3
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(7)])
    weights = torch.rand(7, TOPK, generator=generator)
    with torch.no_grad():
        z = call(x, ids, weights)
    assert z.shape == x.shape and z.dtype == x.dtype
    sent, want = value(*_in_torch(x, "block")), torch.zeros(7, HIDDEN, dtype=torch.float64)
    for t, chosen in enumerate(ids.tolist()):
        for factor, expert in zip(weights[t].double(), chosen, strict=True):
            gate, y = (up[expert] @ sent[t]).bfloat16().chunk(2)
            if limit is None:
                h = (torch.nn.functional.silu(gate.float()) * y.float()).bfloat16()
            else:
                h = torch.nn.functional.silu(gate.clamp(max=limit)) * y.clamp(-limit, limit)
            want[t] += factor * (down[expert] @ value(*_in_torch(h[None], "block"))[0])
    tw.close()
    return float((z.double() - want).norm() / want.norm())


@pytest.mark.parametrize("limit", [None, 1.0], ids=["swiglu", "clamped"])
def test_experts_over_ranks(pair: World, limit: float | None) -> None:
    # rows that were not quantised would be off by 3e-2
    assert max(pair.run(shared_experts, limit)) < 1e-2


def test_experts_that_operators_do_not_take_are_refused() -> None:
    x, ids = torch.zeros(1, HIDDEN), torch.zeros(1, TOPK, dtype=torch.int64)
    for options, text in (
        ({"block_size": (64, 128)}, "128 x 128"),
        ({"activation_scheme": "static"}, "dynamic"),
        ({}, "gradients"),
    ):
        made, _ = experts_of(0, 1, **options)
        call: Any = ExpertParallel.__new__(ExpertParallel)
        call.experts, call.group, call.shared, call.max_tokens = made, None, None, 1
        call.even = False
        with pytest.raises(InputError, match=text):
            call(x, ids, torch.ones(1, TOPK, requires_grad=not options))
