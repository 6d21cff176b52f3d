"""Samples of all_to_all_matmul. Shapes: rows and columns of the result, K of a part."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.cases import PROJECTIONS, exchange_cases, smoke_cases, typical_plans
from tileweave.bench.rivals import ExchangeRivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Bar, Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.subjects import AllToAllMatmul, Shape
from tileweave.planning.matmul import plan_all_to_all_matmul

OP = "all_to_all_matmul"


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    """The output projection of a Ulysses layer: 8192 columns of heads, split over ranks."""
    scale = 1 if on_gpu else 64
    half, scaled = (torch.bfloat16, "") if on_gpu else (torch.float16, f", 1/{scale}")
    first = torch.float16 if on_gpu else torch.float32
    odd = Shape(1021, 1000, 1240) if on_gpu else Shape(17, 50, 25)
    return [
        DemoCase(OP, "random, odd sizes, bias", odd, first, bias=True),
        DemoCase(
            OP,
            f"Ulysses output, 16384 tokens{scaled}",
            Shape(16384 // world_size // scale, 4096 // scale, 8192 // world_size // scale),
            half,
        ),
    ]


SAMPLES = Samples(
    subject=AllToAllMatmul(),
    check_on_gpu=Checked(
        shapes(
            (1, 256, 128), (16, 384, 256), (37, 200, 328), (256, 2560, 1024), (1021, 1000, 1000)
        ),
        of_rows((1, 16, 37, 128, 256, 777), 384, 128),
        shapes((16, 1024, 512), (1024, 2048, 512)),
    ),
    check_on_cpu=Checked(shapes((1, 32, 16), (17, 50, 25)), of_rows((1, 8, 17, 64), 32, 16)),
    stress_on_gpu=Stressed(of_rows((16, 777), 384, 128), of_rows((128,), 384, 128)),
    stress_on_cpu=Stressed(of_rows((17,), 32, 16), of_rows((8,), 32, 16)),
    demo=_demo,
    bench=BENCHED,
    cases=exchange_cases(OP, PROJECTIONS),
    smoke=smoke_cases(OP, (256, 64, 128), (32, 64, 96)),
    quick=r"ulysses-.*-m(1024|16384)",
    rival=ExchangeRivals,
    bars={"large": {"over_unfused": Bar(1.25, 1.0)}, "small": {"over_unfused": Bar(worst=0.98)}},
    shared=("rows", "depth"),
    typical=typical_plans(OP, plan_all_to_all_matmul, (1024, 4096, 8192), (16384, 4096, 8192)),
    random=random_cases.matmuls(OP),
)
