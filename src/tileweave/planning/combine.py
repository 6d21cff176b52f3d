"""How a grouped_matmul_combine is cut up, and which path it takes: pure functions of sizes and
machine facts.

No torch, no triton. ``plan_combine`` is the single statement of what the fused operator can do and
when another path is faster; ``tw.explain`` prints what it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.planning.machine import Machine
from tileweave.planning.problem import KernelName, Plan, why_no_kernel, why_unfused
from tileweave.planning.schedules.gather import cdiv
from tileweave.planning.schedules.grouped import GroupedProblem

# of a token on a rank that the Hopper kernel counts: LENGTH in
# ``kernels/experts/combine_hopper_tasks.py``
MAX_ROWS = 255
MAX_GROUPS = 31  # signals that a rank may send to a peer in a call: pairs of chunk and group


@dataclass(frozen=True, slots=True)
class CombineConfig:
    """How one grouped matmul and its combine are cut up.

    tile_m, tile_n, tile_k, num_stages, num_warps, group_m : of the matmul, as in
        ``config.MatmulConfig``.
    chunks : column chunks that are combined one after another. groups : signals of a chunk.
    block_tokens, block_cols : what a program reduces at once; the Hopper kernel's multiplying warps
        have columns of their own.
    num_reduce, num_finish : programs that reduce and finish ("triton"); the Hopper kernel has a
        partition for both.
    programs_per_sm : programs that multiply, for each multiprocessor.
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

    def __str__(self) -> str:
        """What a plan says of it; repr has all of it."""
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        return f"{self.kernel} kernel, {tile}, {self.num_stages} stages, {self.chunks} chunks"


def partial_bytes(p: GroupedProblem) -> int:
    """Of a slot: the peers' partials, up to a multiple of 16."""
    return cdiv((p.world_size - 1) * p.max_tokens * p.cols * p.itemsize, 16) * 16


def slot_bytes(p: GroupedProblem) -> int:
    """Partials, and behind them the weights of all ranks' tokens, fp32."""
    return partial_bytes(p) + p.world_size * p.max_tokens * p.topk * 4


@dataclass(frozen=True, slots=True)
class CombineCut:
    """How a shape is cut by a config: counts that kernel and signals are made from."""

    tile_cols: int
    chunks: int
    chunk_cols: int
    blocks: int
    groups: int
    group_blocks: int

    @staticmethod
    def of(shape: GroupedProblem, config: CombineConfig) -> CombineCut:
        """Chunks of whole tile columns, groups of whole blocks; none is empty."""
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
    """The path of a grouped_matmul_combine: what can run, then what is fastest. The same on every
    rank."""
    s = shape
    if s.world_size == 1:
        return Plan("local", "a group of one rank has nobody to send to")
    reason = why_unfused(
        s.world_size, (s.max_tokens, s.topk, s.cols, s.depth), machine, interpreting
    )
    if reason is not None:
        return Plan("unfused", reason)
    if machine.backend == "cpu":
        config = CombineConfig("triton", 16, 32, 64, 1, 4, 2, 2, 2, 8, 32, 1, 1)
        return Plan("fused", f"interpreted; {s.rows_per_expert:.0f} rows an expert", config)
    reason = why_no_kernel(s.dtype, machine)
    if reason is not None:
        return Plan("unfused", reason)
    config, reason = _config_of(s), f"{s.rows_per_expert:.0f} rows an expert if balanced"
    if config.kernel == "hopper" and s.topk > MAX_ROWS:
        config, reason = (
            _PORTABLE,
            f"{reason}; the Hopper kernel counts {MAX_ROWS} rows of a token at most, k = {s.topk}",
        )
    return Plan("fused", reason, config)


# for what TMA or the Hopper kernel lacks
_PORTABLE = CombineConfig("triton", 64, 128, 64, 4, 4, 4, 4, 2, 2, 1024, 32, 32, 2)


def _config_of(s: GroupedProblem) -> CombineConfig:
    """By the rows an expert has on average: few are a stream of weights, many are tensor-core work
    (decisions 0069, 0077)."""
    rows = s.rows_per_expert
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
