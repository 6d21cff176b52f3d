"""Samples of matmul_all_to_all. Shapes: rows of x, columns of the result, K."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.cases import QKV_LAYERS, exchange_cases, smoke_cases, typical_plans
from tileweave.bench.rivals import ExchangeRivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Bar, Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.subjects import MatmulAllToAll, Shape
from tileweave.planning.matmul import plan_matmul_all_to_all

OP = "matmul_all_to_all"


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    """The QKV projection of Ulysses-style sequence parallelism.

    Hidden size 4096, 64 heads of 128, grouped queries: 10240 columns.
    """
    scale = 1 if on_gpu else 64
    half, scaled = (torch.bfloat16, "") if on_gpu else (torch.float16, f", 1/{scale}")
    first = torch.float16 if on_gpu else torch.float32
    odd = Shape(1021, 1000, 1240) if on_gpu else Shape(17, 25, 50)
    return [
        DemoCase(OP, "random, odd sizes, bias", odd, first, bias=True),
        DemoCase(
            OP,
            f"Ulysses QKV, 16384 tokens{scaled}",
            Shape(16384 // world_size // scale, 10240 // world_size // scale, 4096 // scale),
            half,
        ),
    ]


SAMPLES = Samples(
    subject=MatmulAllToAll(),
    check_on_gpu=Checked(
        shapes(
            (1, 64, 512), (16, 384, 1024), (37, 200, 328), (256, 1280, 4096), (1021, 1000, 1000)
        ),
        of_rows((1, 16, 37, 128, 256, 777), 128, 384),
        shapes((16, 512, 1024), (1024, 512, 2048)),
    ),
    check_on_cpu=Checked(shapes((1, 16, 32), (17, 25, 50)), of_rows((1, 8, 17, 64), 16, 32)),
    stress_on_gpu=Stressed(of_rows((16, 256), 128, 384), of_rows((37,), 128, 384)),
    stress_on_cpu=Stressed(of_rows((17,), 16, 32), of_rows((8,), 16, 32)),
    demo=_demo,
    bench=BENCHED,
    cases=exchange_cases(OP, QKV_LAYERS),
    smoke=smoke_cases(OP, (256, 128, 64), (32, 96, 64)),
    quick=r"ulysses-.*-m(1024|16384)",
    rival=ExchangeRivals,
    bars={"large": {"over_unfused": Bar(1.25, 1.0)}, "small": {"over_unfused": Bar(worst=0.98)}},
    shared=("rows", "cols"),
    typical=typical_plans(OP, plan_matmul_all_to_all, (1024, 10240, 4096), (16384, 10240, 4096)),
    self_signaling=True,
    random=random_cases.matmuls(OP),
)
