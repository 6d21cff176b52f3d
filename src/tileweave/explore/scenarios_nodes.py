"""Matmul operators over nodes, where chunks travel while others are multiplied; 2 x 1, 3 x 1 and
2 x 2 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from tileweave.planning.problem import MatmulConfig, Plan

AG = "all_gather_matmul"
RS = "matmul_reduce_scatter"
AR = "matmul_all_reduce"


@dataclass(frozen=True)
class OverNodes:
    """``shapes``: (rows, cols, K) of a rank, of an all-reduce for each rank of a node."""

    name: str
    op: str
    shapes: tuple[tuple[int, int, int], ...]
    chunks: int
    gathered: bool = False
    over_nodes: bool = True
    programs: tuple[int, ...] = (1, 2)
    resident: int = 1
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS[:1]  # sums of other dtypes are rounded twice

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        world.workspace(rank).transport = spanning(world, rank)
        world.barrier()

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
            gathered = torch.full_like(whole, float("nan")) if self.gathered else None
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

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from ()


SCENARIOS = (
    OverNodes("over nodes", AG, ((5, 8, 16), (2, 16, 8)), 3),
    OverNodes("over nodes, gathered", AG, ((4, 8, 16),), 2, gathered=True),
    OverNodes("over nodes", RS, ((5, 8, 16), (1, 16, 8)), 3),
    OverNodes("over nodes, whole", RS, ((3, 8, 16),), 1),
    OverNodes("over nodes", AR, ((5, 8, 16), (1, 16, 8)), 3),
)
