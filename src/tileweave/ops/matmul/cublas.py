"""Operators whose matmul is the vendor library's.

One launch of ours for what goes between ranks, before it or behind it: for sizes where data is
short of time to travel and cuBLAS is faster than a matmul that waits for peers as it goes
(decisions 0011 and 0056). Or, of an all-gather, a matmul for each shard as copy engines bring it:
where our main loop is slower (decision 0114). Tables and planners choose (``MatmulConfig.kernel ==
"library"``, and its transport).
"""

from __future__ import annotations

import torch

from tileweave.kernels.all_reduce.collective import ALIGN, Launcher, slot_elements
from tileweave.ops import reference
from tileweave.ops.core.registry import endpoint
from tileweave.ops.matmul.concurrent_gather import begin_gather
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.workspace import Instance, Workspace

INSTANCE = "library"  # of its own: its slots have another layout than a fused kernel's


def gather_then_multiply(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    config: MatmulConfig,
    mark: int = 0,
) -> None:
    """out [R m, n] = gather(x [m, K]) @ w [n, K].T + bias; ``gathered`` [R m, K] too where it is
    asked for."""
    size = workspace.transport.world_size
    whole = x.new_empty(size * x.shape[0], x.shape[1]) if gathered is None else gathered
    _exchange(workspace, op, config, x.contiguous(), whole, x.numel(), False, True, mark=mark)
    _multiply(whole, w, bias, out)


def multiply_shards(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
    mark: int = 0,
) -> None:
    """As :func:`gather_then_multiply`, shard after shard, while copy engines bring the next."""
    rows = x.shape[0]
    gathering = begin_gather(x, group_name, mark)
    try:
        for source, shard in gathering.shards():
            part = slice(source * rows, (source + 1) * rows)
            _multiply(shard, w, bias, out[part])
            if gathered is not None:
                gathered[part].copy_(shard)
    finally:  # also when memory runs out: a gather that nobody ends leaves its signals to the next one
        gathering.end(out, *(() if gathered is None else (gathered,)))


def _multiply(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
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
    mark: int = 0,
) -> None:
    """out = sum over ranks of x [M, k] @ w [N, k].T, + bias, + residual: own rows of it, or all
    where ``out`` has M rows."""
    partial = torch.mm(x, w.t())
    size, everywhere = workspace.transport.world_size, out.shape[0] == x.shape[0]
    shard = cdiv(cdiv(partial.numel(), size), ALIGN) * ALIGN if everywhere else out.numel()
    _exchange(workspace, op, config, partial, out, shard, True, everywhere, bias, residual, mark)


def multiply_then_exchange(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    how: Exchange,
    config: MatmulConfig,
    mark: int = 0,
) -> None:
    """out = x [M, K] @ w [N, K].T + bias, its parts exchanged."""
    parts = reference.product_in_parts(x, w, bias, how, workspace.transport.world_size)
    part = parts[0].numel()
    reference.exchange_parts(
        parts,
        how,
        out,
        lambda got: _exchange(workspace, op, config, parts, got, part, False, False, mark=mark),
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
    mark: int = 0,
) -> None:
    instance = workspace.instance(op, INSTANCE)
    key = (x.shape, x.dtype, config)
    launch = instance.cache.get(key)
    if launch is None:
        launch = _launcher(workspace, instance, config, x, shard, reduce, gather)
        instance.keep(key, launch)
    instance.begin(mark)
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
    return Launcher(
        endpoint(instance, x.dtype),
        size,
        transport.rank,
        total,
        shard,
        x.shape[-1],
        transport.machine.num_sms,
        config,
        reduce,
        gather,
    )
