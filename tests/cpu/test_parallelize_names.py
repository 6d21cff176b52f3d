"""tw.parallelize of attentions and MLPs with layers of other than the usual names, which trials
show to be such. Against the unsplit model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.test_parallelize import FORMS, filled, run_either, train_alike
from tests.support.worlds import Member, Worlds
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw

WIDTH, HEADS = 16, 4


class Tutorial(nn.Module):
    """Three inputs, names of its own, heads and their size as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.d_k = HEADS, WIDTH // HEADS
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.size()
        return x.view(batch, rows, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
        q, k, v = (
            self.split_heads(layer(t)) for layer, t in ((self.W_q, q), (self.W_k, k), (self.W_v, v))
        )
        weights = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(-1)
        y = (weights @ v).transpose(1, 2).contiguous()
        return self.W_o(y.view(*y.shape[:2], self.num_heads * self.d_k))


class Words(nn.Module):
    """One input, heads of queries that share keys."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8)
        self.values, self.unify = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.unify(y.transpose(1, 2).flatten(2))


class Patches(nn.Module):
    """As in vit-pytorch: a norm in it, one layer for q, k and v, a sequence at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, 0.5
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = self.attend(q @ k.transpose(-1, -2) * self.scale) @ v
        return self.to_out(y.transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """As in diffusers: a layer each, a list at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (layer(x) for layer in (self.to_q, self.to_k, self.to_v))
        head = k.shape[-1] // self.heads
        q, k, v = (t.view(x.shape[0], -1, self.heads, head).transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = y.reshape(x.shape[0], -1, self.heads * head)
        for layer in self.to_out:
            y = layer(y)
        return y


class Configured(nn.Module):
    """Takes all numbers from a configuration, which its block shares."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.query, self.key, self.value, self.dense = (
            nn.Linear(config.n_embd, config.n_embd) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.config.n_head, self.config.n_embd // self.config.n_head)
        q, k, v = (
            layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.dense(y.reshape(*x.shape[:2], self.config.n_embd))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.all_head_size = HEADS, WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        return y.view(*y.shape[:2], self.all_head_size)


class Inside(nn.Module):
    """As in BERT: the layer at the end is in another module; numbers are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = Projections(), nn.Module()
        self.output.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output.dense(self.self(x))  # type: ignore[operator]


def configured() -> nn.Module:
    return Configured(SimpleNamespace(n_head=HEADS, n_embd=WIDTH, vocab=37))


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * gate.sigmoid()


class Reversed(nn.Module):
    """Its last layer is defined first; it has the size of its input."""

    def __init__(self, inner: int = WIDTH) -> None:
        super().__init__()
        self.back, self.there = nn.Linear(inner, WIDTH), nn.Linear(WIDTH, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.there(x).relu())


class Own(nn.Module):
    """An activation of one's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)


def sequence(*between: nn.Module, inner: int = 24, first: int = 24, norm: bool = False) -> Any:
    before = [nn.LayerNorm(WIDTH)] if norm else []
    layers = (nn.Linear(WIDTH, first), *between, nn.Dropout(0.0), nn.Linear(inner, WIDTH))
    return nn.Sequential(*before, *layers)


ATTENTIONS: dict[str, Any] = {
    "tutorial": Tutorial,
    "words": Words,
    "patches": Patches,
    "separate": Separate,
    "configured": configured,
    "inside": Inside,
}
MLPS: dict[str, Any] = {
    "sequence": lambda: sequence(nn.GELU()),
    "norm first": lambda: sequence(Own(), norm=True),
    "gated": lambda: sequence(Gate(), first=48),
    "reversed": Reversed,
    "reversed, wide": lambda: Reversed(24),
}
WHOLE: dict[str, Any] = {
    "a parameter": lambda: sequence(nn.PReLU()),
    "a softmax": lambda: sequence(nn.Softmax(-1)),
    "a norm": lambda: sequence(nn.LayerNorm(24), nn.GELU()),
    "odd": lambda: sequence(nn.GELU(), inner=23, first=23),
}


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + (
            self.attention(h, h, h) if isinstance(self.attention, Tutorial) else self.attention(h)
        )
        return x + self.mlp(self.norm2(x))


def build(attention: Any, mlp: Any) -> Any:
    return filled(lambda: nn.Sequential(*(Block(attention(), mlp()) for _ in range(2))))


def right(me: Member, attention: Any, mlp: Any, sequence: bool) -> None:
    part, reference = (build(ATTENTIONS[attention], {**MLPS, **WHOLE}[mlp]) for _ in range(2))
    tw.parallelize(part, sequence_parallel=sequence)
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        y, want = part(x), reference(x)
        train_alike(part, reference, y, want, 5e-5)
    kinds = (tw.nn.ColumnParallelLinear, tw.nn.RowParallelLinear)
    layers = [isinstance(m, kinds) for m in part[0].mlp.modules()]
    assert sum(layers) == (0 if mlp in WHOLE else 3 if mlp == "gated" else 2)
    assert sum(isinstance(m, kinds) for m in part[0].attention.modules()) == 4


@FORMS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attentions(worlds: Worlds, attention: str, size: int, sequence: bool) -> None:
    run_either(worlds("gloo", size), False, right, attention, "sequence", sequence)


@FORMS
@pytest.mark.parametrize("mlp", [*MLPS, *WHOLE])
def test_mlps(worlds: Worlds, mlp: str, sequence: bool) -> None:
    run_either(worlds("gloo", 2), False, right, "words", mlp, sequence)


def shared_configuration(me: Member) -> None:
    config = SimpleNamespace(n_head=HEADS, n_embd=WIDTH)
    part = nn.Sequential(*(Block(Configured(config), sequence(nn.GELU())) for _ in range(2)))
    tw.parallelize(part)
    assert (config.n_head, config.n_embd) == (HEADS, WIDTH)
    own = part[0].attention.config  # type: ignore[union-attr]
    assert (own.n_head, own.n_embd) == (HEADS // 2, WIDTH // 2)


def test_a_configuration_of_all_modules_stays(worlds: Worlds) -> None:
    run_either(worlds("gloo", 2), False, shared_configuration)
