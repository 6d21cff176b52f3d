"""What is benchmarked: sizes of real layers, by operator. Plain data.

Sizes are global: M rows over all ranks, N columns over all ranks, K as it is. A rank has M/R rows and N/R columns,
rounded down where the world does not divide them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from tileweave.bench import embedding_cases

Block = Literal["large", "small", "odd", "smoke"]


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
        """(rows, cols, depth) of one rank."""
        return max(self.rows // world_size, 1), max(self.cols // world_size, 1), self.depth


# (N, K) of column-parallel layers: qkv; gate and up of half the layer; both; the first of GPT-3's MLP.
LAYERS = {
    "llama70b-qkv": (10240, 8192),
    "llama70b-gate-up-half": (28672, 8192),
    "llama70b-gate-up": (57344, 8192),
    "gpt3-fc1": (49152, 12288),
}
LARGE = (2048, 4096, 8192, 16384)
SMALL = (64, 128, 256, 512, 1024)
_QUICK = re.compile(r"(llama70b-qkv|llama70b-gate-up-half)-m(64|512|2048|8192)$|odd|" + embedding_cases.QUICK)


def _all_gather_matmul() -> list[Case]:
    op = "all_gather_matmul"
    cases = [Case(op, f"{layer}-m{m}", m, *LAYERS[layer], False, "large") for m, layer in product(LARGE, LAYERS)]
    cases.append(Case(op, "odd-m4084", 4 * 1021, 4 * 2500, 5000, False, "odd"))
    return cases + [Case(op, f"{layer}-m{m}", m, *LAYERS[layer], True, "small") for m, layer in product(SMALL, LAYERS)]


# Values are lists of Case, or of what an operator with sizes of another kind has in its place.
CASES: dict[str, list[Any]] = {"all_gather_matmul": _all_gather_matmul(), "embedding_bag_all_to_all": embedding_cases.CASES}

# For trying the bench out without a GPU: interpreted kernels, times without meaning.
SMOKE: dict[str, list[Any]] = {
    "all_gather_matmul": [
        Case("all_gather_matmul", "smoke-m256", 256, 256, 128, False, "smoke", "float32"),
        Case("all_gather_matmul", "smoke-m32", 32, 128, 96, False, "smoke", "float16"),
    ],
    "embedding_bag_all_to_all": embedding_cases.SMOKE,
}


def select(op: str, pattern: str | None = None, quick: bool = False) -> list[Any]:
    """Cases of ``op`` in whose name ``pattern`` (a regular expression) is found; ``quick``: a short list of them."""
    wanted = re.compile(pattern or "")
    return [case for case in CASES[op] if wanted.search(case.name) and (not quick or _QUICK.search(case.name))]
