"""Grouped matmuls of a mixture of experts: configs, plans, and the order of tiles that kernels use.

No torch, no triton. ``plan_dispatch`` says which path a call of dispatch_grouped_matmul takes, and
with which config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tileweave.planning import topology
from tileweave.planning.machine import Machine
from tileweave.planning.problem import (
    FUSED_WORLD_SIZES,
    C,
    KernelName,
    Plan,
    why_no_kernel,
    why_unfused,
)
from tileweave.planning.schedules.gather import cdiv


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How a dispatch_grouped_matmul is divided.

    kernel : ``"triton"`` or ``"hopper"``.
    tile_m, tile_n, tile_k, num_stages, num_warps, group_m : as in
        :class:`~tileweave.planning.problem.MatmulConfig`.
    num_producers : programs that push tokens (``"triton"``: before they multiply). They must all be
        resident at once, so they are only some of the programs.
    push_rows : tokens that a producer has in flight (``"triton"``).
    signal_blocks : signals per peer, at most 32. Each announces the tokens of a block of experts.
    ordered : whether rows are copied into the order of experts for TMA before they are multiplied;
        otherwise tiles gather them (``"hopper"``).
    scaled : of the kernel for FP8 operands (``"hopper"``), which is ordered.
    nodes : of the group. Over several, tokens cross once per node, and the rest is about the ranks
        of a node; ``"library"``, torch's grouped matmul, where it has one.
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
    scaled: bool = False
    nodes: int = 1

    def __str__(self) -> str:
        """The summary that a plan shows; repr has every field."""
        if self.kernel == "library":
            return "torch's grouped matmul"
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{self.kernel} kernel, {tile}, {self.num_stages} stages"


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """The sizes of one grouped matmul.

    max_tokens, topk : tokens per rank, at most, and experts per token.
    experts : local experts.
    cols, depth : columns and K of each expert's weight.
    nodes : into which the ranks are divided equally.
    """

    world_size: int
    max_tokens: int
    topk: int
    experts: int
    cols: int
    depth: int
    itemsize: int
    dtype: str
    nodes: int = 1

    @property
    def fp8(self) -> bool:
        """Whether rows and experts are FP8, with scales."""
        return self.itemsize == 1

    @property
    def out_itemsize(self) -> int:
        """Bytes of an element of the result, and of a product as it is sent."""
        return max(self.itemsize, 2)

    @property
    def in_node(self) -> GroupedProblem:
        """That of the ranks of one node, each of which has the tokens of a rail."""
        near, most = self.world_size // self.nodes, self.nodes * self.max_tokens
        return replace(self, world_size=near, max_tokens=most, nodes=1)

    @property
    def rows_per_expert(self) -> float:
        """Rows per expert if routing is balanced."""
        return self.max_tokens * self.topk / self.experts

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts that are read if each row may have another one."""
        read = min(self.experts, self.max_tokens * self.topk)
        return read * self.cols * self.depth * self.itemsize

    def why_unfused(self, machine: Machine, interpreting: bool) -> str | None:
        """Why no kernel of ours can run this in a group on one node; None if one can."""
        sizes = (self.max_tokens, self.topk, self.cols, self.depth)
        reason = why_unfused(self.world_size, sizes, machine, interpreting)
        if reason is None and machine.backend != "cpu":
            return why_no_kernel(self.dtype, machine)
        return reason


def packed_pitch(depth: int) -> int:
    """Bytes of a token of FP8 as it travels: data, a scale for each 128 elements, and as many bytes
    as make a multiple of 16."""
    return cdiv(depth + 4 * cdiv(depth, 128), 16) * 16


ONE_LAUNCH = 8192  # up to this many choices of all ranks a routing plan takes one launch


@dataclass(frozen=True, slots=True)
class RoutingCut:
    """How a routing plan is computed.

    launches : 1, or 2 for a sort with a histogram.
    block : choices that a program reads at once.
    slices : programs that push ids.
    """

    launches: int
    block: int
    slices: int

    def span(self, entries: int, num_sms: int) -> int:
        """Blocks per unit of the sort, for two units per multiprocessor."""
        return max(1, cdiv(entries, self.block * 2 * num_sms))

    def units(self, world_size: int, max_tokens: int, topk: int, num_sms: int) -> int:
        """Units of all sorts, which are the rows of the histogram: the choices of each source, and
        the own tokens for each peer."""
        unit = self.block * self.span(world_size * max_tokens * topk, num_sms)
        return world_size * (cdiv(max_tokens * topk, unit) + cdiv(max_tokens, unit))


