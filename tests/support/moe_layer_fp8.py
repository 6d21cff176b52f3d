"""Shared by CPU and GPU tests: nn.MoE with FP8 experts, against fp64 of the numbers that its
operands represent, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests.support.scaled_experts import by_tiles, value
from tests.support.worlds import Member
from torch.nn.functional import silu

import tileweave as tw
from tileweave.ops.matmul.quantize import _in_torch

HIDDEN, INNER, TOPK = 144, 80, 2
WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Kind:
    """A layer. ``shared``: inner size of its shared expert."""

    experts: int = 4
    shared: int = 0
    bias: bool = False
    hidden_act: str = "silu"
    tokens: str = "own"
    dtype: torch.dtype = torch.bfloat16

    def make(self, **options: Any) -> tw.nn.MoE:
        given = {"fp8": "block", "dtype": torch.bfloat16} | options
        layer = tw.nn.MoE(
            HIDDEN,
            INNER,
            self.experts,
            TOPK,
            shared_intermediate_size=self.shared,
            hidden_act=self.hidden_act,
            bias=self.bias,
            tokens=self.tokens,
            **given,
        )
        return layer.eval()

    def state(self) -> dict[str, torch.Tensor]:
        """Of the whole layer, in bfloat16."""
        generator = torch.Generator().manual_seed(5)
        e, h, i, s = self.experts, HIDDEN, INNER, self.shared
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (e, h)}
        shapes |= {WEIGHTS[0]: (e, 2 * i, h), WEIGHTS[1]: (e, h, i)}
        if self.bias:
            shapes |= {f"{WEIGHTS[0]}_bias": (e, 2 * i), f"{WEIGHTS[1]}_bias": (e, h)}
        if s:
            shapes |= {f"shared_experts.{n}_proj.weight": (s, h) for n in ("gate", "up")}
            shapes["shared_experts.down_proj.weight"] = (h, s)
        return {
            name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()
            for name, shape in shapes.items()
        }


def quantized(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint: experts and shared expert are FP8, with their scales."""
    found = dict(state)
    for name, w in state.items():
        if name in WEIGHTS:
            found[name], found[f"{name}_scale_inv"] = by_tiles(w)
        elif name.startswith("shared_experts."):
            found[name], found[f"{name}_scale_inv"] = _in_torch(w, "tile")
    return found


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What is left of rows that are quantised by blocks of 128, in fp64."""
    return value(*_in_torch(x, "block"))


def narrow(x: torch.Tensor, truncated: bool) -> torch.Tensor:
    """In bfloat16, to which the interpreter truncates. An activation that is a little off may be
    another FP8 number."""
    if not truncated:
        return x.to(torch.bfloat16)
    return (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def expected(
    kind: Kind, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, truncated: bool
) -> torch.Tensor:
    """The layer for tokens x and their choices, one at a time, in fp64 with the roundings of the
    layer."""
    state = kind.state()
    found = quantized(state)
    of = {
        name: [value(d, s) for d, s in zip(found[name], found[f"{name}_scale_inv"], strict=True)]
        for name in WEIGHTS
    }
    sent = rounded(x)
    z = torch.zeros(x.shape, dtype=torch.float64)
    for t, (factors, chosen) in enumerate(zip(weights.double(), ids.tolist(), strict=True)):
        for factor, expert in zip(factors, chosen, strict=True):
            y = narrow(of[WEIGHTS[0]][expert] @ sent[t], truncated)
            if kind.bias:
                y = y + state[f"{WEIGHTS[0]}_bias"][expert]
            gate, up = y.chunk(2)
            if kind.hidden_act == "silu":
                h = narrow(silu(gate.float()) * up.float(), truncated)
            else:  # of torch, in bfloat16
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                h = gate * (1.702 * gate).sigmoid() * (up + 1)
            product = of[WEIGHTS[1]][expert] @ rounded(h[None])[0]
            if kind.bias:
                product = product + state[f"{WEIGHTS[1]}_bias"][expert].double()
            z[t] += factor * product
    if kind.shared:
        w = {
            n: value(found[n], found[f"{n}_scale_inv"])
            for n in found
            if "shared" in n and not n.endswith("_inv")
        }
        gate, up = (x.double() @ w[f"shared_experts.{n}_proj.weight"].t() for n in ("gate", "up"))
        z += (silu(gate) * up) @ w["shared_experts.down_proj.weight"].t()
    return z


def tokens(kind: Kind, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0 if kind.tokens == "replicated" else rank)
    return torch.randn(5, HIDDEN, generator=generator).to(kind.dtype)


def error(me: Member, kind: Kind, interpreted: bool) -> float:
    """How far a layer that has loaded a checkpoint is off, relative to the norm."""
    layer, x = kind.make(device=me.device), tokens(kind, me.rank)
    layer.load_state_dict({n: t.to(me.device) for n, t in quantized(kind.state()).items()})
    with torch.no_grad():
        z = layer(x.to(me.device))
        weights, ids = layer.gate(x.to(me.device))
    assert z.shape == x.shape and z.dtype == x.dtype
    want = expected(kind, x, weights.cpu(), ids.cpu(), interpreted)
    return float((z.double().cpu() - want).norm() / want.norm())


KINDS = {
    "shared": Kind(shared=48),
    "uneven": Kind(experts=3, dtype=torch.float32),
    "gpt-oss": Kind(bias=True, hidden_act="clamped_swiglu", tokens="replicated"),
}
