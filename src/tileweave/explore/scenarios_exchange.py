"""Scenarios of matmul_all_to_all and all_to_all_matmul: all four exchanges, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios import (
    PAYLOADS,
    POOL,
    Drawn,
    MatmulInstance,
    added,
    laid,
    operand,
    placed,
    product,
    triton_config,
    unwritten,
    whole_numbers,
)
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.scatter import Exchange

OUT, IN = "matmul_all_to_all", "all_to_all_matmul"


@dataclass(frozen=True)
class Exchanged(MatmulInstance):
    """``shapes``: (rows, cols, depth) of a part, used in turn, and so are ``exchanges``. ``kept``:
    the exchanged x is returned, too."""

    name: str
    op: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    exchanges: tuple[Exchange, ...]
    programs: tuple[int, ...]
    kept: bool = False
    captured: bool = False
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS

    @property
    def resident(self) -> int:
        if self.op == IN or self.config.kernel == "library":
            return 1
        # with "sm", a program may wait for any program of a peer
        return max(self.programs) if self.config.transport == "sm" else 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.all_gather_matmul_fused import run_fused as run_in
        from tileweave.ops.matmul.matmul_all_to_all_fused import run_fused as run_out

        turn = number + drawn.order
        exchange = self.exchanges[turn % len(self.exchanges)]
        shape = self.shapes[turn % len(self.shapes)]
        seed = turn % POOL
        biased = self.op == OUT and turn % 3 == 1
        x, w, exchanged, want = _operands(
            drawn.payload, self.op, shape, exchange, world.size, rank, seed, biased
        )
        if biased:
            bias = _bias(w, rank, seed)
        else:
            bias = None if self.op == OUT else added(want, turn, rank)
            want = want if bias is None else want + bias
        w = laid(w, turn // 2)
        out, plan = unwritten(want, turn), Plan("fused", "explored", self.config)
        world.know(rank, "result", out)
        world.transports[rank].captured = self.captured and number > 0
        x = placed(x, turn)
        if self.op == OUT:
            run_out(x, w, bias, out, exchange, world.ranks[rank].group, plan)
        else:
            got = unwritten(exchanged) if self.kept else None
            run_in(x, w, bias, out, got, world.ranks[rank].group, plan, how=exchange)
            if got is not None:
                yield "exchanged", got, exchanged
        yield "out", out, want

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        yield from super().end(world, rank, drawn)
        instance = self.instance(world, rank)
        yield "flags not at zero", int(instance.flags.count_nonzero()), 0
        if self.op == OUT and self.config.transport == "sm":  # what is pushed is taken
            yield "left in slots", int(instance.slots.any()), 0


def _bias(w: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    return whole_numbers((w.shape[0],), "bias", rank, seed).to(w.dtype)


@lru_cache(maxsize=4096)
def _operands(
    payload: str,
    op: str,
    shape: tuple[int, int, int],
    exchange: Exchange,
    size: int,
    rank: int,
    seed: int,
    biased: bool = False,
) -> tuple[torch.Tensor, ...]:
    """x, w, the exchanged x (all_to_all_matmul), the result, with each sender's bias."""
    rows, cols, depth = shape
    scatter_dim, gather_dim = exchange.scatter_dim, exchange.gather_dim
    m = rows * size if scatter_dim == 0 else rows

    def exchanged(wholes: list[torch.Tensor]) -> torch.Tensor:
        parts = [whole.tensor_split(size, scatter_dim)[rank] for whole in wholes]
        return torch.cat(parts, gather_dim)

    if op == OUT:
        n = cols if scatter_dim == 0 else cols * size
        xs = [operand(payload, (m, depth), "x", r, seed) for r in range(size)]
        ws = [whole_numbers((n, depth), "w", r, seed).to(xs[0].dtype) for r in range(size)]
        products = [product(x, w).to(x.dtype) for x, w in zip(xs, ws, strict=True)]
        if biased:
            products = [
                y + _bias(w, r, seed) for r, (y, w) in enumerate(zip(products, ws, strict=True))
            ]
        return xs[rank], ws[rank], xs[rank], exchanged(products)
    k, gathered_k = (depth * size if dim == 1 else depth for dim in (scatter_dim, gather_dim))
    xs = [operand(payload, (m, k), "x", r, seed) for r in range(size)]
    w, got = whole_numbers((cols, gathered_k), "w", rank, seed).to(xs[0].dtype), exchanged(xs)
    return xs[rank], w, got, product(got, w).to(got.dtype)


_ALL = tuple(Exchange(scatter, gather) for scatter in (0, 1) for gather in (0, 1))
_QKV, _PROJECTION = Exchange(1, 0), Exchange(0, 1)

SCENARIOS = (
    Exchanged("sm", OUT, triton_config("sm"), ((16, 16, 16), (18, 17, 17)), _ALL, (1, 2, 3)),
    Exchanged("sm, cut", OUT, triton_config("sm", tile_k=8), ((16, 16, 48),), (_QKV,), (2, 3)),
    Exchanged(
        "library",
        OUT,
        triton_config("sm", kernel="library"),
        ((16, 16, 16), (5, 52, 16)),
        _ALL,
        (1, 2, 3),
    ),
    Exchanged(
        "copy engine",
        OUT,
        triton_config("copy_engine"),
        ((33, 12, 16), (17, 9, 17)),  # the first has a last chunk of fewer tiles
        _ALL,
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
    Exchanged(
        "sm", IN, triton_config("sm"), ((16, 16, 16), (5, 17, 17)), _ALL, (1, 2, 3), kept=True
    ),
    Exchanged(
        "sm, cut", IN, triton_config("sm", tile_k=8), ((16, 16, 48),), (_PROJECTION,), (2, 3)
    ),
    Exchanged(
        "sm, low tiles", IN, triton_config("sm", tile_n=64), ((5, 70, 17),), (_PROJECTION,), (1, 2)
    ),
    Exchanged(
        "library",
        IN,
        triton_config("sm", kernel="library"),
        ((16, 16, 16), (5, 16, 8)),
        _ALL,
        (1, 2, 3),
        kept=True,
    ),
    Exchanged(
        "copy engine", IN, triton_config("copy_engine"), ((32, 16, 16), (18, 17, 17)), _ALL, (1, 2)
    ),
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
