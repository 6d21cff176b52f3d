"""matmul_all_reduce of many rows in one launch: a matmul_reduce_scatter whose kernel stores the
reduced rows at all peers, too.

``kernels/reduce_scatter/triton.py`` has the protocol (``GATHER``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tileweave.ops.matmul.inputs import ready
from tileweave.ops.matmul.matmul_reduce_scatter_fused import FusedCall, fused_call
from tileweave.ops.matmul.products import Added
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.transport.workspace import GATHER, Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.runtime.launch import Launcher
    from tileweave.kernels.scaling import Scaling

OP = "matmul_all_reduce"


class Operands(NamedTuple):
    """x [M, k] and w [N, k]; of FP8 with how they are scaled, and their scales."""

    x: torch.Tensor
    w: torch.Tensor
    scaling: Scaling | None = None
    scales: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Call:
    """Calls of one shape. ``begin``, ``end``: the rows that this rank reduces."""

    scatter: FusedCall
    begin: int
    end: int
    norm: Launcher

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ``tensor`` [M, N] that this rank reduces."""
        return tensor[self.begin : self.end]


def reduce_by_tiles(
    operands: Operands,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """The sum over ranks of x @ w.T, plus bias, plus residual.

    out : [M, N]. With ``added.norm_weight`` it gets the norm of the sum, and ``residual_out`` the
        sum.
    """
    x, w, bias, residual = operands.x, operands.w, added.bias, added.residual
    sums = out if residual_out is None else residual_out
    aligned = (x.data_ptr() | w.data_ptr()) & 15 == 0, sums.data_ptr() & 15 == 0
    of_residual = None if residual is None else residual.data_ptr() & 15 == 0
    key = (*aligned, of_residual, operands.scaling)
    instance, (call, launch) = ready(
        chosen, key, group_name, _make, x, operands, sums, residual, chosen.config
    )
    capturing = instance.begin(chosen.checksum)
    residual = None if residual is None else call.own(residual)
    given = x, w, bias, call.own(sums)
    call.scatter.launch_and_push(launch, given, capturing, residual, operands.scales)
    if added.norm_weight is not None:
        call.norm(sums, added.norm_weight, added.norm_eps, out)


def _make(
    workspace: Workspace,
    x: torch.Tensor,
    operands: Operands,
    sums: torch.Tensor,
    residual: torch.Tensor | None,
    config: MatmulConfig,
) -> tuple[Instance, tuple[_Call, Callable[..., None]]]:
    w = operands.w
    instance = workspace.instance(OP, GATHER)
    scatter = fused_call(workspace, x, w, sums.dtype, config, operands.scaling, instance)
    s = scatter.schedule
    key = ("by tiles", x.shape, w.shape[0], sums.dtype, config, operands.scaling)
    call = instance.cache.get(key)
    if call is None:
        from tileweave.kernels.all_reduce.norm import norm_launcher

        begin = s.rank * s.rows
        end = min(begin + s.rows, scatter.gathered)
        call = _Call(scatter, begin, end, norm_launcher(x.shape[0], s.cols))
        instance.keep(key, call)
    assert isinstance(call, _Call), "other keys of this instance have no name in front"
    residual = None if residual is None else call.own(residual)
    return instance, (call, scatter.launcher(x, w, call.own(sums), residual))
