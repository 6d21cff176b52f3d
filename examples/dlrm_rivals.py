"""Three exchanges between tables and samples, for the step of ``dlrm_peers.py``: the fused operator
and two rivals."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dlrm import RATE
from torch import nn

import tileweave as tw
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.core.collectives import all_to_all_whole
from tileweave.ops.embedding.bag_all_to_all_fused import begin_push, end_push
from tileweave.ops.embedding.table_gradient import (
    Lookups,
    SortedLookups,
    Update,
    sort_lookups,
    table_gradients,
)
from tileweave.planning.sharding import EmbeddingLayout, rows_of

LOOKUP = "lookup"
TO_SAMPLES = "to samples' owners"
TO_TABLES = "to tables' owners"
SUMS = "sums, step of tables"
BOTH, BOTH_BACK = f"{LOOKUP}, {TO_SAMPLES}", f"{TO_TABLES}, {SUMS}"
Phase = Callable[[str], object]


def quiet(name: str) -> None:
    """A phase callback that does nothing: the step is not divided into phases."""


class Exchange:
    """The common part of the three. By default the host needs no data of ids before a lookup."""

    captured = False

    def arriving(self, offsets: torch.Tensor) -> object:
        """Called when the lengths of a batch have arrived, steps before its lookup. Returns what
        the host needs for that lookup."""


class Ours(Exchange):
    """Our lookup, sort, sums and step in place. Their sizes do not depend on data, so CUDA graphs
    can capture them."""

    captured = True

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.module, self.batch, self.layout, self.rank = module, batch, module.layout, module.rank
        self.tables = [w.detach() for w in module.weights()]
        none = torch.empty(0, dtype=torch.int64, device=self.tables[0].device)
        self.bags = Lookups(none, none, None, batch, False)  # sums read only the batch size

    def sort(self, indices: torch.Tensor, offsets: torch.Tensor) -> SortedLookups:
        """Positions by table row. It needs no gradient, so it can run during the step before."""
        return sort_lookups(
            self.tables,
            Lookups(indices, offsets, None, self.batch, False),
            indices.is_cuda or self.compiled,
        )

    def sums(
        self, grad: torch.Tensor, ordered: SortedLookups, phase: Phase, push: Any = None
    ) -> None:
        phase(SUMS)
        compiled, factor = grad.is_cuda or self.compiled, 1.0 / self.module.world_size
        update = Update("sgd", rate=self.module.optimizer.rate)
        table_gradients(
            grad, self.tables, self.bags, ordered, factor, update, compiled=compiled, push=push
        )


class Fused(Ours):
    """The fused operator. Its result is always in the same region of symmetric memory, because
    graphs freeze its address."""

    compiled = True
    pooled: Any = None

    @torch.no_grad()
    def lookup(
        self, indices: torch.Tensor, offsets: torch.Tensor, known: object, phase: Phase
    ) -> None:
        phase(BOTH)
        m = self.module
        y = tw.embedding_bag_all_to_all(
            self.tables,
            indices,
            offsets,
            batch=self.batch,
            layout=m.layout,
            out_dtype=m.out_dtype,
            group=m.group_name,
            out=self.pooled,
        )
        self.pooled = y if self.pooled is None else self.pooled

    def update(self, grad: torch.Tensor, ordered: SortedLookups, phase: Phase) -> None:
        phase(BOTH_BACK)
        push = begin_push(grad, self.layout, self.batch, self.module.group_name)
        self.sums(push.slot, ordered, quiet, push)  # in the same launch
        end_push(push, self.module.group_name)


class Unfused(Ours):
    """NCCL all-to-alls, and one copy into or out of columns."""

    compiled = False

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        super().__init__(module, batch)
        self.pooled = pooled_buffer(module, batch)

    @torch.no_grad()
    def lookup(
        self, indices: torch.Tensor, offsets: torch.Tensor, known: object, phase: Phase
    ) -> None:
        phase(LOOKUP)
        y = tw.embedding_bag(self.tables, indices, offsets)
        phase(TO_SAMPLES)
        to_samples(y, self.layout, self.rank, self.pooled)

    def update(self, grad: torch.Tensor, ordered: SortedLookups, phase: Phase) -> None:
        phase(TO_TABLES)
        self.sums(to_tables(grad, self.layout, self.rank, self.batch), ordered, phase)


class Torch(Exchange):
    """torch alone: a call of ``embedding_bag`` per table, sparse gradients and torch's SGD. The
    sizes of gradients depend on data."""

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.batch, self.layout, self.rank = batch, module.layout, module.rank
        self.weights = module.weights()
        self.optimizer = torch.optim.SGD(self.weights, lr=RATE / module.world_size)
        self.pooled = pooled_buffer(module, batch)

    def arriving(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copies to the host where the ids of each table end, for slicing."""
        ends = offsets[:: self.batch]
        if not ends.is_cuda:
            return ends, None
        ends = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True).copy_(
            ends, non_blocking=True
        )
        return ends, torch.cuda.current_stream().record_event()

    def lookup(
        self, indices: torch.Tensor, offsets: torch.Tensor, known: Any, phase: Phase
    ) -> None:
        phase(LOOKUP)
        ends, ready = known
        if ready is not None:
            ready.synchronize()
        cuts, bags = ends.tolist(), []
        for number, weight in enumerate(self.weights):
            begins = offsets[number * self.batch : (number + 1) * self.batch + 1] - cuts[number]
            rows = indices[cuts[number] : cuts[number + 1]]
            bags.append(
                nn.functional.embedding_bag(
                    rows, weight, begins, mode="sum", sparse=True, include_last_offset=True
                )
            )
        self.bags = torch.cat(bags, 1)
        phase(TO_SAMPLES)
        to_samples(self.bags.detach(), self.layout, self.rank, self.pooled)

    def sort(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """``backward`` sorts."""

    def update(self, grad: torch.Tensor, ordered: None, phase: Phase) -> None:
        phase(TO_TABLES)
        mine = to_tables(grad, self.layout, self.rank, self.batch)
        phase(SUMS)
        self.bags.backward(mine)
        self.optimizer.step()
        self.optimizer.zero_grad()


def pooled_buffer(module: ShardedEmbeddingBag, batch: int) -> torch.Tensor:
    """The tensor for the pooled vectors of this rank's samples in all steps: [b, width]."""
    begin, end = rows_of(batch, module.world_size, module.rank)
    return torch.empty(end - begin, module.layout.width, device=module.weights()[0].device)


def to_samples(pooled: torch.Tensor, layout: EmbeddingLayout, rank: int, out: torch.Tensor) -> None:
    """Send pooled vectors [B, own columns] to the owners of the samples: an all-to-all, and one
    copy into columns of ``out``."""
    (batch, width), size = pooled.shape, len(layout.dims)
    samples = [end - begin for begin, end in (rows_of(batch, size, r) for r in range(size))]
    sizes = [samples[rank] * sum(dims) for dims in layout.dims]
    sends = [n * width for n in samples]
    got = all_to_all_whole(pooled.view(-1), sends, sizes, dist.group.WORLD).split(sizes)
    placed = []
    for block, columns, dims in zip(got, layout.columns, layout.dims, strict=True):
        parts = block.view(samples[rank], sum(dims)).split(list(dims), 1)
        placed += zip(columns, parts, strict=True)
    torch.cat([part for _, part in sorted(placed, key=lambda pair: pair[0])], 1, out=out)


def to_tables(grad: torch.Tensor, layout: EmbeddingLayout, rank: int, batch: int) -> torch.Tensor:
    """Send gradients [b, width] to the owners of the tables, [B, own columns]: one copy out of
    columns, and an all-to-all."""
    samples, size = grad.shape[0], len(layout.dims)
    split = [samples * sum(dims) for dims in layout.dims]
    flat = grad.new_empty(sum(split))
    for piece, columns, dims in zip(flat.split(split), layout.columns, layout.dims, strict=True):
        if dims:
            parts = [grad[:, c : c + d] for c, d in zip(columns, dims, strict=True)]
            torch.cat(parts, 1, out=piece.view(samples, sum(dims)))
    width = sum(layout.dims[rank])
    sizes = [(end - begin) * width for begin, end in (rows_of(batch, size, r) for r in range(size))]
    return all_to_all_whole(flat, split, sizes, dist.group.WORLD).view(batch, width)
