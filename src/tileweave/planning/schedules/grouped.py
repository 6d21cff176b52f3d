"""Grouped matmuls of a mixture of experts: how they are cut, and the host's twin of the device's
walk over tiles.

No torch, no triton. ``plan_dispatch`` says which path a call of dispatch_grouped_matmul takes, and
how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tileweave.planning.machine import Machine
from tileweave.planning.problem import (
    FUSED_WORLD_SIZES,
    KernelName,
    Plan,
    why_no_kernel,
    why_unfused,
)
from tileweave.planning.schedules.gather import cdiv


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How one dispatch_grouped_matmul is cut up.

    tile_m, tile_n, tile_k, num_stages, num_warps, group_m : as in ``config.MatmulConfig``.
    num_producers : programs that push tokens ("triton": before they multiply); they must be
        resident together, so not all.
    push_rows : tokens that one has in flight ("triton").
    signal_blocks : at how many points of its list of experts a rank says that its tokens so far are
        there (at most 32).
    ordered : whether rows are lined up in memory for TMA before they are multiplied, or gathered by
        tiles ("hopper").
    """

    kernel: KernelName
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    num_producers: int = 32
    push_rows: int = 4
    signal_blocks: int = 8
    ordered: bool = False

    def __str__(self) -> str:
        """What a plan says of it; repr has all of it."""
        return f"{self.kernel} kernel, tile {self.tile_m}x{self.tile_n}x{self.tile_k}, {self.num_stages} stages"


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """Sizes of one grouped matmul: tokens and choices of a rank, local experts, columns and depth
    of each."""

    world_size: int
    max_tokens: int
    topk: int
    experts: int
    cols: int
    depth: int
    itemsize: int
    dtype: str

    @property
    def rows_per_expert(self) -> float:
        """What an expert gets if routing is balanced: its share of the choices of all ranks."""
        return self.max_tokens * self.topk / self.experts


ONE_LAUNCH = 8192  # choices of all ranks up to which a routing plan takes one launch


@dataclass(frozen=True, slots=True)
class RoutingCut:
    """How a routing plan is made.

    launches : 1, or 2 for a sort with a histogram. block : choices that a program looks at at once.
        slices : programs that push ids.
    """

    launches: int
    block: int
    slices: int

    def span(self, entries: int, num_sms: int) -> int:
        """Blocks of a unit of the sort: two units for each multiprocessor."""
        return max(1, cdiv(entries, self.block * 2 * num_sms))

    def units(self, world_size: int, max_tokens: int, topk: int, num_sms: int) -> int:
        """Units of all sorts, hence rows of the histogram: of each source's choices, and of own
        tokens for each peer."""
        unit = self.block * self.span(world_size * max_tokens * topk, num_sms)
        return world_size * (cdiv(max_tokens * topk, unit) + cdiv(max_tokens, unit))


def routing_cut(world_size: int, max_tokens: int, topk: int) -> RoutingCut:
    """One launch while programs that count for themselves are quick, else the sort."""
    size = max_tokens * topk
    if world_size * size <= ONE_LAUNCH:
        return RoutingCut(1, max(1024, 1 << max(size - 1, 0).bit_length()), 1)
    return RoutingCut(2, 128, 32)


def experts_per_block(experts: int, blocks: int) -> int:
    """Local experts between two signals, so that there are at most ``blocks`` signals."""
    return cdiv(experts, max(1, min(blocks, experts)))


