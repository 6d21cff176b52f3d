"""A matmul by cuBLAS whose result is summed over ranks: an all-reduce, or a reduce-scatter.

The result is made in chunks of rows or columns, each followed by a launch of
``kernels/all_reduce/collective.py``. One chunk is reduced while the next one is multiplied, by few
programs, so that cuBLAS keeps most multiprocessors; only the last one has all of them::

    main stream  | multiply 0 | multiply 1     | multiply 2     | reduce 2 |
    side stream               | reduce 0       | reduce 1     | |

Order of launches. Those of a call are all of one instance, and each of them is a call in the sense
of ``collective.py``: it has an epoch of its own, and needs data of every peer. They run one after
the other, in the same order on every rank, whatever their stream: those of the side stream in its
order, the last one when they have ended, and the next call after that. So the slot of a launch is
free again two launches later, as it is two calls later where a call has one launch. In a captured
graph the same edges are between the nodes.

Why no rank waits for ever: a launch waits for the same launch of its peers, and that one for their
cuBLAS, which waits for no rank. A launch that finds no multiprocessor free gets some when cuBLAS
ends. While it waits for peers it holds no more of them than it has programs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tileweave.errors import require
from tileweave.kernels.all_reduce.collective import Shards, launcher, slot_elements
from tileweave.kernels.all_reduce.norm import norm_launcher
from tileweave.kernels.runtime.launch import Launcher
from tileweave.ops.core.registry import endpoint
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.chunks import chunks_of
from tileweave.transport.workspace import Instance, Workspace

INSTANCE = "library"  # its slots have another layout than those of other kernels


class Added(NamedTuple):
    """What is added to the sum, and what it is normalised with; None where there is none."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 0.0


class _Chunk(NamedTuple):
    """A chunk of the result, and the launch that reduces it.

    row, rows, col, cols : where it is. -1 rows or columns: all.
    norm : normalises its rows, once all of their columns are there; else None.
    """

    row: int
    rows: int
    col: int
    cols: int
    reduce: Launcher
    norm: Launcher | None

    def part(self, whole: torch.Tensor | None, rows: bool = True, cols: bool = True) -> Any:
        """The chunk's rows and columns of ``whole``."""
        if whole is None:
            return None
        if rows and self.rows >= 0:
            whole = whole.narrow(0, self.row, self.rows)
        if cols and self.cols >= 0:
            whole = whole.narrow(whole.dim() - 1, self.col, self.cols)
        return whole


def multiply_then_reduce(
    workspace: Workspace,
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    config: MatmulConfig,
    checksum: int = 0,
) -> None:
    """The sum over ranks of x [M, k] @ w [N, k].T, plus bias, plus residual.

    out : [M, N], or this rank's rows [M / R, N] of it. With ``added.norm_weight`` it gets the norm
        of the sum, and ``residual_out`` the sum.
    """
    transport, instance = workspace.transport, workspace.instance(op, INSTANCE)
    key = (x.shape[0], w.shape[0], x.dtype, out.shape[0], config)
    chunks: Any = instance.cache.get(key)
    if chunks is None:
        chunks = _make_chunks(instance, x.shape[0], w.shape[0], x.dtype, out.shape[0], config)
        instance.keep(key, chunks)
    columns, sums = w.t(), out if residual_out is None else residual_out
    partials: list[torch.Tensor] = []  # kept until the side stream has been joined

    def multiply(chunk: _Chunk) -> None:
        partials.append(torch.mm(chunk.part(x, cols=False), chunk.part(columns, rows=False)))

    def reduce(chunk: _Chunk, partial: torch.Tensor) -> None:
        bias, residual = chunk.part(added.bias, rows=False), chunk.part(added.residual)
        chunk.reduce(partial, chunk.part(sums), bias, residual)
        if added.norm_weight is not None and chunk.norm is not None:
            rows = (chunk.part(whole, cols=False) for whole in (sums, out))
            chunk.norm(next(rows), added.norm_weight, added.norm_eps, next(rows))

    multiply(chunks[0])
    instance.begin(checksum)
    try:
        for chunk, following in pairwise(chunks):
            with transport.side():
                reduce(chunk, partials[-1])
            multiply(following)
        if len(chunks) > 1:
            transport.join_side()
        reduce(chunks[-1], partials[-1])
    finally:
        if len(chunks) > 1:
            transport.join_side()  # also if a launch raised
        instance.launched()


def _make_chunks(
    instance: Instance,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    own_rows: int,
    config: MatmulConfig,
) -> list[_Chunk]:
    transport = instance.transport
    size, everywhere = transport.world_size, own_rows == rows
    require(
        everywhere or (config.row_chunks == 1 and config.shots == 2),
        f"a reduce-scatter in {config.row_chunks} chunks of rows, {config.shots} shots",
        "chunks of columns",
        "pass a config of the planner",
    )
    one_shot = config.shots == 1
    across = list(chunks_of(cols, config.col_chunks))
    down = list(chunks_of(rows, config.row_chunks))
    places = [(top, left) for top in down for left in across]

    def shards(rows: int, chunk_cols: int) -> Shards:
        if not everywhere:
            return Shards.of_rows(own_rows, chunk_cols, cols)
        if one_shot:
            return Shards.of_all(rows, chunk_cols, cols)
        return Shards.of_columns(rows, chunk_cols, cols, size)

    gather = everywhere and not one_shot
    most = shards(down[0][1], across[0][1])  # the first chunk is the largest
    elements = slot_elements(most, size, True, gather, one_shot)
    instance.reserve(elements * dtype.itemsize)

    def reducer(rows: int, cols: int, last: bool) -> Launcher:
        return launcher(
            endpoint(instance, dtype),
            size,
            transport.rank,
            shards(rows, cols),
            transport.machine.num_sms,
            config,
            True,
            gather,
            None if last else config.num_producers,
        )

    reducers: dict[tuple[int, int, bool], Launcher] = {}
    norms: dict[int, Launcher] = {}
    chunks = []
    for place in places:
        (row, row_end), (col, col_end) = place
        shape = (row_end - row, col_end - col, place == places[-1])
        reducers[shape] = reducers.get(shape) or reducer(*shape)
        norm = None
        if everywhere and col_end == cols:
            norm = norms[shape[0]] = norms.get(shape[0]) or norm_launcher(shape[0], cols)
        chunks.append(
            _Chunk(
                row,
                shape[0] if len(down) > 1 else -1,
                col,
                shape[1] if len(across) > 1 else -1,
                reducers[shape],
                norm,
            )
        )
    return chunks
