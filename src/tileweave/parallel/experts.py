"""Stacked experts of transformers, sharded by expert: dispatch, activation, combine.

A module of experts has ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I], stacked, which its
decorator ``use_experts_implementation`` describes: transposed, interleaved, with biases, with or
without a gate. ``_apply_gate`` computes rows of its activation, also those of one's own, such as
the clamped SwiGLU of gpt-oss. Nothing here imports transformers.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tileweave.errors import require
from tileweave.nn.gated_experts import bias_of_rows, bias_of_tokens
from tileweave.nn.linear import under_autocast
from tileweave.nn.made_classes import make_class
from tileweave.ops.core.registry import group_of, name_of
from tileweave.ops.experts.dispatch_grouped_matmul import dispatch_grouped_matmul
from tileweave.ops.experts.grouped_matmul_combine import grouped_matmul_combine
from tileweave.ops.experts.routing_plan import RoutingPlan
from tileweave.ops.experts.swiglu import swiglu
from tileweave.parallel.fused import is_adapter
from tileweave.parallel.own_shards import shard_own
from tileweave.transport.torch_collectives import all_gather_flat

_LOG = logging.getLogger("tileweave")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DESCRIBED_BY = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
MATRICES = ("gate_up_proj", "up_proj", "down_proj")
STACKED = {*MATRICES, *(f"{name}_bias" for name in MATRICES)}


def is_described(module: Any) -> bool:
    """Whether ``module`` has experts that transformers' ``use_experts_implementation``
    describes."""
    return all(name in vars(module) for name in DESCRIBED_BY)


class ExpertParallel:
    """Calls the experts of all ranks for this rank's tokens, as an ``EPImplementation`` does.

    Parameters
    ----------
    experts : nn.Module
        Experts of transformers, of which each rank has E / R. Its parameters are local tensors
        during a call.

    group : ProcessGroup
        The ranks that share the experts.

    shared : ProcessGroup or None
        The ranks that have the same tokens, a part of ``group``. Each computes its slice of the
        tokens, and gathers the slices of the others. None: tokens are this rank's own.

    max_tokens : int, optional
        The largest number of tokens of any rank, where ranks of ``group`` have different batches.

    even : bool
        Ranks have different tokens, but as many.

    Raises
    ------
    InputError
        for a module whose activation or layout is not known.
    """

    def __init__(
        self,
        experts: nn.Module,
        group: dist.ProcessGroup,
        shared: dist.ProcessGroup | None,
        max_tokens: int | None = None,
        even: bool = False,
    ) -> None:
        known = all(hasattr(experts, what) for what in DESCRIBED_BY)
        require(
            known and not getattr(experts, "has_post_expert_norm", False),
            f"experts {type(experts).__name__}",
            "experts that transformers' use_experts_implementation describes, "
            "without a norm after each expert",
            'load the model with another ep_implementation, such as "auto"; before transformers '
            "5.21: enable(experts=False)",
        )
        self.experts: Any = experts
        self.group, self.shared, self.max_tokens = group, shared, max_tokens
        size = dist.get_world_size(group)
        self.even = even or (shared is not None and dist.get_world_size(shared) == size)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, shared = hidden_states.shape[0], self.shared
        if shared is None:
            own = tokens
            x, ids, weights = hidden_states, top_k_index, top_k_weights
        else:
            own = -(-tokens // dist.get_world_size(shared))
            x = _Slice.apply(hidden_states, own, shared)
            weights = _Slice.apply(top_k_weights, own, shared)
            ids = _own_rows(top_k_index, own, shared)
        most = own if self.even else self._most_tokens(own, x.device)
        z = self._compute(x, ids, weights, most)
        return z if shared is None else _Gather.apply(z, tokens, own, shared)

    def _compute(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, for this rank's tokens."""
        experts, group = self.experts, self.group
        first = experts.gate_up_proj if experts.has_gate else experts.up_proj
        require(
            first.dtype in DTYPES and experts.down_proj.dtype in DTYPES,
            lambda: f"{type(experts).__name__} with weights in {first.dtype}",
            "float16, bfloat16 or float32, or FP8 with scales of blocks",
            'load the model with another ep_implementation, such as "auto"',
        )
        rows, up, down = under_autocast(x.contiguous(), first, experts.down_proj)
        if experts.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        ids, weights = ids.contiguous(), weights.float().contiguous()
        y, plan = dispatch_grouped_matmul(rows, up, ids, group=group, max_tokens=most)
        if experts.has_bias:
            bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
            y = y + bias_of_rows(bias, plan).to(y.dtype)
        z = grouped_matmul_combine(self._activate(y, plan), down, plan, weights, group=group)
        if experts.has_bias:
            biases = bias_of_tokens(experts.down_proj_bias, ids, weights, name_of(group))
            z = z + biases.to(z.dtype)
        return z.to(x.dtype)

    def _activate(self, y: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        """The activation of each row. Undefined rows stay undefined: it treats rows one by one."""
        experts = self.experts
        if not experts.has_gate:
            return experts.act_fn(y).contiguous()
        if self._is_swiglu():
            return swiglu(y, plan)
        return experts._apply_gate(y).contiguous()

    def _is_swiglu(self) -> bool:
        """Whether the activation is silu(gate) * up, gate rows first."""
        experts = self.experts
        if not experts.has_gate:
            return False
        silu = isinstance(getattr(experts, "act_fn", None), nn.SiLU) or (
            type(getattr(experts, "act_fn", None)).__name__ == "SiLUActivation"
        )
        return self._has_default_gate() and silu and experts.is_concatenated

    def _has_default_gate(self) -> bool:
        """Whether the gate is act(gate) * up."""
        return type(self.experts)._apply_gate.__name__ == "_default_apply_gate"

    def _most_tokens(self, own: int, device: torch.device) -> int:
        """The largest number of tokens of any rank, of which this one has ``own``."""
        if self.max_tokens is not None:
            return self.max_tokens
        most = torch.tensor(own, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most.item())


# --- Tokens that ranks share ---


def _own_rows(t: torch.Tensor, own: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's slice of ``own`` rows; the last ones are shorter or empty."""
    rank = dist.get_rank(group)
    return t[min(t.shape[0], rank * own) : min(t.shape[0], (rank + 1) * own)].contiguous()


def _all_rows(t: torch.Tensor, total: int, own: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The slices of all ranks, in rank order: ``total`` rows."""
    if t.shape[0] < own:
        t = torch.cat([t, t.new_zeros(own - t.shape[0], *t.shape[1:])])
    rows = t.new_empty(own * dist.get_world_size(group), *t.shape[1:])
    all_gather_flat(rows, t.contiguous(), group=group)
    return rows[:total]


class _Slice(torch.autograd.Function):
    """Rows that all ranks have -> this rank's slice. Gradients of the slices are gathered."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, own: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.total, ctx.own, ctx.group = t.shape[0], own, group
        return _own_rows(t, own, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_rows(grads[0], ctx.total, ctx.own, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """This rank's slice -> rows that all ranks have. What follows is the same on all ranks, so each
    has the whole gradient and takes its slice."""

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, total: int, own: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.own, ctx.group = own, group
        return _all_rows(t, total, own, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own_rows(grads[0], ctx.own, ctx.group), None, None, None


# --- In a model ---


def experts_of(model: nn.Module, size: int) -> list[str]:
    """The paths of experts in ``model`` that are sharded; a warning names others."""
    found = []
    for path, module in model.named_modules():
        if not is_described(module) or is_adapter(module):
            continue
        reason = why_whole(module, size)
        if reason is None:
            found.append(path)
        else:
            _LOG.warning("%s stays whole on every rank: %s", path, reason)
    return found


def why_whole(module: Any, size: int) -> str | None:
    """Why ``size`` ranks cannot share the experts of ``module``; None: they can."""
    if getattr(module, "has_post_expert_norm", False):
        return "they have a norm after each expert"
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if (
        not own
        or not set(own) <= STACKED
        or any(True for c in module.children() for _ in c.parameters())
    ):
        return "they have other parameters than transformers' experts"
    if any(p.dtype not in DTYPES for p in own.values()):
        return "their weights are not float16, bfloat16 or float32"
    count = next(iter(own.values())).shape[0]
    return f"{count} experts over {size} ranks" if count % size else None


def check_experts(path: str, module: Any, size: int) -> None:
    """Raise :class:`InputError` for a module whose experts cannot be sharded."""
    require(
        is_described(module) and not isinstance(module, ShardedExperts),
        f"{path}, a {type(module).__name__}, as experts",
        "experts that transformers' use_experts_implementation describes, not sharded yet",
        "pass a plan without it, or put a tileweave.nn.MoE in the place of the block",
    )
    reason = why_whole(module, size)
    require(
        reason is None,
        f"{path}, experts that are sharded: {reason}",
        "a multiple of the number of ranks, and stacked weights in 16 or 32 bits",
        "pass a plan without it: they stay whole on every rank",
    )


class ShardedExperts(nn.Module):
    """Experts of transformers that are sharded by expert. Made by :func:`shard_experts`."""

    _group_name: str
    _own_tokens: bool

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        group = group_of(self._group_name)
        shared = None if self._own_tokens else group
        experts = ExpertParallel(self, group, shared, even=True)
        return experts(hidden_states, top_k_index, top_k_weights)


def shard_experts(module: Any, mesh: DeviceMesh, own_tokens: bool, source: int | None) -> None:
    """Shard experts by expert, in place.

    Parameters
    ----------
    own_tokens : bool
        Each rank calls them with its own tokens, as many as the others. False: all have the same.

    source : int, optional
        The rank whose values are taken. None: ranks have equal values.
    """
    names = [name for name, p in module._parameters.items() if p is not None]
    module._group_name, module._own_tokens = name_of(mesh), own_tokens
    module.__class__ = _class_of(type(module))
    shard_own(module, names, mesh, source)


@cache
def _class_of(cls: type) -> type:
    return make_class(cls, ShardedExperts, {}, _class_of)
