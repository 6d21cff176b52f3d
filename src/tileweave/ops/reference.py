"""Every operator unfused, in plain torch and torch.distributed: the specification, the oracle and the baseline.

Rounding of sums over ranks. Fused kernels add fp32 numbers in rank order and round once. Here each rank's partial is
rounded to its dtype when its matmul stores it; then the CPU adds in fp32 in rank order and rounds once more, and NCCL
adds in an order and with roundings of its own. The bias enters one partial, in fp32, before that is rounded; a residual
is added to the rounded sum, and the result rounded again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import linear, rms_norm

from tileweave.transport.collectives import all_gather_flat, reduce_scatter_flat


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order."""
    gathered, work = begin_all_gather(x, group)
    if work is not None:
        work.wait()
    return gathered


def begin_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`all_gather`, beside what is queued next: the result, and what to wait for."""
    gathered = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    return gathered, all_gather_flat(gathered, x.contiguous(), group=group, async_op=True)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks."""
    out, work = begin_reduce_scatter(x, group)
    if work is not None:
        work.wait()
    return out


def begin_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work | None]:
    """As :func:`reduce_scatter`, beside what is queued next where there is a GPU: the result, and what to wait for."""
    size = dist.get_world_size(group)
    if size == 1:
        return x, None
    if x.device.type == "cpu":
        rows = x.shape[0] // size
        return _sum_of_all(x, group, slice(dist.get_rank(group) * rows, (dist.get_rank(group) + 1) * rows)), None
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return out, reduce_scatter_flat(out, x.contiguous(), group=group, async_op=True)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, on every rank; x may be overwritten."""
    if dist.get_world_size(group) == 1:
        return x
    if x.device.type == "cpu":
        return _sum_of_all(x, group, slice(None))
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def _sum_of_all(x: torch.Tensor, group: dist.ProcessGroup, rows: slice) -> torch.Tensor:
    """These rows of the sum over ranks, in fp32 (fp64 stays) and in rank order: gloo's own way differs between releases."""
    everyone = all_gather(x, group).view(dist.get_world_size(group), *x.shape)[:, rows]
    total = everyone[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in everyone[1:]:
        total = total + part
    return total.to(x.dtype)


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K], w [n, K], bias [n] -> (gather(x) @ w.T + bias [R * m, n], gather(x) [R * m, K])."""
    gathered = x if dist.get_world_size(group) == 1 else all_gather(x, group)
    return linear(gathered, w, bias), gathered


def matmul_reduce_scatter(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """x [M, k], w [N, k], bias [N] -> this rank's rows of the sum over ranks of x @ w.T, plus bias: [M / R, N]."""
    return reduce_scatter(_partial(x, w, bias, group), group)


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [M, k], w [N, k], bias [N], residual [M, N], norm_weight [N] -> (y or its norm, y), [M, N] on every rank.

    y is the sum over ranks of x @ w.T, plus bias, plus residual; its norm is RMSNorm(y) * norm_weight of y as rounded.
    Without ``norm_weight`` the second is None.
    """
    y = all_reduce(_partial(x, w, bias, group), group)
    if residual is not None:
        y = y + residual
    if norm_weight is None:
        return y, None
    return rms_norm(y, (y.shape[-1],), norm_weight, norm_eps), y


def _partial(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum; rank 0's has the bias, so that it is added once."""
    return linear(x, w, bias if dist.get_rank(group) == 0 else None)
