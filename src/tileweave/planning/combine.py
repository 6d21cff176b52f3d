"""Configs and plans of grouped_matmul_combine, as pure functions of sizes and machine facts.

No torch, no triton. ``plan_combine`` is the single statement of what the fused operator can do and
when another path is faster; ``tw.explain`` prints what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.planning.machine import Machine
from tileweave.planning.problem import KernelName, Plan
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import SMALL_FP8, GroupedProblem, over_nodes

# Rows of one token on one rank that the Hopper kernel can count: LENGTH in
# ``kernels/experts/combine_hopper_tasks.py``.
MAX_ROWS = 255
MAX_GROUPS = 31  # pairs of chunk and group: each is a signal to a peer


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """How a grouped matmul and its combine are divided.

    kernel : ``"triton"`` or ``"hopper"``.
    tile_m, tile_n, tile_k, num_stages, num_warps, group_m : of the matmul, as in
        :class:`~tileweave.planning.problem.MatmulConfig`.
    chunks : column chunks, which are combined one after another.
    groups : signals per chunk.
    block_tokens, block_cols : tokens and columns that a program reduces at once. The multiplying
        warps of the Hopper kernel use columns of their own.
    num_reduce, num_finish : programs that reduce and that finish (``"triton"``). The Hopper kernel
        has a warp partition for both.
    programs_per_sm : programs that multiply, per multiprocessor.
    nodes : of the group, as in a ``DispatchConfig``.
    """

    kernel: KernelName
    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    chunks: int = 4
    groups: int = 4
    block_tokens: int = 4
    block_cols: int = 512
    num_reduce: int = 16
    num_finish: int = 8
    programs_per_sm: int = 1
    nodes: int = 1

    def __str__(self) -> str:
        """The summary that a plan shows; repr has every field."""
        if self.kernel == "library":
            return "torch's grouped matmul"
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{self.kernel} kernel, {tile}, {self.num_stages} stages, {self.chunks} chunks"


def partial_bytes(p: GroupedProblem) -> int:
    """Bytes of the peers' partial sums in a slot, rounded up to a multiple of 16."""
    return cdiv((p.world_size - 1) * p.max_tokens * p.cols * p.out_itemsize, 16) * 16


def slot_bytes(p: GroupedProblem) -> int:
    """Bytes of a slot: partial sums, then the routing weights of all ranks' tokens in fp32."""
    return partial_bytes(p) + p.world_size * p.max_tokens * p.topk * 4


@dataclass(frozen=True, slots=True)
class CombineCut:
    """Counts of chunks, blocks and groups that follow from a shape and a config."""

    tile_cols: int
    chunks: int
    chunk_cols: int
    blocks: int
    groups: int
    group_blocks: int

    @staticmethod
    def of(shape: GroupedProblem, config: CombineConfig) -> CombineCut:
        """Chunks are whole tile columns and groups are whole blocks; none is empty."""
        tile_cols = cdiv(shape.cols, config.tile_n)
        chunk_cols = cdiv(tile_cols, config.chunks)
        chunks = cdiv(tile_cols, chunk_cols)
        blocks = cdiv(shape.max_tokens, config.block_tokens)
        group_blocks = cdiv(blocks, min(config.groups, MAX_GROUPS // chunks))
        return CombineCut(
            tile_cols, chunks, chunk_cols, blocks, cdiv(blocks, group_blocks), group_blocks
        )


def plan_combine(
    shape: GroupedProblem, machine: Machine, interpreting: bool
) -> Plan[CombineConfig]:
    """The plan of a grouped_matmul_combine: what can run, then what is fastest. The same on all
    ranks."""
    s = shape
    if s.fp8 and s.nodes > 1:
        return Plan("unfused", f"{s.nodes} nodes: FP8 rows have no path between nodes")
    if s.nodes > 1:
        inside = plan_combine(s.in_node, machine, interpreting)
        return over_nodes(s, inside, _ALONE, machine, interpreting)
    if s.world_size == 1:
        return Plan("local", "a group of one rank has nothing to send")
    reason = s.why_unfused(machine, interpreting)
    if reason is not None:
        return Plan("unfused", reason)
    if machine.backend == "cpu":
        tile = (16, 128, 128) if s.fp8 else (16, 32, 64)
        config = CombineConfig("triton", *tile, 1, 4, 2, 2, 2, 8, 32, 1, 1)
        return Plan("fused", f"interpreted; {s.rows_per_expert:.0f} rows per expert", config)
    config, reason = _config_of(s), f"{s.rows_per_expert:.0f} rows per expert if balanced"
    if config.kernel == "hopper" and s.topk > MAX_ROWS:
        config, reason = (
            SCALED_PORTABLE if s.fp8 else _PORTABLE,
            f"{reason}; the Hopper kernel counts at most {MAX_ROWS} rows per token, k = {s.topk}",
        )
    return Plan("fused", reason, config)


_ALONE = CombineConfig("library", 16, 32, 64, 1, 4)
# for shapes that TMA or the Hopper kernel cannot take
_PORTABLE = CombineConfig("triton", 64, 128, 64, 4, 4, 4, 4, 2, 2, 1024, 32, 32, 2)


SCALED_PORTABLE = CombineConfig("triton", 64, 128, 128, 3, 4, 4, 4, 2, 2, 1024, 32, 32, 2)


def _config_of(s: GroupedProblem) -> CombineConfig:
    """Chosen by the average rows per expert. Few rows are bound by reading weights, many by the
    tensor cores (decisions 0029, 0030)."""
    rows = s.rows_per_expert
    few = s.fp8 and s.weight_bytes <= SMALL_FP8
    if few and rows <= 4:  # as many bytes in flight as with 16 bits
        workers = 32 if rows <= 2 else 64
        return CombineConfig("triton", 16, 128, 128, 7, 4, 8, 4, 1, 1, 1024, workers, workers, 2)
    if few and rows <= 16:
        return CombineConfig("triton", 32, 128, 128, 5, 4, 8, 4, 1, 1, 1024, 64, 64, 2)
    if s.fp8:
        return CombineConfig("hopper", 128, 256, 128, 4, 4, 8, 4, 7, 16, 256)
    if rows <= 4:
        workers = 32 if rows <= 2 else 64
        return CombineConfig("triton", 16, 128, 128, 4, 4, 8, 4, 1, 1, 1024, workers, workers, 2)
    if rows <= 16:
        return CombineConfig("triton", 32, 64, 128, 4, 4, 8, 4, 1, 1, 1024, 64, 64, 2)
    if s.depth * s.itemsize % 16 or s.cols * s.itemsize % 16:
        return _PORTABLE
    if rows <= 64:
        block_cols = 1024 if s.cols > 2048 else 512  # no wider than a chunk
        return CombineConfig("hopper", 64, 256, 64, 5, 4, 8, 4, 7, 4, block_cols)
    return CombineConfig("hopper", 128, 256, 64, 4, 8, 32 if rows >= 2048 else 8, 4, 7, 16, 256)
