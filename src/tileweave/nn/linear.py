"""Linear layers of tensor and sequence parallelism, with the parameters of ``torch.nn.Linear``, one
shard a rank.

A column-parallel layer, something elementwise, a row-parallel layer: the pair of a Megatron-style
MLP or attention. Both start as a full ``nn.Linear`` would, and :meth:`from_linear` cuts one out of
a full layer that every rank has.

Seed all ranks alike before making layers: what is replicated starts equal then, and shards start
different all the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tileweave.errors import require
from tileweave.ops.core.registry import group_of, name_of
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter


def under_autocast(*operands: Any) -> tuple[Any, ...]:
    """Under ``torch.autocast`` in its dtype, as ``nn.Linear`` has its operands (tensors or None);
    else as they are."""
    kind = operands[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands)


def draw_seed(like: torch.Tensor) -> int | None:
    """A number from the generator of that device; None where a draw has no value, and nothing is
    filled."""
    if like.is_meta or hasattr(like, "fake_mode"):
        return None
    # room for what is added
    return int(torch.empty((), dtype=torch.int64, device=like.device).random_()) >> 1


def generator_of(shard: torch.Tensor, seed: int | None, number: int) -> torch.Generator | None:
    """For shard ``number`` of what is drawn from ``seed``.

    From the device's own, ranks that were seeded alike would draw equal shards, whose gradients are
    equal too: for ever.
    """
    return None if seed is None else torch.Generator(shard.device).manual_seed(seed + number)


def fill_shard(shard: torch.Tensor, bound: float, group_name: str) -> None:
    """Uniform in [-bound, bound], other values on each rank."""
    generator = generator_of(shard, draw_seed(shard), dist.get_rank(group_of(group_name)))
    nn.init.uniform_(shard, -bound, bound, generator)


class _ParallelLinear(nn.Module):
    """What both layers share: ``shape`` of this rank's weight, ``bias_size`` elements of bias (0:
    none)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shards_bias: bool

    def __init__(
        self, in_features: int, out_features: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.group_name = name_of(group)
        self.world_size = dist.get_world_size(group_of(self.group_name))
        self.in_features, self.out_features = in_features, out_features

    def _share(self, name: str) -> int:
        """This rank's share of the features called ``name``."""
        features = getattr(self, name)
        asked = f"{name}={features} over {self.world_size} ranks"
        require(
            features % self.world_size == 0,
            asked,
            "a multiple of the group's size",
            "pad the layer or choose another group",
        )
        return features // self.world_size

    def _make_parameters(
        self,
        shape: tuple[int, int],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear.reset_parameters`` of the full layer: the bound comes from its
        ``in_features``."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        fill_shard(self.weight, bound, self.group_name)
        if self.bias is not None:
            if self.shards_bias:
                fill_shard(self.bias, bound, self.group_name)
            else:
                nn.init.uniform_(self.bias, -bound, bound)

    def _copy_from(self, linear: nn.Linear, dimension: int) -> None:
        """This rank's shard of the weight along ``dimension``; the bias goes with the rows, or
        stays whole."""
        rank = dist.get_rank(group_of(self.group_name))
        with torch.no_grad():
            self.weight.copy_(linear.weight.chunk(self.world_size, dimension)[rank])
            self.weight.requires_grad_(linear.weight.requires_grad)
            if self.bias is not None:
                self.bias.copy_(
                    linear.bias.chunk(self.world_size)[rank] if dimension == 0 else linear.bias
                )
                self.bias.requires_grad_(linear.bias.requires_grad)


class ColumnParallelLinear(_ParallelLinear):
    """``gather(x) @ weight.T + bias``, with rows of x sharded over the group and output features
    too.

    =======  ===========================  ==========================================
    weight   [out_features / R, in]       rows of the full Linear weight, rank by rank
    bias     [out_features / R]           or None
    x        [m, ..., in]                 this rank's rows (m = M / R)
    y        [M, ..., out_features / R]   all rows, this rank's features
    =======  ===========================  ==========================================

    Parameters
    ----------
    in_features, out_features : of the full layer. group : the ranks that share it; None is the
        default group.
    save_gathered : keep gather(x) for backward (R times the memory of x) in place of gathering it
        again.
    """

    shards_bias = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        save_gathered: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, group)
        self.save_gathered = save_gathered
        self._make_parameters((self._share("out_features"), in_features), bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        save_gathered: bool = False,
    ) -> ColumnParallelLinear:
        """This rank's share of a full ``nn.Linear`` (which every rank has)."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            save_gathered=save_gathered,
        )
        layer._copy_from(linear, 0)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operands = under_autocast(x, self.weight, self.bias)
        keep = self.save_gathered and torch.is_grad_enabled()
        result = all_gather_matmul(*operands, group=self.group_name, return_gathered=keep)
        return result[0] if isinstance(result, tuple) else result

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} / {self.world_size} ranks, "
            f"bias={self.bias is not None}, save_gathered={self.save_gathered}"
        )


class RowParallelLinear(_ParallelLinear):
    """``sum over ranks of x @ weight.T, plus bias``, with input features sharded over the group.

    =======  ===========================  ==============================================================
    weight   [out, in_features / R]       columns of the full Linear weight, rank by rank
    bias     [out]                        or None; the same on every rank, and so is its gradient
    x        [M, ..., in_features / R]    all rows, this rank's features
    y        [M / R, ..., out]            this rank's rows; with ``scatter=False`` [M, ..., out], all rows
    =======  ===========================  ==============================================================

    Parameters
    ----------
    in_features, out_features : of the full layer. group : the ranks that share it; None is the
        default group.
    scatter : True: ``matmul_reduce_scatter``, for sequence parallelism. False:
        ``matmul_all_reduce``; backward then takes the gradient of y to be the same on every rank.

    With ``scatter=False`` all ranks have all rows, and a :class:`ColumnParallelLinear` does not
    stand before this layer: it gathers rows that ranks share out. What does is a linear layer over
    this rank's output features, of the same x on every rank (``torch.nn.Linear`` of a shard). Its
    gradient of x is then this rank's part of the sum over ranks, which nothing here adds up:
    all-reduce it (an autograd function: identity forward, ``all_reduce`` backward) before whatever
    is replicated and has parameters below. Gradients of this layer's x, weight and bias need
    nothing of the kind.

    A replicated bias has to start equal: seed all ranks alike before making the layer, load a
    state_dict, or use :meth:`from_linear`.
    """

    shards_bias = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scatter: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, group)
        self.scatter = scatter
        self._make_parameters((out_features, self._share("in_features")), bias, device, dtype)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None, scatter: bool = True
    ) -> RowParallelLinear:
        """This rank's share of a full ``nn.Linear`` (which every rank has)."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            scatter=scatter,
        )
        layer._copy_from(linear, 1)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operands = under_autocast(x, self.weight, self.bias)
        if self.scatter:
            return matmul_reduce_scatter(*operands, group=self.group_name)
        y = matmul_all_reduce(*operands, group=self.group_name)
        assert isinstance(y, torch.Tensor), "without a norm there is one result"
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} / {self.world_size} ranks, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scatter={self.scatter}"
        )
