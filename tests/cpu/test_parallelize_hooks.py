"""What users add to a sharded model, and what they call it with: hooks that see the features or
rows of one rank, random numbers, sequences of any length."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import MLP, Model, compare, ids_of, model
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn

import tileweave as tw


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean((1, 2), keepdim=True)


def after(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
    return centred(y)


def before(module: nn.Module, args: Any) -> Any:
    return centred(args[0])


def in_place(module: nn.Module, args: Any, y: torch.Tensor) -> None:
    with torch.no_grad():
        y.copy_(centred(y))


def doubled(module: nn.Module, given: Any, of_output: Any) -> Any:
    return tuple(None if grad is None else 2 * grad for grad in given)


def hooked(sequence: bool, path: str, kind: str, hook: Any) -> tuple[str, int]:
    """The error of a training step of a model with this hook, and how many warnings name it."""
    part = tw.parallelize(model(), sequence_parallel=sequence)
    getattr(part.get_submodule(path), f"register_{kind}_hook")(hook)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tileweave").addHandler(handler)
    error = refusal(lambda: [part(ids_of()).sum().backward() for _ in range(2)])
    logging.getLogger("tileweave").removeHandler(handler)
    return error, sum(f"{path} has hooks" in line for line in told)


UP, DOWN = "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"
CHANGES = [
    (False, UP, "forward", after),
    (False, UP, "forward", in_place),
    (False, DOWN, "forward_pre", before),
    (False, UP, "full_backward", doubled),
    (True, DOWN, "forward", after),
    (True, "layers.0", "forward", after),
    (True, "layers.1.norm1", "forward", after),
    (True, "layers.1", "forward_pre", before),
]


def change(me: Member) -> list[tuple[str, int]]:
    return [hooked(*given) for given in CHANGES]


def test_hooks_must_not_change_the_part_of_one_rank(world: World) -> None:
    for results in run_either(world, False, change):
        for (error, told), (_, path, *_) in zip(results, CHANGES, strict=True):
            assert error.startswith(f"InputError: asked: a hook of {path} that changes"), error
            assert "remedy" in error and told == 1


def read(me: Member) -> None:
    """Hooks that read, and those that change what every rank has whole, are right."""
    part, reference, seen = model(), model(), []
    tw.parallelize(part)
    for made in (part, reference):
        for path, kind, hook in ((UP, "forward_pre", before), (DOWN, "forward", after)):
            getattr(made.get_submodule(path), f"register_{kind}_hook")(hook)
    part.get_submodule(UP).register_forward_hook(lambda _, args, y: seen.append(y.shape))
    compare(copy.deepcopy(part), reference)
    reference.zero_grad()
    compare(part, reference)
    rows = tw.parallelize(model(), sequence_parallel=True)
    rows.get_submodule("layers.1").register_forward_hook(
        lambda _, args, y: seen.append(args[0].shape)
    )
    compare(rows, model())
    assert seen == [(2, 6, 12), (2, 6, 12), (2, 3, 16)]


def test_hooks_that_read(world: World) -> None:
    run_either(world, False, read)


class Recorded(Model):
    """As models of transformers."""

    _can_record_outputs: Any = None

    def __init__(self) -> None:
        super().__init__(2)
        self.config = SimpleNamespace(output_hidden_states=False)

    def forward(self, ids: torch.Tensor, output_hidden_states: bool | None = None) -> Any:
        return super().forward(ids)


class Listed(nn.Module):
    """Blocks that have the sharded layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mlps = nn.Embedding(12, 16), nn.ModuleList([MLP(16, 24), MLP(16, 24)])
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mlp in self.mlps:
            x = mlp(x)
        return self.drop(x)


def called(me: Member) -> list[str]:
    rows, recorded = Listed(), tw.parallelize(Recorded(), sequence_parallel=True)
    compare(tw.parallelize(rows.eval(), sequence_parallel=True), Listed().eval())
    assert recorded(ids_of()).shape == (2, 6, 12)
    dropped = tw.parallelize(Listed())
    torch.manual_seed(1)
    assert not refusal(dropped, ids_of())
    other = tw.parallelize(Listed())
    torch.manual_seed(me.rank)
    assert not refusal(dropped, ids_of())  # has been compared
    assert not refusal(other.eval(), ids_of())
    return [
        refusal(rows, ids_of()[:, :5]),
        refusal(recorded, ids_of(), output_hidden_states=True),
        refusal(other.train(), ids_of()),
    ]


NAMED = (
    "mlps.0 of x (2, 5, 16), whose rows (dimension 1) are sharded over 2 ranks",
    "output_hidden_states of Recorded with sequence_parallel=True",
    "training of Listed, which has dropout in drop, with random generators in other states",
)


def test_calls_that_do_not_fit_are_named(world: World) -> None:
    for errors in run_either(world, False, called):
        for error, named in zip(errors, NAMED, strict=True):
            assert error.startswith("InputError: asked:") and named in error, (named, error)
            assert "remedy" in error
