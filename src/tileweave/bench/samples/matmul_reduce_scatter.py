"""Samples of matmul_reduce_scatter. Shapes: rows of the result, columns and K of the weight of a
rank."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.cases import (
    LARGE,
    ROW_LAYERS,
    SMALL,
    Case,
    fp8_cases,
    fp8_smoke,
    layer_cases,
    smoke_cases,
    typical_plans,
)
from tileweave.bench.rivals import MatmulReduceScatterRivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Bar, Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.scaled_rivals import RivalsOf, ScaledScatterRivals
from tileweave.bench.subjects import MatmulReduceScatter, Shape
from tileweave.planning.matmul import plan_matmul_reduce_scatter

OP = "matmul_reduce_scatter"


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    """Odd sizes, then the row-parallel layers of a Llama-3-8B block.

    Output of attention 4096, second matmul of the MLP 14336.
    """
    scale = 1 if on_gpu else 32
    prefill, chunk = (2048, 128) if on_gpu else (32, 16)
    hidden = 4096 // scale
    attention = 4096 // scale // world_size
    mlp = 14336 // scale // world_size
    odd = Shape(1021, 1000, 1240) if on_gpu else Shape(17, 50, 100)
    half, scaled = (torch.bfloat16, "") if on_gpu else (torch.float16, f", 1/{scale}")
    first = torch.float16 if on_gpu else torch.float32
    return [
        DemoCase(OP, "random, odd sizes, bias", odd, first, bias=True),
        DemoCase(
            OP,
            f"Llama-3-8B attention out, prefill{scaled}",
            Shape(prefill, hidden, attention),
            half,
        ),
        DemoCase(OP, f"Llama-3-8B down, prefill{scaled}", Shape(prefill, hidden, mlp), half),
        DemoCase(OP, f"Llama-3-8B down, chunk{scaled}", Shape(chunk, hidden, mlp), torch.bfloat16),
    ]


SAMPLES = Samples(
    subject=MatmulReduceScatter(),
    check_on_gpu=Checked(
        shapes(
            (1, 256, 512), (16, 1024, 384), (37, 328, 200), (256, 4096, 2560), (1021, 2504, 1000)
        ),
        of_rows((1, 16, 37, 64, 128, 200, 256, 777), 512, 384),
        shapes((16, 2048, 1024), (1024, 2048, 2048)),
    ),
    check_on_cpu=Checked(shapes((1, 32, 64), (17, 50, 100)), of_rows((1, 8, 17, 32), 64, 32)),
    stress_on_gpu=Stressed(of_rows((16, 200, 777), 512, 384), of_rows((200, 777), 512, 384)),
    stress_on_cpu=Stressed(of_rows((1, 17), 64, 32), of_rows((17,), 64, 32)),
    demo=_demo,
    bench=BENCHED,
    cases=[
        *layer_cases(OP, ROW_LAYERS, LARGE, False, "large"),
        Case(OP, "odd-m4084", 4 * 1021, 2500, 4 * 5000, False, "odd"),
        *layer_cases(OP, ROW_LAYERS, SMALL, True, "small"),
        *fp8_cases(OP, ROW_LAYERS, LARGE, SMALL[:-1]),
    ],
    smoke=[*smoke_cases(OP, (256, 64, 256), (32, 96, 128)), fp8_smoke(OP, 64, 96, 256)],
    quick=r"llama70b-(o|down)-m(1|16|64|512|2048|8192)$|odd",
    rival=RivalsOf(MatmulReduceScatterRivals, ScaledScatterRivals),
    bars={
        "fp8": {
            "limit_ratio": Bar(0.90),
            "over_unfused": Bar(1.2, 1.0),
            "over_torch": Bar(1.1, 1.0),
        },
        "fp8 small": {"over_unfused": Bar(worst=0.98), "over_torch": Bar(worst=0.98)},
        "large": {
            "limit_ratio": Bar(0.95, 0.90),
            "over_unfused": Bar(worst=1.0),
            "over_torch": Bar(1.10, 1.0),
        },
        "small": {"over_unfused": Bar(1.2, 0.98)},
    },
    shared=("rows", "depth"),
    typical=typical_plans(
        OP,
        plan_matmul_reduce_scatter,
        (64, 8192, 28672),
        (1024, 8192, 28672),
        (8192, 8192, 28672),
    ),
    self_signaling=True,
    random=random_cases.matmuls(OP),
)
