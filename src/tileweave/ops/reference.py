"""Every operator unfused, in plain torch and torch.distributed: the specification, the oracle and the baseline."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.transport.collectives import all_gather_flat, reduce_scatter_flat


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[m, ...] on each rank -> [R * m, ...], shards in rank order."""
    size = dist.get_world_size(group)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather_flat(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R * m, ...] on each rank -> [m, ...]: this rank's rows of the sum over ranks."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    if x.device.type == "cpu":  # gloo has no bf16 reduce-scatter on every release: sum in fp32
        total = x.float()
        dist.all_reduce(total, group=group)
        return total.view(size, *out.shape)[dist.get_rank(group)].to(x.dtype)
    reduce_scatter_flat(out, x.contiguous(), group=group)
    return out


def all_gather_matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, K], w [n, K], bias [n] -> (gather(x) @ w.T + bias [R * m, n], gather(x) [R * m, K])."""
    gathered = x if dist.get_world_size(group) == 1 else all_gather(x, group)
    return torch.nn.functional.linear(gathered, w, bias), gathered


def matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [M, k], w [N, k] -> rows of this rank of the sum over ranks of x @ w.T, [M / R, N]."""
    return reduce_scatter(x @ w.t(), group)
