"""Fine-grained FP8 layers of transformers, split over ranks, against the numbers they represent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.worlds import Member, World
from torch.distributed.device_mesh import init_device_mesh

transformers = pytest.importorskip(
    "transformers", reason="pip install 'tileweave[transformers]'", exc_type=ImportError
)
from transformers.integrations.finegrained_fp8 import FP8Linear  # noqa: E402

import tileweave as tw  # noqa: E402
import tileweave.integrations.transformers as adapter  # noqa: E402
from tileweave.integrations import _scaled_linear as fp8  # noqa: E402
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
