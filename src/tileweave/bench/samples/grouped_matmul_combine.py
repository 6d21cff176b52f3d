"""Samples of grouped_matmul_combine; see ``expert_cases.py`` for shapes."""

from __future__ import annotations

from tileweave.bench import expert_cases, random_cases
from tileweave.bench.expert_subject import GroupedMatmulCombine
from tileweave.bench.experts import BENCHED, ExpertRivals
from tileweave.bench.samples import Samples

OP = "grouped_matmul_combine"
SAMPLES = Samples(
    subject=GroupedMatmulCombine(),
    check_on_gpu=expert_cases.CHECKED_ON_GPU,
    check_on_cpu=expert_cases.CHECKED_ON_CPU,
    stress_on_gpu=expert_cases.STRESSED_ON_GPU,
    stress_on_cpu=expert_cases.STRESSED_ON_CPU,
    demo=expert_cases.demo_of(OP),
    bench=BENCHED,
    cases=expert_cases.cases(OP, (1.7, 1.4, 1.08)),
    smoke=expert_cases.smoke(OP),
    quick=expert_cases.QUICK,
    rival=ExpertRivals,
    traced=((16, 64, 32), (4096, 4096, 4096)),
    self_signaling=True,
    random=random_cases.experts(OP),
)
