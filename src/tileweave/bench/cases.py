"""What is benchmarked: sizes of real layers, by operator, and the bars their figures are held to.
Plain data.

Sizes are global: M rows, N columns and K of the whole layer. Which of them a rank has a share of
depends on the operator (:data:`SHARED`), rounded down where the world does not divide them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from tileweave.bench import embedding_cases, expert_cases

Block = Literal["large", "odd", "gemv", "small", "smoke"]
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OUT, IN = "matmul_all_to_all", "all_to_all_matmul"

# What a rank has a share of. Of a reduce-scatter it is K, and the rows of the result. Exchanges are
# those of Ulysses.
SHARED = {
    AG: ("rows", "cols"),
    RS: ("rows", "depth"),
    AR: ("depth",),
    OUT: ("rows", "cols"),
    IN: ("rows", "depth"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. ``graph``: timed inside a CUDA graph, as decoding runs it; else eagerly."""

    op: str
    name: str
    rows: int
    cols: int
    depth: int
    graph: bool
    block: Block
    dtype: str = "bfloat16"

    def shard(self, world_size: int) -> tuple[int, int, int]:
        """(rows, cols, depth) of one rank: rows of its shard, columns and depth of its weight."""
        rows, cols, depth = (
            max(getattr(self, name) // world_size, 1)
            if name in SHARED[self.op]
            else getattr(self, name)
            for name in ("rows", "cols", "depth")
        )
        return rows, cols, depth

    def whole(self, world_size: int) -> tuple[int, int, int]:
        """(M, N, K) as they run, after rounding."""
        rows, cols, depth = (
            size * (world_size if name in SHARED[self.op] else 1)
            for name, size in zip(("rows", "cols", "depth"), self.shard(world_size), strict=True)
        )
        return rows, cols, depth


@dataclass(frozen=True, slots=True)
class Bar:
    """What the ratios of a block should reach: their geometric mean, and each of them. ``most``: at
    most, each of them."""

    mean: float | None = None
    worst: float | None = None
    most: float | None = None


# (operator, block) -> figure -> bar; names of figures as in ``run.judge``.
BARS: dict[tuple[str, str], dict[str, Bar]] = {
    (AG, "large"): {
        "limit_ratio": Bar(0.97, 0.92),
        "over_unfused": Bar(worst=1.0),
        "over_torch": Bar(worst=1.0),
    },
    (AG, "odd"): {"over_unfused": Bar(worst=1.0)},
    (AG, "small"): {"over_unfused": Bar(1.25, 0.98), "over_torch": Bar(worst=1.0)},
    (RS, "large"): {
        "limit_ratio": Bar(0.95, 0.90),
        "over_unfused": Bar(worst=1.0),
        "over_torch": Bar(1.10, 1.0),
    },
    (RS, "small"): {"over_unfused": Bar(1.2, 0.98)},
    (AR, "gemv"): {
        "over_gemm_us": Bar(most=3.0),
        "over_unfused": Bar(1.4),
        "over_torch": Bar(1.15),
    },
    (AR, "small"): {"over_best": Bar(1.1, 0.98)},
    (OUT, "large"): {"over_unfused": Bar(1.25, 1.0)},
    (OUT, "small"): {"over_unfused": Bar(worst=0.98)},
    (IN, "large"): {"over_unfused": Bar(1.25, 1.0)},
    (IN, "small"): {"over_unfused": Bar(worst=0.98)},
}

# (N, K) of column-parallel layers: qkv; gate and up of half the layer; both; the first of GPT-3's
# MLP.
LAYERS = {
    "llama70b-qkv": (10240, 8192),
    "llama70b-gate-up-half": (28672, 8192),
    "llama70b-gate-up": (57344, 8192),
    "gpt3-fc1": (49152, 12288),
}
# (N, K) of row-parallel layers: attention's output; the MLP's second; that of GPT-3 and of Llama
# 8B; a wide square.
ROW_LAYERS = {
    "llama70b-o": (8192, 8192),
    "llama70b-down": (8192, 28672),
    "gpt3-fc2": (12288, 49152),
    "llama8b-down": (4096, 14336),
}
DECODE_LAYERS = {
    name: ROW_LAYERS[name] for name in ("llama70b-o", "llama70b-down", "llama8b-down")
} | {"square-16k": (16384, 16384)}
# (N, K) of attention layers: hidden 4096, 64 heads of 128, with 8 groups of keys and values, or one
# for each head.
QKV_LAYERS = {"ulysses-qkv-gqa": (10240, 4096), "ulysses-qkv-mha": (24576, 4096)}
PROJECTIONS = {"ulysses-o": (4096, 8192)}
SEQUENCES, SHORT_SEQUENCES = (4096, 16384), (256, 1024)
LARGE = (2048, 4096, 8192, 16384)
SMALL = (64, 128, 256, 512, 1024)
GEMV = (1, 2, 4, 8, 16)
FEW = (32, 64, 128, 256, 512)
_QUICK = re.compile(
    r"(llama70b-qkv|llama70b-gate-up-half)-m(64|512|2048|8192)$|llama70b-(o|down)-m(1|16|64|512|2048|8192)$|odd|"
    + rf"ulysses-.*-m(1024|16384)|{embedding_cases.QUICK}|{expert_cases.QUICK}"
)


def _all_gather_matmul() -> list[Case]:
    cases = [
        Case(AG, f"{layer}-m{m}", m, *LAYERS[layer], False, "large")
        for m, layer in product(LARGE, LAYERS)
    ]
    cases.append(Case(AG, "odd-m4084", 4 * 1021, 4 * 2500, 5000, False, "odd"))
    return cases + [
        Case(AG, f"{layer}-m{m}", m, *LAYERS[layer], True, "small")
        for m, layer in product(SMALL, LAYERS)
    ]


def _matmul_reduce_scatter() -> list[Case]:
    cases = [
        Case(RS, f"{layer}-m{m}", m, *ROW_LAYERS[layer], False, "large")
        for m, layer in product(LARGE, ROW_LAYERS)
    ]
    cases.append(Case(RS, "odd-m4084", 4 * 1021, 2500, 4 * 5000, False, "odd"))
    return cases + [
        Case(RS, f"{layer}-m{m}", m, *ROW_LAYERS[layer], True, "small")
        for m, layer in product(SMALL, ROW_LAYERS)
    ]


def _matmul_all_reduce() -> list[Case]:
    layers = DECODE_LAYERS
    cases = [
        Case(AR, f"{layer}-m{m}", m, *layers[layer], True, "gemv")
        for m, layer in product(GEMV, layers)
    ]
    return cases + [
        Case(AR, f"{layer}-m{m}", m, *layers[layer], True, "small")
        for m, layer in product(FEW, layers)
    ]


def _exchange(op: str, layers: dict[str, tuple[int, int]]) -> list[Case]:
    cases = [
        Case(op, f"{layer}-m{m}", m, *layers[layer], False, "large")
        for m, layer in product(SEQUENCES, layers)
    ]
    return cases + [
        Case(op, f"{layer}-m{m}", m, *layers[layer], True, "small")
        for m, layer in product(SHORT_SEQUENCES, layers)
    ]


# Values are lists of Case, or of what an operator with sizes of another kind has in its place.
CASES: dict[str, list[Any]] = {
    AG: _all_gather_matmul(),
    RS: _matmul_reduce_scatter(),
    AR: _matmul_all_reduce(),
    OUT: _exchange(OUT, QKV_LAYERS),
    IN: _exchange(IN, PROJECTIONS),
    "embedding_bag_all_to_all": embedding_cases.CASES,
    **expert_cases.CASES,
}

# For trying the bench out without a GPU: interpreted kernels, times without meaning.
_TINY = {
    AG: ((256, 256, 128), (32, 128, 96)),
    RS: ((256, 64, 256), (32, 96, 128)),
    AR: ((1, 128, 256), (64, 96, 128)),
    OUT: ((256, 128, 64), (32, 96, 64)),
    IN: ((256, 64, 128), (32, 64, 96)),
}
SMOKE: dict[str, list[Any]] = {
    op: [
        Case(op, f"smoke-m{sizes[0]}", *sizes, op == AR, "smoke", dtype)
        for sizes, dtype in zip(both, ("float32", "float16"), strict=True)
    ]
    for op, both in _TINY.items()
} | {"embedding_bag_all_to_all": embedding_cases.SMOKE, **expert_cases.SMOKE}


def select(op: str, pattern: str | None = None, quick: bool = False) -> list[Any]:
    """Cases of ``op`` in whose name ``pattern`` (a regular expression) is found; ``quick``: a short
    list of them."""
    wanted = re.compile(pattern or "")
    return [
        case
        for case in CASES[op]
        if wanted.search(case.name) and (not quick or _QUICK.search(case.name))
    ]
