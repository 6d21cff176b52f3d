"""Operators over nodes: matmuls, where chunks travel while others are multiplied, experts, where
tokens cross once per node, and embeddings, whose vectors cross in slices; 2 x 1, 3 x 1 and 2 x 2
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tileweave.explore.rails import spanning
from tileweave.explore.ranks import World
from tileweave.explore.scenarios import (
    PAYLOADS,
    POOL,
    Drawn,
    added,
    gather_operands,
    laid,
    placed,
    reduce_operands,
    unwritten,
    whole_numbers,
)
from tileweave.explore.scenarios_dispatch import operands as dispatch_operands
from tileweave.explore.scenarios_embedding import BAG, DIM, draw_bags, draw_ragged
from tileweave.explore.scenarios_experts import combine_operands
from tileweave.explore.scenarios_local import near
from tileweave.planning.combine import CombineConfig
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.grouped import DispatchConfig
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout, rows_of

AG = "all_gather_matmul"
RS = "matmul_reduce_scatter"
AR = "matmul_all_reduce"
LOOKUP = "embedding_bag_all_to_all"


class Spanning:
    """What all scenarios over nodes have in common."""

    over_nodes: ClassVar[bool] = True

    @property
    def resident(self) -> int:
        return 1

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        world.workspace(rank).transport = spanning(world, rank)
        world.barrier()

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from ()


@dataclass(frozen=True)
class OverNodes(Spanning):
    """``shapes``: (rows, cols, K) of a rank, of an all-reduce for each rank of a node."""

    name: str
    op: str
    shapes: tuple[tuple[int, int, int], ...]
    chunks: int
    gathered: bool = False
    programs: tuple[int, ...] = (1, 2)
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS[:1]  # sums of other dtypes are rounded twice

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul import (
            all_gather_matmul_fused,
            matmul_all_reduce_fused,
            matmul_reduce_scatter_fused,
        )

        at = number + drawn.order
        rows, cols, depth = self.shapes[at % len(self.shapes)]
        seed, size, group = at % POOL, world.size, world.ranks[rank].group
        config = MatmulConfig("library", "nodes", 16, 16, 16, 1, 4, num_slices=self.chunks)
        plan = Plan("fused", "explored", config)
        whole = torch.empty(0)
        if self.op == AG:
            whole, w, want = gather_operands(drawn.payload, (rows, cols, depth), size, rank, seed)
            x = whole[rank * rows : (rank + 1) * rows]
        else:
            each = len(world.topology.near(rank))
            every = rows * (size if self.op == RS else each) + (self.op == AR and seed % 2)
            shape = every, cols, depth
            x, w, want = reduce_operands(drawn.payload, shape, size, rank, seed)
            if self.op == RS:
                want = want[rank * rows : (rank + 1) * rows]
        bias = added(want, at, rank if self.op == AG else 0)
        want = want if bias is None else want + bias
        x, w, out = placed(x, at), laid(w, at // 2), unwritten(want, at)
        if self.op == AG:
            gathered = unwritten(whole) if self.gathered else None
            all_gather_matmul_fused.run_fused(x, w, bias, out, gathered, group, plan)
            if gathered is not None:
                yield "gathered", gathered, whole
        elif self.op == RS:
            matmul_reduce_scatter_fused.run_fused(x, w, bias, out, group, plan)
        else:
            residual = whole_numbers(tuple(want.shape), "residual", seed).to(want.dtype)
            want = want + residual
            matmul_all_reduce_fused.run_fused(
                x, w, bias, residual, None, 0.0, out, None, group, plan
            )
        yield "out", out, want


@dataclass(frozen=True)
class ExpertsOverNodes(Spanning):
    """A dispatch, or a combine, of tokens that cross once per node. ``tokens``: of rank 0, used in
    turn; other ranks have fewer."""

    name: str
    op: str
    tokens: tuple[int, ...]
    topk: int = 2
    sizes: tuple[int, int] = (16, 8)
    programs: tuple[int, ...] = (2,)

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.experts import dispatch_grouped_matmul, over_nodes

        at = number + drawn.order
        most = self.tokens[at % len(self.tokens)]
        group = world.ranks[rank].group
        nodes = world.topology.nodes
        alone = len(world.topology.near(rank)) == 1
        if self.op == DISPATCH:
            x, experts, plan, want = dispatch_operands(
                most, self.topk, 2, self.sizes, world.size, rank, at % POOL, nodes
            )
            plan = replace(plan, group_name=group)
            config = replace(_DISPATCH, kernel="library" if alone else "triton", nodes=nodes)
            y = unwritten(torch.empty(plan.bound, self.sizes[0]))
            kept = torch.zeros((world.size - 1) * most, self.sizes[1])
            with over_nodes.arriving(self.op, x, experts, plan) as (tokens, near):
                places = over_nodes.keep_tokens(kept, tokens, plan)
                dispatch_grouped_matmul._multiply_tokens(tokens, experts, near, y, config, places)
            yield "y", y[: len(want)], want
            whole, _, near = over_nodes.kept_tokens(x, kept, plan, nodes)
            yield "kept tokens of the rail", whole, tokens
            return
        y, experts, plan, weights, want = combine_operands(
            most, self.topk, self.sizes, 2, world.size, rank, at % POOL, at % 2 == 0
        )
        plan = replace(plan, group_name=group)
        way = replace(_COMBINE, kernel="library" if alone else "triton", nodes=nodes)
        out = unwritten(want)
        over_nodes.combine(self.op, y, experts, plan, weights, out, way)
        yield "z", out, want


@dataclass(frozen=True)
class EmbeddingOverNodes(Spanning):
    """Lookups of which each table crosses in a slice of its own. ``batches``: samples of all ranks,
    used in turn. ``tables``: per rank."""

    name: str
    batches: tuple[int, ...]
    tables: int = 2
    op: str = LOOKUP
    programs: tuple[int, ...] = (1, 2)

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.embedding import over_nodes
        from tileweave.ops.embedding.call import Call

        at = number + drawn.order
        batch, seed, size = self.batches[at % len(self.batches)], at % POOL, world.size
        *operands, want = draw_ragged(batch, self.tables, size, rank, seed)
        tables, indices, offsets, weights = operands
        for table in tables:
            world.know(rank, "table", table)
        layout = EmbeddingLayout.in_rank_order([[DIM] * self.tables] * size)
        mean, group = seed % 2 == 1, world.ranks[rank].group
        call = Call(tables, indices, offsets, weights, layout, batch, mean, torch.float32, group)
        got = over_nodes.run(call, replace(_CUT, nodes=world.topology.nodes), None, 1, least=1)
        ranks = world.topology.near(rank)
        begin, end = (DIM * self.tables * r for r in (ranks[0], ranks[-1] + 1))
        for row in got:  # where torch copies what has crossed
            world.wrote(rank, row[:begin])
            world.wrote(rank, row[end:])
        yield near("result", got, want) if mean else ("result", got, want)


@dataclass(frozen=True)
class GradientOverNodes(Spanning):
    """Backward with SGD steps in place, of tables whose gradients cross in a slice each."""

    name: str
    batches: tuple[int, ...]
    tables: int = 2
    op: str = f"{LOOKUP}_backward"
    programs: tuple[int, ...] = (1, 2)

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.embedding import gradient_over_nodes
        from tileweave.ops.embedding.call import Call
        from tileweave.ops.embedding.table_gradient import (
            Lookups,
            Update,
            sort_lookups,
            table_gradients,
        )

        at = number + drawn.order
        batch, seed, size = self.batches[at % len(self.batches)], at % POOL, world.size
        before, indices, offsets, _ = draw_bags(batch, self.tables, size, rank, seed)
        layout = EmbeddingLayout.in_rank_order([[DIM] * self.tables] * size)
        whole = whole_numbers((batch, layout.width), "gradient", seed)
        grad, rate = whole[slice(*rows_of(batch, size, rank))].clone(), torch.ones(1)
        tables = [table.clone() for table in before]
        lookups = Lookups(indices, offsets, None, batch, False)
        ordered = sort_lookups(tables, lookups, False)
        group = world.ranks[rank].group
        call = Call(tables, indices, offsets, None, layout, batch, False, grad.dtype, group)
        known = (("rate", rate), ("keys", ordered.keys), ("bags", ordered.bags))
        for name, tensor in (*known, *(("table", table) for table in tables)):
            world.know(rank, name, tensor)
        with gradient_over_nodes.arriving(grad, call, least=1) as (mine, parts):
            world.know(rank, "gradient", mine)
            update = Update("sgd", rate=rate)
            table_gradients(mine, tables, lookups, ordered, 1.0, update, parts=parts)
        chosen = indices.view(self.tables, batch, BAG)
        for t, (table, old) in enumerate(zip(tables, before, strict=True)):
            column = layout.columns[rank][t]
            mine = whole[:, column : column + DIM].repeat_interleave(BAG, 0)
            yield f"table {t}", table, old.index_add(0, chosen[t].reshape(-1), mine, alpha=-1)


DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
_DISPATCH = DispatchConfig("triton", 16, 16, 8, 1, 4, 2, 1, 2, 2)
_COMBINE = CombineConfig("triton", 16, 8, 8, 1, 4, 1, 2, 2, 2, 8, 1, 1)

_CUT = EmbeddingConfig(4, 2, 1, 1, 1)

SCENARIOS = (
    EmbeddingOverNodes("over nodes", (6, 5)),
    GradientOverNodes("over nodes", (5, 3)),
    ExpertsOverNodes("over nodes", DISPATCH, (3, 2)),
    ExpertsOverNodes("over nodes", COMBINE, (3, 2)),
    OverNodes("over nodes", AG, ((5, 8, 16), (2, 16, 8)), 3),
    OverNodes("over nodes, gathered", AG, ((4, 8, 16),), 2, gathered=True),
    OverNodes("over nodes", RS, ((5, 8, 16), (1, 16, 8)), 3),
    OverNodes("over nodes, whole", RS, ((3, 8, 16),), 1),
    OverNodes("over nodes", AR, ((5, 8, 16), (1, 16, 8)), 3),
)
