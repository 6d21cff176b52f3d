"""Scenarios of embedding_bag_all_to_all and its backward.

Results are held over further calls, which must use other regions. Backward pushes gradients and
sums them, one group of tables after another, in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios import POOL, Drawn, OneInstance, whole_numbers
from tileweave.explore.scenarios_local import bags_of, near, pooled
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout, rows_of

ROWS, DIM, BAG = 5, 8, 2  # of a table; indices in a bag


@dataclass(frozen=True)
class EmbeddingBag(OneInstance):
    """embedding_bag_all_to_all.

    batches : samples of all ranks, used in turn.
    tables : per rank.
    held : every other rank keeps this many results over further calls, so that ranks announce
        different regions.
    """

    name: str
    batches: tuple[int, ...]
    tables: int
    config: EmbeddingConfig
    held: int = 0
    ragged: bool = False
    op: str = "embedding_bag_all_to_all"
    programs: tuple[int, ...] = (1, 2, 3)
    resident: int = 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.embedding.bag_all_to_all_fused import run_fused
        from tileweave.ops.embedding.call import Call

        turn = number + drawn.order
        batch = self.batches[turn % len(self.batches)]
        seed = turn % POOL
        weights, mean = None, self.ragged and seed % 2 == 1
        if self.ragged:
            *operands, want = draw_ragged(batch, self.tables, world.size, rank, seed)
            tables, indices, offsets, weights = operands
        else:
            tables, indices, offsets, want = draw_bags(batch, self.tables, world.size, rank, seed)
        for table in tables:
            world.know(rank, "table", table)
        layout = EmbeddingLayout.in_rank_order([[DIM] * self.tables] * world.size)
        group = world.ranks[rank].group
        call = Call(tables, indices, offsets, weights, layout, batch, mean, torch.float32, group)
        got = run_fused(call, self.config)
        kept: dict[object, Any] = self.instance(world, rank).cache
        held: list[tuple[torch.Tensor, torch.Tensor]] = kept.setdefault("explored", [])
        held.append((got, want))
        yield near("result", got, want) if mean else ("result", got, want)
        for old, wanted in held[:-1]:
            yield "a result that is held", old, wanted
        keep = self.held * (rank % 2)
        del held[: len(held) - keep]

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from super().end(world, rank, drawn)
        instance = self.instance(world, rank)
        most = max(-(-batch // world.size) for batch in self.batches)
        rows = most * EmbeddingLayout.in_rank_order([[DIM] * self.tables] * world.size).width
        regions = instance.slots.view(torch.float32).view(instance.num_slots, -1)
        yield "stored after the last rows", int(regions[:, rows:].any()), 0


@lru_cache(maxsize=4096)
def draw_bags(
    batch: int, tables: int, size: int, rank: int, seed: int, dim: int = DIM
) -> tuple[Any, ...]:
    """This rank's tables, indices and offsets of the global batch, and its rows of the result."""
    all_tables = [
        [whole_numbers((ROWS, dim), "table", r, t, seed) for t in range(tables)]
        for r in range(size)
    ]
    indices = [
        (torch.arange(tables * batch * BAG) * (r + 2) + seed)
        .remainder(ROWS)
        .view(tables, batch, BAG)
        for r in range(size)
    ]
    columns = [all_tables[r][t][indices[r][t]].sum(1) for r in range(size) for t in range(tables)]
    chunk = -(-batch // size)
    want = torch.cat(columns, 1)[rank * chunk : (rank + 1) * chunk]
    offsets = torch.arange(tables * batch + 1) * BAG
    return [t.clone() for t in all_tables[rank]], indices[rank].reshape(-1).clone(), offsets, want


@lru_cache(maxsize=4096)
def draw_ragged(batch: int, tables: int, size: int, rank: int, seed: int) -> tuple[Any, ...]:
    """This rank's tables, indices, offsets and weights, and its rows of the result."""
    columns, mine = [], ()
    for r in range(size):
        owned = [whole_numbers((ROWS, DIM), "table", r, t, seed).clone() for t in range(tables)]
        bags = bags_of(seed + 100 * r, owned, batch, seed % 4 >= 2)
        columns.append(pooled(owned, bags, batch, seed % 2 == 1))
        if r == rank:
            mine = owned, *bags
    chunk = -(-batch // size)
    return *mine, torch.cat(columns, 1)[rank * chunk : (rank + 1) * chunk]


@dataclass(frozen=True)
class TableGradient(OneInstance):
    """Backward with SGD steps in place.

    samples : per rank.
    tables : per rank, each in a group of its own.
    carrier : transport of gradients.
    alone : the push is a launch of its own, as when gradients of per-sample weights need the old
        tables.
    first_only : only rank 0 has samples.
    in_turn : only rank 0 has samples in every other call.
    idle : rank 0 looks nothing up.
    dim : columns of a table.
    """

    name: str
    samples: int
    tables: int
    carrier: str
    alone: bool = False
    first_only: bool = False
    in_turn: bool = False
    idle: bool = False
    dim: int = DIM
    op: str = "embedding_bag_all_to_all_backward"
    programs: tuple[int, ...] = (1, 2, 3)  # programs that push; one more watches, two or three sum
    resident: int = 1

    @property
    def instance_kind(self) -> str:
        return self.carrier

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.embedding.bag_all_to_all_fused import begin_push, end_push
        from tileweave.ops.embedding.table_gradient import (
            Lookups,
            Update,
            sort_lookups,
            table_gradients,
        )

        first_only = self.first_only or (self.in_turn and number % 2 == 1)
        assert self.samples == 1 or not first_only, "one sample belongs to one rank"
        batch = self.samples * (1 if first_only else world.size)
        seed = (number + drawn.order) % POOL
        rows = [rows_of(batch, world.size, peer) for peer in range(world.size)]
        drawn_bags = draw_bags(batch, self.tables, world.size, rank, seed, self.dim)
        tables, indices, offsets, _ = drawn_bags
        if nothing := self.idle and rank == 0:
            indices, offsets = indices[:0], torch.zeros_like(offsets)
        layout = EmbeddingLayout.in_rank_order([[self.dim] * self.tables] * world.size)
        grads = [
            whole_numbers((end - begin, layout.width), "gradient", r, seed)
            for r, (begin, end) in enumerate(rows)
        ]
        grad, rate = grads[rank].clone(), torch.ones(1)
        lookups = Lookups(indices, offsets, None, batch, False)
        ordered = sort_lookups(tables, lookups, False)
        push = begin_push(grad, layout, batch, world.ranks[rank].group, self.alone, self.carrier)
        if self.alone and self.carrier == "copy_engine":
            world.wrote(rank, push.slot[slice(*rows[rank])])  # torch copies the own rows
        push = replace(push, candidates=drawn.programs * (8 if self.alone else 1))
        known = (
            ("gradient", grad),
            ("rate", rate),
            ("keys", ordered.keys),
            ("bags", ordered.bags),
            ("plan", push.plan),
        )
        for name, tensor in known:
            world.know(rank, name, tensor)
        # clones: the operands are used again, and a timeout leaves NaN in these
        before, tables = tables, [t.clone() for t in tables]
        for table in tables:
            world.know(rank, "table", table)
        if self.alone:
            push.launch_alone()
        with_sums, update = None if self.alone else push, Update("sgd", rate=rate)
        table_gradients(push.slot, tables, lookups, ordered, 1.0, update, push=with_sums)
        if self.alone:
            push.end_alone()
        end_push(push, world.ranks[rank].group)
        bags = 0 if nothing else BAG
        whole, chosen = torch.cat(grads), indices.view(self.tables, batch, bags)
        for t, (table, old) in enumerate(zip(tables, before, strict=True)):
            column = layout.columns[rank][t]
            mine = whole[:, column : column + self.dim].repeat_interleave(bags, 0)
            yield f"table {t}", table, old.index_add(0, chosen[t].reshape(-1), mine, alpha=-1)

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        from tileweave.kernels.embedding.gradient import ARRIVED

        yield from super().end(world, rank, drawn)
        arrived = self.instance(world, rank).counters[ARRIVED.value]
        yield "groups that have arrived", int(arrived), 0


_CUT = EmbeddingConfig(4, 2, 1, 1, 1)
EMBEDDING = (
    TableGradient("groups", 2, 2, "sm"),
    TableGradient("groups by copy engines", 1, 2, "copy_engine"),
    TableGradient("nine tables", 1, 9, "sm"),
    TableGradient("nine tables by copy engines", 1, 9, "copy_engine"),
    TableGradient("alone", 1, 2, "sm", alone=True),
    TableGradient("alone by copy engines", 1, 2, "copy_engine", alone=True),
    TableGradient("of one rank", 1, 2, "sm", first_only=True, dim=DIM + 1),
    TableGradient("several tickets of a group", 3, 1, "sm", dim=4, programs=(2, 3)),
    TableGradient("rows in turn", 1, 1, "sm", in_turn=True, programs=(2,)),
    TableGradient("nothing looked up", 1, 1, "sm", idle=True, programs=(1,)),
    EmbeddingBag("tickets", (6, 9), 1, _CUT),
    EmbeddingBag("ragged", (5,), 2, EmbeddingConfig(4, 1, 1, 1, 1, run=1), ragged=True),
    EmbeddingBag("few samples", (1, 0), 1, _CUT),
    EmbeddingBag("held", (8,), 2, EmbeddingConfig(4, 2, 1, 1, 0), held=1),
)
