"""Linear layers of tensor and sequence parallelism, with the parameters of ``torch.nn.Linear``, one shard a rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from tileweave.errors import require
from tileweave.ops.all_gather_matmul import all_gather_matmul
from tileweave.ops.registry import group_of, name_of


class ColumnParallelLinear(nn.Module):
    """``gather(x) @ weight.T + bias``, with rows of x sharded over the group and output features too.

    =======  ===========================  ==========================================
    weight   [out_features / R, in]       rows of the full Linear weight, rank by rank
    bias     [out_features / R]           or None
    x        [m, ..., in]                 this rank's rows (m = M / R)
    y        [M, ..., out_features / R]   all rows, this rank's features
    =======  ===========================  ==========================================

    ``state_dict`` has ``weight`` and ``bias`` as a Linear of this rank's size has them; :meth:`from_linear` cuts them out
    of a full layer. Parameters start as a full ``nn.Linear``'s would: the bound comes from ``in_features``.

    Parameters
    ----------
    in_features, out_features : of the full layer. group : the ranks that share it; None is the default group.
    save_gathered : keep gather(x) for backward (R times the memory of x) in place of gathering it again.
    """

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
        super().__init__()
        self.group_name = name_of(group)
        self.world_size = dist.get_world_size(group_of(self.group_name))
        require(
            out_features % self.world_size == 0,
            f"out_features={out_features} over {self.world_size} ranks",
            "a multiple of the group's size",
            "pad the layer or choose another group",
        )
        self.in_features, self.out_features, self.save_gathered = in_features, out_features, save_gathered
        shape = (out_features // self.world_size, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear.reset_parameters`` of the full layer."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None, save_gathered: bool = False
    ) -> ColumnParallelLinear:
        """This rank's share of a full ``nn.Linear`` (which every rank has)."""
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, group=group,
            device=linear.weight.device, dtype=linear.weight.dtype, save_gathered=save_gathered,
        )  # fmt: skip
        rank = dist.get_rank(group_of(layer.group_name))
        with torch.no_grad():
            layer.weight.copy_(linear.weight.chunk(layer.world_size)[rank])
            if layer.bias is not None:
                layer.bias.copy_(linear.bias.chunk(layer.world_size)[rank])
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = all_gather_matmul(
            x, self.weight, self.bias, group=self.group_name, return_gathered=self.save_gathered and torch.is_grad_enabled()
        )
        return result[0] if isinstance(result, tuple) else result

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} / {self.world_size} ranks, "
            f"bias={self.bias is not None}, save_gathered={self.save_gathered}"
        )
