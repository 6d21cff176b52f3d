"""Scenarios of matmul_all_to_all and all_to_all_matmul: all four ways to exchange, by turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios import (
    POOL,
    Drawn,
    begin_instance,
    end_instance,
    instance_of,
    triton_config,
    whole_numbers,
)
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange

OUT, IN = "matmul_all_to_all", "all_to_all_matmul"


@dataclass(frozen=True)
class Exchanged:
    """``shapes``: (rows, cols, depth) of a part, used in turn, as the ways are. ``kept``: the
    exchanged x is handed back."""

    name: str
    op: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    ways: tuple[Exchange, ...]
    programs: tuple[int, ...]
    kept: bool = False
    captured: bool = False

    @property
    def resident(self) -> int:
        if self.op == IN or self.config.kernel == "library":
            return 1
        # where a program waits for any of a peer's
        return max(self.programs) if self.config.transport == "sm" else 1

    @property
    def kind(self) -> str:
        return instance_of(self.config)

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        begin_instance(world, rank, self.op, self.kind, drawn.epoch)

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.all_gather_matmul_fused import run_fused as run_in
        from tileweave.ops.matmul.matmul_all_to_all_fused import run_fused as run_out

        turn = number + drawn.order
        how, shape = self.ways[turn % len(self.ways)], self.shapes[turn % len(self.shapes)]
        x, w, exchanged, want = _operands(self.op, shape, how, world.size, rank, turn % POOL)
        out, plan = torch.full_like(want, float("nan")), Plan("fused", "explored", self.config)
        world.know(rank, "result", out)
        world.transports[rank].captured = self.captured and number > 0
        if self.op == OUT:
            run_out(x.clone(), w, None, out, how, world.ranks[rank].group, plan)
        else:
            got = torch.full_like(exchanged, float("nan")) if self.kept else None
            run_in(x.clone(), w, None, out, got, world.ranks[rank].group, plan, how=how)
            if got is not None:
                yield "exchanged", got, exchanged
        yield "out", out, want

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from end_instance(world, rank, self.op, self.kind, drawn)
        yield (
            "flags not at zero",
            int(world.workspace(rank).instance(self.op, self.kind).flags.count_nonzero()),
            0,
        )


@lru_cache(maxsize=4096)
def _operands(
    op: str, shape: tuple[int, int, int], how: Exchange, size: int, rank: int, seed: int
) -> tuple[torch.Tensor, ...]:
    """x, w, what x is exchanged into (or nothing), the result."""
    rows, cols, depth = shape
    m = rows * size if how.scatter_dim == 0 else rows

    def exchanged(wholes: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [whole.tensor_split(size, how.scatter_dim)[rank] for whole in wholes], how.gather_dim
        )

    if op == OUT:
        n = cols if how.scatter_dim == 0 else cols * size
        xs, ws = (
            [whole_numbers(s, v, r, seed) for r in range(size)]
            for s, v in (((m, depth), "x"), ((n, depth), "w"))
        )
        return (
            xs[rank],
            ws[rank],
            xs[rank],
            exchanged([x @ w.t() for x, w in zip(xs, ws, strict=True)]),
        )
    k, k_there = (depth * size if dim == 1 else depth for dim in (how.scatter_dim, how.gather_dim))
    xs = [whole_numbers((m, k), "x", r, seed) for r in range(size)]
    w, got = whole_numbers((cols, k_there), "w", rank, seed), exchanged(xs)
    return xs[rank], w, got, got @ w.t()


_WAYS = tuple(Exchange(scatter, gather) for scatter in (0, 1) for gather in (0, 1))
_QKV, _PROJECTION = Exchange(1, 0), Exchange(0, 1)

SCENARIOS = (
    Exchanged("sm", OUT, triton_config("sm"), ((16, 16, 16), (18, 16, 16)), _WAYS, (1, 2, 3)),
    Exchanged("sm, cut", OUT, triton_config("sm", tile_k=8), ((16, 16, 48),), (_QKV,), (2, 3)),
    Exchanged(
        "library",
        OUT,
        triton_config("sm", kernel="library"),
        ((16, 16, 16), (5, 8, 16)),
        _WAYS,
        (1, 2, 3),
    ),
    Exchanged(
        "copy engine",
        OUT,
        triton_config("copy_engine"),
        ((32, 24, 16), (17, 8, 16)),
        _WAYS,
        (1, 2, 3),
    ),
    Exchanged(
        "copy engine, captured",
        OUT,
        triton_config("copy_engine"),
        ((17, 16, 16),),
        (_QKV, _PROJECTION),
        (1, 2),
        captured=True,
    ),
    Exchanged("sm", IN, triton_config("sm"), ((16, 16, 16), (5, 16, 16)), _WAYS, (1, 2, 3)),
    Exchanged("copy engine", IN, triton_config("copy_engine"), ((32, 16, 16),), _WAYS, (1, 2)),
    Exchanged(
        "copy engine, kept",
        IN,
        triton_config("copy_engine"),
        ((32, 16, 16),),
        (_PROJECTION, _QKV),
        (2, 3),
        kept=True,
    ),
    Exchanged(
        "copy engine, captured",
        IN,
        triton_config("copy_engine"),
        ((32, 16, 16),),
        (_PROJECTION,),
        (1, 2),
        captured=True,
    ),
)
