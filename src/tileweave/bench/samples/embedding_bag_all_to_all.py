"""Samples of embedding_bag_all_to_all. Shapes: samples and tables per rank, columns per table."""

from __future__ import annotations

import torch

from tileweave.bench import random_cases
from tileweave.bench.embedding import BENCHED, EmbeddingRivals
from tileweave.bench.embedding_cases import CASES, OP, QUICK, SMOKE
from tileweave.bench.embedding_subject import EmbeddingBagAllToAll
from tileweave.bench.samples import Checked, DemoCase, Samples, Stressed, of_rows, shapes
from tileweave.bench.subjects import Shape
from tileweave.planning.sharding import plan_embedding


def _demo(on_gpu: bool, world_size: int) -> list[DemoCase]:
    first = torch.float16 if on_gpu else torch.float32
    samples, tables, columns = (1024, 8, 128) if on_gpu else (4, 2, 16)
    return [
        DemoCase(OP, "random, odd sizes, weighted", Shape(samples + 1, 3, 13), first, bias=True),
        DemoCase(
            OP, f"DLRM, {tables} tables per rank", Shape(samples, tables, columns), torch.bfloat16
        ),
    ]


SAMPLES = Samples(
    subject=EmbeddingBagAllToAll(),
    check_on_gpu=Checked(
        shapes((1, 1, 128), (37, 3, 64), (512, 8, 128), (100, 2, 13)),
        of_rows((1, 16, 37, 200, 512), 4, 64),
        shapes((16, 4, 128), (1024, 8, 128)),
    ),
    check_on_cpu=Checked(shapes((1, 1, 8), (3, 2, 5)), of_rows((1, 2, 4), 2, 4)),
    stress_on_gpu=Stressed(of_rows((1, 37, 512), 4, 64), of_rows((16,), 4, 64)),
    stress_on_cpu=Stressed(of_rows((1, 4), 2, 4), of_rows((2,), 2, 4)),
    demo=_demo,
    bench=BENCHED,
    cases=CASES,
    smoke=SMOKE,
    quick=QUICK,
    rival=EmbeddingRivals,
    traced=((16, 2, 16), (16384, 32, 128)),
    typical=(
        (
            f"{OP}, 128 columns of fp32, 8 rows per bag",
            lambda size, machine: plan_embedding(size, 512, 8.0, machine, False),
        ),
    ),
    measured=False,
    random=random_cases.embedding_bags(OP),
)
