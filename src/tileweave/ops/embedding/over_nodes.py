"""embedding_bag_all_to_all where ranks are on several nodes.

    pool slice 0 for other nodes | pool slice 1 ... | pool for the own node, in place | place
    network:                       slice 0          | slice 1 ...

A slice is a part of this rank's tables. Their bags of the samples of all other nodes are pooled,
packed by rank, and sent by NCCL (gloo on the CPU), straight to the ranks of the samples, while the
next slice is pooled. A vector has one reader, so it crosses once; NCCL joins what goes to the ranks
of a node. Sizes follow from the layout, which all ranks know, so the host waits for nothing. Inside
a node the kernel of one node stores into the result (``kernels/embedding/bag_all_to_all.py``), and
what arrives is copied to its columns.

Why no rank waits for ever: transfers wait for lookups of this rank alone. The kernel of the node is
queued after all of them. NCCL's kernels occupy a few multiprocessors while they wait for ranks of
other nodes; the programs of the kernel on the others end without them, since a peer's region is
announced by its first program and stores wait for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tileweave.ops.core.collectives import enter_launch_order_of
from tileweave.ops.core.ways import Ways, spanning_call
from tileweave.ops.embedding.bag_all_to_all_fused import run_fused, run_lookup
from tileweave.ops.embedding.call import OP, Call
from tileweave.ops.embedding.table_gradient import on_device
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout, rows_of

SLICES = 4  # at most
LEAST_BYTES = 2 << 20  # of a slice
_METAS: dict = {}


class _Slice(NamedTuple):
    """A slice on its way.

    columns : of the result, which it fills.
    got, widths : the vectors of each rank, [b, width] one after the other, flat.
    read : what the network reads, kept until the end of the call.
    wait : orders later work after the transfer.
    """

    columns: tuple[int, ...]
    got: torch.Tensor
    widths: list[int]
    read: torch.Tensor
    wait: Callable[[], None]


def run(
    call: Call,
    config: EmbeddingConfig,
    out: torch.Tensor | None,
    checksum: int,
    lends: bool = True,
    least: int = 0,
) -> torch.Tensor:
    """The result [b, width], as ``run_fused`` of ``bag_all_to_all_fused.py`` returns it.

    ``least``: bytes of a slice, if not ``LEAST_BYTES``.
    """
    with spanning_call(OP, call.group_name, call.indices, checksum) as ways:
        parts = slices_of(call.layout, call.batch, call.out_dtype.itemsize, least)
        traveling = [_send(ways, call, config, part, parts) for part in range(parts)]
        y = _own_node(ways, call, config, out, checksum, lends)
        enter_launch_order_of(call.indices)  # again: the kernel has left it
        for each in traveling:
            each.wait()
            if each.got.numel():
                blocks = each.got.split([len(y) * width for width in each.widths])
                whole = torch.cat([block.view(len(y), -1) for block in blocks if len(block)], 1)
                y.index_copy_(1, on_device(each.columns, y.device), whole)
        return y


def _own_node(
    ways: Ways,
    call: Call,
    config: EmbeddingConfig,
    out: torch.Tensor | None,
    checksum: int,
    lends: bool,
) -> torch.Tensor:
    """The result, with the columns of the tables of this node."""
    if ways.each > 1:
        near = call._replace(group_name=ways.near)
        return run_fused(near, config, out, checksum, ways.node, lends)
    layout, rank = call.layout, ways.node
    begin, end = rows_of(call.batch, len(layout.dims), rank)
    if out is None:
        out = call.indices.new_empty(end - begin, layout.width, dtype=call.out_dtype)
    _pool(call, slice(0, len(call.tables)), layout.columns[rank], begin, out, config)
    return out


def samples_of(layout: EmbeddingLayout, batch: int) -> list[tuple[int, int]]:
    """The samples [begin, end) of each rank."""
    size = len(layout.dims)
    return [rows_of(batch, size, rank) for rank in range(size)]


def slices_of(layout: EmbeddingLayout, batch: int, itemsize: int, least: int) -> int:
    """In how many slices a call crosses; the same on every rank."""
    most = max(map(len, layout.dims))
    nbytes = max(sum(dims) for dims in layout.dims) * batch * itemsize
    return max(1, min(SLICES, most, nbytes // (least or LEAST_BYTES)))


def tables_of(count: int, part: int, parts: int) -> slice:
    """Which of a rank's ``count`` tables are in a slice."""
    return slice(count * part // parts, count * (part + 1) // parts)


def _send(ways: Ways, call: Call, config: EmbeddingConfig, part: int, parts: int) -> _Slice:
    """Pool a slice for other nodes, and begin its transfer."""
    layout, batch, rank, near = call.layout, call.batch, ways.rank, ways.near_ranks
    rows = samples_of(layout, batch)
    begin, end = rows[near[0]][0], rows[near[-1]][1]  # samples of this node
    mine = tables_of(len(call.tables), part, parts)
    places = list(accumulate(layout.dims[rank][mine], initial=0))
    width = places.pop()
    x = call.indices.new_empty(batch - (end - begin), width, dtype=call.out_dtype)
    _pool(call, mine, places, 0, x[:begin], config)
    _pool(call, mine, places, end, x[begin:], config)
    sent = [0 if r in near else (e - b) * width for r, (b, e) in enumerate(rows)]
    columns, widths = [], []
    for r, (starts, dims) in enumerate(zip(layout.columns, layout.dims, strict=True)):
        which = slice(0) if r in near else tables_of(len(dims), part, parts)
        widths.append(sum(dims[which]))
        for start, dim in zip(starts[which], dims[which], strict=True):
            columns += range(start, start + dim)
    count = rows[rank][1] - rows[rank][0]
    received = [count * each for each in widths]
    got = x.new_empty(sum(received))
    wait = ways.rail.begin(lambda: ways.rail.all_to_all_parts(got, x.view(-1), received, sent))
    return _Slice(tuple(columns), got, widths, x, wait)


def _pool(
    call: Call,
    mine: slice,
    columns: Sequence[int],
    begin: int,
    out: torch.Tensor,
    config: EmbeddingConfig,
) -> None:
    """The bags of samples from ``begin`` on, as many as ``out`` has rows, of the tables ``mine``,
    into ``columns`` of ``out``."""
    if out.numel():
        offsets = call.offsets[mine.start * call.batch + begin :]
        pooled = call._replace(tables=call.tables[mine], offsets=offsets)
        run_lookup(pooled, columns, out, config, _METAS)
