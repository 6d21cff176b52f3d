"""Linear layers for tensor and sequence parallelism. Each rank has one shard of the parameters of
``torch.nn.Linear``.

A column-parallel layer, an elementwise function and a row-parallel layer make a Megatron-style MLP
or attention. Both layers are initialized like the full ``nn.Linear``; ``from_linear`` takes the
shard of this rank from a full layer that every rank has.

Use the same seed on all ranks before making layers: replicated parameters are then equal on all
ranks, and shards still differ.
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
    """``operands`` (tensors or None) in the dtype of ``torch.autocast`` if it is enabled, as
    ``nn.Linear`` casts them; else as they are."""
    kind = operands[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands)


def draw_seed(like: torch.Tensor) -> int | None:
    """A random number from the default generator of the device of ``like``; None for meta and fake
    tensors."""
    if like.is_meta or hasattr(like, "fake_mode"):
        return None
    # leaves room for the number that is added to it
    return int(torch.empty((), dtype=torch.int64, device=like.device).random_()) >> 1


def generator_of(shard: torch.Tensor, seed: int | None, number: int) -> torch.Generator | None:
    """The generator of shard ``number`` of a tensor that is drawn from ``seed``.

    From the default generator, ranks with the same seed would draw equal shards. Their gradients
    would be equal, too, so the shards would stay equal for ever.
    """
    return None if seed is None else torch.Generator(shard.device).manual_seed(seed + number)


def fill_shard(shard: torch.Tensor, bound: float, group_name: str) -> None:
    """Fill ``shard`` with values uniform in [-bound, bound], different on each rank."""
    generator = generator_of(shard, draw_seed(shard), dist.get_rank(group_of(group_name)))
    nn.init.uniform_(shard, -bound, bound, generator)


class _ParallelLinear(nn.Module):
    """The common part of both layers."""

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

    def _features_per_rank(self, name: str) -> int:
        """How many of the features ``name`` ("in_features", "out_features") each rank has."""
        features = getattr(self, name)
        asked = f"{name}={features} over {self.world_size} ranks"
        require(
            features % self.world_size == 0,
            asked,
            "a multiple of the world size",
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
        """Initialize like ``nn.Linear.reset_parameters`` of the full layer, whose ``in_features``
        give the bound."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        fill_shard(self.weight, bound, self.group_name)
        if self.bias is not None:
            if self.shards_bias:
                fill_shard(self.bias, bound, self.group_name)
            else:
                nn.init.uniform_(self.bias, -bound, bound)

    def _copy_from(self, linear: nn.Linear, dimension: int) -> None:
        """Copy this rank's shard of ``linear`` along ``dimension`` of the weight. The bias is
        sharded if ``dimension`` is 0, else whole."""
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
    """``gather(x) @ weight.T + bias``. Rows of x and output features are sharded over the group.

    =======  ===========================  ==============================================
    weight   [out_features / R, in]       rows of the full Linear weight, in rank order
    bias     [out_features / R]           or None
    x        [m, ..., in]                 this rank's rows (m = M / R)
    y        [M, ..., out_features / R]   all rows, this rank's features
    =======  ===========================  ==============================================

    Parameters
    ----------
    in_features : int
        input features of the full layer.

    out_features : int
        output features of the full layer, a multiple of R.

    bias : bool
        whether the layer has a bias.

    group : ProcessGroup, optional
        the ranks that share the layer; None is the default group.

    device, dtype : optional
        of the parameters, as in ``nn.Linear``.

    save_gathered : bool
        keep gather(x) for backward, which takes R times the memory of x, instead of gathering it
        again.

    Raises
    ------
    InputError
        if ``out_features`` is not a multiple of R, or x does not fit.
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
        self._make_parameters(
            (self._features_per_rank("out_features"), in_features), bias, device, dtype
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: dist.ProcessGroup | None = None,
        save_gathered: bool = False,
    ) -> ColumnParallelLinear:
        """This rank's shard of a full ``nn.Linear``, which every rank has."""
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
            f"in_features={self.in_features}, "
            f"out_features={self.out_features} / {self.world_size} ranks, "
            f"bias={self.bias is not None}, save_gathered={self.save_gathered}"
        )


class RowParallelLinear(_ParallelLinear):
    """``sum over ranks of x @ weight.T, plus bias``. Input features are sharded over the group.

    =======  ===========================  ========================================================
    weight   [out, in_features / R]       columns of the full Linear weight, in rank order
    bias     [out]                        or None; the same on every rank, and so is its gradient
    x        [M, ..., in_features / R]    all rows, this rank's features
    y        [M / R, ..., out]            this rank's rows; all rows with ``scatter=False``
    =======  ===========================  ========================================================

    Parameters
    ----------
    in_features : int
        input features of the full layer, a multiple of R.

    out_features : int
        output features of the full layer.

    bias : bool
        whether the layer has a bias. It is replicated and must be equal on all ranks: use the same
        seed on all ranks before making the layer, load a state_dict, or use :meth:`from_linear`.

    group : ProcessGroup, optional
        the ranks that share the layer; None is the default group.

    device, dtype : optional
        of the parameters, as in ``nn.Linear``.

    scatter : bool
        True calls ``matmul_reduce_scatter``, for sequence parallelism. False calls
        ``matmul_all_reduce``; backward then assumes that the gradient of y is the same on every
        rank.

    Raises
    ------
    InputError
        if ``in_features`` is not a multiple of R, or x does not fit.

    Notes
    -----
    With ``scatter=False`` all ranks have all rows, so the layer before this one must not be a
    :class:`ColumnParallelLinear`, which gathers sharded rows. Use a linear layer over this rank's
    output features with the same x on every rank (a ``torch.nn.Linear`` of a shard). Its gradient
    of x is this rank's partial sum and is not summed over ranks here. All-reduce it (an autograd
    function: identity in forward, ``all_reduce`` in backward) before replicated parameters use it.
    The gradients of this layer's own x, weight and bias are complete.
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
        self._make_parameters(
            (out_features, self._features_per_rank("in_features")), bias, device, dtype
        )

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None, scatter: bool = True
    ) -> RowParallelLinear:
        """This rank's shard of a full ``nn.Linear``, which every rank has."""
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
            f"in_features={self.in_features} / {self.world_size} ranks, "
            f"out_features={self.out_features}, "
            f"bias={self.bias is not None}, scatter={self.scatter}"
        )
