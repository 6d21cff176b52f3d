"""Scenarios of routing plans and of dispatch_grouped_matmul: few tokens, and experts that no token
has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tileweave.explore.ranks import World
from tileweave.explore.results import unwritten
from tileweave.explore.scenarios import POOL, Drawn, OneInstance, placed, whole_numbers
from tileweave.ops.experts.routing_plan import RoutingPlan, reference_plan
from tileweave.planning.schedules.grouped import DispatchConfig, RoutingCut


@dataclass(frozen=True)
class Routing(OneInstance):
    """Routing plans from ids.

    tokens : of rank 0, used in turn; rank r has r fewer.
    cut : None is the cut for few tokens.
    experts : per rank.
    """

    name: str
    tokens: tuple[int, ...]
    cut: RoutingCut | None = None
    experts: int = 2
    topk: int = 2
    op: str = "dispatch_grouped_matmul.routing"
    programs: tuple[int, ...] = (1, 2, 3)
    resident: int = 1

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.experts.route_tokens import run_routing

        turn = number + drawn.order
        most = self.tokens[turn % len(self.tokens)]
        ids = _ids(most, self.topk, self.experts, world.size, turn % POOL)
        want = reference_plan(ids, rank, self.experts * world.size)
        mine = ids[rank, : max(most - rank, 0)].clone()
        if drawn.order % 2:  # nor is an id an expert's that 32 bits cannot hold
            mine[mine < 0] = 2**32 if drawn.order % 4 == 1 else -(2**32)
        got = run_routing(mine, self.experts * world.size, most, world.ranks[rank].group, self.cut)
        rows = int(want.offsets[-1])
        yield "offsets", got.offsets, want.offsets
        yield "rows", got.row_entry[:rows], want.row_entry[:rows]
        yield "entries", got.entry_row, want.entry_row
        yield "own ids", got.topk_ids, want.topk_ids
        yield "send offsets", got.send_offsets, want.send_offsets
        for peer in range(world.size):
            sent = int(want.send_offsets[peer, -1])
            yield f"send order to {peer}", got.send_order[peer, :sent], want.send_order[peer, :sent]


@dataclass(frozen=True)
class Dispatch(OneInstance):
    """dispatch_grouped_matmul with given plans. ``tokens`` as above; ``sizes``: (cols, depth).
    ``one_way``: a rank sends to the next one alone, and rank 0 receives nothing."""

    name: str
    config: DispatchConfig
    tokens: tuple[int, ...]
    experts: int = 2
    topk: int = 2
    sizes: tuple[int, int] = (16, 8)
    one_way: bool = False
    op: str = "dispatch_grouped_matmul"
    programs: tuple[int, ...] = (1, 2, 3)

    @property
    def resident(self) -> int:
        return self.config.num_producers

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.kernels.experts.rows import gather_rows
        from tileweave.ops.experts.dispatch_grouped_matmul_fused import run_fused

        turn = number + drawn.order
        most = self.tokens[turn % len(self.tokens)]
        seed = turn % POOL
        drawn_for = (self.sizes, world.size, rank, seed)
        x, experts, plan, want = operands(
            most, self.topk, self.experts, *drawn_for, one_way=self.one_way
        )
        experts = experts.clone()
        if self.sizes[1] == 1:  # whatever the stride along K is
            experts = torch.stack((experts, experts), 3)[..., 0]
        elif seed % 2:
            experts = experts.transpose(1, 2).contiguous().transpose(1, 2)
        world.know(rank, "plan", plan.table)
        y = unwritten(torch.empty(plan.bound, self.sizes[0]))
        kept = torch.zeros(world.size - 1, most, self.sizes[1])
        x, count = placed(x, turn), len(want)
        peers, _ = run_fused(x, experts, plan, y, world.ranks[rank].group, self.config, kept)
        yield "y", y[:count], want
        yield "y with the rows that do not exist", y, y
        rows = gather_rows(x, peers, plan.fields, self.experts, most, self.topk, rank, world.size)
        whole = [whole_numbers((most, self.sizes[1]), "x", r, seed) for r in range(world.size)]
        tokens = torch.cat(whole)[plan.row_entry[:count].long() // self.topk]
        yield "gathered rows", rows[:count], tokens
        for row, entry in enumerate(plan.row_entry[: len(want)].tolist()):
            source, token = entry // (most * self.topk), entry // self.topk % most
            if source != rank:
                sent = whole_numbers((most, self.sizes[1]), "x", source, seed)[token]
                yield f"token of row {row}", kept[(rank - source) % world.size - 1, token], sent


@dataclass(frozen=True)
class ScaledDispatch(Dispatch):
    """The same with FP8 operands, whose tokens travel packed. Scales are powers of two and differ
    between tokens, so that a scale that is not its token's is noticed."""

    def call(
        self, world: World, rank: int, number: int, drawn: Drawn
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from tileweave.ops.experts.dispatch_grouped_matmul_fused import run_fused
        from tileweave.ops.experts.scaled import FP8, packed

        turn = number + drawn.order
        most = self.tokens[turn % len(self.tokens)]
        seed = turn % POOL
        x, experts, plan, plain = operands(
            most, self.topk, self.experts, self.sizes, world.size, rank, seed
        )
        token = torch.arange(world.size * most) + seed
        scales = 2.0 ** (token % 5)
        mine = scales[rank * most :][: x.shape[0], None]
        want = plain * scales[plan.row_entry[: len(plain)].long() // self.topk, None]
        world.know(rank, "plan", plan.table)
        y = unwritten(torch.empty(plan.bound, self.sizes[0]))
        tokens, weights = packed(x.to(FP8), mine), experts.to(FP8)
        ones = torch.ones(self.experts, 1, 1)
        group = world.ranks[rank].group
        run_fused(tokens, weights, plan, y, group, self.config, w_scale=ones)
        yield "y", y[: len(want)], want


@lru_cache(maxsize=4096)
def _ids(most: int, topk: int, experts: int, size: int, seed: int) -> torch.Tensor:
    """The ids of all ranks, [R, most, k]."""
    ids = torch.randint(
        -1, experts * size, (size, most, topk), generator=torch.Generator().manual_seed(seed)
    )
    for source in range(size):
        ids[source, max(most - source, 0) :] = -1
    return ids


@lru_cache(maxsize=4096)
def operands(
    most: int,
    topk: int,
    experts: int,
    sizes: tuple[int, int],
    size: int,
    rank: int,
    seed: int,
    nodes: int = 1,
    one_way: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, RoutingPlan, torch.Tensor]:
    """This rank's x, experts and plan, and its rows of y."""
    tokens = max(most - rank, 0)
    ids = _ids(most, topk, experts, size, seed)
    if one_way:
        owner = (torch.arange(size) + 1).clamp(max=size - 1)[:, None, None]
        ids = torch.where(ids < 0, ids, ids % experts + owner * experts)
    plan = reference_plan(ids, rank, experts * size, tokens, nodes)
    whole = torch.cat([whole_numbers((most, sizes[1]), "x", r, seed) for r in range(size)])
    weights = whole_numbers((experts, *sizes), "w", rank, seed)
    rows = whole[plan.row_entry[: int(plan.offsets[-1])].long() // topk]
    parts = [
        rows[b:e] @ w.t() for b, e, w in zip(plan.offsets, plan.offsets[1:], weights, strict=False)
    ]
    return whole[rank * most : rank * most + tokens], weights, plan, torch.cat(parts)


_CUT = DispatchConfig("triton", 16, 16, 8, 1, 4, 1, num_producers=1, push_rows=2, signal_blocks=2)
DISPATCH = (
    Routing("few", (3, 4)),
    Routing("many experts", (5,), None, 3, 3),
    Routing("sorted", (3, 4), RoutingCut(2, 4, 1), 3, programs=(1, 2)),
    # as many experts as a power of two, in "two slices", or fewer by more than one
    Routing("sorted, five experts", (3, 4), RoutingCut(2, 4, 1), 5, programs=(1, 2)),
    Routing("two slices", (515,), RoutingCut(2, 512, 2), programs=(2,)),
    Dispatch("one producer", _CUT, (3, 4)),
    Dispatch("uneven", replace(_CUT, push_rows=1), (5,), 3, 3, (17, 9), programs=(2, 3)),
    Dispatch(
        "producers", DispatchConfig("triton", 16, 8, 8, 1, 4, 1, 2, 1, 2), (4,), programs=(2, 3)
    ),
    Dispatch("one way", replace(_CUT, signal_blocks=1), (3,), one_way=True, programs=(1, 2)),
    Dispatch("one column", _CUT, (3,), sizes=(8, 1), programs=(2,)),
    ScaledDispatch(
        "packed FP8", replace(_CUT, tile_n=128, tile_k=128), (3, 4), sizes=(16, 16), programs=(2, 3)
    ),
)
