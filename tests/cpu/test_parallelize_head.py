"""Heads of models by tw.parallelize: each rank computes its own features of the output, which are
gathered, while the weight stays whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, MLP, filled, ids_of, train_alike
from tests.support.calls import refusal, run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn.functional import cross_entropy, linear

import tileweave as tw
from tileweave.parallel import gathered
from tileweave.parallel.gathered import GatheredLinear, pays
from tileweave.planning.machine import H200, Machine
from tileweave.planning.topology import Topology

WORDS, WIDTH = 12, 16


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class Words(nn.Module):
    """Two blocks, and a head with a bias and a weight of its own. ``own_loss``: the loss reads the
    weight, as fused losses do, without the head."""

    def __init__(self, words: int = WORDS, own_loss: bool = False) -> None:
        super().__init__()
        self.embed, self.own_loss = nn.Embedding(words, WIDTH), own_loss
        self.layers = nn.ModuleList([MLP(WIDTH, 24), MLP(WIDTH, 24)])
        self.head = nn.Linear(WIDTH, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.own_loss:
            logits = linear(x, self.head.weight, self.head.bias)
            return cross_entropy(logits.flatten(0, 1), ids.flatten())
        return self.head(x)


def made(**options: Any) -> Any:
    return filled(lambda: Words(**options))


def right(me: Member, sequence: bool, compiles: bool, options: dict[str, Any]) -> bool:
    """Whether the head is gathered; the model trains as the whole one does."""
    part, reference = made(**options), made(**options)
    tw.parallelize(part, sequence_parallel=sequence)
    call = torch.compile(part, backend="aot_eager", fullgraph=True) if compiles else part
    ids = ids_of()
    y, want = call(ids), reference(ids)
    assert y.shape == want.shape
    train_alike(part, reference, y, want, 5e-5)
    with torch.no_grad():
        torch.testing.assert_close(call(ids), reference(ids), rtol=1e-4, atol=1e-5)
    assert part.head.weight.full_tensor().shape == reference.head.weight.shape
    return isinstance(part.head, GatheredLinear)


@FORMS
@pytest.mark.parametrize(
    ("options", "gathers"),
    [({}, True), ({"words": 13}, False), ({"own_loss": True}, True)],
    ids=["", "odd", "a loss of its own"],
)
def test_a_head_trains_as_the_whole_one(
    world: World, sequence: bool, options: dict[str, Any], gathers: bool
) -> None:
    found = run_either(world, False, right, sequence, False, options)
    assert found == [gathers] * 2


@FORMS
def test_a_compiled_head_is_part_of_the_graph(world: World, sequence: bool) -> None:
    assert run_either(world, False, right, sequence, True, {}) == [True, True]


class Around(nn.Module):
    """A module with linear layers of its own around a list of lists: it has this rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Identity(), MLP(WIDTH, 24)])])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        for identity, mlp in layers:
            x = identity(x) + mlp(x)
        return self.last(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), Around()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Sequence(nn.Module):
    """The list has an embedding and the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), MLP(WIDTH, 24), MLP(WIDTH, 24), nn.Linear(WIDTH, WORDS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.all(ids)


def gathered_of(me: Member, kind: type, sequence: bool) -> list[str]:
    part, reference = filled(kind), filled(kind)
    plan: Any = "auto"
    if sequence and kind is Nested:
        layers = "blocks.layers.0.1."
        plan = {f"{layers}{name}": "colwise" for name in ("gate_proj", "up_proj")}
        plan |= {f"{layers}down_proj": "rowwise", "blocks.last": "sequence_parallel"}
    tw.parallelize(part, plan=plan, sequence_parallel=sequence)
    ids = ids_of()
    train_alike(part, reference, part(ids), reference(ids), 5e-5)
    return [path for path, m in part.named_modules() if isinstance(m, GatheredLinear)]


@pytest.mark.parametrize(
    ("kind", "sequence", "paths"),
    [
        (Nested, False, ["blocks.last", "head"]),
        (Nested, True, ["head"]),
        (Sequence, False, []),
        (Sequence, True, []),
    ],
)
def test_layers_with_the_rows_of_one_rank_are_not_gathered(
    world: World, kind: type, sequence: bool, paths: list[str]
) -> None:
    assert run_either(world, False, gathered_of, kind, sequence) == [paths] * 2


def of_uses(me: Member) -> list[str]:
    """Calls without rows, and second derivatives."""
    part = made()
    tw.parallelize(part)
    empty = part.head(torch.zeros(0, 3, WIDTH))
    assert empty.shape == (0, 3, WORDS)
    # as after resize_token_embeddings
    other = nn.Parameter(torch.randn(WORDS + 1, WIDTH, generator=torch.Generator().manual_seed(1)))
    head = nn.Linear(WIDTH, WORDS, bias=False)
    head.__class__ = GatheredLinear
    head.weight, head.group_name = other, part.head.group_name  # type: ignore[assignment]
    assert torch.equal(head(other), linear(other, other))
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = part.head(x)
    return [refusal(torch.autograd.grad, y.sum(), x, create_graph=True)]


def test_second_derivatives_are_refused(world: World) -> None:
    for errors in run_either(world, False, of_uses):
        assert "create_graph" in errors[0] and "asked:" in errors[0]


@pytest.mark.parametrize(
    ("machine", "nodes", "known"),
    [
        (H200, (0, 0), True),
        (replace(H200, name="NVIDIA H100", num_sms=114), (0, 0), True),
        (replace(H200, arch=80), (0, 0), False),
        (replace(H200, unreachable="no peer access"), (0, 0), False),
        (H200, (0, 1), False),
    ],
    ids=["H200", "H100", "A100", "no peer access", "two hosts"],
)
def test_heads_stay_whole_where_nothing_was_measured(
    machine: Machine, nodes: tuple[int, ...], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "machine_of", lambda device: machine)
    monkeypatch.setattr(gathered, "known_topology_of", lambda name: Topology(nodes))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert gathered.resembles_measured("group") == known


GPU = torch.device("cuda")


class Shape:
    """What :func:`pays` asks of a tensor on a GPU."""

    def __init__(self, *shape: int, trains: bool = False) -> None:
        self.shape, self.device, self.requires_grad = shape, GPU, trains

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def element_size(self) -> int:
        return 2


# Two H200, 2026-11-29, us: rows, features, K, training, whole, by parts.
MEASURED = [
    (16, 128256, 4096, False, 253, 171),
    (16, 151936, 2048, False, 157, 124),
    (16, 256000, 3584, False, 450, 282),
    (16, 32000, 1024, False, 19, 23),
    (512, 32000, 4096, False, 212, 346),
    (512, 151936, 2048, False, 462, 703),
    (2048, 151936, 2048, False, 1723, 2440),
    (8192, 151936, 2048, False, 6718, 9524),
    (512, 128256, 4096, True, 2323, 3531),
    (512, 32000, 4096, True, 645, 1945),
    (512, 256000, 3584, True, 4156, 6402),
    (2048, 151936, 2048, True, 4983, 5536),
    (2048, 256000, 3584, True, 16303, 14754),
    (8192, 128256, 4096, True, 38836, 25441),
    (8192, 32000, 4096, True, 8967, 7094),
    (8192, 151936, 2048, True, 22107, 18379),
]


@pytest.mark.parametrize(
    ("rows", "features", "depth", "trains", "whole", "parts"),
    MEASURED,
    ids=[f"{rows}x{n}x{k}{'-trained' * trains}" for rows, n, k, trains, *_ in MEASURED],
)
def test_parts_are_chosen_where_they_were_faster(
    rows: int, features: int, depth: int, trains: bool, whole: int, parts: int
) -> None:
    x, w = Shape(1, rows, depth, trains=trains), Shape(features, depth, trains=trains)
    assert pays(x, w, 2) == (parts < whole)  # type: ignore[arg-type]
    assert not pays(Shape(0, depth), w, 2)  # type: ignore[arg-type]
