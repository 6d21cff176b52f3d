"""Gradients of pooled vectors to the ranks of the tables, where ranks are on several nodes.

    pack slice 0 for other nodes | pack slice 1 ... | own node | sum slice 0 | sum slice 1 ...
    network:                       slice 0          | slice 1 ...

A slice is a part of each rank's tables, as in the forward (``over_nodes.py``). The columns that
other nodes need of it are packed by rank and sent by NCCL (gloo on the CPU), straight to the ranks
of the tables, while the next is packed, lookups are sorted and the ranks of the node push theirs
(``kernels/embedding/gradient.py``). Tables of a slice are summed as soon as it is there, while
later ones travel.

Nothing is summed before it crosses: which vectors belong to one row of a table only its rank knows,
and a vector has one reader. So as many bytes cross as in the forward.

Sums take all samples of a row in the order of the sort, whichever node they come from, so results
have the same bits in each call.

Why no rank waits for ever: transfers wait for packing alone. What is pushed inside the node is
queued after all of them, and needs no multiprocessor that NCCL occupies. Sums are queued after the
transfers that they read, and no kernel polls for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tileweave.ops.core.collectives import enter_launch_order_of
from tileweave.ops.core.registry import number_of
from tileweave.ops.core.ways import Ways, spanning_call
from tileweave.ops.embedding.bag_all_to_all_fused import begin_push, end_push
from tileweave.ops.embedding.call import BACKWARD, Call
from tileweave.ops.embedding.over_nodes import samples_of, slices_of, tables_of
from tileweave.ops.embedding.table_gradient import Part
from tileweave.planning.sharding import EmbeddingLayout


@contextmanager
def arriving(
    grad: torch.Tensor, call: Call, least: int = 0
) -> Iterator[tuple[torch.Tensor, list[Part]]]:
    """grad [b, width] of each rank's samples -> [B, sum of own dims], of which the columns of some
    tables are there after a wait each. The call lasts as long as the context.

    ``least``: as for ``over_nodes.run``.
    """
    layout, batch = call.layout, call.batch
    checksum = hash((number_of(BACKWARD), number_of(grad.dtype), batch, layout)) or 1
    with spanning_call(BACKWARD, call.group_name, grad, checksum) as ways:
        mine = grad.new_empty(batch, sum(layout.dims[ways.rank]))
        count = slices_of(layout, batch, grad.element_size(), least)
        parts = [_send(ways, grad, layout, mine, part, count) for part in range(count)]
        _own_node(ways, grad, layout, mine)
        enter_launch_order_of(grad)  # again: the push has left it
        yield mine, parts


def _send(
    ways: Ways,
    grad: torch.Tensor,
    layout: EmbeddingLayout,
    mine: torch.Tensor,
    part: int,
    parts: int,
) -> Part:
    """Pack a slice for other nodes, and begin its transfer. ``mine``: where it arrives."""
    near, rows = ways.near_ranks, samples_of(layout, len(mine))
    begin, end = rows[near[0]][0], rows[near[-1]][1]  # samples of this node
    mine_of = [tables_of(len(dims), part, parts) for dims in layout.dims]
    far = [r for r in range(len(rows)) if r not in near]
    sent = [0] * len(rows)
    for r in far:
        sent[r] = len(grad) * sum(layout.dims[r][mine_of[r]])
    x = grad.new_empty(sum(sent))
    for r, block in enumerate(x.split(sent)):
        _pack(grad, layout, r, mine_of[r], block.view(len(grad), -1) if sent[r] else block)
    own, dims = mine_of[ways.rank], layout.dims[ways.rank]
    left, width = sum(dims[: own.start]), sum(dims[own])
    received = [0 if r in near else (e - b) * width for r, (b, e) in enumerate(rows)]
    got = grad.new_empty(len(mine) - (end - begin), width)
    done = ways.rail.begin(lambda: ways.rail.all_to_all_parts(got.view(-1), x, received, sent))

    def wait() -> None:
        done()
        mine[:begin, left : left + width].copy_(got[:begin])
        mine[end:, left : left + width].copy_(got[begin:])

    return Part(own, wait, x)


def _own_node(ways: Ways, grad: torch.Tensor, layout: EmbeddingLayout, mine: torch.Tensor) -> None:
    """The columns of this rank's tables for the samples of this node."""
    near, rows = ways.near_ranks, samples_of(layout, len(mine))
    begin, end = rows[near[0]][0], rows[near[-1]][1]
    if ways.each == 1:
        _pack(grad, layout, ways.rank, slice(None), mine[begin:end])
        return
    # the last ranks may have fewer samples: inside the node each has as many as the first of all
    inside, chunk = EmbeddingLayout.in_rank_order([layout.dims[r] for r in near]), rows[0][1]
    packed, at = grad.new_zeros(chunk, inside.width), 0
    for r in near:
        width = sum(layout.dims[r])
        _pack(grad, layout, r, slice(None), packed[: len(grad), at : at + width])
        at += width
    push = begin_push(packed, inside, ways.each * chunk, ways.near, own=True)
    try:
        push.launch_alone()
        mine[begin:end].copy_(push.slot[: end - begin])
        push.end_alone()
    finally:
        end_push(push, ways.near)


def _pack(
    grad: torch.Tensor, layout: EmbeddingLayout, rank: int, tables: slice, out: torch.Tensor
) -> None:
    """``out`` = the columns of these tables of ``rank``, next to each other."""
    spans = list(zip(layout.columns[rank][tables], layout.dims[rank][tables], strict=True))
    if spans and out.numel():
        torch.cat([grad[:, column : column + dim] for column, dim in spans], 1, out=out)
