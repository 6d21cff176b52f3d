"""Products of the backward: each operator's input gradient is its dual operator, with w transposed.

Forward and backward contract a weight along different dimensions. Kernels read either layout
(``DEPTH_FIRST``), so nothing is copied.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops import reference
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import group_of
from tileweave.ops.matmul.inputs import plan_for
from tileweave.planning.matmul import (
    plan_all_gather_matmul,
    plan_all_to_all_matmul,
    plan_matmul_all_to_all,
    plan_matmul_reduce_scatter,
)
from tileweave.planning.schedules.scatter import Exchange


def gather_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, group_name: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gather(grad) @ w for grad [m, n] and w [n, K], and gather(grad) if ``keep``."""
    group = group_of(group_name)
    if (
        plan_for(
            plan_all_gather_matmul, grad, grad.shape[0], w.shape[1], dist.get_world_size(group)
        ).config
        is None
    ):
        y, gathered = reference.all_gather_matmul(grad, w.t(), None, group)
    else:
        y, gathered = operator("all_gather_matmul")(grad, w.t(), None, group_name, keep)
    return y, gathered if keep else None


def scatters_fused(grad: torch.Tensor, w: torch.Tensor, group_name: str) -> bool:
    """Whether :func:`multiply_and_scatter` is one fused kernel.

    While such a kernel runs, no other work may need a multiprocessor.
    """
    size = dist.get_world_size(group_of(group_name))
    return (
        plan_for(plan_matmul_reduce_scatter, grad, grad.shape[0] // size, w.shape[1], size).config
        is not None
    )


def multiply_and_scatter(grad: torch.Tensor, w: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's rows of the sum over ranks of grad @ w, by the fused operator; grad [M, n], w [n,
    K]."""
    return operator("matmul_reduce_scatter")(grad, w.t(), None, group_name)


def exchange_and_multiply(
    grad: torch.Tensor, w: torch.Tensor, how: Exchange, group_name: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(exchanged grad) @ w for w [n, K], and the exchanged grad if ``keep``."""
    group = group_of(group_name)
    rows, depth = how.part(grad.shape[0], grad.shape[1], dist.get_world_size(group))
    if (
        plan_for(
            plan_all_to_all_matmul, grad, rows, w.shape[1], dist.get_world_size(group), depth
        ).config
        is None
    ):
        y, exchanged = reference.all_to_all_matmul(
            grad, w.t(), None, group, how.scatter_dim, how.gather_dim
        )
    else:
        y, exchanged = operator("all_to_all_matmul")(
            grad, w.t(), None, how.scatter_dim, how.gather_dim, group_name, keep
        )
    return y, exchanged if keep else None


def multiply_and_exchange(
    grad: torch.Tensor, w: torch.Tensor, how: Exchange, group_name: str
) -> torch.Tensor:
    """The exchanged grad @ w, for grad [m, n] and w [n, K]."""
    group = group_of(group_name)
    rows, cols = how.part(grad.shape[0], w.shape[1], dist.get_world_size(group))
    if (
        plan_for(plan_matmul_all_to_all, grad, rows, cols, dist.get_world_size(group)).config
        is None
    ):
        return reference.matmul_all_to_all(
            grad, w.t(), None, group, how.scatter_dim, how.gather_dim
        )
    return operator("matmul_all_to_all")(
        grad, w.t(), None, how.scatter_dim, how.gather_dim, group_name
    )
