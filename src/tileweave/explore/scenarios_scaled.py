"""Scenarios of FP8 operands: all_gather_matmul, whose rows and scales have one signal, and
matmul_reduce_scatter and matmul_all_reduce, whose partial sums are scaled before they are sent.

Data are whole numbers that FP8 has, scales powers of two that differ between rows, ranks and calls:
results are exact, and scales of another call or rank are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tileweave.explore.ranks import World
from tileweave.explore.results import unwritten
from tileweave.explore.scenarios import (
    PAYLOADS,
    POOL,
    Drawn,
    MatmulInstance,
    OneShot,
    triton_config,
    whole_numbers,
)
from tileweave.planning.problem import MatmulConfig, Plan

if TYPE_CHECKING:
    from tileweave.ops.matmul.scaled import Scaled, ScaledProduct


@dataclass(frozen=True)
class ScaledGather(MatmulInstance):
    """``shapes``: (rows, cols, K) of a rank, used in turn; ``kind`` of the scales of x: those of w
    are ones."""

    name: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]
    kind: str = "row"
    captured: bool = False
    op: str = "all_gather_matmul"
    resident: int = 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.all_gather_matmul_fused import run_scaled
        from tileweave.ops.matmul.scaled import FP8, Scaled, ScaledProduct, as_sent, blocks

        seed = (number + drawn.order) % POOL
        rows, cols, depth = self.shapes[(number + drawn.order) % len(self.shapes)]
        count = blocks(depth) if self.kind == "block" else 1
        whole = whole_numbers((world.size * rows, depth), "x", seed)
        scale = 2.0 ** whole_numbers((world.size * rows, count), "scale", seed).clamp(-1, 1)
        w = whole_numbers((cols, depth), "w", rank, seed)
        want = Scaled(whole, scale, self.kind).value() @ w.t()
        of_w = "row" if self.kind == "row" else "block"
        ones = torch.ones((1, cols) if of_w == "row" else (blocks(cols), count))
        product = ScaledProduct(Scaled(w.to(FP8), ones, of_w), None, self.kind, torch.float16)
        mine = slice(rank * rows, (rank + 1) * rows)
        parts = whole[mine].to(FP8), as_sent(scale[mine].clone(), self.kind)
        out = unwritten(want.half())
        world.transports[rank].captured = self.captured and number > 0
        plan = Plan("fused", "explored", self.config, world_size=world.size)
        run_scaled(parts, product, out, world.ranks[rank].group, plan)
        yield "out", out, want.half()


def summed_operands(
    shape: tuple[int, int, int], kind: str, size: int, rank: int, seed: int
) -> tuple[tuple[torch.Tensor, ...], ScaledProduct, torch.Tensor]:
    """x of this rank as it is passed, what it is multiplied by, and the sum of the products of all
    ranks in fp16. ``shape``: (rows, cols, K of a rank); ``kind`` of the scales of x: those of w are
    alike."""
    from tileweave.ops.matmul.scaled import FP8, Scaled, ScaledProduct, as_sent, blocks

    rows, cols, depth = shape
    count = blocks(depth) if kind == "block" else 1
    of_w = (blocks(cols), count) if kind == "block" else (cols, 1)

    def made(shape: tuple[int, int], of: tuple[int, int], *seeds: object) -> Scaled:
        scale = 2.0 ** whole_numbers(of, "scale", *seeds).clamp(-1, 1)
        return Scaled(whole_numbers(shape, *seeds), scale, kind)

    xs = [made((rows, depth), (rows, count), "x", r, seed) for r in range(size)]
    ws = [made((cols, depth), of_w, "w", r, seed) for r in range(size)]
    whole = torch.stack([x.value() @ w.value().t() for x, w in zip(xs, ws, strict=True)]).sum(0)
    x, w = xs[rank], ws[rank]
    product = ScaledProduct(w._replace(data=w.data.to(FP8)), None, kind, torch.float16)
    return (x.data.to(FP8), as_sent(x.scale.clone(), kind)), product, whole.half()


@dataclass(frozen=True)
class ScaledScatter(MatmulInstance):
    """``shapes``: (rows of an owner, cols, K of a rank), used in turn; ``kind`` of the scales of x:
    those of w are alike."""

    name: str
    config: MatmulConfig
    shapes: tuple[tuple[int, int, int], ...]
    programs: tuple[int, ...]
    kind: str = "row"
    captured: bool = False
    op: str = "matmul_reduce_scatter"
    payloads: ClassVar[tuple[str, ...]] = PAYLOADS[1:2]  # partial sums of 16 bits signal themselves

    @property
    def resident(self) -> int:
        return max(self.programs)  # a program may wait for any program of a peer

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.matmul_reduce_scatter_fused import run_scaled

        seed = (number + drawn.order) % POOL
        rows, cols, depth = self.shapes[(number + drawn.order) % len(self.shapes)]
        shape = world.size * rows, cols, depth
        parts, product, whole = summed_operands(shape, self.kind, world.size, rank, seed)
        want = whole[rank * rows : (rank + 1) * rows]
        out = unwritten(want)
        world.transports[rank].captured = self.captured and number > 0
        plan = Plan("fused", "explored", self.config, world_size=world.size)
        run_scaled(parts, product, None, out, world.ranks[rank].group, plan)
        yield "out", out, want


@dataclass(frozen=True)
class ScaledOneShot(OneShot):
    """matmul_all_reduce of few rows; ``kind`` as in :func:`summed_operands`."""

    norm: bool = False
    kind: str = "row"

    @property
    def payloads(self) -> tuple[str, ...]:
        return PAYLOADS[1:2]

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.matmul.matmul_all_reduce_fused import run_scaled
        from tileweave.ops.matmul.products import NOTHING

        seed = (number + drawn.order) % POOL
        shape = self.shapes[(number + drawn.order) % len(self.shapes)]
        parts, product, want = summed_operands(shape, self.kind, world.size, rank, seed)
        out = unwritten(want)
        plan = Plan("fused", "explored", self.config)
        run_scaled(parts, product, NOTHING, out, None, world.ranks[rank].group, plan)
        yield "out", out, want


_SHARDS = triton_config("copy_engine", kernel="library")
_KERNEL = triton_config("copy_engine", tile_k=128)
SCENARIOS = (
    ScaledGather("FP8, by shards", _SHARDS, ((2, 16, 16), (3, 16, 32)), (1,)),
    ScaledGather("FP8, by shards, captured", _SHARDS, ((2, 16, 16),), (1,), captured=True),
    ScaledGather(
        "FP8, library",
        triton_config("sm", kernel="library"),
        ((9, 16, 16), (5, 16, 32)),
        (1, 2, 3),
    ),
    ScaledGather("FP8, kernel", _KERNEL, ((16, 16, 32), (17, 24, 16)), (1, 2)),
    ScaledGather("FP8, kernel, blocks", _KERNEL, ((17, 24, 272),), (1, 2), kind="block"),
    ScaledScatter("FP8, kernel", _KERNEL, ((16, 16, 32), (17, 24, 16)), (1, 2)),
    ScaledScatter("FP8, kernel, captured", _KERNEL, ((17, 16, 16),), (1, 2), captured=True),
    ScaledScatter("FP8, kernel, blocks", _KERNEL, ((17, 24, 160),), (1, 2), kind="block"),
    ScaledScatter(
        "FP8, kernel, sm", triton_config("sm", tile_k=128), ((16, 16, 32), (5, 24, 16)), (1, 2)
    ),
    ScaledOneShot(
        "one shot, FP8", triton_config("sm", tile_k=128, shots=1), ((3, 32, 32), (5, 16, 16))
    ),
    ScaledOneShot(
        "one shot, FP8, blocks, teams",
        triton_config("sm", tile_n=64, tile_k=128, team=2, shots=1),
        ((3, 144, 160), (1, 64, 128)),
        kind="block",
    ),
)
