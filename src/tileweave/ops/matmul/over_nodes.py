"""The matmul operators where ranks are on several nodes: chunks travel between nodes by NCCL (gloo
on the CPU) while cuBLAS multiplies others.

N nodes of L ranks. Rank (a, l) is number l of node a. Its *rail* is ranks (b, l) of all nodes b.

    all_gather_matmul      rail: chunk 0 | chunk 1 | ...             (all-gather of rows of x)
                           own node's rows | rows of chunk 0 | rows of chunk 1 | ...
    matmul_reduce_scatter  rows of other nodes, chunk 0 | chunk 1 | ... | own node's rows | add
                           rail:        chunk 0 | chunk 1 | ...      (all-to-all of node sums)
    matmul_all_reduce      rows of chunk 0 | chunk 1 | ... | gather in the node
                           rail:        chunk 0 | chunk 1 | ...      (all-reduce of node sums)

Inside a node copy engines push: each rank's part of a chunk that arrived goes on to the others of
the node (``concurrent_gather.py``), and partial sums of a chunk are added in the node before one
sum of the node travels (``shards_by_cublas.py``). So all that crosses, crosses once per node. A
node sum is rounded to the dtype of x before it crosses. Sums of nodes are added in float32 and
rounded once; those of an all-reduce on GPUs as NCCL does it.

Streams: the rail has a stream of its own. A transfer follows an event of the matmul that made its
chunk, and a matmul follows an event of the transfer whose chunk it reads. The current stream waits
for all transfers before the call ends.

Why no rank waits for ever: a kernel of NCCL needs multiprocessors of all ranks of its rail while it
waits for them. Here nothing else that waits needs multiprocessors which others wait for: matmuls
wait for nothing once they run, copies need no multiprocessor, and the kernels that wait for copies
(one program, or the sum of partial sums) wait for matmuls and copies of ranks of the node that come
before the same transfer, in an order that is the same on all ranks. So the first transfer or wait
in that order that has not ended always goes on. A fused kernel that fills the device and waits for
peers would not do: it could hold the multiprocessors that NCCL needs on one rank, and wait for a
rank where NCCL holds those that the fused kernel needs.

Why nothing is overwritten: chunks that cross are in memory of this call alone. What copy engines
write inside a node is protected as in any call of ``concurrent_gather.py`` and
``shards_by_cublas.py``, whose instances are those of the group of the node.

A rank that does not come is a ``PeerTimeout`` on the CPU and inside a node; between GPUs of
different nodes NCCL has a time-out of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm

from tileweave.ops.core.ways import Ways, add_in_order, spanning_call
from tileweave.ops.matmul.concurrent_gather import begin, gather_of
from tileweave.ops.matmul.products import Added, Plain, Storing, multiply
from tileweave.ops.matmul.shards_by_cublas import shard_sums
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.chunks import EVEN, GROWING, SHRINKING, chunks_by_weight

GATHER = "all_gather_matmul"
SCATTER = "matmul_reduce_scatter"
REDUCE = "matmul_all_reduce"
_LATER = 2  # chunks of an all-reduce that are multiplied before the first is gathered in the node


# --- The operators ---


def gather(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """all_gather_matmul of plan ``chosen``: x [m, K], w [n, K], out [R m, n], gathered [R m, K]."""
    rows = x.shape[0]
    with spanning_call(GATHER, group_name, x, chosen.checksum) as ways:
        places = out.view(ways.nodes, ways.each, rows, out.shape[1])
        kept = None
        if gathered is not None:
            kept = gathered.view(ways.nodes, ways.each, rows, x.shape[1])
        arriving = []
        for begin_, end in _chunks(rows, chosen, SHRINKING):
            arrived = x.new_empty(ways.nodes, end - begin_, x.shape[1])
            transfer = _bind(ways.rail.all_gather, arrived, x[begin_:end])
            arriving.append((begin_, end, arrived, ways.rail.begin(transfer)))
        whole = (out,) if gathered is None else (out, gathered)
        keep = None if kept is None else kept[ways.node]
        _multiply_in_node(ways, x, w, bias, places[ways.node], keep, whole)
        for begin_, end, arrived, wait in arriving:
            wait()
            for node in ways.others:
                place = places[node, :, begin_:end]
                keep = None if kept is None else kept[node, :, begin_:end]
                _multiply_in_node(ways, arrived[node], w, bias, place, keep, whole)


def scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """matmul_reduce_scatter of plan ``chosen``: x [R m, k], w [N, k], out [m, N]."""
    rows, cols = out.shape
    with spanning_call(SCATTER, group_name, x, chosen.checksum) as ways:
        owned = x.view(ways.nodes, ways.each, rows, x.shape[1])
        traveling = []
        for begin_, end in _chunks(rows, chosen, GROWING):
            sums, arrived = (out.new_empty(ways.nodes, end - begin_, cols) for _ in range(2))
            for node in ways.others:
                _sum_in_node(ways, owned[node, :, begin_:end], w, None, sums[node])
            wait = ways.rail.begin(_bind(ways.rail.all_to_all, arrived, sums))
            # kept until the end of the call: the network reads them
            traveling.append((begin_, end, sums, arrived, wait))
        own = torch.empty_like(out)
        _sum_in_node(ways, owned[ways.node], w, bias, own)
        for begin_, end, _, arrived, wait in traveling:
            wait()
            add_in_order(own[begin_:end], arrived, ways.node, out[begin_:end])


def reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    added: Added,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    group_name: str,
    chosen: Plan[MatmulConfig],
) -> None:
    """matmul_all_reduce of plan ``chosen``: x [M, k], w [N, k], out [M, N]. M is at least the
    ranks of a node. With ``added.norm_weight`` out gets the norm of the sum, and ``residual_out``
    the sum."""
    sums = out if residual_out is None else residual_out
    with spanning_call(REDUCE, group_name, x, chosen.checksum) as ways:
        first = ways.node == 0  # where the bias is added
        traveling = []
        for part in _of_each(x.shape[0], ways.each, chosen):
            target = sums[part]
            rows = target.shape[0] // ways.each
            own = target if ways.each == 1 else target.new_empty(rows, target.shape[1])
            of_ranks = x[part].view(ways.each, rows, x.shape[1])
            _sum_in_node(ways, of_ranks, w, added.bias if first else None, own)
            traveling.append((own, target, ways.rail.begin(_bind(ways.rail.all_reduce, own))))
            if len(traveling) > _LATER:
                _gather_in_node(ways, traveling.pop(0), sums)
        for each in traveling:
            _gather_in_node(ways, each, sums)
        if added.residual is not None:
            torch.add(sums, added.residual, out=sums)
        if added.norm_weight is not None:
            out.copy_(rms_norm(sums, (sums.shape[-1],), added.norm_weight, added.norm_eps))


def _chunks(
    rows: int, chosen: Plan[MatmulConfig], weights: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """(begin, end) of the chunks of ``rows``. ``weights``: of one chunk, of two, and so on."""
    assert chosen.config is not None, "the unfused path has no config"
    return chunks_by_weight(rows, chosen.config.num_slices, weights)


def _of_each(rows: int, each: int, chosen: Plan[MatmulConfig]) -> list[slice]:
    """Chunks of ``rows``, of which each of ``each`` ranks sums as many. If these do not divide
    ``rows``, the last chunk is the last ``each`` rows, some of which are also in the one before."""
    chunks = [slice(begin * each, end * each) for begin, end in _chunks(rows // each, chosen, EVEN)]
    return [*chunks, slice(rows - each, rows)] if rows % each else chunks


def _bind(transfer: Callable[..., None], *tensors: torch.Tensor) -> Callable[[], None]:
    return lambda: transfer(*tensors)


# --- Inside a node ---


def _multiply_in_node(
    ways: Ways,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
    kept: torch.Tensor | None,
    whole: tuple[torch.Tensor, ...],
) -> None:
    """Multiply x [r, K] of each rank of this node by w.

    places : [L, r, n], where the products go.
    kept : [L, r, K], where the x themselves go; None: nowhere.
    whole : the results that these are parts of; they become NaN after a time-out.
    """

    def use(index: int, part: torch.Tensor) -> None:
        multiply(part, w, bias, places[index])
        if kept is not None:
            kept[index].copy_(part)

    _each_of_node(ways, x, use, whole)


def _each_of_node(
    ways: Ways,
    x: torch.Tensor,
    use: Callable[[int, torch.Tensor], object],
    whole: tuple[torch.Tensor, ...],
) -> None:
    """Call ``use(index, x)`` for each rank of this node, as its x arrives. ``whole``: tensors that
    are computed from these; they become NaN after a time-out."""
    if ways.inside is None:
        use(0, x)
        return
    instance, call = gather_of(ways.inside, (x,))
    gathering = begin(instance, call, (x,))
    try:
        for index, (part,) in gathering.shards():
            use(index, part)
    finally:  # also when memory runs out: the next gather would find the signals of this one
        gathering.end(*whole)


class _OfRanks(NamedTuple):
    """A product for the rows of each rank of a node, which do not follow each other in x."""

    plain: Plain
    rows: torch.Tensor  # [L, r, k]

    @property
    def cols(self) -> int:
        return self.plain.cols

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def __call__(
        self, x: tuple[torch.Tensor, ...], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.plain(x, out)

    def rows_of(
        self, x: tuple[torch.Tensor, ...], begin: int, rows: int
    ) -> tuple[torch.Tensor, ...]:
        return (self.rows[begin // rows],)

    def repeated(self) -> Storing:
        return self.plain.repeated()


def _sum_in_node(
    ways: Ways,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The sum over ranks of this node of x [L, r, k] @ w.T, plus bias: the rows of this rank, into
    ``out`` [r, N]."""
    if ways.inside is None:
        multiply(x[0], w, bias, out)
        return
    product = _OfRanks(Plain(w, None), x)
    instance, call = shard_sums(ways.inside, SCATTER, out.shape[0], product)
    call(instance, (x,), product, Added(bias), out)


def _gather_in_node(
    ways: Ways,
    traveling: tuple[torch.Tensor, torch.Tensor, Callable[[], None]],
    whole: torch.Tensor,
) -> None:
    """Gather the rows that arrive from other nodes among the ranks of this node.

    traveling : this rank's rows [r, N]; the memory [L r, N] for those of all ranks of this node; a
        function that waits until this rank's rows are there.
    whole : the result that they are a part of; it becomes NaN after a time-out.
    """
    own, target, wait = traveling
    wait()
    if ways.inside is None:
        return
    places = target.view(ways.each, *own.shape)
    _each_of_node(ways, own, lambda index, part: places[index].copy_(part), (whole,))
