"""The experts of :class:`tileweave.nn.MoE`: stacked weights, sharded by expert, and what they
compute of rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, pad, relu, silu

from tileweave.errors import require
from tileweave.nn.linear import fill_shard, under_autocast
from tileweave.nn.shards import ShardedModule, local, mesh_of, sharded
from tileweave.ops.core.registry import Group, name_of, rank_and_size
from tileweave.ops.core.replicated import copy_to_group, gather_parts
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu

# Functions of an expert's rows [gate, up]; names of transformers' ``hidden_act``.
ACTIVATIONS = {
    "silu": silu,
    "swiglu": silu,
    "gelu": gelu,
    "geglu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}
CLAMPED = "clamped_swiglu"  # of gpt-oss
ALPHA, LIMIT = 1.702, 7.0


def activate(y: torch.Tensor, plan: RoutingPlan, hidden_act: str) -> torch.Tensor:
    """The activation of each row [gate, up] of ``plan``; undefined rows stay undefined."""
    if hidden_act in ("silu", "swiglu"):
        return swiglu(y, plan)
    gate, up = y.chunk(2, -1)
    if hidden_act == CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * (ALPHA * gate).sigmoid() * (up + 1)).contiguous()
    return (ACTIVATIONS[hidden_act](gate) * up).contiguous()


class Experts(ShardedModule):
    """All experts, stacked, DTensors sharded by expert: ``gate_up_proj`` [E, 2 I, H] (gate rows,
    then up rows) and ``down_proj`` [E, H, I]; with biases also ``gate_up_proj_bias`` [E, 2 I] and
    ``down_proj_bias`` [E, H].

    Each rank has ``each`` = ceil(E / R) experts in order, the last ranks fewer or none.
    """

    trained = True  # whether parameters have gradients

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        group: Group | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        draw: bool = True,
    ) -> None:
        from torch.distributed.tensor import Shard

        super().__init__()
        self.group_name, self.hidden_size = name_of(group), hidden_size
        self.intermediate_size = intermediate_size
        rank, size = rank_and_size(self.group_name)
        self.each = -(-count // size)
        mine = max(min(self.each, count - rank * self.each), 0)
        for name, shape in self.shapes(bias).items():
            kind = self.dtype_of(name, dtype)
            shard = torch.empty(mine, *shape, device=device, dtype=kind)
            mesh = mesh_of(group, shard.device)
            parameter = sharded(shard, mesh, Shard(0), (count, *shape))
            setattr(self, name, parameter.requires_grad_(self.trained))
        if draw:
            self.reset_parameters()

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...]]:
        """The parameters of one expert."""
        found: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (2 * self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        if bias:
            found |= {f"{name}_bias": shape[:1] for name, shape in found.items()}
        return found

    def dtype_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype of a parameter of a layer of ``dtype``."""
        return dtype

    def whole_shard(self, name: str) -> Any:
        """What operators take of a parameter: as many experts on each rank. Missing ones are zeros,
        which no token has. None: there is no such parameter."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return None
        shard: torch.Tensor = local(parameter)
        missing = self.each - shard.shape[0]
        if not missing:
            return shard
        more = (0, 0) * (shard.dim() - 1) + (0, missing)
        if shard.itemsize == 1:
            return pad(shard.view(torch.uint8), more).view(shard.dtype)
        return pad(shard, more)

    def run(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        max_tokens: int | None,
        hidden_act: str,
    ) -> torch.Tensor:
        """The weighted sum of the experts of each of this rank's tokens."""
        y, plan = self.dispatch(tokens, ids, max_tokens)
        biases = self.whole_shard("gate_up_proj_bias")
        if biases is not None:
            y = y + bias_of_rows(biases, plan).to(y.dtype)
        z = self.combine(y, plan, weights, hidden_act)
        if biases is not None:
            shard = self.whole_shard("down_proj_bias")
            z = z + bias_of_tokens(shard, ids, weights, self.group_name).to(z.dtype)
        return z

    def dispatch(
        self, tokens: torch.Tensor, ids: torch.Tensor, max_tokens: int | None
    ) -> tuple[torch.Tensor, RoutingPlan]:
        """Rows of this rank's experts, times their first weights."""
        rows, up = under_autocast(tokens, self.whole_shard("gate_up_proj"))
        return dispatch_grouped_matmul(rows, up, ids, group=self.group_name, max_tokens=max_tokens)

    def combine(
        self, y: torch.Tensor, plan: RoutingPlan, weights: torch.Tensor, hidden_act: str
    ) -> torch.Tensor:
        """Sums of the activated rows, times their second weights."""
        h = activate(y, plan, hidden_act)
        h, down = under_autocast(h, self.whole_shard("down_proj"))
        return grouped_matmul_combine(h, down, plan, weights, group=self.group_name)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                inner = self.hidden_size if "gate_up" in name else self.intermediate_size
                fill_shard(local(parameter), 1 / math.sqrt(inner), self.group_name)

    def prepared(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        for name in self._parameters:
            given = state.get(prefix + name)
            if given is not None and given.dtype.itemsize == 1:
                require(
                    not self.trained,
                    f"{prefix}{name} of {given.dtype}",
                    "experts of 16 or 32 bits in a layer without fp8=",
                    'make the layer with fp8="block"',
                )
        return state


def bias_of_rows(bias: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """[E / R, N] -> [bound, N]: the bias of each row's expert, 0 for undefined rows, whose gradient
    is then left out."""
    rows = torch.arange(plan.bound, dtype=torch.int32, device=bias.device)
    expert = torch.searchsorted(plan.offsets[1:], rows, right=True)
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[expert]


def bias_of_tokens(
    bias: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group_name: str
) -> torch.Tensor:
    """[E / R, N] -> [T, N]: the weighted sum of the biases of each token's experts.

    Biases of all experts are small: they are gathered, so that no second combine is needed.
    """
    everyone = copy_to_group(gather_parts(bias, 0, group_name), group_name)
    chosen = weights.new_zeros(ids.shape[0], everyone.shape[0])
    used = weights.masked_fill(ids < 0, 0)
    chosen = chosen.scatter_add(1, ids.long().clamp(min=0), used)
    return chosen.to(everyone.dtype) @ everyone
