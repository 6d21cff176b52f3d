"""Operators whose matmul is that of cuBLAS.

One kernel communicates before or after the matmul. This is for sizes where communication is too
short to overlap, and cuBLAS is faster than a matmul that waits for peers (decision 0014). An
all-gather may also be multiplied by cuBLAS one shard at a time, as copy engines bring the shards,
where our matmul is slower (decision 0016). Tables and planners choose (``MatmulConfig.kernel ==
"library"``, and its transport).
"""

from __future__ import annotations

import torch

from tileweave.kernels.all_reduce.collective import ALIGN, Shards, launcher, slot_elements
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.concurrent_gather import begin_gather
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv
from tileweave.transport.workspace import Instance, Workspace

INSTANCE = (
    "library"  # an instance of its own: its slots have another layout than those of a fused kernel
)


def gather_then_multiply(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """out [R * m, n] = gather(x [m, K]) @ w [n, K].T + bias; stores gather(x) in ``gathered`` if
    given."""
    size = workspace.transport.world_size
    whole = x.new_empty(size * x.shape[0], x.shape[1]) if gathered is None else gathered
    _exchange(
        workspace, op, config, x.contiguous(), whole, x.numel(), False, True, checksum=checksum
    )
    multiply(whole, w, bias, out)


def multiply_shards(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
    checksum: int = 0,
) -> None:
    """As :func:`gather_then_multiply`, one shard at a time, while copy engines bring the next."""
    rows = x.shape[0]
    gathering = begin_gather(x, group_name, checksum)
    try:
        for source, shard in gathering.shards():
            part = slice(source * rows, (source + 1) * rows)
            multiply(shard, w, bias, out[part])
            if gathered is not None:
                gathered[part].copy_(shard)
    finally:  # also when memory runs out: the next gather would find the signals of this one
        gathering.end(out, *(() if gathered is None else (gathered,)))


def multiply(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out = x @ w.T + bias."""
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


def multiply_then_reduce(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """out = sum over ranks of x [M, k] @ w [N, k].T, + bias, + residual.

    ``out`` has M rows, or this rank's M / R.
    """
    partial = torch.mm(x, w.t())
    size, everywhere = workspace.transport.world_size, out.shape[0] == x.shape[0]
    shard = cdiv(cdiv(partial.numel(), size), ALIGN) * ALIGN if everywhere else out.numel()
    _exchange(
        workspace, op, config, partial, out, shard, True, everywhere, bias, residual, checksum
    )


def _exchange(
    workspace: Workspace,
    op: str,
    config: MatmulConfig,
    x: torch.Tensor,
    out: torch.Tensor,
    shard: int,
    reduce: bool,
    gather: bool,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    checksum: int = 0,
) -> None:
    instance = workspace.instance(op, INSTANCE)
    key = (x.shape, x.dtype, config)
    launch = instance.cache.get(key)
    if launch is None:
        launch = _launcher(workspace, instance, config, x, shard, reduce, gather)
        instance.keep(key, launch)
    instance.begin(checksum)
    try:
        launch(x, out, bias, residual)  # type: ignore[operator]
    finally:
        instance.launched()


def _launcher(
    workspace: Workspace,
    instance: Instance,
    config: MatmulConfig,
    x: torch.Tensor,
    shard: int,
    reduce: bool,
    gather: bool,
) -> Launcher:
    transport = workspace.transport
    size = transport.world_size
    instance.reserve(slot_elements(shard, size, reduce, gather) * x.element_size())
    total = size * x.numel() if gather and not reduce else x.numel()
    return launcher(
        endpoint(instance, x.dtype),
        size,
        transport.rank,
        Shards(shard, total, x.shape[-1]),
        transport.machine.num_sms,
        config,
        reduce,
        gather,
    )
