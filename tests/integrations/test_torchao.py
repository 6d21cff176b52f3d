"""FP8 training against torchao itself, which emulates FP8 matmuls on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.worlds import Member, World

import tileweave as tw

pytest.importorskip("torchao", reason="pip install torchao", exc_type=ImportError)
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import tileweave.integrations.torchao as adapter
from tileweave.errors import InputError
from tileweave.ops.matmul.scaled_training import linear

RECIPES = ("rowwise", "rowwise_with_gw_hp")


def config(recipe: str) -> Any:
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_computes_as_torchao(recipe: str) -> None:
    """Rows and columns of sizes that differ by a lot, so that the scales matter."""
    torch.manual_seed(0)
    theirs: Any = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False).bfloat16())
    with torch.no_grad():
        theirs[0].weight *= torch.exp2(-6.0 * (torch.arange(64) % 3)).bfloat16()
    x = torch.randn(32, 64).bfloat16() * torch.exp2(5.0 * (torch.arange(32) % 4) - 12)[:, None]
    x, w = x.bfloat16().requires_grad_(), theirs[0].weight.detach().clone().requires_grad_()
    g = torch.randn(32, 48).bfloat16() * torch.exp2(-5.0 * (torch.arange(48) % 4)).bfloat16()
    convert_to_float8_training(theirs, config=config(recipe))
    assert adapter.recipe_of("0", theirs[0]) == recipe
    y = theirs(x)
    y.backward(g)
    assert x.grad is not None
    want: list[Any] = [y.detach(), x.grad.clone(), theirs[0].weight.grad]
    x.grad = None
    y = linear(x, w, None, recipe)
    y.backward(g)
    for name, got, wanted in zip(("y", "gx", "gw"), (y, x.grad, w.grad), want, strict=True):
        assert got is not None
        for dim in (0, 1):
            apart = (got - wanted).double().norm(dim=dim) / wanted.double().norm(dim=dim)
            assert apart.max() < 1e-2, f"{name}: {apart.max():.1e}"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(32, 64, bias=False)
        self.up_proj = torch.nn.Linear(32, 64, bias=False)
        self.down_proj = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def split(me: Member, recipe: str) -> list[float]:
    """How far result and gradients of the split model are from those of torchao's."""
    torch.manual_seed(1)
    whole = Block().bfloat16()
    torch.manual_seed(1)
    ours = Block().bfloat16()
    for model in (whole, ours):
        convert_to_float8_training(model, config=config(recipe))
    adapter.parallelize(ours)
    assert not any(isinstance(m, Float8Linear) for m in ours.modules())
    assert ours.up_proj.fp8 == ours.down_proj.fp8 == recipe
    x = torch.randn(16, 32).bfloat16()
    found = [off(ours(x), whole(x))]
    for model in (whole, ours):
        model(x).square().sum().backward()
    grads = [(p.grad, q.grad) for p, q in zip(ours.parameters(), whole.parameters(), strict=True)]
    found += [off(p.full_tensor(), q) for p, q in grads]  # type: ignore[union-attr,arg-type]
    tw.close()
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_model_trains_as_torchao(pair: World, recipe: str) -> None:
    """Scales of a row-parallel layer are those of one rank's part, so bits differ."""
    for found in pair.run(split, recipe):
        assert max(found) < 6e-2, found


def test_other_recipes_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    convert_to_float8_training(model, config=replace(Float8LinearConfig(), emulate=True))
    with pytest.raises(InputError, match="rowwise_with_gw_hp"):
        adapter.parallelize(model)
    assert type(model[0]) is Float8Linear
