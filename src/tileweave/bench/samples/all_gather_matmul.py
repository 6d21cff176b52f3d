"""Samples of all_gather_matmul. Shapes: rows of a shard, columns and K of a rank's weight."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.cases import (
    LARGE,
    LAYERS,
    SMALL,
    Case,
    fp8_cases,
    fp8_smoke,
    layer_cases,
    smoke_cases,
    typical_plans,
)
from tileweave.bench.rivals import AllGatherMatmulRivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Bar, Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.scaled_rivals import RivalsOf, ScaledGatherRivals
from tileweave.bench.subjects import AllGatherMatmul, Shape
from tileweave.planning.matmul import plan_all_gather_matmul

OP = "all_gather_matmul"


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    """Random odd sizes, then the column-parallel layers of a Llama-3-8B block.

    Hidden size 4096, qkv 6144, gate+up 28672. Prefill is long enough for copy engines; a chunk and
    decoding are pushed by the kernel.
    """
    scale = 1 if on_gpu else 32
    prefill, chunk, decode = (2048, 128, 16) if on_gpu else (64, 32, 2)
    hidden = 4096 // scale
    qkv = 6144 // scale // world_size
    gate_up = 2 * 14336 // scale // world_size
    odd_rows, odd_cols, odd_depth = (1021, 1000, 1240) if on_gpu else (67, 50, 100)
    half = torch.bfloat16 if on_gpu else torch.float16
    first = torch.float16 if on_gpu else torch.float32
    scaled, late = ("", 3e-4) if on_gpu else (f", 1/{scale}", 0.5)
    chunked = Shape(chunk, gate_up, hidden)
    return [
        DemoCase(
            OP, "random, odd sizes, bias", Shape(odd_rows, odd_cols, odd_depth), first, bias=True
        ),
        DemoCase(OP, "random, gathered too", Shape(24, odd_cols, odd_depth), first, second=True),
        DemoCase(
            OP, f"Llama-3-8B qkv, prefill{scaled}", Shape(prefill, qkv, hidden), half, drawn=True
        ),
        DemoCase(OP, f"Llama-3-8B gate+up, prefill{scaled}", Shape(prefill, gate_up, hidden), half),
        DemoCase(OP, f"Llama-3-8B gate+up, chunk{scaled}", chunked, torch.bfloat16, drawn=True),
        DemoCase(
            OP, "the same, last rank late", chunked, torch.bfloat16, drawn=True, late_seconds=late
        ),
        DemoCase(OP, f"Llama-3-8B qkv, decode{scaled}", Shape(decode, qkv, hidden), half),
        DemoCase(OP, f"Llama-3-8B gate+up, decode{scaled}", Shape(decode, gate_up, hidden), half),
    ]


SAMPLES = Samples(
    subject=AllGatherMatmul(),
    # Rows of 1 and of odd counts, tiles that span shards, both transports, K that no tile divides.
    check_on_gpu=Checked(
        shapes(
            (1, 256, 512), (16, 384, 1024), (37, 200, 328), (256, 2560, 4096), (1021, 2500, 5000)
        ),
        of_rows((1, 16, 37, 64, 128, 200, 256, 512, 777, 1024), 384, 512),
        shapes((16, 1024, 2048), (128, 1024, 2048), (1024, 2048, 2048)),
    ),
    check_on_cpu=Checked(
        shapes((1, 32, 64), (17, 50, 100), (64, 48, 96)), of_rows((1, 8, 17, 32, 64), 32, 64)
    ),
    stress_on_gpu=Stressed(of_rows((16, 37, 200, 777), 384, 512), of_rows((16, 777), 384, 512)),
    stress_on_cpu=Stressed(of_rows((1, 17, 64), 32, 64), of_rows((17,), 32, 64)),
    demo=_demo,
    bench=BENCHED,
    cases=[
        *layer_cases(OP, LAYERS, LARGE, False, "large"),
        Case(OP, "odd-m4084", 4 * 1021, 4 * 2500, 5000, False, "odd"),
        *layer_cases(OP, LAYERS, SMALL, True, "small"),
        *fp8_cases(OP, LAYERS, LARGE, SMALL[:-1]),
    ],
    smoke=[*smoke_cases(OP, (256, 256, 128), (32, 128, 96)), fp8_smoke(OP, 64, 384, 128)],
    quick=r"(llama70b-qkv|llama70b-gate-up-half)-m(64|512|2048|8192)$|odd",
    rival=RivalsOf(AllGatherMatmulRivals, ScaledGatherRivals),
    bars={
        "fp8": {
            "limit_ratio": Bar(0.93, 0.85),
            "over_unfused": Bar(1.15, 1.0),
            "over_torch": Bar(1.05, 1.0),
        },
        "fp8 small": {"over_unfused": Bar(worst=0.98), "over_torch": Bar(worst=0.98)},
        "large": {
            "limit_ratio": Bar(0.97, 0.92),
            "over_unfused": Bar(worst=1.0),
            "over_torch": Bar(worst=1.0),
        },
        "odd": {"over_unfused": Bar(worst=1.0)},
        "small": {"over_unfused": Bar(1.25, 0.98), "over_torch": Bar(worst=1.0)},
    },
    shared=("rows", "cols"),
    typical=typical_plans(
        OP,
        plan_all_gather_matmul,
        (64, 28672, 8192),
        (1024, 28672, 8192),
        (8192, 28672, 8192),
    ),
    random=random_cases.matmuls(OP),
)
