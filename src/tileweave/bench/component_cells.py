"""The components that are measured for the simulator, in groups, with the shapes that it uses.

Shapes (see sim/predict.py) are those of the whole problem: M, N, K; bytes of a collective; batch,
tables, dim, pooling and bytes per element of a lookup; tokens, columns, 1, world size and k of a
top-k sum; rows, hidden, ffn, heads, kv_heads and sequence of a layer. *Small matmuls* run on one
rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tileweave.planning.problem import MatmulConfig

# Kernels that store tiles to their owners, whether or not a planner chooses them: up to this many
# rows.
_STORES = (
    (64, MatmulConfig("hopper", "sm", 64, 64, 128, 6, 4, split_tail=False)),
    (512, MatmulConfig("hopper", "sm", 128, 64, 64, 8, 8, split_tail=False)),
    (1 << 30, MatmulConfig("hopper", "sm", 128, 128, 64, 6, 8, split_tail=False)),
)
_EXCHANGE = MatmulConfig("hopper", "sm", 64, 128, 128, 4, 4)
_SMOKE = MatmulConfig("triton", "sm", 16, 32, 32, 1, 4, split_tail=False)


@dataclass(frozen=True, slots=True)
class Component:
    """One cell. ``config``: of a fused kernel, if not the one that the planner chooses."""

    op: str
    quantity: str
    shape: tuple[int, ...]
    graph: bool
    config: MatmulConfig | None = None


def _both(op: str, *shapes: tuple[int, ...]) -> list[Component]:
    return [Component(op, what, s, s[0] <= 1024) for s in shapes for what in ("fused", "unfused")]


def _operators(_: int) -> list[Component]:
    return [
        *_both("all_gather_matmul", (512, 28672, 8192), (2048, 28672, 8192), (8192, 10240, 8192)),
        *_both(
            "matmul_reduce_scatter", (512, 8192, 28672), (2048, 8192, 8192), (8192, 8192, 28672)
        ),
        *_both(
            "matmul_all_reduce",
            (1, 8192, 8192),
            (16, 8192, 28672),
            (64, 8192, 28672),
            (256, 8192, 8192),
        ),
    ]


def _layers(_: int) -> list[Component]:
    shapes = [(m, 8192, 28672, 64, 8, 2048) for m in (4096, 8192, 2048, 16384)]
    return [
        Component("layer", what, shape, False) for shape in shapes for what in ("fused", "unfused")
    ]


def _matmuls(_: int) -> list[Component]:
    return [
        Component("all_gather_matmul", "compute", (m, n, k), m <= 1024)
        for m in (384, 1536, 6144, 96, 192, 768, 3072, 12288)
        for n, k in ((10240, 8192), (36864, 12288))
    ] + [
        Component("matmul_reduce_scatter", "compute", (m, 8192, k), m <= 1024)
        for m in (768, 3072, 12288)
        for k in (8192, 28672)
    ]


def _collectives(_: int) -> list[Component]:
    """Collectives of NCCL, with sizes that use either of its protocols."""
    return [
        Component(op, "comm", (1 << power,), True)
        for powers in (range(14, 29, 2), range(15, 28, 2))
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for power in powers
    ]


def _lookups(world: int) -> list[Component]:
    return [
        Component(
            "embedding_bag_all_to_all", what, (batch, 8 * world, 128, pooling, itemsize), False
        )
        for batch in (8192, 32768)
        for pooling in (1, 8, 40)
        for itemsize in (2, 4)
        for what in ("compute", "fused")
    ]


def _sums(world: int) -> list[Component]:
    return [
        Component("grouped_matmul_combine", "reduce", (tokens, hidden, 1, world, k), tokens <= 1024)
        for tokens in (1024, 4096, 8192)
        for hidden in (4096, 7168)
        for k in (2, 4, 8)
    ]


def _small_matmuls(_: int) -> list[Component]:
    """Few tiles and short K, where the tile sizes of cuBLAS matter."""
    return [
        Component("matmul", "compute", (m, n, k), True)
        for m in (64, 128, 256, 512, 1024)
        for n in (4096, 6144, 8192)
        for k in (2048, 4096)
    ]


def _stores(_: int) -> list[Component]:
    shapes = [
        (m, n, k)
        for m in (64, 128, 256, 512, 1024)
        for n, k in ((4096, 7168), (8192, 4096), (8192, 14336))
    ]
    found = [
        Component(
            "matmul_reduce_scatter",
            "fused",
            shape,
            True,
            next(config for rows, config in _STORES if shape[0] <= rows),
        )
        for shape in shapes
    ]
    return found + [
        Component("matmul_all_to_all", "fused", (m, n, k), True, _EXCHANGE)
        for m in (256, 512, 1024, 2048)
        for n, k in ((10240, 4096), (8192, 2048))
    ]


# The most important first.
GROUPS: dict[str, Callable[[int], list[Component]]] = {
    "operators": _operators,
    "layers": _layers,
    "matmuls": _matmuls,
    "collectives": _collectives,
    "lookups": _lookups,
    "sums": _sums,
    "stores": _stores,
    "small_matmuls": _small_matmuls,
}


def components(world: int, groups: tuple[str, ...] = tuple(GROUPS)) -> list[Component]:
    """Components that are measured between ``world`` ranks, of some groups."""
    return [one for group in groups for one in GROUPS[group](world)]


def smoke(world: int) -> list[Component]:
    """One of each kind, tiny."""
    return [
        Component("all_gather_matmul", "compute", (64, 64 * world, 32), False),
        Component("matmul", "compute", (64, 64, 32), False),
        *[
            Component(op, "comm", (1 << 12,), False)
            for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        ],
        Component("embedding_bag_all_to_all", "compute", (64, world, 16, 3, 4), False),
        Component("grouped_matmul_combine", "reduce", (32, 64, 1, world, 2), False),
        *[Component("layer", what, (64, 64, 128, 4, 2, 1), False) for what in ("fused", "unfused")],
        *[
            Component(op, "fused", (16, 64, 64), False)
            for op in ("all_gather_matmul", "matmul_all_reduce")
        ],
        *[
            Component(op, "fused", (16 * world, 64, 64), False, _SMOKE)
            for op in ("matmul_reduce_scatter", "matmul_all_to_all")
        ],
        Component("embedding_bag_all_to_all", "fused", (8, world, 16, 3, 4), False),
    ]
