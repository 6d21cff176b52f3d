"""Samples of matmul_all_reduce. Shapes: rows of x, columns and K of a rank's weight."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.cases import (
    DECODE_LAYERS,
    FEW,
    GEMV,
    fp8_cases,
    fp8_smoke,
    layer_cases,
    smoke_cases,
    typical_plans,
)
from tileweave.bench.rivals import MatmulAllReduceRivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Bar, Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.scaled_rivals import RivalsOf, ScaledReduceRivals
from tileweave.bench.subjects import MatmulAllReduce, Shape
from tileweave.planning.matmul import plan_matmul_all_reduce

OP = "matmul_all_reduce"


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    """The row-parallel layers of a Llama-3-8B block in decoding, with one or a few rows.

    With the residual and the norm that follow in serving.
    """
    scale = 1 if on_gpu else 32
    hidden = 4096 // scale
    attention = 4096 // scale // world_size
    mlp = 14336 // scale // world_size
    half, scaled = (torch.bfloat16, "") if on_gpu else (torch.float16, f", 1/{scale}")
    first = torch.float16 if on_gpu else torch.float32
    many = 256 if on_gpu else 64
    return [
        DemoCase(OP, "random, odd sizes, bias", Shape(5, 50, 100), first, bias=True),
        DemoCase(OP, f"Llama-3-8B down, 1 token{scaled}", Shape(1, hidden, mlp), half),
        DemoCase(
            OP,
            f"Llama-3-8B attention out, 16 tokens, norm{scaled}",
            Shape(16, hidden, attention),
            half,
            second=True,
        ),
        DemoCase(
            OP, f"Llama-3-8B down, {many} tokens{scaled}", Shape(many, hidden, mlp), torch.bfloat16
        ),
    ]


SAMPLES = Samples(
    subject=MatmulAllReduce(),
    check_on_gpu=Checked(
        shapes(
            (1, 4096, 1024), (5, 328, 200), (16, 1024, 384), (64, 2504, 1000), (512, 4096, 2560)
        ),
        of_rows((1, 2, 7, 16, 17, 64, 200, 512), 1024, 384),
        shapes((1, 4096, 2048), (16, 4096, 2048), (256, 2048, 1024)),
    ),
    check_on_cpu=Checked(shapes((1, 64, 32), (65, 50, 100)), of_rows((1, 2, 17, 64), 64, 32)),
    stress_on_gpu=Stressed(of_rows((2, 17, 64, 200), 1024, 384), of_rows((7, 200), 1024, 384)),
    stress_on_cpu=Stressed(of_rows((1, 17), 64, 32), of_rows((2,), 64, 32)),
    demo=_demo,
    bench=BENCHED,
    cases=[
        *layer_cases(OP, DECODE_LAYERS, GEMV, True, "gemv"),
        *layer_cases(OP, DECODE_LAYERS, FEW, True, "small"),
        *fp8_cases(OP, DECODE_LAYERS, (), (*GEMV, *FEW)),
    ],
    smoke=[*smoke_cases(OP, (1, 128, 256), (64, 96, 128), graph=True), fp8_smoke(OP, 16, 96, 256)],
    quick=r"llama70b-(o|down)-m(1|16|64|512|2048|8192)$",
    rival=RivalsOf(MatmulAllReduceRivals, ScaledReduceRivals),
    bars={
        "fp8 small": {"over_unfused": Bar(worst=0.98)},
        "gemv": {
            "over_gemm_us": Bar(most=3.0),
            "over_unfused": Bar(1.4),
            "over_torch": Bar(1.15),
        },
        "small": {"over_best": Bar(1.1, 0.98)},
    },
    shared=("depth",),
    typical=typical_plans(
        OP, plan_matmul_all_reduce, (1, 8192, 28672), (16, 8192, 28672), (256, 8192, 28672)
    ),
    self_signaling=True,
    random=random_cases.matmuls(OP, 14.0, even=False),
)
