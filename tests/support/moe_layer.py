"""Shared by CPU and GPU tests: nn.MoE over ranks against the whole layer on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.support.worlds import Member
from torch.nn.functional import linear, silu, softmax

from tileweave.nn import MoE
from tileweave.nn.shards import local

LIMIT = {"float32": 2e-5, "bfloat16": 3e-2}  # of the norm


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer; ``tokens`` is per rank."""

    tokens: tuple[int, ...]
    hidden: int = 16
    width: int = 8
    experts: int = 2  # per rank
    topk: int = 2
    shared: int = 0
    normalize: bool = True
    dtype: str = "float32"

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]


def whole_state(layer: Layer, size: int) -> dict[str, torch.Tensor]:
    """Parameters of the layer with all experts, fp32."""
    generator = torch.Generator().manual_seed(11)
    number, h, i = layer.experts * size, layer.hidden, layer.width
    shapes = {
        "gate.weight": (number, h),
        "experts.gate_up_proj": (number, 2 * i, h),
        "experts.down_proj": (number, h, i),
    }
    if layer.shared:
        shapes |= {
            "shared_experts.gate_proj.weight": (layer.shared, h),
            "shared_experts.up_proj.weight": (layer.shared, h),
            "shared_experts.down_proj.weight": (h, layer.shared),
        }
    dtype = getattr(torch, layer.dtype)
    return {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).float()
        for name, shape in shapes.items()
    }


def whole_layer(
    state: dict[str, torch.Tensor], x: torch.Tensor, layer: Layer, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer in plain torch, expert by expert, differentiable. ``ids`` are choices made
    elsewhere, so that rounding cannot change them."""
    probabilities = softmax(linear(x, state["gate.weight"]), -1)
    ids = probabilities.topk(layer.topk, -1).indices if ids is None else ids
    weights = probabilities.gather(1, ids)
    if layer.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for j in range(layer.topk):
        gate, up = torch.einsum("tnh,th->tn", state["experts.gate_up_proj"][ids[:, j]], x).chunk(
            2, -1
        )
        y = y + weights[:, j, None] * torch.einsum(
            "thi,ti->th", state["experts.down_proj"][ids[:, j]], silu(gate) * up
        )
    if layer.shared:
        gate, up = (
            linear(x, state[f"shared_experts.{name}_proj.weight"]) for name in ("gate", "up")
        )
        y = y + linear(silu(gate) * up, state["shared_experts.down_proj.weight"])
    return y


def verify_near(got: torch.Tensor | None, want: torch.Tensor, layer: Layer, what: str) -> None:
    assert got is not None and got.shape == want.shape, (
        f"{what}: {None if got is None else tuple(got.shape)}"
    )
    off = float((got.detach().double().cpu() - want.double()).norm())
    assert off <= LIMIT[layer.dtype] * float(want.norm()) + 1e-9, (
        f"{what}: off by {off} of {float(want.norm())}"
    )


def layer_over_ranks(me: Member, layers: list[Layer], backend: str | None = None) -> None:
    """Check outputs, every gradient, and the names in the state_dict."""
    for layer in layers:
        what = f"rank {me.rank}, {layer}"
        dtype, state = getattr(torch, layer.dtype), whole_state(layer, me.world_size)
        module = MoE(
            layer.hidden,
            layer.width,
            layer.experts * me.world_size,
            layer.topk,
            shared_intermediate_size=layer.shared,
            normalize=layer.normalize,
            max_tokens=max(layer.tokens),
            device=me.device,
            dtype=dtype,
        )
        assert module.state_dict().keys() == state.keys(), what
        module.load_whole_state_dict({name: t.to(me.device) for name, t in state.items()})
        leaves = {name: t.double().requires_grad_() for name, t in state.items()}
        xs, losses, ys = [], [], []
        for rank in range(me.world_size):
            generator = torch.Generator().manual_seed(rank)
            draws = [
                torch.randn(layer.tokens_of(rank), layer.hidden, generator=generator).to(dtype)
                for _ in range(2)
            ]
            x = draws[0].double().requires_grad_()
            ids = None
            # as the gate of the module chooses, on the same device: rounding decides near ties
            if layer.dtype != "float32":
                logits = linear(draws[0].to(me.device), state["gate.weight"].to(me.device, dtype))
                ids = logits.float().softmax(-1).topk(layer.topk, -1).indices.cpu()
            ys.append(whole_layer(leaves, x, layer, ids))
            losses.append((ys[-1] * draws[1].double()).sum())
            xs.append((x, draws))
        sum(losses[1:], losses[0]).backward()

        x = xs[me.rank][1][0].to(me.device).requires_grad_()
        call = module if backend is None else torch.compile(module, fullgraph=True, backend=backend)
        y = call(x)
        verify_near(y, ys[me.rank].detach(), layer, f"{what}: output")
        (y.float() * xs[me.rank][1][1].float().to(me.device)).sum().backward()
        verify_near(x.grad, xs[me.rank][0].grad, layer, f"{what}: of x")
        mine = slice(me.rank * layer.experts, (me.rank + 1) * layer.experts)
        for name, parameter in module.named_parameters():
            grad, want = local(parameter.grad), leaves[name].grad
            assert grad is not None and want is not None, f"{what}: {name}"
            if name.startswith("experts."):
                verify_near(grad, want[mine], layer, f"{what}: of {name}")
            else:
                verify_near(grad, want, layer, f"{what}: of {name}")