def routing_cut(world_size: int, max_tokens: int, topk: int) -> RoutingCut:
    """One launch while it is fast for every program to count by itself, else the sort."""
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
    tiles = min(bound, experts + bound // c.tile_m) * tile_cols  # an upper bound
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
    """(expert, first row, end of the expert's rows, tile column) of each tile, in order; see
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
    """Early and late tickets of a combine as (for a peer, chunk, block); see
    ``kernels/experts/combine_hopper_tasks.py``.

    A chunk has ``sends`` blocks for peers and ``own`` blocks of this rank.
    """
    early = []
    for chunk in range(chunks - 1):
        early += [(True, chunk, block) for block in range(sends)]
        early += [(False, chunk - 1, block) for block in range(own if chunk else 0)]
    finished = (
        (False, chunk, block) for chunk in range(max(chunks - 2, 0), chunks) for block in range(own)
    )
    mixed = sends + (own if chunks > 1 else 0)
    # spread evenly: send i at the i-th part of the tickets
    places = {block * mixed // sends: block for block in range(sends)}
    late = [
        (True, chunks - 1, places[n]) if n in places else next(finished)
        for n in range(sends + min(chunks, 2) * own)
    ]
    return early, late


def routes_fused(world_size: int, machine: Machine, interpreting: bool) -> bool:
    """Whether our kernel makes the routing plan of a group. It computes with integers only, so it
    runs on any device whose ranks share memory."""
    can_run = machine.backend != "cpu" or interpreting
    return world_size in FUSED_WORLD_SIZES and can_run and not machine.unreachable


def plan_dispatch(p: GroupedProblem, machine: Machine, interpreting: bool) -> Plan[DispatchConfig]:
    """The plan of a dispatch_grouped_matmul: what can run, then what is fastest."""
    if p.fp8 and p.nodes > 1:
        return Plan("unfused", f"{p.nodes} nodes: FP8 tokens have no path between nodes")
    if p.nodes > 1:
        inside = plan_dispatch(p.in_node, machine, interpreting)
        return over_nodes(p, inside, _ALONE, machine, interpreting)
    if p.world_size == 1:
        return Plan("unfused", "a group of one rank has nothing to send")
    reason = p.why_unfused(machine, interpreting)
    if reason is not None:
        return Plan("unfused", reason)
    if machine.backend == "cpu":
        tile = (16, 128, 128) if p.fp8 else (16, 32, 64)
        return Plan("fused", "interpreted", DispatchConfig("triton", *tile, 1, 4, 4, 1, 4, 4))
    if p.depth * p.itemsize % 16:
        return Plan("unfused", f"rows of K = {p.depth} are not a multiple of 16 bytes")
    return Plan("fused", f"{p.rows_per_expert:.0f} rows per expert if balanced", dispatch_config(p))


def over_nodes(
    p: GroupedProblem, inside: Plan[C], alone: C, machine: Machine, interpreting: bool
) -> Plan[C]:
    """The plan of an expert operator over several nodes, given that of the ranks of one.

    ``alone``: how it is divided where a node has one rank, which then exchanges nothing inside.
    """
    near = p.world_size // p.nodes
    where = f"{p.nodes} nodes x {near}"
    config, reason = inside.config, inside.reason
    if machine.backend != "cpu" and not topology.TRY_ALL:
        why = _NOTHING_INSIDE if near == 1 else topology.NOT_ON_GPUS
        return Plan("unfused", f"{where}: {why}")
    if near == 1:
        sizes = (p.max_tokens, p.topk, p.cols, p.depth)
        found = why_unfused(FUSED_WORLD_SIZES[0], sizes, machine, interpreting)
        config, reason = (alone, f"{p.max_tokens} tokens") if found is None else (None, found)
    if config is None:
        return Plan("unfused", f"{where}: {reason}")
    reason = f"{where}, tokens cross once per node; {reason}"
    return Plan("fused", reason, replace(config, nodes=p.nodes))  # type: ignore[type-var]


# measured on two H100 as 2 nodes: unfused took 0.69 to 0.96 of the time
_NOTHING_INSIDE = "with one rank on each node collectives send as much, in fewer steps"
_ALONE = DispatchConfig("library", 16, 32, 64, 1, 4)
# Weights of FP8 up to which small Triton tiles, which start faster, are as fast as the Hopper
# kernels, which read faster. By six layers on two H200, 1 to 32 tokens (decision 0044): up to 805
# MB (dispatch) and 403 MB (combine) they were, from 940 MB on they were not.
SMALL_FP8 = 870_000_000


def dispatch_config(p: GroupedProblem) -> DispatchConfig:
    """Chosen by rows per expert. Small tiles while reading weights takes the time; for more rows,
    rows in the order of experts (decisions 0029, 0027)."""
    rows, blocks = p.rows_per_expert, min(32, p.experts)
    if p.fp8 and rows <= 2 and p.weight_bytes <= SMALL_FP8:
        # as many bytes in flight as with 16 bits
        return DispatchConfig("triton", 16, 128, 128, 9, 4, 8, 16, push_rows=1, signal_blocks=1)
    if p.fp8:
        return DispatchConfig(
            "hopper", 128, 256, 128, 4, 4, 8, 64, signal_blocks=blocks, ordered=True, scaled=True
        )
    if rows <= 2:
        return DispatchConfig("triton", 16, 128, 128, 5, 4, 8, 16, push_rows=1, signal_blocks=1)
    if rows <= 64:
        return DispatchConfig("hopper", 64, 128, 128, 4, 4, signal_blocks=1)
    return DispatchConfig("hopper", 128, 256, 64, 4, 8, 8, 64, signal_blocks=blocks, ordered=True)
