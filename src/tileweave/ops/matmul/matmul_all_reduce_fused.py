"""The fused call of matmul_all_reduce: one shot for few rows, else cuBLAS followed by two shots.

For many rows cuBLAS multiplies them in chunks, and each chunk is reduced while the next one is
multiplied::

    main stream  | multiply 0 | multiply 1         | multiply 2         | reduce 2, norm 2 |
    side stream               | reduce 0, norm 0   | reduce 1, norm 1 | |

The launches that reduce are all of one instance, and each is a call of its own in the sense of
``kernels/all_reduce/collective.py``: it has an epoch, and needs data of every peer. They run one
after the other, in the same order on every rank, whatever stream they are on: those of the side
stream in its order, the last one after them, and the next call after the last one. So the slot of a
chunk is free again two launches later, as it is two calls later where a call has one launch.

Why no rank waits for ever: a launch waits for the same launch of its peers, and that waits for
their cuBLAS, which waits for no rank. A launch that has no multiprocessor yet gets one when cuBLAS
ends; while it waits for its peers, it holds as many as it has programs, and cuBLAS has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tileweave.ops.core.registry import endpoint, workspace_of
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.rows import chunk_rows
from tileweave.transport.workspace import REGISTRY, Instance, Workspace

if TYPE_CHECKING:
    from tileweave.kernels.runtime.launch import Launcher

OP = "matmul_all_reduce"
LIBRARY = "library"  # the instance of launches that follow cuBLAS
ONE_SHOT = "one_shot"  # an instance of its own: its slots have another layout


class Added(NamedTuple):
    """What is added to the sum, and what it is normalised with; None where there is none."""

    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_eps: float


class _Chunks(NamedTuple):
    """What calls of one shape share.

    rows : of each chunk but the last.
    reduce : launches that reduce a chunk, of all chunks but the last, and of the last.
    norm : the same, of launches that normalise one.
    """

    rows: int
    reduce: tuple[Launcher, Launcher]
    norm: tuple[Launcher, Launcher]


def run_fused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """Make the fused call of plan ``chosen``: x [M, k], w [N, k]; residual, out, residual_out [M,
    N]."""
    config = chosen.config
    assert config is not None, "run_fused needs a fused plan"
    workspace = REGISTRY.find(group_name, x.device) or workspace_of(group_name, x.device)
    if config.kernel == "library":
        added = Added(bias, residual, norm_weight, norm_eps)
        _by_cublas(workspace, x, w, added, out, residual_out, config, chosen.checksum)
        return
    instance, launch = _one_shot(workspace, x, w, norm_weight is not None, config)
    instance.begin(chosen.checksum)
    try:
        launch(x, w, bias, residual, norm_weight, norm_eps, out, residual_out)
    finally:
        instance.launched()


def _one_shot(
    workspace: Workspace, x: torch.Tensor, w: torch.Tensor, norm: bool, config: MatmulConfig
) -> tuple[Instance, Launcher]:
    instance = workspace.instance(OP, ONE_SHOT)
    key = (x.shape, x.stride(0), w.shape[0], w.stride(0), x.dtype, norm, config)
    launch = instance.cache.get(key)
    if launch is None:
        from tileweave.kernels.all_reduce.one_shot import launcher

        size, (rows, depth), cols = workspace.transport.world_size, x.shape, w.shape[0]
        elements = size * -(-cols // config.tile_n) * config.tile_n * config.tile_m
        instance.reserve(elements * x.element_size(), 2)
        launch = launcher(
            endpoint(instance, x.dtype),
            size,
            workspace.transport.rank,
            (rows, cols, depth),
            x.stride(0),
            w.stride(0),
            norm,
            config,
        )
        instance.keep(key, launch)
    return instance, launch  # type: ignore[return-value]


def _by_cublas(
    workspace: Workspace,
    x: torch.Tensor,
    w: torch.Tensor,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    config: MatmulConfig,
    checksum: int,
) -> None:
    transport, instance = workspace.transport, workspace.instance(OP, LIBRARY)
    key = (x.shape[0], w.shape[0], x.dtype, config)
    made = instance.cache.get(key)
    if made is None:
        made = _make_chunks(instance, x.shape[0], w.shape[0], x.dtype, config)
        instance.keep(key, made)
    chunks: _Chunks = made  # type: ignore[assignment]
    sums = out if residual_out is None else residual_out
    partial, columns, last = torch.empty_like(sums), w.t(), cdiv(x.shape[0], chunks.rows) - 1

    def split(whole: torch.Tensor | None) -> Sequence[Any]:
        if whole is None or last == 0:
            return (whole,) * (last + 1)
        return whole.split(chunks.rows)

    def multiply(i: int) -> None:
        torch.mm(xs[i], columns, out=partials[i])

    def reduce(i: int) -> None:
        chunks.reduce[i == last](partials[i], each_sums[i], added.bias, residuals[i])
        if added.norm_weight is not None:
            chunks.norm[i == last](each_sums[i], added.norm_weight, added.norm_eps, outs[i])

    xs, partials, each_sums = split(x), split(partial), split(sums)
    outs, residuals = split(out), split(added.residual)
    multiply(0)
    instance.begin(checksum)
    try:
        for i in range(last):
            with transport.side():
                reduce(i)
            multiply(i + 1)
        transport.join_side()
        reduce(last)
    finally:
        transport.join_side()
        instance.launched()


def _make_chunks(
    instance: Instance, rows: int, cols: int, dtype: torch.dtype, config: MatmulConfig
) -> _Chunks:
    from tileweave.kernels.all_reduce.collective import ALIGN, Shards, launcher, slot_elements
    from tileweave.kernels.all_reduce.norm import norm_launcher

    transport = instance.transport
    size, step = transport.world_size, min(chunk_rows(rows, config.row_chunks), rows)

    def shard(rows: int) -> int:
        return cdiv(cdiv(rows * cols, size), ALIGN) * ALIGN

    instance.reserve(slot_elements(shard(step), size, True, True) * dtype.itemsize)

    def reduce(rows: int, most_programs: int | None) -> Launcher:
        return launcher(
            endpoint(instance, dtype),
            size,
            transport.rank,
            Shards(shard(rows), rows * cols, cols),
            transport.machine.num_sms,
            config,
            True,
            True,
            most_programs,
        )

    last = rows - (cdiv(rows, step) - 1) * step
    return _Chunks(
        step,
        (reduce(step, config.num_producers), reduce(last, None)),
        (norm_launcher(step, cols), norm_launcher(last, cols)),
    )