def dispatch_counts(
    c: DispatchConfig, experts: int, cols: int, bound: int, num_sms: int, most_blocks: int
) -> tuple[int, int, int, int]:
    """(programs, how many of them push, experts between two signals, tile columns) of one shape."""
    tile_cols = cdiv(cols, c.tile_n)
    tiles = min(bound, experts + bound // c.tile_m) * tile_cols  # the most there can be
    programs = max(1, min(num_sms, tiles))
    producers = max(1, min(c.num_producers, programs))
    return (
        programs,
        producers,
        experts_per_block(experts, min(c.signal_blocks, most_blocks)),
        tile_cols,
    )


def walk(
    offsets: Sequence[int], cols: int, tile_m: int, tile_n: int, group_m: int
) -> Iterator[tuple[int, int, int, int]]:
    """(expert, first row, end of the expert's rows, tile column) of each tile in turn; see
    ``kernels/experts/tiles.py``."""
    tile_cols = cdiv(cols, tile_n)
    for expert in range(len(offsets) - 1):
        begin, end = offsets[expert], offsets[expert + 1]
        tile_rows = cdiv(end - begin, tile_m)
        for group in range(0, tile_rows, group_m):
            for col in range(tile_cols):
                for row in range(group, min(group + group_m, tile_rows)):
                    yield expert, begin + row * tile_m, end, col


def tickets(
    chunks: int, sends: int, own: int
) -> tuple[list[tuple[bool, int, int]], list[tuple[bool, int, int]]]:
    """Early and late tickets of a combine as (for a peer, chunk, block of it); see
    ``kernels/experts/combine_hopper_tasks.py``.

    Of a chunk there are ``sends`` blocks for peers and ``own`` ones.
    """
    early = []
    for chunk in range(chunks - 1):
        early += [(True, chunk, block) for block in range(sends)]
        early += [(False, chunk - 1, block) for block in range(own if chunk else 0)]
    finished = (
        (False, chunk, block) for chunk in range(max(chunks - 2, 0), chunks) for block in range(own)
    )
    mixed = sends + (own if chunks > 1 else 0)
    # even: send i at the i-th part of the stretch
    places = {block * mixed // sends: block for block in range(sends)}
    late = [
        (True, chunks - 1, places[n]) if n in places else next(finished)
        for n in range(sends + min(chunks, 2) * own)
    ]
    return early, late


def routes_fused(world_size: int, machine: Machine, interpreting: bool) -> bool:
    """Whether the routing plan of a group is made by our kernel. Integers only, so it runs wherever
    ranks see each other."""
    return world_size in FUSED_WORLD_SIZES and (machine.backend != "cpu" or interpreting)


def plan_dispatch(p: GroupedProblem, machine: Machine, interpreting: bool) -> Plan[DispatchConfig]:
    """The path of a dispatch_grouped_matmul: what can run, then what is fastest."""
    if p.world_size == 1:
        return Plan("unfused", "a group of one rank has nothing to send")
    reason = why_unfused(
        p.world_size, (p.max_tokens, p.topk, p.cols, p.depth), machine, interpreting
    )
    if reason is not None:
        return Plan("unfused", reason)
    if machine.backend == "cpu":
        return Plan("fused", "interpreted", DispatchConfig("triton", 16, 32, 64, 1, 4, 4, 1, 4, 4))
    reason = why_no_kernel(p.dtype, machine)
    if reason is not None:
        return Plan("unfused", reason)
    if p.depth * p.itemsize % 16:
        return Plan("unfused", f"rows of K = {p.depth} are no multiple of 16 bytes")
    return Plan("fused", f"{p.rows_per_expert:.0f} rows an expert if balanced", dispatch_config(p))


def dispatch_config(p: GroupedProblem) -> DispatchConfig:
    """By rows of an expert: low tiles where weights are all there is to read; above, rows in order
    (decisions 0069, 0075)."""
    rows = p.rows_per_expert
    if rows <= 2:
        return DispatchConfig("triton", 16, 128, 128, 5, 4, 8, 16, push_rows=1, signal_blocks=1)
    if rows <= 64:
        return DispatchConfig("hopper", 64, 128, 128, 4, 4, signal_blocks=1)
    return DispatchConfig(
        "hopper", 128, 256, 64, 4, 8, 8, 64, signal_blocks=min(32, p.experts), ordered=True
    )
