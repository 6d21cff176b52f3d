"""Cases of the benches of matmul operators: sizes of real layers, as plain data.

Sizes are those of the whole layer: M rows, N columns and K. Which of them are split over ranks
depends on the operator (``Samples.shared``); they are rounded down where the world size does not
divide them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from tileweave.bench.samples import samples_of
from tileweave.planning.machine import Machine
from tileweave.planning.problem import FAST, Plan, Problem

Block = Literal["large", "odd", "gemv", "small", "fp8", "fp8 small", "smoke"]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. ``graph``: timed inside a CUDA graph, as decoding runs it; otherwise eagerly.

    ``scales``: of FP8 operands, as ``planning.problem.SCALES`` has them; ``dtype`` is then that of
    the result.
    """

    op: str
    name: str
    rows: int
    cols: int
    depth: int
    graph: bool
    block: Block
    dtype: str = "bfloat16"
    scales: str = ""

    @property
    def kind(self) -> str:
        """The kind of the scales of x."""
        return self.scales.removesuffix(FAST)

    @property
    def keeps_sums(self) -> bool:
        """Whether tensor cores may keep the sums of FP8 products."""
        return self.scales.endswith(FAST)

    def shard(self, world_size: int) -> tuple[int, int, int]:
        """(rows, cols, depth) of one rank: rows of its shard, columns and depth of its weight."""
        shared = samples_of(self.op).shared
        rows, cols, depth = (
            max(getattr(self, name) // world_size, 1) if name in shared else getattr(self, name)
            for name in ("rows", "cols", "depth")
        )
        return rows, cols, depth

    def whole(self, world_size: int) -> tuple[int, int, int]:
        """(M, N, K) of the whole problem, after rounding."""
        shared = samples_of(self.op).shared
        rows, cols, depth = (
            size * (world_size if name in shared else 1)
            for name, size in zip(("rows", "cols", "depth"), self.shard(world_size), strict=True)
        )
        return rows, cols, depth


# (N, K) of column-parallel layers: qkv; gate and up of half the layer; both; the first matmul of
# GPT-3's MLP.
LAYERS = {
    "llama70b-qkv": (10240, 8192),
    "llama70b-gate-up-half": (28672, 8192),
    "llama70b-gate-up": (57344, 8192),
    "gpt3-fc1": (49152, 12288),
}
# (N, K) of row-parallel layers: output of attention; second matmul of the MLP; the same of GPT-3
# and of Llama 8B; a large square.
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
# per head.
QKV_LAYERS = {"ulysses-qkv-gqa": (10240, 4096), "ulysses-qkv-mha": (24576, 4096)}
PROJECTIONS = {"ulysses-o": (4096, 8192)}
SEQUENCES, SHORT_SEQUENCES = (4096, 16384), (256, 1024)
LARGE = (2048, 4096, 8192, 16384)
SMALL = (64, 128, 256, 512, 1024)
GEMV = (1, 2, 4, 8, 16)
FEW = (32, 64, 128, 256, 512)


Layers = dict[str, tuple[int, int]]


def layer_cases(
    op: str, layers: Layers, rows: tuple[int, ...], graph: bool, block: Block
) -> list[Case]:
    """Each of ``layers`` with each number of rows."""
    return [
        Case(op, f"{layer}-m{m}", m, *layers[layer], graph, block)
        for m, layer in product(rows, layers)
    ]


def exchange_cases(op: str, layers: Layers) -> list[Case]:
    """``layers`` with sequences of several lengths."""
    return [
        *layer_cases(op, layers, SEQUENCES, False, "large"),
        *layer_cases(op, layers, SHORT_SEQUENCES, True, "small"),
    ]


def fp8_cases(
    op: str, layers: Layers, large: tuple[int, ...], small: tuple[int, ...]
) -> list[Case]:
    """``layers`` with FP8 operands and scales of rows; the most rows also with blocks."""

    def case(layer: str, m: int, graph: bool, block: Block, scales: str = "row") -> Case:
        name = f"fp8-{scales}-{layer}-m{m}"
        return Case(op, name, m, *layers[layer], graph, block, scales=scales)

    return [
        *(case(layer, m, False, "fp8") for m, layer in product(large, layers)),
        *(case(layer, large[-1], False, "fp8", "block") for layer in layers if large),
        *(case(layer, m, True, "fp8 small") for m, layer in product(small, layers)),
    ]


def fp8_smoke(op: str, rows: int, cols: int, depth: int) -> Case:
    """As :func:`smoke_cases`, with FP8 operands."""
    name = f"smoke-fp8-m{rows}"
    return Case(op, name, rows, cols, depth, False, "smoke", "float16", scales="row")


def smoke_cases(
    op: str, first: tuple[int, int, int], second: tuple[int, int, int], graph: bool = False
) -> list[Case]:
    """Tiny cases to try the bench without a GPU: interpreted kernels, times without meaning."""
    return [
        Case(op, f"smoke-m{sizes[0]}", *sizes, graph, "smoke", dtype)
        for sizes, dtype in ((first, "float32"), (second, "float16"))
    ]


def typical_plans(
    op: str, planner: Callable[[Problem, Machine, bool], Plan], *wholes: tuple[int, int, int]
) -> tuple[tuple[str, Callable[[int, Machine], Plan]], ...]:
    """Problems of bf16 with sizes ``wholes`` (M, N, K), and their plans: what ``doctor`` shows of
    ``op``."""

    def plan_of(whole: tuple[int, int, int]) -> Callable[[int, Machine], Plan]:
        def plan(size: int, machine: Machine) -> Plan:
            shard = Case(op, "", *whole, False, "large").shard(size)
            return planner(Problem(size, *shard, 2, "bfloat16"), machine, False)

        return plan

    return tuple((f"{op} {', '.join(map(str, whole))}", plan_of(whole)) for whole in wholes)


def select(op: str, pattern: str | None = None, quick: bool = False) -> list[Any]:
    """Cases of ``op`` whose names match ``pattern``, a regular expression; ``quick``: of a short
    list."""
    samples, wanted = samples_of(op), re.compile(pattern or "")
    return [
        case
        for case in samples.cases
        if wanted.search(case.name) and (not quick or re.search(samples.quick, case.name))
    ]
