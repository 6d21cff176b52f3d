"""Three ways between tables and samples, for the step of ``dlrm_peers.py``: the fused operator, and
two to hold it against."""

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
    sort_lookups,
    table_gradients,
)
from tileweave.planning.sharding import EmbeddingLayout, rows_of

LOOKUP, TO_SAMPLES, TO_TABLES, SUMS = (
    "lookup",
    "to samples' owners",
    "to tables' owners",
    "sums, step of tables",
)
BOTH, BOTH_BACK = f"{LOOKUP}, {TO_SAMPLES}", f"{TO_TABLES}, {SUMS}"
Phase = Callable[[str], object]


def quiet(name: str) -> None:
    """No clock: the step is not cut into phases."""


class Exchange:
    """What the three have in common: they need to know nothing of ids before they look them up."""

    captured = False

    def arriving(self, offsets: torch.Tensor) -> object:
        """Lengths of a batch have come, steps before its lookup: what that will want to know on the
        host."""


class Ours(Exchange):
    """Our lookup, sort, sums and step in place; sizes are no data of these, so CUDA graphs take
    them."""

    captured = True

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.module, self.batch, self.layout, self.rank = module, batch, module.layout, module.rank
        self.tables = [w.detach() for w in module.weights()]
        none = torch.empty(0, dtype=torch.int64, device=self.tables[0].device)
        self.bags = Lookups(none, none, None, batch, False)  # sums ask for no more than the batch

    def sort(self, indices: torch.Tensor, offsets: torch.Tensor) -> SortedLookups:
        """Positions by table row; needs no gradient, hence beside the step before."""
        return sort_lookups(
            self.tables,
            Lookups(indices, offsets, None, self.batch, False),
            indices.is_cuda or self.compiled,
        )

    def sums(
        self, grad: torch.Tensor, ordered: SortedLookups, phase: Phase, push: Any = None
    ) -> None:
        phase(SUMS)
        table_gradients(
            grad,
            self.tables,
            self.bags,
            ordered,
            1.0 / self.module.world_size,
            "sgd",
            (),
            self.module.optimizer.rate,
            0.0,
            grad.is_cuda or self.compiled,
            push,
        )


class Fused(Ours):
    """The operator; its result stands in one region of symmetric memory, since graphs have frozen
    where it is."""

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
        self.sums(push.slot, ordered, quiet, push)  # one launch
        end_push(push, self.module.group_name)


class Unfused(Ours):
    """NCCL, and one copy into or out of columns."""

    compiled = False

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        super().__init__(module, batch)
        self.pooled = place_of(module, batch)

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
    """Torch alone: a call of ``embedding_bag`` for each table, sparse gradients, its SGD; sizes of
    those are data."""

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.batch, self.layout, self.rank = batch, module.layout, module.rank
        self.weights = module.weights()
        self.optimizer = torch.optim.SGD(self.weights, lr=RATE / module.world_size)
        self.pooled = place_of(module, batch)

    def arriving(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Where each table's ids end, which a slice needs, on its way to the host."""
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


def place_of(module: ShardedEmbeddingBag, batch: int) -> torch.Tensor:
    """Where pooled vectors of this rank's samples stand, step after step: [b, width]."""
    begin, end = rows_of(batch, module.world_size, module.rank)
    return torch.empty(end - begin, module.layout.width, device=module.weights()[0].device)


def to_samples(pooled: torch.Tensor, layout: EmbeddingLayout, rank: int, out: torch.Tensor) -> None:
    """Pooled vectors [B, own columns] to their samples' owners: an all-to-all, and one copy into
    columns of ``out``."""
    (batch, width), size = pooled.shape, len(layout.dims)
    shares = [end - begin for begin, end in (rows_of(batch, size, r) for r in range(size))]
    sizes = [shares[rank] * sum(dims) for dims in layout.dims]
    got = all_to_all_whole(
        pooled.view(-1), [n * width for n in shares], sizes, dist.group.WORLD
    ).split(sizes)
    placed = []
    for block, columns, dims in zip(got, layout.columns, layout.dims, strict=True):
        placed += zip(
            columns, block.view(shares[rank], sum(dims)).split(list(dims), 1), strict=True
        )
    torch.cat([part for _, part in sorted(placed, key=lambda pair: pair[0])], 1, out=out)


def to_tables(grad: torch.Tensor, layout: EmbeddingLayout, rank: int, batch: int) -> torch.Tensor:
    """The other way: [b, width] to [B, own columns]; one copy out of columns, an all-to-all, which
    lands in place."""
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
