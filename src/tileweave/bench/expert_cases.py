"""Cases of the expert operators: layers of published models in prefill, under skew, and in
decoding.

Shapes are tokens per rank, and columns and K per expert, of which each rank has two; with few rows
per expert, and many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tileweave.bench.samples import Checked, DemoCase, Stressed, of_rows, shapes
from tileweave.bench.subjects import Shape

DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
# hidden size, width of an expert, experts, choices per token
MODELS = {
    "qwen3-235b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """``tokens`` per rank; ``experts`` of all ranks.

    ``zipf``: experts are chosen by Zipf's law with this exponent; 0: uniformly. ``bar``: the least
    speedup over unfused.
    """

    op: str
    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    topk: int
    bar: float
    zipf: float = 0.0
    graph: bool = False
    block: str = "prefill"
    dtype: str = "bfloat16"

    @property
    def cols(self) -> int:
        """Columns of the matmul: gate and up together, or the hidden size."""
        return 2 * self.width if self.op == DISPATCH else self.hidden

    @property
    def depth(self) -> int:
        return self.hidden if self.op == DISPATCH else self.width


def cases(op: str, bars: tuple[float, float, float]) -> list[ExpertCase]:
    """Layers of all models; ``bars``: the least speedup in prefill of each of :data:`MODELS`."""
    prefill = [
        ("qwen3-235b", 4096, bars[0]),
        ("deepseek-v3", 1024, bars[1]),
        ("deepseek-v3", 4096, bars[1]),
        ("mixtral-8x7b", 4096, bars[2]),
    ]
    found = [
        ExpertCase(op, f"{model}-t{tokens}", tokens, *MODELS[model], bar)
        for model, tokens, bar in prefill
    ]
    found += [
        ExpertCase(op, f"{model}-t4096-zipf", 4096, *MODELS[model], 1.0, zipf=1.0)
        for model in ("qwen3-235b", "deepseek-v3")
    ]
    return found + [
        ExpertCase(
            op, f"{model}-t{tokens}", tokens, *MODELS[model], 1.1, graph=True, block="decode"
        )
        for model in ("qwen3-235b", "deepseek-v3")
        for tokens in (1, 8, 32, 128)
    ]


def smoke(op: str) -> list[ExpertCase]:
    """Tiny cases; times without meaning."""
    return [
        ExpertCase(op, "smoke-even", 4, 16, 16, 4, 2, 0.0, block="smoke", dtype="float32"),
        ExpertCase(
            op, "smoke-zipf", 3, 24, 16, 4, 2, 0.0, zipf=1.0, block="smoke", dtype="float16"
        ),
    ]


def demo_of(op: str) -> Callable[[bool, int], list[DemoCase]]:
    """The cases of the demo."""

    def cases_of(on_gpu: bool, world_size: int) -> list[DemoCase]:
        half, scale = (torch.bfloat16, 1) if on_gpu else (torch.float16, 64)
        first = torch.float16 if on_gpu else torch.float32
        odd = Shape(301, 328, 200) if on_gpu else Shape(3, 24, 20)
        return [
            DemoCase(op, "random, odd sizes, weighted", odd, first, bias=True),
            DemoCase(
                op,
                "Qwen3-MoE, 2 experts per rank" + ("" if on_gpu else f", 1/{scale}"),
                Shape(1024 if on_gpu else 4, 4096 // scale, 1536 // scale),
                half,
            ),
        ]

    return cases_of


CHECKED_ON_GPU = Checked(
    shapes((1, 256, 512), (37, 328, 200), (300, 520, 384), (1021, 1000, 1024)),
    of_rows((1, 16, 37, 200, 777), 384, 256),
    shapes((4, 1024, 512), (600, 1024, 512)),
)
CHECKED_ON_CPU = Checked(shapes((3, 24, 20)), of_rows((1, 2, 4), 16, 16))
STRESSED_ON_GPU = Stressed(of_rows((16, 200), 384, 256), of_rows((37,), 384, 256))
STRESSED_ON_CPU = Stressed(of_rows((4,), 16, 16), of_rows((2,), 16, 16))
QUICK = r"(qwen3-235b-t(4096|1|128)|deepseek-v3-t1024|mixtral-8x7b-t4096)$"
