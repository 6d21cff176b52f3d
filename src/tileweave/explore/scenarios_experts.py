"""Scenarios of the expert operators: few tokens, experts that have rows and experts that have
none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tileweave.explore.ranks import World
from tileweave.explore.results import unwritten
from tileweave.explore.scenarios import POOL, Drawn, OneInstance, whole_numbers
from tileweave.ops.experts.routing_plan import RoutingPlan, reference_plan
from tileweave.ops.matmul.scaled import BLOCK, FP8
from tileweave.planning.combine import CombineConfig


@dataclass(frozen=True)
class Combine(OneInstance):
    """grouped_matmul_combine.

    tokens : numbers of tokens of rank 0, used in turn; rank r has r fewer, at least one.
    sizes : (cols, depth).
    full : all tokens choose experts of rank 0.
    """

    name: str
    config: CombineConfig
    tokens: tuple[int, ...]
    topk: int
    weighted: bool = True
    sizes: tuple[int, int] = (16, 8)
    experts: int = 2  # of a rank
    scaled: bool = False  # operands are FP8, with scales of blocks
    full: bool = False
    op: str = "grouped_matmul_combine"
    programs: tuple[int, ...] = (1, 4)  # multiprocessors, which roles divide
    resident: int = 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.experts.grouped_matmul_combine_fused import run_fused

        tokens = self.tokens[(number + drawn.order) % len(self.tokens)]
        seed = (number + drawn.order) % POOL
        group = world.ranks[rank].group
        sizes = (self.sizes, self.experts, world.size)
        y, experts, plan, weights, want = combine_operands(
            tokens, self.topk, *sizes, rank, seed, self.weighted, self.full
        )
        world.know(rank, "plan", plan.table)
        scales = None
        if self.scaled:
            places = torch.arange(1 + self.sizes[1] // BLOCK) + seed
            of_rows = 2.0 ** ((torch.arange(y.shape[0])[:, None] + places) % 4)
            of_experts = 2.0 ** ((torch.arange(self.experts)[:, None, None] + places) % 3)
            y, experts, want = in_fp8(y, of_rows), in_fp8(experts, of_experts), want.half()
            scales = of_rows, of_experts
        elif seed % 2:
            experts = experts.transpose(1, 2).contiguous().transpose(1, 2)
        out = unwritten(want)
        run_fused(y, experts, plan, weights, out, group, self.config, scales)
        yield "z", out, want


def in_fp8(whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 numbers that represent ``whole`` with these scales of blocks."""
    return (whole / scale.repeat_interleave(BLOCK, -1)[..., : whole.shape[-1]]).to(FP8)


@lru_cache(maxsize=4096)
def combine_operands(
    most: int,
    topk: int,
    sizes: tuple[int, int],
    own: int,
    size: int,
    rank: int,
    seed: int,
    weighted: bool,
    full: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, RoutingPlan, torch.Tensor | None, torch.Tensor]:
    """This rank's y, experts, plan and weights, and its z."""
    cols, depth = sizes
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, own * size, (size, most, topk), generator=generator)
    if full:
        ids %= own
    counts = [max(most - r, 1) for r in range(size)]
    for source, count in enumerate(counts):
        ids[source, count:] = -1
    values = [whole_numbers((most, topk, depth), "y", r, seed) for r in range(size)]
    experts = torch.cat([whole_numbers((own, cols, depth), "w", r, seed) for r in range(size)])
    weights = [
        whole_numbers((most, topk), "topk", r, seed) if weighted else torch.ones(most, topk)
        for r in range(size)
    ]
    plan = reference_plan(ids, rank, own * size, counts[rank])
    y = torch.zeros(plan.bound, depth)
    for row, entry in enumerate(plan.row_entry[: int(plan.offsets[-1])].tolist()):
        y[row] = values[entry // (most * topk)][entry // topk % most, entry % topk]
    z = torch.zeros(counts[rank], cols)
    for token in range(counts[rank]):
        for j, expert in enumerate(ids[rank, token].tolist()):
            if expert >= 0:
                z[token] += weights[rank][token, j] * (experts[expert] @ values[rank][token, j])
    mine = experts[rank * own : (rank + 1) * own].clone()
    return y, mine, plan, weights[rank][: counts[rank]].clone() if weighted else None, z


_CUT = CombineConfig(
    "triton",
    16,
    8,
    8,
    1,
    4,
    1,
    chunks=2,
    groups=2,
    block_tokens=2,
    block_cols=8,
    num_reduce=1,
    num_finish=1,
)
EXPERT_SCENARIOS = (
    Combine("roles", _CUT, (3, 4), 2),
    Combine(
        "several",
        CombineConfig("triton", 16, 16, 8, 1, 4, 1, 1, 1, 1, 16, num_reduce=2, num_finish=2),
        (3,),
        2,
        weighted=False,
    ),
    # the last chunk, group, block and tile of columns are smaller than the others, and experts have
    # several tiles of rows, each in a group of its own
    Combine(
        "uneven",
        replace(_CUT, tile_m=4, block_cols=4, num_finish=2),
        (5,),
        3,
        sizes=(21, 9),
        experts=3,
    ),
    # the last chunk has fewer tiles, all whole; the memory of more tokens is used again. There are
    # more groups than chunks, and a later chunk may be stored before an earlier one
    Combine("fewer tokens", replace(_CUT, groups=3, num_reduce=2), (5, 1), 2, sizes=(24, 8)),
    # after the last row, and the last columns that are summed at once, there is no memory
    Combine("all rows", _CUT, (1,), 2, sizes=(21, 9), full=True),
    Combine(
        "FP8",
        replace(_CUT, tile_n=128, tile_k=128, chunks=1),
        (3,),
        2,
        sizes=(16, 144),
        scaled=True,
        programs=(4,),
    ),
    Combine(
        "FP8, whole columns",
        replace(_CUT, tile_n=128, tile_k=128, chunks=1, block_cols=64),
        (1,),
        2,
        sizes=(128, 144),
        scaled=True,
        programs=(4,),
    ),
)
