"""tw.parallelize(sequence_parallel=True) of attentions that take the number of rows from their
input, while their layers, after a norm, return the rows of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, MLP, filled, ids_of, train_alike
from tests.support.calls import run_either
from tests.support.worlds import Member, World, Worlds
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("gloo", 2)


class NormedAttention(nn.Module):
    """A norm in the attention, and the number of rows from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(16), 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 16) for _ in range(3))
        self.to_out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, keys: Any = None, mask: Any = None) -> torch.Tensor:
        b, t, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            layer(y).view(b, t, self.heads, -1).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class OneLayerAttention(NormedAttention):
    def __init__(self) -> None:
        super().__init__()
        del self.to_q, self.to_k, self.to_v
        self.to_qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, keys: Any = None, mask: Any = None) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class SeveralArguments(NormedAttention):
    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(q)


class RowsFromLayers(NormedAttention):
    """The number of rows from what a layer returns: no gather of the input is needed."""

    def forward(self, x: torch.Tensor, keys: Any = None, mask: Any = None) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class NormedBlock(nn.Module):
    def __init__(self, kind: type[NormedAttention]) -> None:
        super().__init__()
        self.attention, self.mlp = kind(), MLP(16, 24)
        self.inputs = 3 if kind is SeveralArguments else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(*[x] * self.inputs)
        return x + self.mlp(x)


def normed(kind: type[NormedAttention]) -> nn.Sequential:
    blocks = nn.Sequential(NormedBlock(kind), NormedBlock(kind))
    return filled(lambda: nn.Sequential(nn.Embedding(12, 16), blocks, nn.Linear(16, 12)))


def normed_inside(me: Member, kind: type[NormedAttention], sequence: bool) -> list[str]:
    part, reference = normed(kind), normed(kind)
    tw.parallelize(part, sequence_parallel=sequence)
    ids = ids_of()
    for _ in range(2):
        train_alike(part, reference, part(ids), reference(ids), 5e-5)
    return [
        name
        for name, module in part.named_modules()
        if isinstance(module, tw.nn.RowParallelLinear) and module.scatter
    ]


@FORMS
@pytest.mark.parametrize(
    ("kind", "scatters"),
    [
        (NormedAttention, False),
        (OneLayerAttention, False),
        (SeveralArguments, False),
        (RowsFromLayers, True),
    ],
)
def test_attentions_that_count_the_rows_of_their_input(
    world: World, kind: type[NormedAttention], scatters: bool, sequence: bool
) -> None:
    """They take all rows where they must; their layers are sharded all the same."""
    for found in run_either(world, False, normed_inside, kind, sequence):
        layers = ("attention.to_out", "mlp.down_proj")[not scatters :]
        wanted = [f"1.{n}.{layer}" for n in (0, 1) for layer in layers]
        assert found == (wanted if sequence else [])
