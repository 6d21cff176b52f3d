"""What people do with a sharded model besides training it: copies, pickles, averages. And errors of
models that are no plain ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, compare, ids_of, model, whole
from tests.support.calls import refusal, run_either
from tests.support.tolerances import assert_near
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tileweave as tw


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def pickled(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied(me: Member, sequence: bool) -> None:
    """Copies have layers of their own: the first model does not matter any more."""
    part = tw.parallelize(model(), sequence_parallel=sequence)
    copies = [copy.deepcopy(part), pickled(part), AveragedModel(part).module]
    for parameter in part.parameters():
        nn.init.zeros_(parameter)
    for made in copies:
        compare(made, model())
    assert all(parameter.grad is None for parameter in part.parameters())


@FORMS
def test_copies_of_a_sharded_model(world: World, sequence: bool) -> None:
    run_either(world, False, copied, sequence)


def pickled_experts(me: Member) -> None:
    torch.manual_seed(0)
    moe = tw.nn.MoE(8, 8, 4, 2)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(me.rank))
    for made in (copy.deepcopy(moe), pickled(moe)):
        assert_near(made(x), moe(x), 1e-5, 1e-5, "y")


def test_copies_of_experts(world: World) -> None:
    run_either(world, False, pickled_experts)


def overflown(me: Member) -> float:
    """A gradient overflows in the shard of one rank."""
    part = tw.parallelize(model())
    scaler, optimizer = torch.amp.GradScaler("cpu", 8.0), torch.optim.SGD(part.parameters(), 1.0)
    scaler.scale(part(ids_of()).square().mean()).backward()
    if me.rank == 0:
        part.layers[0].mlp.up_proj.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    before = dict(model().named_parameters())
    assert all(torch.equal(whole(p), before[name]) for name, p in part.named_parameters())
    return scaler.get_scale()


def test_all_ranks_skip_a_step_that_overflows_on_one(world: World) -> None:
    assert run_either(world, False, overflown) == [4.0, 4.0]


def refused(me: Member) -> list[str]:
    twice, normed, rows = tw.parallelize(model()), model(), model()
    nn.utils.weight_norm(normed.layers[1].mlp.up_proj)
    tw.parallelize(rows, plan={"layers.*.mlp.down_proj": "rowwise"})
    return [
        refusal(tw.parallelize, twice),
        refusal(tw.parallelize, normed),
        refusal(rows, ids_of()),
    ]


NAMED = (
    "layers.0.self_attn.q_proj, which is sharded already",
    "layers.1.mlp.up_proj, whose weight is computed",
    "layers.0.mlp.down_proj of x",
)


def test_errors_name_the_layer(world: World) -> None:
    for errors in run_either(world, False, refused):
        for error, named in zip(errors, NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
