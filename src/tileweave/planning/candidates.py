"""The configs that can run a problem: what a planner chooses among, and what a tuner measures.

This is the only statement of which kernel takes which sizes. No torch, no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tileweave.planning.machine import Machine
from tileweave.planning.problem import MatmulConfig, Problem

FP8_ARCH = 89  # compute capability, times ten, of the first GPUs whose tensor cores take FP8


def _launch(tile_n: int, num_warps: int = 8, tile_m: int = 16) -> MatmulConfig:
    """cuBLAS and one launch that communicates, by blocks of ``tile_m`` x ``tile_n`` elements."""
    return MatmulConfig("library", "sm", tile_m, tile_n, 64, 1, num_warps)


_PER_SHARD = MatmulConfig("library", "copy_engine", 128, 256, 64, 4, 8)
_WIDE = MatmulConfig("hopper", "copy_engine", 128, 256, 64, 4, 8, team=4)
_SQUARE = MatmulConfig("hopper", "copy_engine", 128, 128, 64, 6, 8, group_m=4, team=4)
_LOW = MatmulConfig("hopper", "copy_engine", 64, 256, 64, 4, 4, team=4)
_SMALL = MatmulConfig("hopper", "sm", 64, 64, 128, 6, 4)
_BROAD = MatmulConfig("hopper", "sm", 128, 128, 64, 6, 8, team=2)
_FLAT = MatmulConfig("hopper", "sm", 64, 128, 128, 4, 4, team=2)


def _uncut(config: MatmulConfig, slices: int = 32) -> MatmulConfig:
    return replace(config, split_tail=False, team=1, num_slices=slices)


def _one_shot(m: int, n: int, k: int, stages: int, warps: int, team: int = 1) -> MatmulConfig:
    return MatmulConfig("triton", "sm", m, n, k, stages, warps, team=team, shots=1)


_LARGE_BLOCKS = _launch(128, 8, 64), _launch(128, 16, 128)
_GATHER = (
    _launch(128),
    _launch(256),
    *_LARGE_BLOCKS,
    _PER_SHARD,
    _WIDE,
    _uncut(_WIDE),
    _SQUARE,
    _uncut(_SQUARE),
    _BROAD,
    _FLAT,
    _SMALL,
)
_SCATTER = (
    _launch(64, 4),
    _launch(128),
    _launch(256),
    *_LARGE_BLOCKS,
    _PER_SHARD,
    *(_uncut(_WIDE, slices) for slices in (1, 2, 4)),
    *(_uncut(replace(_SQUARE, group_m=8), slices) for slices in (1, 2)),
    _uncut(_SMALL),
)
_REDUCE = (
    _launch(64, 4),
    _launch(64),
    _launch(128, 4),
    *_LARGE_BLOCKS,
    replace(_launch(64, 4), shots=1),
    *(_uncut(_WIDE, slices) for slices in (2, 4, 8)),
    *(_uncut(replace(_SQUARE, group_m=8), slices) for slices in (2, 4)),
    _one_shot(16, 16, 128, 6, 2),
    _one_shot(16, 32, 128, 5, 2),
    _one_shot(16, 64, 256, 4, 4),
    *(_one_shot(16, 64, 128, 6, 4, team) for team in (1, 2, 4)),
    _one_shot(16, 128, 128, 3, 4),
    _one_shot(32, 32, 256, 4, 4),
    *(_one_shot(32, 64, 128, 5, 4, team) for team in (1, 2)),
)


def _by_cublas(configs: tuple[MatmulConfig, ...]) -> tuple[MatmulConfig, ...]:
    """Those whose matmul is cuBLAS; with FP8 operands torch._scaled_mm."""
    return tuple(config for config in configs if config.kernel == "library")


# Of FP8 operands: 128 of K are the bytes that 64 elements of 16 bits have. Tiles of 128 columns
# add each 128 of K in fp32.
_FP8_WIDE = replace(_WIDE, tile_k=128)
_FP8_SQUARE = replace(_SQUARE, tile_k=128, num_stages=5)
_FP8_GATHER = (*_by_cublas(_GATHER), _FP8_WIDE, _FP8_SQUARE, _uncut(_FP8_SQUARE))
_FP8_SCATTER = (
    *_by_cublas(_SCATTER),
    *(_uncut(_FP8_WIDE, slices) for slices in (1, 2, 4)),
    *(_uncut(replace(_SQUARE, tile_k=128, group_m=8), slices) for slices in (2, 4)),
)


_FP8_REDUCE = (
    *_by_cublas(_REDUCE),
    *(_uncut(_FP8_WIDE, slices) for slices in (2, 4, 8)),
    *(_uncut(replace(_SQUARE, tile_k=128, group_m=8), slices) for slices in (2, 4)),
    _one_shot(16, 32, 128, 8, 2),
    *(_one_shot(16, 64, 128, 8, 4, team) for team in (1, 2, 4)),
    *(_one_shot(16, 128, 128, 6, 4, team) for team in (1, 2)),
    *(_one_shot(32, 64, 128, 8, 4, team) for team in (1, 2)),
)


_EXCHANGE_AFTER = (
    _launch(128),
    _launch(256),
    *_LARGE_BLOCKS,
    *(_uncut(_WIDE, slices) for slices in (1, 2, 4, 8)),
    *(_uncut(replace(_SQUARE, group_m=8), slices) for slices in (1, 2)),
)
_EXCHANGE_BEFORE = (
    _launch(128),
    _launch(256),
    *_LARGE_BLOCKS,
    *(_uncut(_WIDE, slices) for slices in (1, 2, 4)),
    _uncut(replace(_SQUARE, group_m=8), 1),
    _uncut(_LOW, 1),
    _FLAT,
    _SMALL,
)


@dataclass(frozen=True, slots=True)
class MatmulOperator:
    """What the planner knows about one operator.

    collective : what its unfused path communicates by.
    purpose : what it does with shards, for the reasons that plans give.
    configs : its candidates on Hopper.
    fp8 : its candidates with FP8 operands.
    over_nodes : whether it is fused where ranks are on several nodes.
    """

    name: str
    collective: str
    purpose: str
    configs: tuple[MatmulConfig, ...]
    fp8: tuple[MatmulConfig, ...] = ()
    over_nodes: bool = False


_PLANNED = (
    MatmulOperator("all_gather_matmul", "all_gather", "gather", _GATHER, _FP8_GATHER, True),
    MatmulOperator(
        "matmul_reduce_scatter", "reduce_scatter", "reduce", _SCATTER, _FP8_SCATTER, True
    ),
    MatmulOperator("matmul_all_reduce", "all_reduce", "reduce", _REDUCE, _FP8_REDUCE, True),
    MatmulOperator("matmul_all_to_all", "all_to_all", "exchange", _EXCHANGE_AFTER),
    MatmulOperator("all_to_all_matmul", "all_to_all", "exchange", _EXCHANGE_BEFORE),
)
PLANNED = {one.name: one for one in _PLANNED}
TUNABLE = tuple(PLANNED)  # operators with candidates


# Bytes of shared memory that a program may have, by architecture; at least that of sm_86.
_SHARED_KB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}


def _portable(configs: tuple[MatmulConfig, ...]) -> tuple[MatmulConfig, ...]:
    """The candidates of a GPU without Hopper kernels: the Triton kernels with the same tiles."""
    return tuple(
        dict.fromkeys(
            replace(c, kernel="triton", num_stages=stages, num_warps=c.tile_m // 16)
            if c.kernel == "hopper"
            else c
            for c in configs
            for stages in ((2, 3, 4) if c.kernel == "hopper" else (1,))
            if stages <= c.num_stages
        )
    )


_PORTABLE = {name: _portable(one.configs) for name, one in PLANNED.items()}


def _interpreted(op: str, fp8: bool) -> tuple[MatmulConfig, ...]:
    """Small tiles for the interpreter on the CPU."""
    if op == "matmul_all_reduce":
        one_shot = _one_shot(16, 32, 128 if fp8 else 64, 1, 4)
        return MatmulConfig("library", "sm", 16, 32, 64, 1, 4), one_shot
    if fp8:
        transports = ("sm", "copy_engine")
        return tuple(MatmulConfig("library", each, 16, 32, 64, 1, 4) for each in transports)
    return tuple(
        MatmulConfig("triton", transport, 16, 32, 64, 1, 4, num_slices=4, num_producers=1)
        for transport in ("sm", "copy_engine")
    )


def candidates(op: str, p: Problem, machine: Machine) -> tuple[MatmulConfig, ...]:
    """The configs of ``op`` that can run ``p``. The unfused path always can, and is not listed."""
    if machine.backend == "cpu":
        known = _interpreted(op, p.fp8)
    elif p.fp8:
        known = PLANNED[op].fp8 if machine.arch >= FP8_ARCH else ()
    elif p.dtype == "float32":
        known = ()  # not a tensor-core dtype
    else:
        known = PLANNED[op].configs if machine.hopper else _PORTABLE[op]
    return tuple(config for config in known if can_run(op, config, p, machine))


def _ring_bytes(c: MatmulConfig, p: Problem) -> int:
    return (c.tile_m + c.tile_n) * c.tile_k * p.itemsize * c.num_stages


def _takes_fp8(op: str, c: MatmulConfig, p: Problem) -> bool:
    """Whether a kernel of ours takes FP8 operands with these tiles."""
    known = op in ("matmul_reduce_scatter", "matmul_all_reduce") or (
        op == "all_gather_matmul" and c.transport == "copy_engine"
    )
    # tiles of more columns have no registers for a second accumulator, or only where they are
    # multiplied in quarters and blocks have no scales
    quarters = op != "all_gather_matmul" and p.scales != "block"
    return known and c.tile_k == 128 and (c.tile_n <= 128 or p.keeps_sums or quarters)


def takes_rows(op: str, c: MatmulConfig, rows: int, world_size: int) -> bool:
    """Whether config ``c`` of ``op`` takes so many rows of a shard; of an all-reduce, of the whole
    result."""
    if op != "matmul_all_reduce":
        return c.fits_rows(rows)
    if c.transport == "copy_engine":
        return c.kernel != "library" and rows >= world_size * c.tile_m
    return c.kernel == "library" or rows <= c.tile_m


def can_run(op: str, c: MatmulConfig, p: Problem, machine: Machine) -> bool:
    """Whether config ``c`` of ``op`` can run a problem of these sizes."""
    own = c.kernel != "library"
    if p.fp8 and own and not _takes_fp8(op, c, p):
        return False
    if not takes_rows(op, c, p.rows, p.world_size):
        return False
    if machine.backend == "cpu":
        return True
    if c.kernel != "library" and _ring_bytes(c, p) > 1024 * _SHARED_KB.get(machine.arch, 99):
        return False
    if p.depth * p.itemsize % 16:
        return False  # rows of K are no multiple of 16 bytes, which the copy hardware needs
    # where rows of a result are not, cuBLAS takes 2 to 3 times as long; tiles of an exchange leave
    # by TMA
    return p.cols * p.itemsize % 16 == 0 or not (c.kernel == "library" or op == "matmul_all_to_all")
